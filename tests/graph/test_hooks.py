"""Hooks that observe do not run in a trace, hooks that change tensors are traced, and side effects are undone."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ecc.errors import UntraceableModel
from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, slim, trace_channels, verify_graph, with_widths
from ecc.graph.hooks import hook_names, undo_changes, without_observer_hooks
from graph.cases import chain
from graph.layers import conv, image

GLOBAL_RECORDS: list[Tensor] = []


def facts(graph: ChannelGraph) -> dict[str, tuple[int, str | None]]:
    return {group.name: (group.width, group.frozen) for group in graph.groups}


def assert_slimmed_exactly(net: nn.Module, graph: ChannelGraph, inputs: Any) -> nn.Module:
    dead = {group.name: list(range(0, group.width - group.min_width, 2)) for group in graph.prunable}
    mask_channels_(net, graph, dead)
    small = slim(net, graph)
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())
    assert max_relative_diff(net, small, inputs) < 1e-5
    return small


# ---------------------------------------------------------------- observers


class Recorder:
    """An object with a method that is the hook."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.calls = 0
        self.total = torch.zeros(())

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(output)
        self.calls += 1
        self.total += output.mean()


def reads_values(module: nn.Module, args: Any, output: Tensor) -> None:
    """Meta tensors have no values."""
    assert output.abs().mean().item() >= 0


def has_sizes_of_its_own(module: nn.Module, args: Any, output: Tensor) -> None:
    """The hard-coded width would freeze its channels."""
    output.reshape(len(output), 6, -1).softmax(1)


def wants_gradients(module: nn.Module, args: Any, output: Tensor) -> None:
    output.register_hook(lambda gradient: None)
    output.retain_grad()


