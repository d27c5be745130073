"""`trace_channels` on small networks: groups, slices, reasons, notes, and no side effects."""

from __future__ import annotations

import random
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.graph import ChannelGraph, ParamSlice, Role, trace_channels, verify_graph
from ecc.zoo import AlexNet, MobileNetV1
from graph.cases import CASES, chain, conv, named, traced
from graph.special_nets import BranchesOnChannels


def slice_of(graph: ChannelGraph, group: str, tensor: str, axis: int) -> ParamSlice:
    (found,) = [one for one in graph[group].slices if (one.tensor, one.axis) == (tensor, axis)]
    return found


# ---------------------------------------------------------------- every case


@pytest.mark.parametrize("name", CASES)
def test_groups_reasons_and_notes_are_those_found_by_hand(name: str) -> None:
    case = CASES[name]
    net, inputs, graph = traced(name)
    assert {g.name: g.width for g in graph.groups if g.frozen is None} == dict(case.prunable)
    assert {g.name: g.width for g in graph.groups if g.frozen} == {n: width for n, (width, _) in case.frozen.items()}
    for group, (_, words) in case.frozen.items():
        assert words in str(graph[group].frozen)
    assert len(graph.notes) == len(case.notes)
    for note, words in zip(graph.notes, case.notes, strict=True):
        assert words in note
    assert graph.max_relative_diff is None
    verified = verify_graph(net, graph, inputs)  # which freezes nothing more
    assert verified.groups == graph.groups
    assert verified.max_relative_diff is not None
    assert verified.max_relative_diff <= 1e-4


@pytest.mark.parametrize("name", CASES)
def test_the_network_and_the_random_state_do_not_change(name: str) -> None:
    net, inputs = CASES[name].build(), CASES[name].inputs()
    net.train()
    next(net.children()).eval()  # a mixture of modes
    modes = [module.training for module in net.modules()]
    attributes = [set(vars(module)) for module in net.modules()]
    before = {key: (value, value.clone()) for key, value in net.state_dict(keep_vars=True).items()}
    states = torch.get_rng_state(), random.getstate(), str(np.random.get_state())  # noqa: NPY002
    trace_channels(net, inputs)
    assert (torch.get_rng_state() == states[0]).all()
    assert (random.getstate(), str(np.random.get_state())) == states[1:]  # noqa: NPY002
    assert [module.training for module in net.modules()] == modes
    assert [set(vars(module)) for module in net.modules()] == attributes
    for key, now in net.state_dict(keep_vars=True).items():
        tensor, value = before[key]
        assert now is tensor
        assert torch.equal(now, value)
        assert now.grad is None


# ---------------------------------------------------------------- slices and layers


def test_the_slices_of_a_chain() -> None:
    graph = traced("chain")[2]
    norm = [(f"bn1.{name}", 0, (Role.PER_CHANNEL,)) for name in ("weight", "bias", "running_mean", "running_var")]
    expected = [
        ("conv1.weight", 0, (Role.PRODUCER,)),
        ("conv1.bias", 0, (Role.PRODUCER,)),
        *norm,
        ("conv2.weight", 1, (Role.CONSUMER,)),
    ]
    found = graph["conv1"].slices
    assert sorted((one.tensor, one.axis, one.roles) for one in found) == sorted(expected)
    assert all(torch.equal(one.index, torch.arange(8)[:, None]) for one in found)


SLICES: dict[str, list[tuple[str, str, int, Any]]] = {
    "flattened chain": [("conv", "fc1.weight", 1, torch.arange(8 * 16).view(8, 16))],
    "option A": [
        ("stem", "conv.weight", 0, torch.arange(2, 10)[:, None]),
        ("conv", "conv.weight", 0, torch.tensor([[0], [1], [10], [11]])),
    ],
    "depthwise with multiplier": [
        ("conv1", "dw.weight", 0, torch.arange(16).view(8, 2)),
        ("conv1", "pw.weight", 1, torch.arange(16).view(8, 2)),
    ],
    "grouped": [
        ("conv1", "conv1.weight", 0, torch.arange(8).view(4, 2)),
        ("conv1", "conv2.weight", 0, torch.arange(12).view(4, 3)),
    ],
    "concat": [
        ("left", "head.weight", 1, torch.arange(4)[:, None]),
        ("right", "head.weight", 1, torch.arange(4, 10)[:, None]),
    ],
    "chunk and cat": [("stem", "stem.weight", 0, torch.arange(8).view(2, 4).t())],
    "channel shuffle": [
        ("stem", "stem.weight", 0, torch.arange(12).view(3, 4).t()),
        ("stem", "head.weight", 1, torch.arange(12).view(4, 3)),
    ],
    "pixel shuffle": [
        ("stem", "stem.weight", 0, torch.arange(12).view(3, 4)),
        ("stem", "head.weight", 1, torch.arange(3)[:, None]),
    ],
    "transformer block": [("value", "value.weight", 0, torch.arange(8).view(2, 4).t())],
}


