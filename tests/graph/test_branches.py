"""Residual branches: masked and removed networks agree for every subset, and costs count what is left."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import BadFile, BadWidths
from ecc.export.slim_file import load_slim, save_slim
from ecc.graph import (
    Branch,
    ChannelGraph,
    mask_branches_,
    mask_channels_,
    max_relative_diff,
    removed_branches,
    slim,
    slim_optimizer,
    trace_channels,
    verify_graph,
    with_widths,
)
from ecc.graph.numerics import randomize_constants_
from ecc.graph.removal import RemovedModule
from ecc.graph.verification import Check
from graph.branch_nets import NETWORKS, TOKENS, TRAPS, Transformer, built, token_net

CASES = {name: (build, shape, count, blocks) for name, (build, shape, count, blocks) in NETWORKS.items()}
CASES |= {name: (build, TOKENS, count, blocks) for name, (build, count, blocks) in TRAPS.items()}


def subsets(names: list[str]) -> list[list[str]]:
    """All subsets of up to four branches, else single ones, all, and some at random."""
    if len(names) <= 4:
        return [list(some) for count in range(1, len(names) + 1) for some in itertools.combinations(names, count)]
    generator = torch.Generator().manual_seed(0)
    drawn = [[n for n in names if torch.rand((), generator=generator) < 0.5] for _ in range(5)]
    return [names, *[[name] for name in names], *[some for some in drawn if some]]


def widths_without(graph: ChannelGraph, names: list[str]) -> dict[str, int]:
    return {group: 0 for name in names for group in graph.branch(name).groups}


def names_of(graph: ChannelGraph) -> list[str]:
    return [branch.name for branch in graph.branches]


def count_macs(net: nn.Module, x: Tensor) -> int:
    """MACs of convolutions and linear layers, from the shapes that they really see."""
    total = 0

    def count(module: nn.Module, _: object, out: Tensor) -> None:
        nonlocal total
        if isinstance(module, nn.Conv2d):
            total += out.numel() * module.weight[0].numel()
        elif isinstance(module, nn.Linear):
            total += out.numel() * module.in_features

    hooks = [module.register_forward_hook(count) for module in net.modules()]
    with torch.no_grad():
        net(x)
    for hook in hooks:
        hook.remove()
    return total


@pytest.mark.parametrize("name", CASES)
def test_every_subset_of_branches_is_removed_exactly(name: str) -> None:
    build, shape, count, blocks = CASES[name]
    net, x = built(build, shape)
    graph = trace_channels(net, x)
    assert len(graph.branches) == count, (names_of(graph), graph.kept_branches)
    paths = [one.path for one in graph.replacements]
    assert sum(any(path.startswith(f"{block}.") for path in paths) for block in paths) == blocks
    dense, wide = with_widths(net, graph, {}).double(), torch.randn(3, *shape[1:], dtype=torch.float64)
    randomize_constants_(dense, torch.Generator().manual_seed(0))
    for some in subsets(names_of(graph)):
        masked = with_widths(dense, graph, {})
        mask_branches_(masked, graph, some)
        assert set(removed_branches(masked, graph)) == set(some)
        small = slim(masked, graph)
        for inputs in (x.double(), wide):
            assert max_relative_diff(masked, small, inputs) < 1e-12
            assert max_relative_diff(dense, small, inputs) > 1e-6
        left = sum(parameter.numel() for parameter in small.parameters())
        assert left == int(graph.parameters(widths_without(graph, some)))
        assert left < int(graph.parameters())


@pytest.mark.parametrize("name", ["basic", "mbconv", "transformer", "post norm"])
def test_counted_macs_are_those_of_the_removed_network(name: str) -> None:
    build, shape, *_ = CASES[name]
    net, x = built(build, shape)
    graph = trace_channels(net, x)
    kinds = torch.tensor([layer.kind in ("conv", "grouped conv", "linear") for layer in graph.layers])
    for some in [[], *subsets(names_of(graph))]:
        widths = widths_without(graph, some)
        counted = graph.costs.macs_per_layer(graph.widths(widths))[kinds].sum()
        assert int(counted) == count_macs(with_widths(net, graph, widths), x)


def test_random_widths_and_removed_branches_together() -> None:
    net, x = built(*NETWORKS["transformer"][:2])
    graph = trace_channels(net, x)
    dense = with_widths(net, graph, {}).double()
    generator = torch.Generator().manual_seed(1)
    for some in subsets(names_of(graph)):
        masked = with_widths(dense, graph, {})
        for group in graph.prunable:
            gone = torch.randperm(group.width, generator=generator)[: group.width // 3]
            mask_channels_(masked, graph, {group.name: gone})
        mask_branches_(masked, graph, some)
        assert max_relative_diff(masked, slim(masked, graph), x.double()) < 1e-12


def test_names_groups_and_exits() -> None:
    net, x = built(*NETWORKS["basic"][:2])
    graph = trace_channels(net, x)
    assert graph.branches[0] == Branch("3", ("3.conv1",), ("3.bn2.weight", "3.bn2.bias"))
    net, x = built(*NETWORKS["transformer"][:2])
    graph = trace_channels(net, x)
    assert names_of(graph) == ["1.attn", "1.mlp", "2.attn", "2.mlp"]
    assert graph.branch("1.mlp").exits == ("1.mlp.3.weight", "1.mlp.3.bias")
    with pytest.raises(BadWidths, match="no branch is called 'attn'"):
        graph.branch("attn")


def test_a_module_frozen_by_the_user_keeps_its_branch() -> None:
    net, x = built(*NETWORKS["transformer"][:2])
    graph = trace_channels(net, x, freeze=["1.mlp*", "2.attn.qkv"])
    assert names_of(graph) == ["1.attn", "2.mlp"]
    assert dict(graph.kept_branches)["1.mlp"].endswith("frozen by the argument `freeze`")


def test_the_reason_of_a_branch_that_stays_is_kept() -> None:
    net, x = built(TRAPS["shared layer"][0], TOKENS)
    graph = trace_channels(net, x)
    assert not graph.branches
    net, x = built(lambda: token_net(Transformer(16)), TOKENS)
    found = trace_channels(net, x, verify=False)
    wrong = replace(found, branches=tuple(replace(b, exits=b.exits[:1]) for b in found.branches))
    with torch.no_grad():
        net[1].attn.proj.bias.fill_(1.0)  # type: ignore[union-attr]
    graph = verify_graph(net, wrong, x)
    assert all("outputs differ" in why for _, why in graph.kept_branches)


def test_zero_scales_of_a_new_network_remove_nothing() -> None:
    net, x = built(*NETWORKS["basic"][:2])
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.zeros_(module.weight)
            nn.init.zeros_(module.bias)
    graph = trace_channels(net, x)
    assert len(graph.branches) == 3
    assert removed_branches(net, graph) == ()
    small = slim(net, graph)
    assert not any(isinstance(module, RemovedModule) for module in small.modules())


def test_masked_channels_alone_do_not_remove_a_branch() -> None:
    net, x = built(*NETWORKS["transformer"][:2])
    graph = trace_channels(net, x)
    mask_channels_(net, graph, {group: torch.ones(graph[group].width, dtype=torch.bool) for group in ("1.mlp.0",)})
    assert removed_branches(net, graph) == ()  # its last bias is still added
    small = slim(net, graph)
    assert max_relative_diff(net, small, x) < 1e-5
    assert small.get_submodule("1.mlp.0").weight.shape[0] == 1


# --- widths --------------------------------------------------------------------------------------


def test_widths_of_a_removed_branch() -> None:
    net, x = built(lambda: token_net(Transformer(16)), TOKENS)
    graph = trace_channels(net, x)
    attn, mlp = graph.branches
    assert graph.structure.branches == graph.branches
    with pytest.raises(BadWidths, match=r"width 0 of group '0' is outside 2\.\.16"):
        graph.widths({"0": 0})
    frozen = replace(graph, groups=tuple(replace(g, frozen="a reason") for g in graph.groups))
    for one in (graph, frozen):
        small = with_widths(net, one, dict.fromkeys(mlp.groups, 0))
        assert not any(name.startswith("1.mlp") for name, _ in small.named_parameters())
        assert {g.name for g in one.variable} >= {*attn.groups, *mlp.groups}
    with pytest.raises(BadWidths, match="not prunable"):
        frozen.widths(dict.fromkeys(mlp.groups, 3))
    assert graph.structure.padded([0] * len(graph.groups), 8, ())[1] > 0
    vector = graph.widths(dict.fromkeys(mlp.groups, 0)).int().tolist()
    assert graph.structure.padded(vector, 8)[[g.name for g in graph.groups].index(mlp.groups[0])] == 0
    assert graph.without_branches().structure.branches == ()


def test_all_groups_of_a_branch_are_removed_together() -> None:
    net, x = built(*NETWORKS["bottleneck"][:2])
    graph = trace_channels(net, x)
    first, second = graph.branches[0].groups
    with pytest.raises(BadWidths, match="all its groups must have width 0"):
        graph.widths({first: 0})
    with pytest.raises(BadWidths, match="all its groups must have width 0"):
        with_widths(net, graph, {second: 0, first: 2})


def test_the_meta_device_and_deep_copies() -> None:
    net, x = built(*NETWORKS["basic"][:2])
    graph = trace_channels(net, x)
    widths = widths_without(graph, names_of(graph))
    small = with_widths(net, graph, widths, device="meta")
    assert all(parameter.is_meta for parameter in small.parameters())
    small = with_widths(net, graph, widths)
    assert torch.equal(copy.deepcopy(small)(x), small(x))
    assert list(small.state_dict()) == list(copy.deepcopy(small).state_dict())


# --- files ---------------------------------------------------------------------------------------


def test_a_graph_file_keeps_branches(tmp_path: Path) -> None:
    net, x = built(*NETWORKS["transformer"][:2])
    graph = trace_channels(net, x)
    graph.save(tmp_path / "graph.json")
    again = ChannelGraph.load(tmp_path / "graph.json")
    assert (again.branches, again.replacements) == (graph.branches, graph.replacements)
    assert again.fingerprint == graph.fingerprint == graph.without_branches().fingerprint
    text = (tmp_path / "graph.json").read_text().replace('"1.mlp.3.bias"', '"1.mlp.9.bias"')
    (tmp_path / "graph.json").write_text(text)
    with pytest.raises(BadFile, match="was changed after it was written"):
        ChannelGraph.load(tmp_path / "graph.json")


@pytest.mark.parametrize("name", ["basic", "transformer", "post norm", "tuples"])
def test_slim_files_are_loaded_without_a_graph(name: str, tmp_path: Path) -> None:
    build, shape, *_ = NETWORKS[name]
    net, x = built(build, shape)
    graph = trace_channels(net, x)
    for number, some in enumerate(subsets(names_of(graph))[:4]):
        masked = copy.deepcopy(net)
        mask_branches_(masked, graph, some)
        small = slim(masked, graph)
        save_slim(small, tmp_path / f"{number}.safetensors")
        dense = built(build, shape)[0]
        again = load_slim(dense, tmp_path / f"{number}.safetensors").eval()
        assert torch.equal(again(x), small(x))
        assert [n for n, _ in again.named_parameters()] == [n for n, _ in small.named_parameters()]
        assert not any(isinstance(module, RemovedModule) for module in dense.modules())
    with pytest.raises(BadFile, match="belongs to another network"):
        load_slim(token_net(nn.Linear(16, 16)), tmp_path / "0.safetensors")


# --- training ------------------------------------------------------------------------------------


def test_the_optimizer_of_the_removed_network() -> None:
    net, x = built(*NETWORKS["transformer"][:2])
    graph = trace_channels(net, x)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    net(x).square().mean().backward()
    optimizer.step()
    mask_branches_(net, graph, ["1.attn", "2.mlp"])
    small = slim(net, graph)
    new = slim_optimizer(optimizer, net, small, graph)
    assert {id(p) for group in new.param_groups for p in group["params"]} == {id(p) for p in small.parameters()}
    before = {name: p.detach().clone() for name, p in small.named_parameters()}
    small.train()
    small(x).square().mean().backward()
    new.step()
    assert all(not torch.equal(p, before[name]) for name, p in small.named_parameters())
    mask_branches_(net, graph, ["2.attn"])
    with pytest.raises(BadWidths, match=r"expected that it was removed"):
        slim_optimizer(optimizer, net, small, graph)


def test_a_slim_network_can_be_traced_and_slimmed_again() -> None:
    net, x = built(*NETWORKS["transformer"][:2])
    graph = trace_channels(net, x)
    mask_branches_(net, graph, ["1.attn"])
    small = slim(net, graph)
    again = trace_channels(small, x)
    assert names_of(again) == ["1", "2.attn", "2.mlp"]  # the only one in its block
    mask_branches_(small, again, ["1"])
    assert max_relative_diff(small, slim(small, again), x) < 1e-5


class RowDrop(nn.Module):
    """Stochastic depth: reads the number of items in train mode, and runs no operator in eval mode."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * torch.empty([x.shape[0]] + [1] * (x.dim() - 1)).bernoulli_(0.8)


