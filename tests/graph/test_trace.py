from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ecc
from ecc.graph import ChannelGraph, ParamSlice, Role, mask_channels_, slim, trace_channels
from ecc.zoo import AlexNet, MobileNetV1
from graph.cases import CASES, chain, conv, image, named, traced
from graph.special_nets import BranchesOnChannels


def place(graph: ChannelGraph, group: str, tensor: str, axis: int) -> ParamSlice:
    (found,) = [p for p in graph[group].slices if (p.tensor, p.axis) == (tensor, axis)]
    return found


# ---------------------------------------------------------------- every case


@pytest.mark.parametrize("name", CASES)
def test_groups_and_reasons_are_those_found_by_hand(name: str) -> None:
    case = CASES[name]
    _, _, graph = traced(name)
    assert {g.name: g.width for g in graph.groups if g.frozen is None} == dict(case.cut)
    assert {g.name: g.width for g in graph.groups if g.frozen} == {n: width for n, (width, _) in case.frozen.items()}
    for group, (_, words) in case.frozen.items():
        assert words in str(graph[group].frozen)
    assert len(graph.notes) == len(case.notes)
    for note, words in zip(graph.notes, case.notes, strict=True):
        assert words in note


@pytest.mark.parametrize("name", CASES)
def test_the_proof_in_numbers_freezes_nothing_more(name: str) -> None:
    net, inputs, graph = traced(name)
    assert graph.max_relative_diff is None
    verified = ecc.verify_graph(net, graph, inputs)
    assert verified.max_relative_diff is not None
    assert verified.max_relative_diff <= 1e-4
    assert verified.groups == graph.groups


@pytest.mark.parametrize("name", CASES)
def test_the_network_and_the_random_state_are_left_as_they_were(name: str) -> None:
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


def test_the_same_network_gives_the_same_graph() -> None:
    net = chain()
    first, second = (trace_channels(net, image()()) for _ in range(2))
    assert first.fingerprint == second.fingerprint


# ---------------------------------------------------------------- places


def test_a_chain_reads_and_writes_what_its_weights_say() -> None:
    _, _, graph = traced("chain")
    everything = torch.arange(8)[:, None]
    expected = [
        ("conv1.weight", 0, (Role.PRODUCER,)),
        ("conv1.bias", 0, (Role.PRODUCER,)),
        ("bn1.weight", 0, (Role.PER_CHANNEL,)),
        ("bn1.bias", 0, (Role.PER_CHANNEL,)),
        ("bn1.running_mean", 0, (Role.PER_CHANNEL,)),
        ("bn1.running_var", 0, (Role.PER_CHANNEL,)),
        ("conv2.weight", 1, (Role.CONSUMER,)),
    ]
    found = graph["conv1"].slices
    assert sorted((p.tensor, p.axis, p.roles) for p in found) == sorted(expected)
    assert all(torch.equal(p.index, everything) for p in found)


def test_one_channel_is_as_many_columns_as_it_has_positions() -> None:
    _, _, graph = traced("flattened chain")
    columns = place(graph, "conv", "fc1.weight", 1)
    assert torch.equal(columns.index, torch.arange(8 * 16).view(8, 16))


def test_one_channel_of_alexnets_conv5_is_36_columns_of_fc6() -> None:
    with torch.device("meta"):  # shapes without the 244 MB
        net = AlexNet()
    graph = trace_channels(net, torch.empty(1, 3, 224, 224, device="meta"))
    fc6 = place(graph, "features.10", "classifier.1.weight", 1)
    assert torch.equal(fc6.index, torch.arange(9216).view(256, 36))
    assert [g.width for g in graph.groups] == [64, 192, 384, 256, 256, 4096, 4096, 1000]
    assert [g.name for g in graph.groups if g.frozen] == ["classifier.6"]


def test_mobilenet_has_one_group_for_each_published_width() -> None:
    with torch.device("meta"):
        net = MobileNetV1()
    graph = trace_channels(net, torch.empty(1, 3, 224, 224, device="meta"))
    published = [32, 64, 128, 128, 256, 256, 512, 512, 512, 512, 512, 512, 1024, 1024]  # Table 1, filters of 1 x 1
    assert [g.width for g in graph.prunable] == published
    assert [g.name for g in graph.groups if g.frozen] == ["fc"]
    assert graph["conv1"].layers(Role.PER_CHANNEL) == ("conv1_bn", "conv_dw_1", "conv_dw_1_bn")


def test_a_residual_stream_has_all_its_writers_and_readers() -> None:
    _, _, graph = traced("residual")
    assert graph["stem"].layers(Role.PRODUCER) == ("stem", "conv2")
    assert graph["stem"].layers(Role.CONSUMER) == ("conv1", "head")


