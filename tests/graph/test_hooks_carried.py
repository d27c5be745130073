"""Hooks in copies of a network: they refer to the copy where they referred to the network."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import EccWarning
from ecc.export import load_slim, save_slim
from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, slim, slim_optimizer, trace_channels, with_widths
from graph.cases import chain
from graph.layers import conv, image


def facts(graph: ChannelGraph) -> dict[str, tuple[int, str | None]]:
    return {group.name: (group.width, group.frozen) for group in graph.groups}


def test_hooks_of_all_kinds_are_carried_to_the_slim_network_and_run_there() -> None:
    net, inputs, heard = chain(), image()(), []
    graph = trace_channels(net, inputs)
    conv2 = net.conv2
    conv2.register_forward_hook(lambda m, a, o: heard.append(("forward", o.shape[1])))
    conv2.register_forward_hook(lambda m, a, k, o: heard.append(("with kwargs", k)), with_kwargs=True, prepend=True)
    conv2.register_forward_hook(lambda m, a, o: heard.append(("always", o is None)), always_call=True)
    conv2.register_forward_pre_hook(lambda m, a: heard.append(("before", a[0].shape[1])))
    conv2.register_forward_pre_hook(lambda m, a, k: heard.append(("before, with kwargs", k)), with_kwargs=True)
    conv2.register_full_backward_hook(lambda m, i, o: heard.append(("backward", o[0].shape[1])))
    conv2.register_full_backward_pre_hook(lambda m, o: heard.append(("before backward", o[0].shape[1])))
    conv2.register_state_dict_pre_hook(lambda m, p, k: heard.append(("state", m.out_channels)))
    conv2._register_state_dict_hook(lambda m, s, p, meta: heard.append(("after state", m.out_channels)))
    conv2.register_load_state_dict_pre_hook(lambda m, *_: heard.append(("before load", m.out_channels)))
    conv2.register_load_state_dict_post_hook(lambda m, k: heard.append(("load", m.out_channels)))
    net.conv1.register_forward_hook(lambda m, a, o: None).remove()
    assert facts(trace_channels(net, inputs)) == facts(graph)
    assert heard == []
    mask_channels_(net, graph, {"conv2": [0, 1], "conv1": [3]})
    small = slim(net, graph)
    assert with_widths(net, graph, {"conv1": 2}).conv2._forward_hooks.keys() == conv2._forward_hooks.keys()
    assert heard == []
    small(inputs).sum().backward()
    small.load_state_dict(small.state_dict())
    assert heard == [
        ("before", 7),
        ("before, with kwargs", {}),
        ("with kwargs", {}),
        ("forward", 4),
        ("always", False),
        ("before backward", 4),
        ("backward", 4),
        ("state", 4),
        ("after state", 4),
        ("before load", 4),
        ("load", 4),
    ]


class Logs(nn.Module):
    """A network that hooks its own layers, as Lightning modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8), conv(8, 4, 1)
        self.records: list[int] = []
        self.handle = self.stem.register_forward_hook(self.note)
        self.names = {self.stem: "stem"}
        self.head.register_forward_pre_hook(partial(self.named_note, names=self.names))

    def note(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.records.append(output.shape[1])

    @staticmethod
    def named_note(module: nn.Module, args: Any, names: dict[nn.Module, str]) -> None:
        names[module] = "head"

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.stem(x))
        return out


def test_hooks_of_the_network_itself_are_those_of_the_copy() -> None:
    net, inputs = Logs(), image()()
    graph = trace_channels(net, inputs)
    assert net.records == []
    assert list(net.names.values()) == ["stem"]
    small = with_widths(net, graph, {"stem": 3})
    small(inputs)
    assert small.records == [3]
    assert small.names == {small.stem: "stem", small.head: "head"}
    assert net.records == []
    small.handle.remove()
    assert not small.stem._forward_hooks
    assert len(net.stem._forward_hooks) == 1


class Scale:
    """A callable that holds the network."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net

    def __call__(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        out: Tensor = output * self.net.bn1.weight.mean() + self.net.conv1.out_channels
        return out


def test_a_callable_that_holds_the_network_holds_the_copy() -> None:
    net, inputs = chain(), image()()
    graph = trace_channels(net, inputs)
    net.conv3.register_forward_hook(Scale(net))
    small = with_widths(net, graph, {"conv1": 3})
    (hook,) = small.conv3._forward_hooks.values()
    assert hook.net is small
    with torch.no_grad():
        plain = with_widths(net, graph, {"conv1": 3})
        plain.conv3._forward_hooks.clear()
        wanted = plain(inputs) * small.bn1.weight.mean() + 3
        assert torch.allclose(small(inputs), wanted, atol=1e-5)


# ---------------------------------------------------------------- hooks of parameters


def test_hooks_of_parameters_do_not_matter_and_the_slim_network_says_that_it_has_none() -> None:
    net, inputs, heard = chain(), image()(), []
    wanted = facts(trace_channels(net, inputs))
    net.conv1.weight.register_hook(heard.append)
    net.conv2.weight.register_post_accumulate_grad_hook(heard.append)
    graph = trace_channels(net, inputs)
    assert facts(graph) == wanted
    mask_channels_(net, graph, {"conv1": [0]})
    with pytest.warns(EccWarning, match=r"^conv1\.weight and 1 more parameters of the dense network have hooks"):
        small = slim(net, graph)
    small(inputs).sum().backward()
    assert heard == []
    net(inputs).sum().backward()
    assert len(heard) == 2


# ---------------------------------------------------------------- files and optimizers


def doubles(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


def hooked() -> nn.Module:
    net = chain()
    net.conv2.register_forward_hook(doubles)
    net.conv2.register_full_backward_hook(lambda *_: None)
    return net


def test_a_slim_network_with_hooks_is_saved_loaded_and_trained_on(tmp_path: Any) -> None:
    net, inputs = hooked(), image()()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    net(inputs).square().mean().backward()
    optimizer.step()
    graph = trace_channels(net, inputs)
    mask_channels_(net, graph, {"conv1": [0, 3], "conv2": [2]})
    small = slim(net, graph)
    save_slim(small, tmp_path / "slim.safetensors")
    again = load_slim(hooked(), tmp_path / "slim.safetensors")
    assert list(again.conv2._forward_hooks.values()) == [doubles]
    assert max_relative_diff(small, again, inputs) == 0
    further = slim_optimizer(optimizer, net, small, graph)
    small(inputs).sum().backward()
    further.step()
    assert further.state[small.conv1.weight]["momentum_buffer"].shape == small.conv1.weight.shape
