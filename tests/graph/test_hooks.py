"""Networks with hooks: those that observe are left out of a trace, those that change tensors are followed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ecc.errors import UntraceableModel
from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, slim, trace_channels, verify_graph, with_widths
from ecc.graph.hooks import hook_names, without_observer_hooks
from graph.cases import Shared, chain
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
    """As users write them: an object with a method that is the hook."""

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []
        self.calls = 0
        self.total = torch.zeros(())

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.outputs.append(output)
        self.calls += 1
        self.total += output.mean()


def reads_values(module: nn.Module, args: Any, output: Tensor) -> None:
    """Meta tensors have none."""
    assert output.abs().mean().item() >= 0


def has_sizes_of_its_own(module: nn.Module, args: Any, output: Tensor) -> None:
    """A width that is written down would freeze what it reads."""
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
def test_a_hook_that_observes_changes_no_graph(hook: Callable[..., Any]) -> None:
    net, inputs = chain(), image()()
    wanted = facts(trace_channels(net, inputs))
    net.conv2.register_forward_hook(hook)
    graph = trace_channels(net, inputs)
    assert facts(graph) == wanted
    assert graph.notes == ()
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff < 1e-5
    assert list(net.conv2._forward_hooks.values()) == [hook]


def test_records_of_the_user_are_left_as_they_were() -> None:
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


def test_a_hook_of_a_shared_module_is_one_hook() -> None:
    net, inputs, heard = Shared(), image()(), []
    wanted = facts(trace_channels(net, inputs))
    net.body.register_forward_hook(lambda m, a, o: heard.append(o.shape))
    graph = trace_channels(net, inputs)
    assert facts(graph) == wanted
    assert heard == []


def test_a_hook_that_removes_itself_stays_registered() -> None:
    net, inputs = chain(), image()()

    def once(module: nn.Module, args: Any, output: Tensor) -> None:
        handle.remove()

    handle = net.conv1.register_forward_hook(once)
    trace_channels(net, inputs)
    assert list(net.conv1._forward_hooks.values()) == [once]
    net(inputs)
    assert not net.conv1._forward_hooks


def test_a_network_without_hooks_is_itself_and_a_copy_shares_the_tensors() -> None:
    net, inputs = chain(), image()()
    with without_observer_hooks(net, (inputs,), {}) as followed:
        assert followed is net
    net.conv1.register_full_backward_hook(lambda *_: None)
    net.conv2.register_forward_hook(lambda *_: None)
    with without_observer_hooks(net, (inputs,), {}) as followed:
        assert followed is not net
        assert [id(p) for p in followed.parameters()] == [id(p) for p in net.parameters()]
        assert not any(m._forward_hooks or m._backward_hooks for m in followed.modules())


def test_random_numbers_and_settings_are_put_back() -> None:
    net, inputs = chain(), image()()
    net.conv1.register_forward_hook(lambda *_: None)
    torch.backends.cudnn.benchmark = True
    try:
        state = torch.get_rng_state()
        trace_channels(net, inputs)
        assert torch.equal(state, torch.get_rng_state())
        assert torch.backends.cudnn.benchmark
        assert not torch.backends.cudnn.deterministic
    finally:
        torch.backends.cudnn.benchmark = False


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
def test_a_hook_that_changes_tensors_channel_by_channel_is_followed(kind: str) -> None:
    net, inputs = chain(), image()()
    CHANGES[kind](net.conv2)
    with without_observer_hooks(net, (inputs,), {}) as followed:
        assert len(hook_names(followed)) == 1
    graph = trace_channels(net, inputs)
    assert {group.name for group in graph.prunable} == {"conv1", "conv2"}
    assert_slimmed_exactly(net, graph, inputs)


def test_a_hook_that_mixes_channels_freezes_them() -> None:
    net, inputs = chain(), image()()
    net.conv2.register_forward_hook(normalises)
    net.conv2.register_forward_hook(reads_values)  # beside one that only observes
    graph = trace_channels(net, inputs)
    assert {group.name for group in graph.prunable} == {"conv1"}
    assert "softmax" in str(graph["conv2"].frozen)
    assert graph.notes == ()
    assert_slimmed_exactly(net, graph, inputs)


def test_a_hook_is_named_where_verification_fails() -> None:
    net, inputs = chain(), image()()
    graph = trace_channels(net, inputs)
    net.conv2.register_forward_hook(normalises)  # which the trace has not seen
    net.conv1.register_forward_hook(reads_values)
    found = verify_graph(net, graph, inputs)
    assert {group.name for group in found.prunable} == {"conv1"}
    assert str(found["conv2"].frozen).endswith("; hooks change tensors: normalises on conv2")


def test_hooks_are_named_in_words() -> None:
    net = chain()
    net.conv2.register_forward_hook(doubles)
    net.conv2.register_forward_pre_hook(partial(scales_the_input))
    net.register_forward_hook(Recorder().note)
    net.conv1.register_forward_hook(lambda *_: None)
    assert hook_names(net) == [
        "Recorder.note on the network",
        "<lambda> on conv1",
        "scales_the_input on conv2",
        "doubles on conv2",
    ]


def only_when_training(module: nn.Module, args: Any, output: Tensor) -> Tensor | None:
    return output * output.mean(1, keepdim=True) if module.training else None


def test_a_hook_that_changes_tensors_in_train_mode_alone_is_no_observer() -> None:
    net, inputs = chain(), image()()
    net.conv2.register_forward_hook(only_when_training)
    with without_observer_hooks(net, (inputs,), {}) as followed:
        assert hook_names(followed) == ["only_when_training on conv2"]
    with without_observer_hooks(net, (torch.randn(1, 3, 1, 1),), {}) as followed:  # batch norm needs more than one value
        assert hook_names(followed) == ["only_when_training on conv2"]


def centres_gradients(module: nn.Module, incoming: Any, outgoing: Any) -> Any:
    return (incoming[0] - incoming[0].mean(1, keepdim=True),)


def test_a_backward_hook_that_changes_gradients_is_no_observer() -> None:
    net, inputs = chain(), image()()
    net.conv1.register_full_backward_pre_hook(lambda module, outgoing: None)
    net.conv2.register_full_backward_hook(centres_gradients)
    with without_observer_hooks(net, (inputs,), {}) as followed:
        assert hook_names(followed) == ["centres_gradients on conv2"]
    graph = trace_channels(net, inputs)
    assert {group.name for group in graph.prunable} == {"conv2"}
    assert str(graph["conv1"].frozen).endswith("; hooks change tensors: centres_gradients on conv2")


class ReadsWhatAHookLeft(nn.Module):
    """The hook returns nothing, and what it keeps is an output."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body, self.head = conv(3, 8), conv(8, 6), conv(6, 4, 1)
        kept = self.kept = {}
        self.stem.register_forward_hook(lambda m, a, o: kept.update(stem=o))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.head(self.body(self.stem(x))), self.kept["stem"]


