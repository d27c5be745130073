"""Copies of networks with other tensors, and their hooks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import partial
from typing import Any

import pytest
import torch
import torch.fx
from torch import Tensor, nn

from ecc.errors import EccWarning, UntraceableModel
from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, slim, trace_channels, with_widths
from ecc.graph.model_copy import load_whole_state_, named_tensors, rebuild, unsaved_tensors, whole_state
from graph.cases import CASES, Shared, Tied, chain
from graph.layers import conv, image


def copied(net: nn.Module) -> nn.Module:
    return rebuild(net, {id(t): like(t, t.detach().clone()) for t in named_tensors(net).values()})


def like(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def with_shapes(net: nn.Module, shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """The same network with zero tensors of these shapes."""
    made = {}
    for name, tensor in named_tensors(net).items():
        shape = shapes.get(name, tuple(tensor.shape))
        made[id(tensor)] = like(tensor, torch.zeros(shape, dtype=tensor.dtype))
    return rebuild(net, made)


# ---------------------------------------------------------------- names


def test_a_tied_tensor_appears_once() -> None:
    net = Tied()
    names = list(named_tensors(net))
    assert "fc2.weight" in names
    assert "fc3.weight" not in names
    assert len(names) == len(list(net.parameters()))


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("name", CASES)
def test_a_copy_has_new_modules_and_equal_values(name: str) -> None:
    net = CASES[name].build()
    copy_ = copied(net)
    assert [type(m) for m in copy_.modules()] == [type(m) for m in net.modules()]
    assert not {id(m) for m in copy_.modules()} & {id(m) for m in net.modules()}
    assert copy_.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in copy_.state_dict().items())
    assert str(copy_) == str(net)


def test_a_shared_module_stays_shared() -> None:
    net = Shared()
    net.again = net.body
    copy_ = copied(net)
    assert copy_.again is copy_.body
    assert copy_.body is not net.body


def test_tied_tensors_stay_tied() -> None:
    copy_ = copied(Tied())
    assert copy_.fc3.weight is copy_.fc2.weight


class Holder(nn.Module):
    """Keeps references in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.layers = [self.layer]
        self.by_name = {"layer": self.layer, "weight": self.layer.weight}
        self.order = OrderedDict(first=1)
        self.empty: list[Any] = []
        self.sizes = (1, 2)
        self.method = self.layer.forward
        self.settings = {"scale": 2.0}


def test_references_point_into_the_copy() -> None:
    net = Holder()
    copy_ = copied(net)
    assert copy_.layers == [copy_.layer]
    assert copy_.by_name["layer"] is copy_.layer
    assert copy_.by_name["weight"] is copy_.layer.weight
    assert copy_.method.__self__ is copy_.layer
    assert (copy_.order, copy_.sizes, copy_.settings) == (net.order, net.sizes, net.settings)


def test_changes_of_the_copy_do_not_reach_the_original() -> None:
    net = Holder()
    copy_ = copied(net)
    copy_.empty.append(1)
    copy_.settings["scale"] = 3.0
    copy_.order["second"] = 2
    copy_.extra = 1
    assert (net.empty, net.settings, list(net.order)) == ([], {"scale": 2.0}, ["first"])
    assert not hasattr(net, "extra")


def test_a_graph_module_is_pruned_and_can_be_recompiled() -> None:
    net = torch.fx.symbolic_trace(nn.Sequential(conv(3, 8), nn.BatchNorm2d(8), nn.ReLU(), conv(8, 4))).eval()
    graph = trace_channels(net, image()())
    assert [group.name for group in graph.prunable] == ["0"]
    mask_channels_(net, graph, {"0": [1, 4, 5]})
    small = slim(net, graph)
    example = image()()
    assert max_relative_diff(net, small, example) < 1e-5
    assert getattr(small, "0").out_channels == 5
    small.graph.erase_node(next(node for node in small.graph.nodes if node.op == "output"))
    small.graph.output(next(node for node in small.graph.nodes if node.op == "placeholder"))
    small.recompile()
    assert torch.equal(small(example), example)
    assert not torch.equal(net(example), example)  # its code is still the old one


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    net = chain()
    net.conv2.lock = threading.Lock()
    with pytest.raises(UntraceableModel) as caught:
        copied(net)
    message = str(caught.value)
    assert message.startswith("the network cannot be copied: attribute Conv2d.lock is a lock (")
    assert message.endswith("Keep such objects outside the modules.")


# ---------------------------------------------------------------- size attributes


