"""The residual width under LayerNorm: masked channels are left out of its statistics, and slim networks are exact."""

from __future__ import annotations

import copy
import pickle
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
    mask_branches_,
    mask_channels_,
    max_relative_diff,
    slim,
    slim_optimizer,
    trace_channels,
    with_widths,
)
from ecc.graph.masked_norm import MaskedNorm, masked_layer_norm
from ecc.graph.model_copy import load_whole_state_, whole_state
from ecc.methods.ecc.importance import ConsumerSlices

EPS = 0.1  # large, so that a wrong eps shows
TOKENS = torch.randint(0, 11, (2, 7), generator=torch.Generator().manual_seed(0))


class FunctionalNorm(nn.Module):
    """A norm of a user's own class, with a literal eps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, 1e-3)


class SubclassedNorm(nn.LayerNorm):
    """A subclass whose forward pass does more."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(0, 1)).transpose(0, 1)


class Block(nn.Module):
    def __init__(self, width: int, norm: Callable[[int], nn.Module], order: str) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.order = norm(width), nn.Linear(width, 12), nn.Linear(12, width), order

    def forward(self, x: Tensor) -> Tensor:
        if self.order == "post-norm":
            return self.norm(x + self.down(F.relu(self.up(x))))
        if self.order == "norm in the branch":
            return x + self.norm(self.down(F.relu(self.up(x))))
        return x + self.down(F.relu(self.up(self.norm(x))))


class Stream(nn.Module):
    """Token and position embeddings, two blocks, and a classifier, which may share the table."""

    def __init__(
        self, norm: Callable[[int], nn.Module], order: str = "pre-norm", *, tied: bool = False, width: int = 10
    ) -> None:
        super().__init__()
        self.table = nn.Embedding(11, width)
        self.place = nn.Parameter(torch.randn(1, 7, width))
        self.blocks = nn.Sequential(Block(width, norm, order), Block(width, norm, order))
        self.norm, self.head = norm(width), nn.Linear(width, 11, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = F.gelu(self.table(tokens) + self.place)  # a producer that is not linear
        return self.head(self.norm(self.blocks(x)))


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "nn.LayerNorm": lambda n: nn.LayerNorm(n, eps=EPS),
    "without bias": lambda n: nn.LayerNorm(n, eps=EPS, bias=False),
    "own class": FunctionalNorm,
    "subclass": SubclassedNorm,
}
ORDERS = ("pre-norm", "post-norm", "norm in the branch")


def traced(net: nn.Module) -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.1)
    net = net.double()
    return net, trace_channels(net, TOKENS)


def cut(net: nn.Module, graph: ChannelGraph, share: float = 0.4) -> nn.Module:
    masked = copy.deepcopy(net)
    for group in graph.prunable:
        mask_channels_(masked, graph, {group.name: torch.randperm(group.width)[: int(share * group.width)]})
    return masked


def train_outputs(net: nn.Module) -> Tensor:
    return net.train()(TOKENS)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", NORMS)
def test_the_residual_width_is_exact(name: str, order: str, tied: bool) -> None:
    net, graph = traced(Stream(NORMS[name], order, tied=tied))
    group = graph["table"]
    assert group.frozen is None
    assert (group.width, group.min_width, group.zeroed) == (10, 2, True)
    masked = cut(net, graph)
    small = slim(masked, graph)
    assert small.table.weight.shape == (11, 6)
    assert max_relative_diff(masked, small, TOKENS) < 1e-12
    torch.testing.assert_close(train_outputs(masked), train_outputs(small), rtol=0, atol=1e-11)
    assert max_relative_diff(masked, net, TOKENS) > 1e-3
    assert [type(module) for module in small.modules()] == [type(module) for module in net.modules()]


def test_the_slim_network_has_the_values_of_the_masked_one() -> None:
    net, graph = traced(Stream(nn.LayerNorm))
    mask_channels_(net, graph, {"table": range(5)})
    small = slim(net, graph)
    assert torch.equal(small.norm.weight, net.norm.weight[5:])
    assert small.norm.eps == net.norm.eps
    assert small.norm.normalized_shape == (5,)
    assert isinstance(net.norm, MaskedNorm)
    assert isinstance(net.norm, nn.LayerNorm)