@pytest.mark.parametrize("called_before", [False, True])
def test_what_a_hook_keeps_for_the_network_is_followed(called_before: bool) -> None:
    net, inputs = ReadsWhatAHookLeft(), image()()
    if called_before:
        net(inputs)  # what it left behind must not be taken for what it would leave now
    kept = dict(net.kept)
    graph = trace_channels(net, inputs)
    assert facts(graph)["stem"] == (8, "it is an output of the network")
    assert {group.name for group in graph.prunable} == {"body"}
    assert net.kept == kept
    small = with_widths(net, graph, {"body": 2})
    outputs = small(inputs)
    assert outputs[1] is small.kept["stem"]
    assert net.kept == kept


def test_a_hook_that_cannot_run_on_a_copy_is_named() -> None:
    net, inputs = chain(), image()()
    names = {id(module): name for name, module in net.named_modules()}

    def looks_up(module: nn.Module, args: Any, output: Tensor) -> None:
        assert names[id(module)]

    net.conv2.register_forward_hook(looks_up)
    with pytest.raises(UntraceableModel, match=r"^a hook \(looks_up\) fails on a copy of the network: KeyError"):
        trace_channels(net, inputs)


def test_a_network_on_meta_tensors_is_traced_with_its_hooks() -> None:
    with torch.device("meta"):
        net = chain()
    net.conv2.register_forward_hook(doubles)
    graph = trace_channels(net, image()())
    assert {group.name for group in graph.prunable} == {"conv1", "conv2"}


# ---------------------------------------------------------------- hooks of all modules


@contextmanager
def registered(register: Callable[..., Any], hook: Callable[..., Any]) -> Iterator[None]:
    handle = register(hook)
    try:
        yield
    finally:
        handle.remove()


def test_hooks_of_all_modules_that_observe_are_not_run() -> None:
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


def test_a_hook_of_all_modules_that_changes_tensors_is_followed() -> None:
    net, inputs = chain(), image()()
    with registered(torch_module.register_module_forward_hook, normalises):
        graph = trace_channels(net, inputs)
    assert not graph.prunable
    assert "softmax" in str(graph["conv1"].frozen)