def test_option_a_ties_the_middle_channels_to_the_shortcut() -> None:
    _, _, graph = traced("option A")
    assert torch.equal(place(graph, "stem", "conv.weight", 0).index, torch.arange(2, 10)[:, None])
    assert place(graph, "conv", "conv.weight", 0).index.flatten().tolist() == [0, 1, 10, 11]


def test_a_depthwise_multiplier_puts_its_copies_into_one_unit() -> None:
    _, _, graph = traced("depthwise with multiplier")
    assert torch.equal(place(graph, "conv1", "dw.weight", 0).index, torch.arange(16).view(8, 2))
    assert torch.equal(place(graph, "conv1", "pw.weight", 1).index, torch.arange(16).view(8, 2))


def test_a_unit_of_a_grouped_convolution_is_a_whole_group() -> None:
    _, _, graph = traced("grouped")
    assert torch.equal(place(graph, "conv1", "conv1.weight", 0).index, torch.arange(8).view(4, 2))
    assert torch.equal(place(graph, "conv1", "conv2.weight", 0).index, torch.arange(12).view(4, 3))


def test_concatenated_branches_stand_side_by_side_in_their_reader() -> None:
    _, _, graph = traced("concat")
    assert place(graph, "left", "head.weight", 1).index.flatten().tolist() == [0, 1, 2, 3]
    assert place(graph, "right", "head.weight", 1).index.flatten().tolist() == [4, 5, 6, 7, 8, 9]


def test_halves_of_a_chunk_stay_equal() -> None:
    _, _, graph = traced("chunk and cat")
    assert place(graph, "stem", "stem.weight", 0).index.tolist() == [[0, 4], [1, 5], [2, 6], [3, 7]]


def test_a_channel_shuffle_ties_its_groups() -> None:
    _, _, graph = traced("channel shuffle")
    assert place(graph, "stem", "stem.weight", 0).index.tolist() == [[k, 4 + k, 8 + k] for k in range(4)]
    assert place(graph, "stem", "head.weight", 1).index.tolist() == [[3 * k, 3 * k + 1, 3 * k + 2] for k in range(4)]


def test_a_pixel_shuffle_makes_one_channel_of_four() -> None:
    _, _, graph = traced("pixel shuffle")
    assert torch.equal(place(graph, "stem", "stem.weight", 0).index, torch.arange(12).view(3, 4))
    assert torch.equal(place(graph, "stem", "head.weight", 1).index, torch.arange(3)[:, None])


def test_attention_heads_lose_the_same_channels() -> None:
    _, _, graph = traced("transformer block")
    assert place(graph, "value", "value.weight", 0).index.tolist() == [[k, 4 + k] for k in range(4)]
    assert graph["value"].layers(Role.CONSUMER) == ("project",)


def test_a_shared_layer_reads_what_it_writes() -> None:
    _, _, graph = traced("shared module")
    assert graph["stem"].layers(Role.PRODUCER) == ("stem", "body")
    assert graph["stem"].layers(Role.CONSUMER) == ("body", "head")


def test_a_tied_weight_appears_once() -> None:
    _, _, graph = traced("tied weights")
    assert [p.axis for p in graph["fc1"].slices if p.tensor == "fc2.weight"] == [0, 1]
    assert not [p for p in graph["fc1"].slices if p.tensor == "fc3.weight"]


def test_a_head_that_runs_in_training_only_is_a_reader_too() -> None:
    _, _, graph = traced("auxiliary head")
    assert graph["body"].layers(Role.CONSUMER) == ("head", "aux")


def test_two_channels_stay_where_code_drops_axes_of_size_one() -> None:
    assert traced("squeeze")[2]["stem"].min_width == 2
    assert traced("chain")[2]["conv1"].min_width == 1


# ---------------------------------------------------------------- costs by hand


def test_macs_of_a_chain_are_the_papers_sum() -> None:
    net = named(conv1=conv(3, 8), conv2=conv(8, 6, stride=2), flatten=nn.Flatten(), fc=nn.Linear(6 * 16, 5))
    graph = trace_channels(net, torch.randn(1, 3, 8, 8))
    for s1, s2 in ((8, 6), (3, 5), (1, 1)):
        by_hand = 3 * 3 * 64 * 3 * s1 + 3 * 3 * 16 * s1 * s2 + 16 * s2 * 5
        assert int(graph.macs({"conv1": s1, "conv2": s2})) == by_hand


def test_macs_count_the_whole_batch_and_nothing_but_the_eval_pass() -> None:
    _, _, graph = traced("auxiliary head")  # batch of 2; aux runs in training only
    assert int(graph.macs()) == 2 * 64 * (9 * 3 * 8 + 9 * 8 * 6 + 6 * 4)


