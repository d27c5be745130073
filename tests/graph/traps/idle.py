"""Modules that the example input does not run, and another input does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.traps.base import EXAMPLE, SECOND, Between, Net, images, ordinary, trap, traps


def bright() -> Tensor:
    return EXAMPLE().abs() + 0.1


def dark() -> Tensor:
    return -bright()


@trap(example=bright, second=dark, idle=("experts.1",))
class IdleExpert(Net):
    """Each image goes to one of two experts, by its brightness."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(conv(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.mean((1, 2, 3)) < 0).long()
        x = F.relu(self.stem(x))
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return self.head(F.relu(self.body(y)))


def tokens(seed: int) -> Tensor:
    return torch.randn(2, 6, 5, generator=torch.Generator().manual_seed(seed))


class Mixture(nn.Module):
    """Tokens choose among feed-forward experts by the largest score; experts that none chose do not run."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router, self.head = nn.Linear(5, 8), nn.Linear(5, 4), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 8)) for _ in range(4))

    def set_weights_(self) -> None:
        self.router.weight.zero_()
        self.router.weight[1, 0] = 1.0
        self.router.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.router(x).argmax(-1)
        hidden = F.relu(self.embed(x))
        result = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            mask = chosen == number
            if mask.any():
                result[mask] = expert(hidden[mask])
        return self.head(hidden + result)


@trap(
    example=lambda: torch.cat([tokens(1)[..., :1].abs() + 0.1, tokens(1)[..., 1:]], -1),
    second=lambda: tokens(2),
    idle=("experts.0", "experts.2", "experts.3"),
)
def idle_experts_of_a_mixture() -> nn.Module:
    return Mixture()


class Late(Between):
    """A branch that runs when `is_open` says so."""

    def __init__(self, is_open: Callable[[Any, Tensor], bool]) -> None:
        super().__init__(lambda net, x: x + net.late(x) if is_open(net, x) else x)
        self.late, self.calls = conv(8, 8), 0


def some_calls(net: Any, x: Tensor) -> bool:
    net.calls += 1
    return bool(net.calls > 3)


traps("opened", {"by a counter": some_calls}, build=Late, idle=("late",))
traps("opened", {"by features": lambda net, x: bool(x.mean() > 0.6)}, build=Late, example=bright, second=dark)
for _name, _open, _first, _second in (
    ("by a size", lambda net, x: x.shape[-1] > 8, images(1, size=8), images(2, size=12)),
    ("by the batch", lambda net, x: len(x) > 2, images(1, batch=1), images(2, batch=3)),
):
    traps("opened", {_name: _open}, build=Late, example=_first, second=_second, idle=("late",))


@trap(idle=("late",))
class OpenedByATrainingStep(Late):
    step: Tensor

    def __init__(self) -> None:
        super().__init__(lambda net, x: net.counted())
        self.register_buffer("step", torch.zeros((), dtype=torch.long))

    def counted(self) -> bool:
        if self.training:
            self.step += 1
        return int(self.step) > 2


@trap()
class MixesChannelsAfterSomeCalls(Net):
    """The branch that opens later has no parameters: only further calls show it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def middle(self, x: Tensor) -> Tensor:
        return x - x.mean(1, keepdim=True) if some_calls(self, x) else x


@trap(example=bright, second=dark)
class MixesChannelsOfDarkImages(Net):
    """The branch has no parameters: only another input shows it."""

    def forward(self, x: Tensor) -> Tensor:
        dim = bool(x.sum() < 0)
        x = F.relu(self.stem(x))
        return self.head(F.relu(self.body(x - x.mean(1, keepdim=True) if dim else x)))


@trap(example=lambda: (EXAMPLE(),), second=lambda: (SECOND(), torch.ones(2, 1, 8, 8)), idle=("late",))
class OpenedByAnOptionalInput(Net):
    def __init__(self) -> None:
        super().__init__()
        self.late = conv(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = F.relu(self.stem(x))
        if mask is not None:
            x = x * mask + self.late(x)
        return self.head(F.relu(self.body(x)))


@trap(example=bright, second=dark)
class PickedPositions(Net):
    """Only positions that the input marks go through a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.point = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        mask = x.mean(1) > 0
        y = F.relu(self.stem(x)).movedim(1, -1)
        z = torch.zeros_like(y)
        z[mask] = self.point(y[mask])
        return self.head(F.relu(self.body((y + z).movedim(-1, 1))))


@ordinary(2)
class UnusedLayer(Net):
    """A layer that nothing ever calls, of another width than all others."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = conv(5, 5)
