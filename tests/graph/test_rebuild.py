from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import UntraceableModel
from ecc.graph.model_copy import load_whole_state_, named_tensors, rebuild, unsaved_tensors, whole_state
from graph.cases import CASES, Shared, Tied, chain


def copied(net: nn.Module) -> nn.Module:
    return rebuild(net, {id(t): like(t, t.detach().clone()) for t in named_tensors(net).values()})


def like(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def with_shapes(net: nn.Module, shapes: dict[str, tuple[int, ...]]) -> nn.Module:
    """The same network with other, empty tensors of these shapes."""
    made = {}
    for name, tensor in named_tensors(net).items():
        shape = shapes.get(name, tuple(tensor.shape))
        made[id(tensor)] = like(tensor, torch.zeros(shape, dtype=tensor.dtype))
    return rebuild(net, made)


# ---------------------------------------------------------------- names


def test_tensors_are_named_as_in_the_state() -> None:
    net = chain()
    assert list(named_tensors(net)) == list(net.state_dict())


def test_a_tied_tensor_appears_once() -> None:
    net = Tied()
    names = list(named_tensors(net))
    assert "fc2.weight" in names
    assert "fc3.weight" not in names
    assert len(names) == len(list(net.parameters()))


def test_buffers_that_are_not_saved_are_tensors_too() -> None:
    net = nn.Module()
    net.register_buffer("hidden", torch.zeros(2), persistent=False)
    net.register_buffer("absent", None)
    assert list(named_tensors(net)) == ["hidden"]


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("name", CASES)
def test_a_copy_is_new_in_every_module_and_equal_in_every_value(name: str) -> None:
    net = CASES[name].build()
    twin = copied(net)
    assert [type(m) for m in twin.modules()] == [type(m) for m in net.modules()]
    assert not {id(m) for m in twin.modules()} & {id(m) for m in net.modules()}
    assert twin.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[key]) for key, value in twin.state_dict().items())
    assert str(twin) == str(net)


def test_a_shared_module_stays_shared() -> None:
    net = Shared()
    net.again = net.body
    twin = copied(net)
    assert twin.again is twin.body
    assert twin.body is not net.body


def test_tied_tensors_stay_tied() -> None:
    twin = copied(Tied())
    assert twin.fc3.weight is twin.fc2.weight


def test_non_persistent_buffers_stay_out_of_the_state() -> None:
    net = nn.Module()
    net.register_buffer("hidden", torch.zeros(2), persistent=False)
    twin = copied(net)
    assert list(twin.state_dict()) == []
    assert torch.equal(twin.hidden, net.hidden)


class Holder(nn.Module):
    """Keeps references beside the usual tables."""

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


def test_references_to_modules_and_tensors_follow_into_the_copy() -> None:
    net = Holder()
    twin = copied(net)
    assert twin.layers == [twin.layer]
    assert twin.by_name["layer"] is twin.layer
    assert twin.by_name["weight"] is twin.layer.weight
    assert twin.method.__self__ is twin.layer
    assert (twin.order, twin.sizes, twin.settings) == (net.order, net.sizes, net.settings)


def test_what_the_copy_stores_does_not_reach_the_original() -> None:
    net = Holder()
    twin = copied(net)
    twin.empty.append(1)
    twin.settings["scale"] = 3.0
    twin.order["second"] = 2
    twin.extra = 1
    assert (net.empty, net.settings, list(net.order)) == ([], {"scale": 2.0}, ["first"])
    assert not hasattr(net, "extra")


def test_a_network_inside_its_own_attribute_is_copied_once() -> None:
    net = chain()
    net.conv1.parent = [net]
    twin = copied(net)
    assert twin.conv1.parent[0] is twin


def test_an_attribute_that_cannot_be_copied_is_named() -> None:
    net = chain()
    net.conv2.lock = threading.Lock()
    with pytest.raises(UntraceableModel) as caught:
        copied(net)
    message = str(caught.value)
    assert message.startswith("the network cannot be copied: attribute Conv2d.lock is a lock (")
    assert message.endswith("Keep such objects outside the modules.")


# ---------------------------------------------------------------- sizes that modules remember


def test_convolutions_know_their_new_channels() -> None:
    net = nn.Conv2d(8, 6, 3)
    twin = with_shapes(net, {"weight": (5, 7, 3, 3), "bias": (5,)})
    assert (twin.in_channels, twin.out_channels, twin.groups) == (7, 5, 1)
    assert twin(torch.zeros(1, 7, 4, 4)).shape == (1, 5, 2, 2)
    assert (net.in_channels, net.out_channels) == (8, 6)


def test_transposed_convolutions_know_theirs() -> None:
    twin = with_shapes(nn.ConvTranspose2d(8, 6, 2), {"weight": (7, 5, 2, 2), "bias": (5,)})
    assert (twin.in_channels, twin.out_channels) == (7, 5)
    assert twin(torch.zeros(1, 7, 4, 4)).shape == (1, 5, 5, 5)


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
def test_grouped_convolutions_know_their_groups(net: nn.Module, shape: Any, expected: tuple[int, int, int]) -> None:
    twin = with_shapes(net, {"weight": shape})
    assert (twin.in_channels, twin.out_channels, twin.groups) == expected
    assert twin(torch.zeros(1, expected[0], 4, 4)).shape[1] == expected[1]


def test_other_layers_know_their_sizes() -> None:
    linear = with_shapes(nn.Linear(4, 3), {"weight": (2, 5), "bias": (2,)})
    assert (linear.in_features, linear.out_features) == (5, 2)
    norm = with_shapes(nn.BatchNorm2d(4), dict.fromkeys(("weight", "bias", "running_mean", "running_var"), (3,)))
    assert norm.num_features == 3
    plain = with_shapes(nn.BatchNorm2d(4, affine=False), dict.fromkeys(("running_mean", "running_var"), (3,)))
    assert plain.num_features == 3
    assert copied(nn.InstanceNorm2d(4)).num_features == 4  # it has no tensor to ask
    assert with_shapes(nn.PReLU(4), {"weight": (3,)}).num_parameters == 3
    table = with_shapes(nn.Embedding(10, 4), {"weight": (10, 3)})
    assert (table.num_embeddings, table.embedding_dim) == (10, 3)


# ---------------------------------------------------------------- what modules keep beside tensors


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


def test_a_function_that_captures_modules_calls_those_of_the_copy() -> None:
    net, images = Keeping(), torch.randn(1, 3, 4, 4)
    twin = copied(net)
    wanted = net(images)
    torch.testing.assert_close(twin(images), wanted)
    with torch.no_grad():
        net.conv.weight.zero_()
    torch.testing.assert_close(twin(images), wanted)
    assert twin.act is nn.functional.relu  # others are the very same: code may compare them


def test_tensors_kept_from_a_forward_pass_are_copied_without_their_past() -> None:
    net, images = Keeping(), torch.randn(1, 3, 4, 4)
    net(images).sum().backward()
    twin = copied(net)
    (kept,) = twin.gate  # type: ignore[misc]
    assert kept.grad_fn is None
    assert torch.equal(kept, net.gate[0])  # type: ignore[index]
    assert kept is not net.gate[0]  # type: ignore[index]


def test_the_whole_state_has_buffers_that_torch_leaves_out() -> None:
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