def test_masked_norms_compute_the_same_while_no_channel_is_masked() -> None:
    x, norm = torch.randn(3, 8, dtype=torch.float64), nn.LayerNorm(8).double()
    torch.testing.assert_close(masked_layer_norm(x, norm.weight, norm.bias, norm.eps), norm(x))
    net, graph = traced(Stream(nn.LayerNorm))
    wanted = net(TOKENS)
    ConsumerSlices(net, graph, torch.device("cpu"))
    assert isinstance(net.norm, MaskedNorm)
    torch.testing.assert_close(net(TOKENS), wanted)
    assert torch.equal(with_widths(net, graph, {})(TOKENS), wanted)  # the layer norm as it is


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_as_in_torch(dtype: torch.dtype) -> None:
    x, norm = torch.randn(3, 64).to(dtype), nn.LayerNorm(64).to(dtype)
    found = masked_layer_norm(x, norm.weight, norm.bias, norm.eps)
    assert found.dtype == dtype
    torch.testing.assert_close(found, norm(x))
    with torch.autocast("cpu", torch.bfloat16):
        weight, bias = norm.weight.float(), norm.bias.float()
        wanted = F.layer_norm(x, (64,), weight, bias)
        found = masked_layer_norm(x, weight, bias, 1e-5)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted)


def test_zero_weights_of_the_dense_network_are_not_masked_channels() -> None:
    net, graph = traced(Stream(nn.LayerNorm))
    with torch.no_grad():
        net.norm.weight[3] = net.norm.bias[3] = 0
    wanted = net(TOKENS)
    masked = copy.deepcopy(net)
    mask_channels_(masked, graph, {"table": []})
    torch.testing.assert_close(masked(TOKENS), wanted)
    mask_channels_(masked, graph, {"table": [1, 2]})
    assert live_channels(masked, graph)["table"] == 8
    assert max_relative_diff(masked, slim(masked, graph), TOKENS) < 1e-12


def test_masked_channels_that_stay_for_a_multiple_are_left_out(tmp_path: Path) -> None:
    net, graph = traced(Stream(nn.LayerNorm))
    mask_channels_(net, graph, {"table": [0, 4, 5]})
    small = slim(net, graph, width_multiple=4)
    assert small.table.weight.shape == (11, 8)
    assert isinstance(small.norm, MaskedNorm)
    assert max_relative_diff(net, small, TOKENS) < 1e-12
    save_slim(small, tmp_path / "slim.safetensors")
    loaded = load_slim(Stream(nn.LayerNorm).double(), tmp_path / "slim.safetensors")
    assert max_relative_diff(small, loaded, TOKENS) == 0


def test_saved_and_loaded_networks(tmp_path: Path) -> None:
    for norm in NORMS.values():
        net, graph = traced(Stream(norm))
        masked = cut(net, graph)
        small = slim(masked, graph)
        save_slim(small, tmp_path / "slim.safetensors")
        loaded = load_slim(Stream(norm).double(), tmp_path / "slim.safetensors")
        assert max_relative_diff(small, loaded, TOKENS) == 0
        assert not any(isinstance(module, MaskedNorm) for module in loaded.modules())
        fresh = Stream(norm).double()
        load_whole_state_(fresh, whole_state(masked))  # as a run that is resumed
        assert max_relative_diff(masked, fresh, TOKENS) == 0
        again = pickle.loads(pickle.dumps(masked))  # noqa: S301 - made here
        assert max_relative_diff(again, masked, TOKENS) == 0


def test_a_graph_file_keeps_the_norms(tmp_path: Path) -> None:
    net, graph = traced(Stream(nn.LayerNorm))
    graph.save(tmp_path / "net.graph")
    loaded = ChannelGraph.load(tmp_path / "net.graph")
    assert loaded.layer_norms == graph.layer_norms == ("blocks.0.norm", "blocks.1.norm", "norm")
    masked = cut(net, loaded)
    assert max_relative_diff(masked, slim(masked, loaded), TOKENS) < 1e-12


def test_masked_channels_stay_zero_in_training_and_the_optimizer_follows() -> None:
    net, graph = traced(Stream(nn.LayerNorm))
    mask_channels_(net, graph, {"table": [1, 4]})
    small = slim(net, graph)
    adam = torch.optim.Adam(net.parameters(), lr=0.1)
    net(TOKENS).square().mean().backward()
    adam.step()
    assert live_channels(net, graph)["table"] == 8
    followed = slim_optimizer(adam, net, small, graph)
    small(TOKENS).square().mean().backward()
    fresh = torch.optim.Adam(small.parameters(), lr=0.1)
    fresh.step()
    for parameter in (small.norm.weight, small.norm.bias, small.table.weight):
        torch.testing.assert_close(followed.state[parameter]["exp_avg"], fresh.state[parameter]["exp_avg"])