# ---------------------------------------------------------------- freezing by wish


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [
        (["conv1"], {"conv1"}),
        (["conv*"], {"conv1", "conv2"}),
        (["bn1"], {"conv1"}),  # a layer that carries the channels
        (["conv2.bias"], {"conv2"}),
        (["conv1", "conv2"], {"conv1", "conv2"}),
        (["relu*"], set()),  # it has nothing to freeze
    ],
)
def test_modules_stay_whole_on_request(patterns: list[str], frozen: set[str]) -> None:
    _, _, graph = traced("chain", freeze=patterns)
    assert {g.name for g in graph.groups if g.frozen == "frozen by the argument `freeze`"} == frozen


@pytest.mark.parametrize("pattern", ["block", "block.0", "b*k", "block.0.weight"])
def test_naming_a_block_freezes_all_that_is_written_in_it(pattern: str) -> None:
    net = nn.Sequential()
    net.block, net.other, net.head = (
        nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU()),
        nn.Conv2d(8, 6, 1),
        nn.Conv2d(6, 2, 1),
    )
    graph = trace_channels(net, torch.randn(1, 3, 4, 4), freeze=pattern)
    assert {g.name for g in graph.groups if g.frozen == "frozen by the argument `freeze`"} == {"block.0"}
    assert graph["other"].frozen is None


def test_a_layer_that_reads_a_frozen_group_can_still_be_cut() -> None:
    _, _, graph = traced("residual", freeze=["conv2"])  # conv2 writes into the residual stream
    assert graph["stem"].frozen == "frozen by the argument `freeze`"
    assert graph["conv1"].frozen is None


# ---------------------------------------------------------------- what a cut changes


class DependsOnWidth(nn.Module):
    """Arithmetic with the number of channels: no operator shows it, only the outputs do."""

    def __init__(self, scale: Any) -> None:
        super().__init__()
        self.stem, self.head, self.scale = conv(3, 8), conv(8, 4, 1), scale

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x * self.scale(x.shape[1]))


def divided(channels: int) -> float:
    return 1 / channels


def divided_by_a_tensor(channels: int) -> Tensor:
    return 1 / torch.tensor(float(channels))


def root(channels: int) -> Tensor:
    return torch.tensor(channels - 7.0).sqrt()  # not a number below 7


@pytest.mark.parametrize("scale", [divided, divided_by_a_tensor, root])
def test_arithmetic_with_the_number_of_channels_freezes_them(scale: Any) -> None:
    graph = trace_channels(DependsOnWidth(scale), torch.randn(2, 3, 8, 8))
    assert graph["stem"].frozen is not None


def doubles_the_first(x: Tensor) -> Tensor:
    x = x.clone()
    x[:, 0] = 2 * x[:, 0]
    return x


def raises_the_first(x: Tensor) -> Tensor:
    offset = torch.zeros_like(x)
    offset[:, 0] = 5.0
    return x + offset


def doubles_three(x: Tensor) -> Tensor:
    return torch.cat([2 * x[:, :3], x[:, 3:]], dim=1)


def gates_the_last(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], torch.sigmoid(x[:, -1:])], dim=1)


def masks_half(x: Tensor) -> Tensor:
    half = x.shape[1] // 2
    return x * torch.cat([x.new_ones(1, half, 1, 1), x.new_zeros(1, x.shape[1] - half, 1, 1)], dim=1)


class NamesChannels(nn.Module):
    """The code means certain channels by their number; after a cut the number means another one."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.stem, self.function, self.head = conv(3, 8), function, conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.function(self.stem(x)))


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("function", [doubles_the_first, raises_the_first, doubles_three, gates_the_last, masks_half])
def test_cutting_is_exact_where_code_means_a_channel_by_its_number(function: Any, verified: bool) -> None:
    net, images = NamesChannels(function).eval(), torch.randn(2, 3, 8, 8)
    graph = trace_channels(net, images, verify=verified)
    for unit in range(8) if graph["stem"].frozen is None else ():
        masked = copy.deepcopy(net)
        mask_channels_(masked, graph, {"stem": torch.tensor([unit])})
        torch.testing.assert_close(slim(masked, graph)(images), masked(images), msg=f"without channel {unit}")
    assert graph["stem"].width == 8


def test_channels_that_decide_what_runs_are_frozen() -> None:
    graph = trace_channels(BranchesOnChannels(), torch.randn(2, 3, 8, 8))
    assert "sum reduces over it" in str(graph["stem"].frozen)
    assert "real tensors" in graph.notes[0]
