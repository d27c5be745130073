"""`width_multiple` where a unit has several channels: blocks of grouped convolutions, and attention heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc import EccSolver, counted_cost, slim, trace_channels
from ecc.graph import max_relative_diff
from ecc.measure.design import sample_widths


class Blocks(nn.Module):
    """A convolution with blocks of 4 channels, and heads of 16 channels with an MLP of one channel a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.grouped, self.point = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 32, 1)
        self.qkv, self.out = nn.Linear(32, 3 * 48), nn.Linear(48, 32)
        self.up, self.down = nn.Linear(32, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(torch.relu(self.grouped(torch.relu(self.stem(x))))).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, 16)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y: Tensor = self.down(torch.relu(self.up(x)))
        return y


def test_a_multiple_counts_channels_and_a_unit_may_have_several() -> None:
    graph = trace_channels(Blocks().eval(), torch.randn(1, 3, 6, 6))
    full, structure = graph.full_widths, graph.structure
    assert (full["stem"], full["qkv"], full["up"]) == (4, 3, 24)  # blocks of 4 channels, heads of 16
    for multiple, blocks, heads, hidden in ((1, 1, 1, 1), (2, 1, 1, 2), (8, 2, 1, 8), (32, 8, 2, 32), (12, 3, 3, 12)):
        steps = dict(zip(structure.groups, structure.width_steps(multiple), strict=True))
        assert (steps["stem"], steps["qkv"], steps["up"]) == (blocks, heads, hidden)
    kept = dict(zip(full, structure.padded([1] * len(full), 8), strict=True))
    assert (kept["stem"], kept["qkv"], kept["up"]) == (2, 1, 8)


@pytest.mark.parametrize("solver", ["scheduled", "admm"])
def test_heads_are_pruned_one_by_one_where_hidden_widths_are_multiples_of_eight(solver: str) -> None:
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(4, 3, 6, 6)
    graph = trace_channels(model, x).without_branches()
    assert {widths["qkv"] for widths in sample_widths(graph, 20, width_multiple=8)} == {1, 2, 3}
    cost = counted_cost(graph, "params")
    options: Any = {"steps": 30, "solver": solver, "width_multiple": 8, "min_width_ratio": 0.1}
    pruner = EccSolver(model, graph, cost, budget="45%", lr=1e-3, **options)
    for _ in range(30):
        pruner.zero_grad()
        model(x).square().mean().backward()
        pruner.step()
    widths = pruner.widths
    assert float(cost.value(graph.widths(widths))) <= 0.45 * float(cost.value(graph.widths()))
    assert widths["stem"] % 2 == 0
    assert widths["up"] % 8 == 0
    assert widths["qkv"] in (1, 2)
    small = slim(model, graph, width_multiple=8)
    assert small.qkv.weight.shape[0] == 3 * 16 * widths["qkv"]
    assert max_relative_diff(model.eval(), small.eval(), x) < 1e-5