def returns_what_it_got(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output


def to_a_global(module: nn.Module, args: Any, output: Tensor) -> None:
    GLOBAL_RECORDS.append(output)


@pytest.mark.parametrize(
    "hook", [reads_values, has_sizes_of_its_own, wants_gradients, returns_what_it_got, to_a_global, Recorder().note]
)
def test_a_hook_that_observes_does_not_change_the_graph(hook: Callable[..., Any]) -> None:
    net, inputs = chain(), image()()
    wanted = facts(trace_channels(net, inputs))
    net.conv2.register_forward_hook(hook)
    graph = trace_channels(net, inputs)
    assert facts(graph) == wanted
    assert graph.notes == ()
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff < 1e-5
    assert list(net.conv2._forward_hooks.values()) == [hook]


def test_records_of_the_user_do_not_change() -> None:
    net, inputs, recorder = chain(), image()(), Recorder()
    seen: dict[str, Tensor] = {}
    last: deque[Tensor] = deque(maxlen=2)
    count = 0

    def closure(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal count
        count += 1
        seen["output"] = output
        last.append(output)

    net.conv1.register_forward_hook(recorder.note)
    net.conv2.register_forward_hook(closure)
    net.conv3.register_forward_hook(to_a_global)
    net(inputs)
    GLOBAL_RECORDS.clear()
    before = list(recorder.outputs), recorder.calls, recorder.total.clone(), seen["output"], last[0]
    trace_channels(net, inputs)
    assert len(recorder.outputs) == 1
    assert recorder.outputs[0] is before[0][0]
    assert recorder.calls == before[1] == count == 1
    assert torch.equal(recorder.total, before[2])
    assert seen["output"] is before[3]
    assert list(last) == [before[4]]
    assert GLOBAL_RECORDS == []


def test_a_network_without_hooks_is_itself_and_a_copy_shares_the_tensors() -> None:
    net, inputs = chain(), image()()
    with without_observer_hooks(net, (inputs,), {}) as network:
        assert network is net
    net.conv1.register_full_backward_hook(lambda *_: None)
    net.conv2.register_forward_hook(lambda *_: None)
    with without_observer_hooks(net, (inputs,), {}) as network:
        assert network is not net
        assert [id(p) for p in network.parameters()] == [id(p) for p in net.parameters()]
        assert not any(m._forward_hooks or m._backward_hooks for m in network.modules())


# ---------------------------------------------------------------- hooks that change tensors


def doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def adds_in_place(module: nn.Module, args: Any, output: Tensor) -> None:
    output.add_(1)


def scales_the_input(module: nn.Module, args: Any) -> Tensor:
    return args[0] * 3


def shifts_by_keyword(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return (args[0] + 1,), kwargs


def scales_with_kwargs(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
    return output * 0.5


def normalises(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output.softmax(1)


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "returns another output": lambda m: m.register_forward_hook(doubles),
    "changes the output in place": lambda m: m.register_forward_hook(adds_in_place),
    "returns another input": lambda m: m.register_forward_pre_hook(scales_the_input),
    "returns another input, with kwargs": lambda m: m.register_forward_pre_hook(shifts_by_keyword, with_kwargs=True),
    "returns another output, with kwargs": lambda m: m.register_forward_hook(
        scales_with_kwargs, with_kwargs=True, always_call=True, prepend=True
    ),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_hook_that_changes_each_channel_by_itself_is_traced(kind: str) -> None:
    net, inputs = chain(), image()()
    CHANGES[kind](net.conv2)
    with without_observer_hooks(net, (inputs,), {}) as network:
        assert len(hook_names(network)) == 1
    graph = trace_channels(net, inputs)
    assert {group.name for group in graph.prunable} == {"conv1", "conv2"}
    assert_slimmed_exactly(net, graph, inputs)


def test_a_hook_that_mixes_channels_freezes_them() -> None:
    net, inputs = chain(), image()()
    net.conv2.register_forward_hook(normalises)
    net.conv2.register_forward_hook(reads_values)  # and an observer
    graph = trace_channels(net, inputs)
    assert {group.name for group in graph.prunable} == {"conv1"}
    assert "softmax" in str(graph["conv2"].frozen)
    assert graph.notes == ()
    assert_slimmed_exactly(net, graph, inputs)


def test_a_failed_verification_names_the_hooks() -> None:
    net, inputs = chain(), image()()
    graph = trace_channels(net, inputs)
    net.conv2.register_forward_hook(normalises)  # after the trace
    net.conv1.register_forward_hook(reads_values)
    found = verify_graph(net, graph, inputs)
    assert {group.name for group in found.prunable} == {"conv1"}
    assert str(found["conv2"].frozen).endswith(". These hooks change tensors: normalises on conv2")


def only_when_training(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output * output.mean(1, keepdim=True) if module.training else None


def test_a_hook_that_changes_tensors_only_in_train_mode_is_not_an_observer() -> None:
    net, inputs = chain(), image()()
    net.conv2.register_forward_hook(only_when_training)
    with without_observer_hooks(net, (inputs,), {}) as network:
        assert hook_names(network) == ["only_when_training on conv2"]
    with without_observer_hooks(net, (torch.randn(1, 3, 1, 1),), {}) as network:  # batch norm needs more than one value
        assert hook_names(network) == ["only_when_training on conv2"]


def centres_gradients(module: nn.Module, incoming: Any, outgoing: Any) -> Any:
    return (incoming[0] - incoming[0].mean(1, keepdim=True),)


def test_a_backward_hook_that_changes_gradients_is_not_an_observer() -> None:
    net, inputs = chain(), image()()
    net.conv1.register_full_backward_pre_hook(lambda module, outgoing: None)
    net.conv2.register_full_backward_hook(centres_gradients)
    with without_observer_hooks(net, (inputs,), {}) as network:
        assert hook_names(network) == ["centres_gradients on conv2"]
    graph = trace_channels(net, inputs)
    assert {group.name for group in graph.prunable} == {"conv2"}
    assert str(graph["conv1"].frozen).endswith(". These hooks change tensors: centres_gradients on conv2")


class UsesValueOfHook(nn.Module):
    """The hook returns nothing, and the value that it stores is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = conv(3, 8), conv(8, 6), conv(6, 4, 1)
        kept = self.kept = {}
        self.stem.register_forward_hook(lambda m, a, o: kept.update(stem=o))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(self.stem(x))), self.kept["stem"]


@pytest.mark.parametrize("called_before", [False, True])
def test_values_that_a_hook_stores_for_the_network_are_traced(called_before: bool) -> None:
    net, inputs = UsesValueOfHook(), image()()
    if called_before:
        net(inputs)  # the old value must not count as the new one
    kept = dict(net.kept)
    graph = trace_channels(net, inputs)
    assert facts(graph)["stem"] == (8, "it is an output of the network")
    assert {group.name for group in graph.prunable} == {"body"}
    assert net.kept == kept
    small = with_widths(net, graph, {"body": 2})
    outputs = small(inputs)
    assert outputs[1] is small.kept["stem"]
    assert net.kept == kept


def test_a_hook_that_fails_on_a_copy_is_named() -> None:
    net, inputs = chain(), image()()
    names = {id(module): name for name, module in net.named_modules()}

    def looks_up(module: nn.Module, args: Any, output: Tensor) -> None:
        assert names[id(module)]

    net.conv2.register_forward_hook(looks_up)
    with pytest.raises(UntraceableModel, match=r"^a hook \(looks_up\) fails on a copy of the network: KeyError"):
        trace_channels(net, inputs)


# ---------------------------------------------------------------- hooks of all modules


@contextmanager
def registered(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def test_global_hooks_that_observe_do_not_run() -> None:
    net, inputs, heard = chain(), image()(), []
    wanted = facts(trace_channels(net, inputs))
    with (
        registered(torch_module.register_module_forward_hook, lambda m, a, o: heard.append(o.mean().item())),
        registered(torch_module.register_module_forward_pre_hook, lambda m, a: heard.append(a)),
        registered(torch_module.register_module_full_backward_hook, lambda m, i, o: heard.append(o)),
    ):
        tables = torch_module._global_forward_hooks, torch_module._global_forward_pre_hooks
        before = [dict(table) for table in tables]
        graph = trace_channels(net, inputs)
        assert [dict(table) for table in tables] == before
        assert len(torch_module._global_backward_hooks) == 1
        assert heard == []
        net(inputs)
        assert heard
    assert facts(graph) == wanted


def test_a_global_hook_that_changes_tensors_is_traced() -> None:
    net, inputs = chain(), image()()
    with registered(torch_module.register_module_forward_hook, normalises):
        graph = trace_channels(net, inputs)
    assert not graph.prunable
    assert "softmax" in str(graph["conv1"].frozen)


# ---------------------------------------------------------------- side effects


class Holder:
    def __init__(self) -> None:
        self.items: list[Any] = [1]
        self.inner = {"a": [1]}
        self.count = 0

    def change(self) -> None:
        self.items = [*self.items, 2]
        self.inner["a"].append(2)
        self.inner["b"] = [3]
        self.count += 1
        self.new = 1


def test_containers_are_restored_with_their_contents() -> None:
    items, pairs, unique, recent = [1, [2]], {"a": 1}, {1}, deque([1, 2], maxlen=2)
    counts, groups = Counter("aab"), defaultdict(list, {"x": [1]})
    inner = items[1]

    def change() -> None:
        inner.append(3)
        items.append(4)
        pairs["b"] = 2
        del pairs["a"]
        unique.add(2)
        recent.append(3)
        counts["c"] += 1
        groups["y"].append(1)
        groups["x"].append(2)

    with undo_changes([change]):
        change()
        assert len(items) == 3
    assert items == [1, [2]]
    assert items[1] is inner
    assert (pairs, unique, list(recent)) == ({"a": 1}, {1}, [1, 2])
    assert counts == Counter("aab")
    assert groups == {"x": [1]}


def test_objects_methods_partials_and_defaults_are_network() -> None:
    one, other, third = Holder(), Holder(), Holder()

    def by_default(held: Holder = third) -> None:
        held.change()

    functions = [one.change, partial(Holder.change, other), by_default]
    with undo_changes(functions):
        for function in functions:
            function()
    for holder in (one, other, third):
        assert vars(holder) == {"items": [1], "inner": {"a": [1]}, "count": 0}


def test_tensors_and_arrays_are_restored() -> None:
    total, array = torch.zeros(3), np.zeros(3)
    with torch.inference_mode():
        inference = torch.zeros(2)
    meter = nn.BatchNorm1d(2)

    def change() -> None:
        total.add_(1)
        np.add(array, 1, out=array)
        with torch.inference_mode():
            inference.add_(1)
        meter(torch.randn(4, 2))

    with undo_changes([change]):
        change()
        assert total.sum() == 3
    assert total.tolist() == [0, 0, 0]
    assert array.tolist() == [0, 0, 0]
    assert inference.tolist() == [0, 0]
    assert meter.running_mean is not None
    assert meter.running_mean.tolist() == [0, 0]
