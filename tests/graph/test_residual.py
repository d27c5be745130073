"""The residual width under RMSNorm and LayerNorm, and other sums over channels: exact, or frozen with a reason."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.export import load_slim, save_slim
from ecc.graph import (
    ChannelGraph,
    live_channels,
    live_masks,
    mask_channels_,
    max_relative_diff,
    slim,
    slim_optimizer,
    trace_channels,
    with_widths,
)
from ecc.graph.model_copy import named_tensors
from ecc.methods.ecc.importance import ConsumerSlices

EPS = 0.1  # large, so that a wrong eps shows


class HandWritten(nn.Module):
    """RMSNorm in plain tensor code, with the weight or one plus the weight, and several spellings."""

    def __init__(self, width: int, form: str = "weight") -> None:
        super().__init__()
        self.form, self.eps = form, EPS
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        square = x.pow(2).mean(-1, keepdim=True)
        if self.form == "literal eps":
            return self.weight * (x * torch.rsqrt(square + 0.1000001))
        if self.form == "one plus":
            return (x * torch.rsqrt(square + self.eps)) * (1.0 + self.weight)
        if self.form == "divided":
            return x / (square + self.eps).sqrt() * self.weight
        if self.form == "power":
            return x * (square + self.eps) ** -0.5 * self.weight
        if self.form == "without eps":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True)) * self.weight
        if self.form == "clamped":
            return x / square.sqrt().clamp(min=self.eps) * self.weight
        if self.form == "normalized":
            return F.normalize(x, dim=-1) * 4.0 * self.weight
        if self.form == "number of channels":
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) / x.shape[-1] + self.eps) * self.weight
        return self.weight * (x * torch.rsqrt(square + self.eps))


class Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.relu(self.up(self.norm(x))))


class Stream(nn.Module):
    """Token and position embeddings, two blocks, and a classifier, which may share the table."""

    def __init__(self, norm: Callable[[int], nn.Module], width: int = 10, *, tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.place = nn.Parameter(torch.randn(1, 7, width))
        self.blocks = nn.Sequential(Block(width, norm), Block(width, norm))
        self.norm, self.head = norm(width), nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.table(tokens) + self.place)))


TOKENS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))
EXACT = ("weight", "one plus", "divided", "power", "without eps", "clamped", "normalized")
NORMS: dict[str, Callable[[int], nn.Module]] = {
    **{f"hand-written, {form}": lambda n, form=form: HandWritten(n, form) for form in EXACT},
    "nn.RMSNorm": lambda n: nn.RMSNorm(n, eps=EPS),
    "nn.RMSNorm, eps of the type": nn.RMSNorm,
    "nn.RMSNorm without weight": lambda n: nn.RMSNorm(n, eps=EPS, elementwise_affine=False),
}


def randomized(net: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.1)
    return net


def traced(net: nn.Module) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    net = randomized(net).double()
    return net, trace_channels(net, TOKENS)


def cut(net: nn.Module, graph: ChannelGraph, share: float = 0.4) -> nn.Module:
    masked = copy.deepcopy(net)
    for group in graph.prunable:
        gone = torch.randperm(group.width)[: int(share * group.width)]
        mask_channels_(masked, graph, {group.name: gone})
    return masked


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", NORMS)
def test_the_residual_width_is_exact_under_rms_norm(name: str, tied: bool) -> None:
    if tied and "without weight" in name:
        pytest.skip("the weight of the classifier cannot absorb the factor and be the table too")
    net, graph = traced(Stream(NORMS[name], tied=tied))
    group = graph["table"]
    assert group.frozen is None
    assert group.zeroed
    assert group.width == 10
    masked = cut(net, graph)
    small = slim(masked, graph)
    assert small.table.weight.shape == (11, 6)
    assert max_relative_diff(masked, small, TOKENS) < 1e-12
    assert max_relative_diff(masked, net, TOKENS) > 1e-3
    assert 1 - float(graph.parameters({g.name: 1 for g in graph.prunable}) / graph.parameters()) > 0.8


def test_what_the_slim_network_changes() -> None:
    net, graph = traced(Stream(HandWritten))
    mask_channels_(net, graph, {"table": range(5)})
    small = slim(net, graph)
    torch.testing.assert_close(small.norm.weight, net.norm.weight[5:] * 2**0.5)
    assert small.norm.eps == pytest.approx(2 * EPS)
    assert net.norm.eps == EPS
    net, graph = traced(Stream(NORMS["hand-written, one plus"]))
    mask_channels_(net, graph, {"table": range(5)})
    torch.testing.assert_close(1 + slim(net, graph).norm.weight, (1 + net.norm.weight[5:]) * 2**0.5)


@pytest.mark.parametrize(
    ("form", "reason"),
    [("literal eps", "adds 0.1 to a mean over channels"), ("number of channels", "depends on the channel count")],
)
def test_code_that_cannot_follow_the_width_is_frozen(form: str, reason: str) -> None:
    net, graph = traced(Stream(lambda n: HandWritten(n, form)))
    assert reason in str(graph["table"].frozen)
    masked = cut(net, graph)
    assert max_relative_diff(masked, slim(masked, graph), TOKENS) < 1e-12
    assert any(group.name.endswith("up") for group in graph.prunable)


def test_a_shared_weight_that_cannot_absorb_the_factor_is_frozen() -> None:
    _, graph = traced(Stream(NORMS["nn.RMSNorm without weight"], tied=True))
    assert "table.weight would have to change with its width" in str(graph["table"].frozen)


class OneNormForTwoStreams(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(5, 8)
        self.norm = HandWritten(8)
        self.head = nn.Linear(8, 3)
        self.other = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x))) + self.other(self.norm(self.second(x)))


def test_a_norm_that_two_streams_share_stays_exact() -> None:
    torch.manual_seed(0)
    net, x = OneNormForTwoStreams().double(), torch.randn(4, 5, dtype=torch.float64)
    graph = trace_channels(net, x)
    masked = cut(net, graph)
    assert max_relative_diff(masked, slim(masked, graph), x) < 1e-12


# ---------------------------------------------------------------- masking


def test_a_unit_is_masked_only_if_its_producers_are_zero_too() -> None:
    net, graph = traced(Stream(HandWritten))
    tensors = named_tensors(net)
    with torch.no_grad():
        for one in graph["table"].slices:
            if one.is_consumer:
                tensors[one.tensor].index_fill_(one.axis, one.index[3].flatten(), 0)
    assert live_channels(net, graph)["table"] == 10
    mask_channels_(net, graph, {"table": [3]})
    assert live_channels(net, graph)["table"] == 9
    assert not net.table.weight[:, 3].any()
    assert not net.blocks[1].down.bias[3].any()
    assert not net.place[..., 3].any()


def test_the_masks_of_a_solver_contain_the_producers() -> None:
    net, graph = traced(Stream(HandWritten))
    slices = ConsumerSlices(net, graph, torch.device("cpu"))
    alive = torch.rand(graph.num_channel_ids - 1, generator=torch.Generator().manual_seed(1)) < 0.6
    start = [0, *torch.tensor([g.width for g in graph.groups]).cumsum(0).tolist()]
    for group, first, stop in zip(graph.groups, start, start[1:], strict=False):
        alive[first:stop] |= group.frozen is not None
        alive[first] = True
    slices.set_mask(alive)
    slices.apply_mask_()
    assert torch.equal(slices.live(), alive)
    assert torch.equal(torch.cat(live_masks(net, graph)), alive)
    assert max_relative_diff(net, slim(net, graph), TOKENS) < 1e-12


def test_masked_channels_stay_zero_in_training_without_a_mask() -> None:
    net, graph = traced(Stream(HandWritten))
    mask_channels_(net, graph, {"table": [1, 4]})
    net(TOKENS).square().mean().backward()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step()
    assert live_channels(net, graph)["table"] == 8


# ---------------------------------------------------------------- what follows the slim network


def test_saved_and_loaded_networks_have_the_scaled_eps(tmp_path: Path) -> None:
    for name in ("hand-written, weight", "nn.RMSNorm, eps of the type", "nn.RMSNorm without weight"):
        net, graph = traced(Stream(NORMS[name]))
        small = slim(cut(net, graph), graph)
        save_slim(small, tmp_path / "slim.safetensors")
        loaded = load_slim(Stream(NORMS[name]).double(), tmp_path / "slim.safetensors")
        assert max_relative_diff(small, loaded, TOKENS) == 0
        assert loaded.norm.eps == small.norm.eps != Stream(NORMS[name]).norm.eps


def test_the_graph_file_keeps_masks_and_factors(tmp_path: Path) -> None:
    net, graph = traced(Stream(HandWritten))
    graph.save(tmp_path / "net.graph")
    loaded = ChannelGraph.load(tmp_path / "net.graph")
    assert loaded["table"].zeroed
    assert loaded.scales == graph.scales
    masked = cut(net, graph)
    assert max_relative_diff(slim(masked, graph), slim(masked, loaded), TOKENS) == 0


def test_the_optimizer_state_of_a_scaled_weight_is_scaled_as_its_gradient() -> None:
    net, graph = traced(Stream(HandWritten))
    mask_channels_(net, graph, {"table": range(5)})
    small = slim(net, graph)
    for one in (net, small):
        one.zero_grad()
        one(TOKENS).square().mean().backward()
    torch.testing.assert_close(small.norm.weight.grad, net.norm.weight.grad[5:] * 0.5**0.5)
    adam = torch.optim.Adam(net.parameters(), lr=0.0)
    adam.step()
    followed = slim_optimizer(adam, net, small, graph)
    fresh = torch.optim.Adam(small.parameters(), lr=0.0)
    fresh.step()
    for key in ("exp_avg", "exp_avg_sq"):
        for parameter in (small.norm.weight, small.head.weight, small.table.weight):
            torch.testing.assert_close(followed.state[parameter][key], fresh.state[parameter][key])


def test_networks_with_other_widths_change_weight_and_eps_alike() -> None:
    net, graph = traced(Stream(HandWritten))
    small = with_widths(net, graph, {"table": 5})
    assert small.norm.eps == pytest.approx(2 * EPS)
    torch.testing.assert_close(small.norm.weight, net.norm.weight[:5] * 2**0.5)


# ---------------------------------------------------------------- other sums over channels


class Towers(nn.Module):
    """The score of a user and an item is the inner product of their embeddings."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.users, self.items, self.way = nn.Embedding(6, 8), nn.Embedding(9, 8), way

    def forward(self, tokens: Tensor) -> Tensor:
        users, items = self.users(tokens % 6), self.items(tokens % 9)
        if self.way == "cosine":
            users, items = F.normalize(users, dim=-1), F.normalize(items, dim=-1)
        return (users * items).mean(-1) if self.way == "mean" else (users * items).sum(-1)