class DroppedRows(nn.Module):
    """Two branches that use the same stochastic depth module."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.other = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8))
        self.drop, self.head = RowDrop(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.one(x))
        return self.head(x + self.drop(self.other(x)))  # type: ignore[no-any-return]


def test_stochastic_depth_gets_a_zero_with_axes() -> None:
    graph = trace_channels(DroppedRows(), torch.randn(3, 5, 8), verify=False)
    assert names_of(graph) == ["one", "other"]
    zeros = [value for part in graph.replacements for value in part.values if value.kind == "zero"]
    assert zeros
    assert all(value.sizes is not None for value in zeros)
    assert names_of(verify_graph(DroppedRows(), graph, torch.randn(3, 5, 8))) == ["one", "other"]


class PostNorm(nn.Module):
    """The code between the layers of a branch needs shapes, and its norm is followed by stochastic depth."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 12), nn.Linear(12, 8), nn.LayerNorm(8)
        self.drop, self.head = RowDrop(), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x).reshape(x.shape[0] * x.shape[1], -1)
        y = self.down(y.relu()).reshape(x.shape)
        return self.head(x + self.drop(self.norm(y)))  # type: ignore[no-any-return]


def test_a_norm_before_stochastic_depth_returns_a_zero_with_axes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    compare = Check.__call__
    monkeypatch.setattr(Check, "__call__", lambda *given: calls.append(1) or compare(*given))
    graph = trace_channels(PostNorm(), torch.randn(3, 5, 8))
    assert len(graph.branches) == 1
    assert len(calls) == 1  # nothing failed in between
    (norm,) = (part for part in graph.replacements if part.path == "norm")
    assert norm.values[0].sizes is not None
    assert all(rule.axis is None for rule in norm.values[0].sizes)  # one zero, which the sum broadcasts