@pytest.mark.parametrize("name", SLICES)
def test_the_indices_of_a_unit(name: str) -> None:
    graph = traced(name)[2]
    for group, tensor, axis, index in SLICES[name]:
        assert torch.equal(slice_of(graph, group, tensor, axis).index, index), (group, tensor)


@pytest.mark.parametrize(
    ("name", "group", "role", "layers"),
    [
        ("residual", "stem", Role.PRODUCER, ("stem", "conv2")),
        ("residual", "stem", Role.CONSUMER, ("conv1", "head")),
        ("shared module", "stem", Role.PRODUCER, ("stem", "body")),
        ("shared module", "stem", Role.CONSUMER, ("body", "head")),
        ("transformer block", "value", Role.CONSUMER, ("project",)),
        ("auxiliary head", "body", Role.CONSUMER, ("head", "aux")),  # aux runs in train mode only
    ],
)
def test_producers_and_consumers(name: str, group: str, role: Role, layers: tuple[str, ...]) -> None:
    assert traced(name)[2][group].layers(role) == layers


def test_two_channels_stay_if_code_squeezes_axes() -> None:
    assert traced("squeeze")[2]["stem"].min_width == 2
    assert traced("chain")[2]["conv1"].min_width == 1


def test_alexnet_and_mobilenet_have_the_published_widths() -> None:
    with torch.device("meta"):  # shapes without values
        alexnet, mobilenet = AlexNet(), MobileNetV1()
    image = torch.empty(1, 3, 224, 224, device="meta")
    graph = trace_channels(alexnet, image, verify=False)
    index = slice_of(graph, "features.10", "classifier.1.weight", 1).index
    assert torch.equal(index, torch.arange(9216).view(256, 36))  # one channel of conv5 is 36 columns of fc6
    assert [g.width for g in graph.groups] == [64, 192, 384, 256, 256, 4096, 4096, 1000]
    assert [g.name for g in graph.groups if g.frozen] == ["classifier.6"]
    graph = trace_channels(mobilenet, image, verify=False)
    published = [32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]  # table 1, 1 x 1 filters
    assert [g.width for g in graph.prunable] == published
    assert [g.name for g in graph.groups if g.frozen] == ["fc"]
    assert graph["conv1"].layers(Role.PER_CHANNEL) == ("conv1_bn", "conv_dw_1", "conv_dw_1_bn")


# ---------------------------------------------------------------- costs


def test_macs_of_a_chain_are_the_papers_sum() -> None:
    net = named(conv1=conv(3, 8), conv2=conv(8, 6, stride=2), flatten=nn.Flatten(), fc=nn.Linear(6 * 16, 5))
    graph = trace_channels(net, torch.randn(1, 3, 8, 8))
    for s1, s2 in ((8, 6), (3, 5), (1, 1)):
        by_hand = 3 * 3 * 64 * 3 * s1 + 3 * 3 * 16 * s1 * s2 + 16 * s2 * 5
        assert int(graph.macs({"conv1": s1, "conv2": s2})) == by_hand


# ---------------------------------------------------------------- frozen by the user


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["conv1"], {"conv1"}),
        (["conv*"], {"conv1", "conv2"}),
        (["bn1"], {"conv1"}),
        (["conv2.bias"], {"conv2"}),
        (["relu*"], set()),
    ],
)
def test_modules_are_frozen_by_pattern(patterns: list[str], frozen: set[str]) -> None:
    graph = traced("chain", freeze=patterns)[2]
    assert {g.name for g in graph.groups if g.frozen == "frozen by the argument `freeze`"} == frozen