def test_inner_products_of_embedding_tables() -> None:
    for way in ("sum", "cosine"):
        net, graph = traced(Towers(way))
        assert graph["users"].frozen is None
        assert graph["users"].width == 8
        masked = cut(net, graph)
        assert slim(masked, graph).items.weight.shape == (9, 5)
        assert max_relative_diff(masked, slim(masked, graph), TOKENS) < 1e-12
    _, graph = traced(Towers("mean"))
    assert "an output of the network is a mean over it" in str(graph["users"].frozen)


class ResponseNorm(nn.Module):
    """Global response norm of ConvNeXt V2."""

    def __init__(self, width: int, *, literal: bool) -> None:
        super().__init__()
        self.gamma, self.beta = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps, self.literal = EPS, literal

    def forward(self, x: Tensor) -> Tensor:
        size = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        share = size / (size.mean(dim=-1, keepdim=True) + (0.2 if self.literal else self.eps))
        return self.gamma * (x * share) + self.beta + x


@pytest.mark.parametrize("literal", [False, True])
def test_global_response_norm(literal: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.GELU(), ResponseNorm(12, literal=literal), nn.Linear(12, 4))
    randomized(net).double()
    images = torch.randn(2, 5, 5, 4, dtype=torch.float64)
    graph = trace_channels(net, images)
    if literal:
        assert "Keep it as an attribute of the module" in str(graph["0"].frozen)
    else:
        assert graph["0"].frozen is None
        masked = cut(net, graph)
        assert max_relative_diff(masked, slim(masked, graph), images) < 1e-12
