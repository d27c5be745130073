"""How much of common architectures can be pruned: one row per network, with the expected share of its parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.graph import mask_channels_, max_relative_diff, slim, trace_channels

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(0))


class Res2(nn.Module):
    """Res2Net: `split` by the attribute `width`."""

    def __init__(self, width: int = 6, scales: int = 4) -> None:
        super().__init__()
        self.width, self.scales = width, scales
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.enter = nn.Conv2d(16, width * scales, 1)
        self.parts = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(scales - 1))
        self.leave = nn.Conv2d(width * scales, 16, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        pieces = torch.split(F.relu(self.enter(x)), self.width, 1)
        y, done = pieces[0], []
        for number, part in enumerate(self.parts):
            y = F.relu(part(y if number == 0 else y + pieces[number]))
            done.append(y)
        x = x + self.leave(torch.cat([*done, pieces[-1]], 1))
        return self.head(x.mean((2, 3)))


class Shuffled(nn.Module):
    """ShuffleNet: grouped convolutions and a shuffle by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first, self.second = nn.Conv2d(16, 24, 1, groups=2), nn.Conv2d(24, 16, 1, groups=2)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(F.relu(self.stem(x))))
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        return self.head(self.second(x).mean((2, 3)))


class Chomp(nn.Module):
    """A temporal convolution with the padding cut off behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(6, 16, 3, padding=2)
        self.second = nn.Conv1d(16, 16, 3, padding=4, dilation=2)
        self.same, self.head = nn.Conv1d(6, 16, 1), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.first(x)[:, :, :-2].contiguous())
        y = F.relu(self.second(y)[:, :, :-4].contiguous())
        return self.head(F.relu(y + self.same(x))[:, :, -1])


class Einsum(nn.Module):
    """Linear layers as einsum with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 12) / 3), nn.Parameter(torch.randn(12, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(torch.einsum("bld,dh->blh", x, self.first))
        return torch.einsum("blh,hd->bld", y, self.second)


class HeadwiseEinsum(nn.Module):
    """Attention in einsum, with projections to (heads, width)."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(8, 4, 5) / 3) for _ in range(3))
        self.out = nn.Parameter(torch.randn(4, 5, 8) / 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("bld,dhe->bhle", x, weight) for weight in (self.q, self.k, self.v))
        scores = torch.einsum("bhqe,bhke->bhqk", q, k) * 5**-0.5
        y = torch.einsum("bhqk,bhke->bhqe", scores.softmax(-1), v)
        return torch.einsum("bhle,hed->bld", y, self.out)


class Attends(nn.Module):
    """`nn.MultiheadAttention` in a residual block with RMSNorm."""

    def __init__(self, *, batch_first: bool, separate: bool) -> None:
        super().__init__()
        self.batch_first, self.separate = batch_first, separate
        self.embed, self.norm = nn.Linear(8, 12), nn.RMSNorm(12)
        sizes = {"kdim": 8, "vdim": 8} if separate else {}
        self.attention = nn.MultiheadAttention(12, 4, batch_first=batch_first, **sizes)
        self.norm2, self.head = nn.RMSNorm(12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.embed(x)
        query = self.norm(y)
        other = x if self.separate else query
        y = y + self.attention(query, other, other, need_weights=False)[0]
        return self.head(self.norm2(y))


class Mixer(nn.Module):
    """MLP-Mixer with RMSNorm: the MLP over tokens leaves the channels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 12)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(12) for _ in range(3))
        self.tokens = nn.Sequential(nn.Linear(6, 10), nn.GELU(), nn.Linear(10, 6))
        self.channels = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 12))
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        x = x + self.channels(self.norm2(x))
        return self.head(self.norm3(x).mean(1))


class SplitByNumber(nn.Module):
    """A gate whose halves are split by a literal width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 24), nn.Linear(12, 8)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.first(x).split((12, 12), -1)
        return self.second(value * gate.sigmoid())


ROWS: dict[str, tuple[Callable[[], nn.Module], Tensor, float]] = {
    "Res2Net, split by an attribute": (Res2, IMAGES, 0.99),
    "ShuffleNet with two groups, shuffled by hand": (Shuffled, IMAGES, 0.0),
    "temporal convolutions with chomp": (Chomp, torch.randn(2, 6, 9), 0.99),
    "einsum with a parameter": (Einsum, TOKENS, 0.99),
    "attention in einsum": (HeadwiseEinsum, TOKENS, 0.99),
    "MultiheadAttention, batch first": (lambda: Attends(batch_first=True, separate=False), TOKENS, 0.99),
    "MultiheadAttention, sequence first": (lambda: Attends(batch_first=False, separate=False), TOKENS, 0.99),
    "MultiheadAttention, separate": (lambda: Attends(batch_first=True, separate=True), TOKENS, 0.99),
    "MLP-Mixer, whose tokens have biases": (Mixer, TOKENS, 0.59),
    "halves split by a number": (SplitByNumber, TOKENS, 0.0),
}


@pytest.mark.parametrize("name", ROWS)
def test_the_share_of_parameters_that_can_be_pruned(name: str) -> None:
    torch.manual_seed(0)
    build, example, share = ROWS[name]
    net, example = build().double().eval(), example.double()
    graph = trace_channels(net, example)
    frozen = [(group.name, group.width, group.frozen) for group in graph.groups if group.frozen]
    assert share <= graph.prunable_share <= max(share, 1.0), frozen
    masked = copy.deepcopy(net)
    for group in graph.prunable:
        gone = torch.randperm(group.width)[: min(int(0.4 * group.width), group.width - group.min_width)]
        mask_channels_(masked, graph, {group.name: gone})
    assert max_relative_diff(masked, slim(masked, graph), example) < 1e-10


def test_the_reason_suggests_a_fix() -> None:
    graph = trace_channels(SplitByNumber(), TOKENS)
    assert "Use `chunk(2, -1)` to make it prunable" in str(graph["first"].frozen)
