"""The catalogue of traps: small networks that are easy to prune wrongly, and similar ordinary ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graph.layers import conv
from graph.networks import randomize_

Inputs = Any


def images(seed: int, batch: int = 2, size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


EXAMPLE, SECOND = images(1), images(2)


@dataclass(frozen=True)
class Trap:
    """A network, the input it is traced with, and another input that it must handle as well."""

    build: Callable[[], nn.Module]
    example: Callable[[], Inputs] = EXAMPLE
    second: Callable[[], Inputs] = SECOND
    min_prunable: int = 0
    """Minimum number of prunable groups."""
    idle: tuple[str, ...] = ()
    """Modules that the example input does not run."""
    is_similar: bool = False
    """Whether it is one more case of an idea; run by `make thorough`."""

    def net(self) -> nn.Module:
        """The network with random weights, unless it sets its own."""
        net = self.build()
        randomize_(net, 0)
        set_weights_: Callable[[], None] | None = getattr(net, "set_weights_", None)
        if set_weights_ is not None:
            with torch.no_grad():
                set_weights_()
        return net


TRAPS: dict[str, Trap] = {}
"""Networks that may be pruned or not, but never wrongly."""
ORDINARY: dict[str, Trap] = {}
"""Networks that resemble traps and must stay prunable."""


def trap(name: str = "", **fields: Any) -> Callable[[Any], Any]:
    def register(build: Any) -> Any:
        key = name or build.__name__
        assert key not in TRAPS
        TRAPS[key] = Trap(build, **fields)
        return build

    return register


def ordinary(min_prunable: int, **fields: Any) -> Callable[[Any], Any]:
    def register(build: Any) -> Any:
        ORDINARY[build.__name__] = Trap(build, min_prunable=min_prunable, **fields)
        return build

    return register


class Net(nn.Module):
    """Three convolutions; `middle` runs between the first and the second, `end` between the second and the third."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.stem, self.body, self.head = conv(3, width), conv(width, 6), conv(6, 4, 1)

    def middle(self, x: Tensor) -> Any:
        return x

    def end(self, x: Tensor) -> Any:
        return x

    def forward(self, x: Tensor) -> Any:
        return self.head(self.end(F.relu(self.body(self.middle(F.relu(self.stem(x)))))))


class Between(Net):
    """Code between the first and the second convolution: always, or in train mode only."""

    def __init__(self, code: Callable[[Any, Tensor], Any], train_only: bool = False) -> None:
        super().__init__()
        self.code, self.train_only = code, train_only

    @property
    def is_learning(self) -> bool:
        return self.training

    def middle(self, x: Tensor) -> Any:
        return x if self.train_only and not self.is_learning else self.code(self, x)


class AfterBody(Net):
    """Code that makes the result from the channels of the stem and of the body."""

    def __init__(self, code: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.code = code

    def forward(self, x: Tensor) -> Any:
        x = F.relu(self.stem(x))
        return self.code(self, x, F.relu(self.body(x)))


def traps(
    kind: str, codes: Mapping[str, Callable[..., Any]], build: Any = Between, every: int = 1, **fields: Any
) -> None:
    """A trap for each piece of code; `train_only` is passed on to `Between`. Every n-th is not a similar one."""
    options = {"train_only": fields.pop("train_only")} if "train_only" in fields else {}
    for number, (name, code) in enumerate(codes.items()):
        trap(f"{kind}: {name}", is_similar=number % every > 0, **fields)(partial(build, code, **options))