class StockTransformer(nn.Module):
    """The encoder of torch, whose layers read the weights of their modules to choose a fused kernel."""

    def __init__(self, *, norm_first: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True, norm_first=norm_first)
        self.embed, self.head = nn.Embedding(30, 16), nn.Linear(16, 5)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)

    def forward(self, tokens: Tensor, padding: Tensor | None = None) -> Tensor:
        out: Tensor = self.head(self.encoder(self.embed(tokens), src_key_padding_mask=padding))
        return out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm_first", [True, False])
def test_branches_of_torchs_transformer_encoder_can_be_removed(norm_first: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, tokens = StockTransformer(norm_first=norm_first).eval(), torch.randint(30, (3, 6))
    padding = torch.arange(6) >= torch.tensor([6, 4, 3])[:, None]
    graph = trace_channels(net, tokens)
    assert len(graph.branches) == 4
    assert not graph.kept_branches
    for chosen in ([graph.branches[0]], [graph.branches[1]], graph.branches[:2], graph.branches):
        masked, widths = copy.deepcopy(net), {name: 0 for branch in chosen for name in branch.groups}
        mask_branches_(masked, graph, [branch.name for branch in chosen])
        small = with_widths(net, graph, widths)
        small.load_state_dict(slim(masked, graph).state_dict())
        save_slim(small, tmp_path / "slim.safetensors")
        again = load_slim(StockTransformer(norm_first=norm_first), tmp_path / "slim.safetensors").eval()
        assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())
        for mask in (None, padding):
            with torch.no_grad():  # as for the fused kernel
                kept = slice(None) if mask is None else ~mask
                wanted, dense = (one(tokens, mask)[kept] for one in (masked, net))
                for found in (small.eval(), again):
                    torch.testing.assert_close(found(tokens, mask)[kept], wanted)
                assert (dense - wanted).abs().max() > 0.01