def test_convolutions_get_their_new_channels() -> None:
    net = nn.Conv2d(8, 6, 3)
    copy_ = with_shapes(net, {"weight": (5, 7, 3, 3), "bias": (5,)})
    assert (copy_.in_channels, copy_.out_channels, copy_.groups) == (7, 5, 1)
    assert copy_(torch.zeros(1, 7, 4, 4)).shape == (1, 5, 2, 2)
    assert (net.in_channels, net.out_channels) == (8, 6)


@pytest.mark.parametrize(
    ("net", "shape", "expected"),
    [
        (nn.Conv2d(8, 8, 3, groups=8, bias=False), (3, 1, 3, 3), (3, 3, 3)),
        (nn.Conv2d(8, 16, 3, groups=8, bias=False), (6, 1, 3, 3), (3, 6, 3)),
        (nn.Conv2d(8, 12, 3, groups=4, bias=False), (9, 2, 3, 3), (6, 9, 3)),
        (nn.Conv2d(8, 12, 3, groups=4, bias=False), (3, 2, 3, 3), (2, 3, 1)),
        (nn.ConvTranspose2d(8, 12, 3, groups=4, bias=False), (6, 3, 3, 3), (6, 9, 3)),
    ],
)
def test_grouped_convolutions_get_their_new_groups(net: nn.Module, shape: Any, expected: tuple[int, int, int]) -> None:
    copy_ = with_shapes(net, {"weight": shape})
    assert (copy_.in_channels, copy_.out_channels, copy_.groups) == expected
    assert copy_(torch.zeros(1, expected[0], 4, 4)).shape[1] == expected[1]


def test_other_layers_get_their_new_sizes() -> None:
    linear = with_shapes(nn.Linear(4, 3), {"weight": (2, 5), "bias": (2,)})
    assert (linear.in_features, linear.out_features) == (5, 2)
    norm = with_shapes(nn.BatchNorm2d(4), dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (3,)))
    assert norm.num_features == 3
    plain = with_shapes(nn.BatchNorm2d(4, affine=False), dict.fromkeys(("running_mean", "running_var"), (3,)))
    assert plain.num_features == 3
    assert copied(nn.InstanceNorm2d(4)).num_features == 4  # it has no tensor
    assert with_shapes(nn.PReLU(4), {"weight": (3,)}).num_parameters == 3
    table = with_shapes(nn.Embedding(10, 4), {"weight": (10, 3)})
    assert (table.num_embeddings, table.embedding_dim) == (10, 3)


# ---------------------------------------------------------------- functions and stored tensors


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.act, self.gate = nn.Conv2d(3, 8, 1), nn.functional.relu, None
        depth = 2

        def twice(images: Tensor, level: int = 0) -> Tensor:
            return images if level == depth else twice(images + 1, level + 1)

        self.trunk = lambda images, conv=self.conv: twice(conv(images)) + self.conv.bias[:, None, None]

    def forward(self, images: Tensor) -> Tensor:
        found = self.act(self.trunk(images))
        self.gate = [found.mean((2, 3))]  # type: ignore[assignment]
        return found


def test_a_closure_calls_the_modules_of_the_copy() -> None:
    net, images = Keeping(), torch.randn(1, 3, 4, 4)
    copy_ = copied(net)
    wanted = net(images)
    torch.testing.assert_close(copy_(images), wanted)
    with torch.no_grad():
        net.conv.weight.zero_()
    torch.testing.assert_close(copy_(images), wanted)
    assert copy_.act is nn.functional.relu  # functions without references are not copied


def test_stored_activations_are_copied_without_their_graph() -> None:
    net, images = Keeping(), torch.randn(1, 3, 4, 4)
    net(images).sum().backward()
    copy_ = copied(net)
    (kept,) = copy_.gate  # type: ignore[misc]
    assert kept.grad_fn is None
    assert torch.equal(kept, net.gate[0])  # type: ignore[index]
    assert kept is not net.gate[0]  # type: ignore[index]


def test_the_whole_state_includes_non_persistent_buffers() -> None:
    net = nn.Conv2d(3, 4, 1)
    net.register_buffer("k", torch.arange(4.0), persistent=False)
    state = {name: value.detach().clone() for name, value in whole_state(net).items()}
    assert list(state) == ["weight", "bias", "k"]
    assert list(unsaved_tensors(net)) == ["k"]
    other = nn.Conv2d(3, 4, 1)
    other.register_buffer("k", torch.zeros(4), persistent=False)
    load_whole_state_(other, state)
    assert all(torch.equal(whole_state(other)[name], value) for name, value in state.items())
    load_whole_state_(other, {name: state[name] * 2 for name in ("weight", "bias")})
    assert torch.equal(other.k, state["k"])


# ---------------------------------------------------------------- hooks


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