def test_a_masked_network_can_be_traced_and_pruned_again() -> None:
    net, graph = traced(Stream(nn.LayerNorm))
    masked = cut(net, graph)
    again = trace_channels(masked, TOKENS)
    assert again.fingerprint == graph.fingerprint
    small = slim(masked, again)
    assert max_relative_diff(masked, small, TOKENS) < 1e-12
    graph = trace_channels(small, TOKENS)
    masked = cut(small, graph)
    assert max_relative_diff(masked, slim(masked, graph), TOKENS) < 1e-12


@pytest.mark.parametrize("order", ORDERS)
def test_removed_branches_and_residual_width_together(order: str) -> None:
    net, graph = traced(Stream(nn.LayerNorm, order))
    assert len(graph.branches) == 2 or order == "post-norm"
    for branch in graph.branches:
        masked = cut(net, graph)
        mask_branches_(masked, graph, [branch.name])
        assert max_relative_diff(masked, slim(masked, graph), TOKENS) < 1e-12


class Merging(nn.Module):
    """Patch merging of Swin: a norm over four neighbours with all channels of each, and two groups in one norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.other = nn.Linear(5, 8), nn.Linear(5, 6)
        self.norm, self.reduce, self.head = nn.LayerNorm(22), nn.Linear(22, 7), nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        merged = torch.cat([y[:, 0::2], y[:, 1::2], self.other(x)[:, 0::2]], -1)
        return self.head(F.relu(self.reduce(self.norm(merged))))


def test_a_norm_over_concatenated_groups() -> None:
    torch.manual_seed(0)
    net, x = Merging().double(), torch.randn(2, 6, 5, dtype=torch.float64)
    graph = trace_channels(net, x)
    assert {g.name: g.width for g in graph.prunable} == {"embed": 8, "other": 6, "reduce": 7}
    masked = cut(net, graph)
    assert slim(masked, graph).norm.normalized_shape == (14,)
    assert max_relative_diff(masked, slim(masked, graph), x) < 1e-12


@pytest.mark.parametrize("norm_first", [False, True])
def test_the_encoder_layer_of_torch(norm_first: bool) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=norm_first)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    net = nn.Sequential(nn.Linear(5, 16), encoder, nn.Linear(16, 3)).double().eval()
    x = torch.randn(2, 7, 5, dtype=torch.float64)
    graph = trace_channels(net, x)
    assert graph["0"].frozen is None
    masked = cut(net, graph)
    assert max_relative_diff(masked, slim(masked, graph), x) < 1e-12


# ---------------------------------------------------------------- what stays frozen


class OtherWeight(nn.Module):
    """The weight of the norm belongs to another module, or is computed."""

    def __init__(self, computed: bool) -> None:
        super().__init__()
        self.fc, self.norm, self.head, self.computed = nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3), computed

    def forward(self, x: Tensor) -> Tensor:
        weight = self.norm.weight * 2 if self.computed else self.norm.weight
        return self.head(F.layer_norm(self.fc(x), (8,), weight, self.norm.bias))


@pytest.mark.parametrize("computed", [False, True])
def test_a_weight_of_another_module_freezes(computed: bool) -> None:
    net, x = OtherWeight(computed).double(), torch.randn(2, 5, dtype=torch.float64)
    graph = trace_channels(net, x)
    assert "is not a parameter of the module that calls it" in str(graph["fc"].frozen)


def test_a_norm_without_weight_freezes() -> None:
    _, graph = traced(Stream(lambda n: nn.LayerNorm(n, elementwise_affine=False)))
    assert "`layer_norm` in blocks.0.norm has no weight, by which channels are masked" in str(graph["table"].frozen)


class ReadsStream(nn.Module):
    """The residual stream is an output of the network, or a softmax reads it."""

    def __init__(self, reads: str) -> None:
        super().__init__()
        self.body, self.reads = Stream(nn.LayerNorm), reads

    def forward(self, tokens: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.body.blocks(self.body.table(tokens) + self.body.place)
        y = self.body.head(self.body.norm(x))
        return (y, x) if self.reads == "output" else y + x.softmax(-1).amax(-1, keepdim=True)


@pytest.mark.parametrize(("reads", "reason"), [("output", "it is an output of the network"), ("softmax", "`softmax`")])
def test_another_reader_of_the_stream_freezes(reads: str, reason: str) -> None:
    net, graph = traced(ReadsStream(reads))
    assert reason in str(graph["body.table"].frozen)
    masked = cut(net, graph)
    assert max_relative_diff(masked, slim(masked, graph), TOKENS) < 1e-12