@pytest.mark.parametrize("pattern", ["block", "block.0", "b*k", "block.0.weight"])
def test_a_pattern_of_a_block_freezes_its_outputs_only(pattern: str) -> None:
    net = named(block=nn.Sequential(conv(3, 8, 1), nn.ReLU()), other=conv(8, 6, 1), head=conv(6, 2, 1))
    graph = trace_channels(net, torch.randn(1, 3, 4, 4), freeze=pattern)
    assert {g.name for g in graph.groups if g.frozen == "frozen by the argument `freeze`"} == {"block.0"}
    assert graph["other"].frozen is None


# ---------------------------------------------------------------- code that does not follow the widths


class Between(nn.Module):
    """Code between two convolutions; `stem` has 6 channels."""

    def __init__(self, code: Callable[[Tensor], Tensor], out: int = 6) -> None:
        super().__init__()
        self.stem, self.code, self.head = conv(3, 6), code, conv(out, 4, 1)

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.code(self.stem(images)))
        return out


HERE = r"\(test_trace.py:\d+\)"
REASONS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "view": (
        lambda x: x.view(-1, 6, 16).view(-1, 6, 4, 4),
        rf"`view\(-1, 6, 16\)` {HERE} has a hard-coded channel count. "
        r"Use `view\(x.shape\[0\], -1, 16\)` to make it prunable",
    ),
    "view of flat channels": (
        lambda x: x.flatten(1).view(-1, 6, 4, 4),
        rf"`view\(-1, 6, 4, 4\)` {HERE} has a hard-coded channel count. "
        r"Use `view\(x.shape\[0\], -1, 4, 4\)` to make it prunable",
    ),
    "split": (
        lambda x: torch.cat(x.split((3, 3), 1)[::-1], 1),
        rf"`split\(\[3, 3\], 1\)` {HERE} has a hard-coded channel count. Use `chunk\(2, 1\)` to make it prunable",
    ),
    "slice": (
        lambda x: torch.cat([x[:, :1] * 2, x[:, 1:]], 1),
        rf"`x\[:, :1\]` {HERE} selects channels by number. "
        r"Compute the bounds from `x.shape\[1\]`, or use `chunk`, to make it prunable",
    ),
    "roll": (lambda x: x.roll(1, 1), rf"`roll\(\[1\], \[1\]\)` {HERE} selects channels by number"),
    "number": (lambda x: x / x.shape[1], rf"`div` {HERE} uses a number that depends on the channel count"),
    "number in a tensor": (
        lambda x: x / torch.tensor(float(x.shape[1])),
        rf"`div` {HERE} uses a number that depends on the channel count",
    ),
    "branch": (
        lambda x: F.relu(x) if x.shape[1] == 6 else x,
        rf"the code runs other operators at another width \(first `conv2d` in head {HERE}\)",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_the_reason_names_the_code_and_a_fix(name: str) -> None:
    code, reason = REASONS[name]
    frozen = trace_channels(Between(code), torch.randn(2, 3, 4, 4), verify=False)["stem"].frozen
    assert frozen is not None
    assert re.fullmatch(reason, frozen), frozen


@pytest.mark.parametrize(
    "code",
    [
        F.relu,
        lambda x: x * 0.5,
        lambda x: x.flip(1),
        lambda x: x - x.shape[2],
        lambda x: x.view(x.shape[0], -1, 16).view(x.shape[0], -1, 4, 4),
        lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    ],
)
def test_code_that_follows_the_widths_is_prunable(code: Callable[[Tensor], Tensor]) -> None:
    graph = trace_channels(Between(code), torch.randn(2, 3, 4, 4))
    assert graph["stem"].frozen is None
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff <= 1e-5


def test_channels_that_decide_which_code_runs_are_frozen() -> None:
    graph = trace_channels(BranchesOnChannels(), torch.randn(2, 3, 8, 8))
    assert "Python code reads its value" in str(graph["stem"].frozen)
    assert "real tensors" in graph.notes[0]


# ---------------------------------------------------------------- modules that the example input does not run


@pytest.mark.parametrize(
    ("idle", "prunable"),
    [(nn.Linear(7, 7), {"stem", "body"}), (nn.Linear(8 * 16, 6), {"stem"}), (nn.Linear(5, 7), {"body"})],
)
def test_an_idle_layer_freezes_channels_of_matching_sizes(idle: nn.Module, prunable: set[str]) -> None:
    net = named(stem=conv(3, 5), relu=nn.ReLU(), body=conv(5, 8), head=conv(8, 4, 1))
    net.stem.idle = idle
    graph = trace_channels(net, torch.randn(2, 3, 4, 4))
    assert {group.name for group in graph.prunable} == prunable
    assert "does not run stem.idle:" in graph.notes[0]


# ---------------------------------------------------------------- side effects


class Remembers(nn.Module):
    """Writes attributes in its forward pass, as caches and counters do."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8), conv(8, 4, 1)
        self.register_buffer("calls", torch.zeros(8))
        self.cache: dict[str, Any] = {}
        self.latest: Any = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.calls += 1
        self.cache["size"] = x.shape
        self.latest = x.detach()
        self.fresh = 1
        return self.head(x)


def test_attributes_written_by_forward_stay_in_the_copy() -> None:
    net = Remembers()
    trace_channels(net, torch.randn(2, 3, 8, 8))
    assert net.cache == {}
    assert net.latest is None
    assert not hasattr(net, "fresh")
    assert torch.equal(net.calls, torch.zeros(8))


def test_the_input_does_not_change() -> None:
    net = named(relu=nn.ReLU(inplace=True), conv1=conv(3, 8), head=conv(8, 4, 1))
    images = torch.randn(2, 3, 8, 8)
    before = images.clone()
    trace_channels(net, images)
    assert torch.equal(images, before)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_network_on_meta_tensors_is_verified_with_random_weights(device: str) -> None:
    with torch.device("meta"):
        net = chain()
    graph = trace_channels(net, torch.randn(1, 3, 8, 8, device=device))
    assert graph.max_relative_diff is not None
    assert all(tensor.device.type == "meta" for tensor in net.state_dict().values())
    assert {g.name: g.width for g in graph.prunable} == {"conv1": 8, "conv2": 6}


def test_a_network_without_parameters_has_no_groups() -> None:
    graph = trace_channels(named(relu=nn.ReLU(), pool=nn.MaxPool2d(2)), torch.randn(1, 3, 8, 8))
    assert graph.groups == ()


def test_the_first_trace_does_not_import_dynamo() -> None:
    """It takes seconds. A process of its own, since another test may have imported it."""
    code = """
import sys, torch
from torch import nn
from ecc.graph import trace_channels

class Joined(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(3, 8, 3), nn.Conv2d(16, 4, 1)

    def forward(self, x):
        joined = torch.cat([self.one(x).relu(), self.other(x) * 2 + 1], 1)
        return self.head(joined / 3).mean((2, 3))

graph = trace_channels(Joined(), torch.randn(1, 3, 8, 8))
assert len(graph.prunable) == 2, graph
print("torch._dynamo" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False"]


class _SizesOfTheInput(nn.Module):
    """Takes the number of the channels of one layer from those of another."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1)
        self.reduce = nn.Conv2d(12, 12, 2, stride=2)
        self.head = nn.Linear(12, 5)
        self.after = nn.Conv2d(12, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        batch, channels = x.shape[:2]
        tokens = self.reduce(x).reshape(batch, channels, -1).transpose(1, 2)
        return self.head(tokens).mean(1), self.after(x)


@pytest.mark.parametrize("verify", [False, True])
def test_a_number_of_channels_that_is_taken_from_other_channels_unites_both(verify: bool) -> None:
    graph = trace_channels(_SizesOfTheInput(), torch.randn(1, 3, 8, 8), verify=verify)
    assert [(group.name, group.width) for group in graph.prunable] == [("stem", 12)]
    produced = {one.tensor for one in graph["stem"].slices if Role.PRODUCER in one.roles}
    assert produced == {"stem.weight", "stem.bias", "reduce.weight", "reduce.bias"}
