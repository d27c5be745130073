"""Code that was once pruned wrongly. `test_regressions.py` puts each piece between two convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Middle = Callable[[Tensor], Any]


def exact(width: int) -> Callable[[Any], Any]:
    def register(middle: Any) -> Any:
        EXACT[middle.__name__] = (middle, width)
        return middle

    return register


def in_place(change: Callable[[Tensor], Any]) -> Middle:
    def middle(x: Tensor) -> Tensor:
        change(x)
        return x

    return middle


def masked(mask: Callable[[Tensor], Tensor]) -> Middle:
    """Times a mask made for the number of channels, of which not all entries are equal."""
    return lambda x: x * mask(x.new_ones(x.shape[1])).view(-1, 1, 1)


def with_first_zero(ones: Tensor) -> Tensor:
    ones[:1] = 0
    return ones


def shifted_in_space(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2, :, 1:] = x[:, :2, :, :-1]
    return y


BY_NUMBER: dict[str, tuple[Middle, int]] = {
    # Channels by number: pruning must not change which ones an operator uses.
    "some are set in place": (in_place(lambda x: x[:, :3].zero_()), 6),
    "one is set in place": (in_place(lambda x: x[:, 0].zero_()), 4),
    "one is changed in place": (in_place(lambda x: x[:, 1].add_(1)), 4),
    "some are scaled in place": (in_place(lambda x: x[:, :3].mul_(0.5)), 6),
    "some are activated in place": (in_place(lambda x: F.relu(x[:, :3], inplace=True)), 6),
    "the first two are activated": (lambda x: torch.cat([F.relu(x[:, :2]), x[:, 2:]], 1), 6),
    "a third is activated": (  # one of four, none of two
        lambda x: torch.cat([F.relu(x[:, : x.shape[1] // 3]), x[:, x.shape[1] // 3 :]], 1),
        4,
    ),
    "the last is activated": (lambda x: torch.cat([x[:, :-1], F.relu(x[:, -1:])], 1), 5),
    "each is scaled by its number": (
        lambda x: torch.cat([x[:, i : i + 1] * (i + 1) for i in range(x.shape[1])], 1),
        4,
    ),
    "some are shifted in space": (shifted_in_space, 6),
    "rotated by one": (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), 5),
    "rotated by one of four": (lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), 4),
    "rotated by half": (lambda x: torch.cat([x[:, 3:], x[:, :3]], 1), 6),
    "rotated by half of four": (lambda x: torch.cat([x[:, 2:], x[:, :2]], 1), 4),
    # The number of channels as a number.
    "divided by the width": (lambda x: x * x.shape[1] ** -0.5, 4),
    "divided by a tensor of the width": (lambda x: x / torch.tensor(float(x.shape[1])), 4),
    "divided by a sum of ones": (lambda x: x / torch.ones_like(x).sum(1, keepdim=True), 4),
    "divided by the number of elements": (lambda x: x / x[0].numel(), 4),
    "branch on the width": (lambda x: F.relu(x) if x.shape[1] == 4 else x, 4),
    # Constants that are not the same everywhere.
    "mask by cumsum": (masked(lambda ones: ones.cumsum(0)), 5),
    "mask by cat": (masked(lambda ones: torch.cat([ones.new_zeros(1), ones[1:]])), 5),
    "mask by pad": (masked(lambda ones: F.pad(ones[1:], (1, 0))), 5),
    "mask by assignment": (masked(with_first_zero), 5),
    # One channel decides for all.
    "scaled by the value of one": (lambda x: x * x[:, 0].mean().item(), 4),
    "branch on the value of one": (lambda x: x if x[:, 1].mean() > 0 else -x, 4),
    "gathered by one": (
        lambda x: x.flatten(2).gather(2, x[:, :1].flatten(2).argsort(2).expand(-1, x.shape[1], -1)).view(x.shape),
        4,
    ),
    "indexed by one": (lambda x: x.flatten(2)[:, :, x[0, 0].flatten().argsort()].view(x.shape), 4),
    "sampled by one": (
        lambda x: F.grid_sample(x, torch.tanh(x[:, 0])[..., None].expand(-1, -1, -1, 2), align_corners=False),
        4,
    ),
}
"""Code without layers, with the width of its input."""

EXACT = dict(BY_NUMBER)
"""Code that may be pruned or not, but never wrongly."""


class WithLayer(nn.Module):
    """Code with a layer of its own."""

    def __init__(self, layer: nn.Module, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.code = layer, code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self.layer, x)


def interleaved(layers: Any, x: Tensor) -> Tensor:
    return layers[0](x[:, ::2]) - layers[1](x[:, 1::2])


def parts(size: int) -> Callable[[Any, Tensor], Tensor]:
    """A group of two units, pruned to one: then there is one part instead of two."""

    def code(layers: Any, x: Tensor) -> Tensor:
        first, *rest = x.split(size, 1)
        return torch.cat([first, *(layer(part + first) for layer, part in zip(layers, rest, strict=False))], 1)

    return code


def unequal_chunks(layer: Any, x: Tensor) -> Tensor:
    first, second = x.chunk(2, 1)
    return torch.cat([layer(first), second], 1)


def written_into_zeros(layer: Any, x: Tensor) -> Tensor:
    """The zeros are as wide as what they are added to, and no longer zeros."""
    zeros = torch.zeros_like(x)
    zeros.narrow(1, 0, 2).copy_(layer(x))
    return x + zeros


def added_into_zeros(layer: Any, x: Tensor) -> Tensor:
    zeros = torch.zeros_like(x)
    part = zeros[:, :2]
    part += layer(x)
    return x + zeros


def embedded_by_one(table: Any, x: Tensor) -> Tensor:
    return x + table((x[:, 0] > 0).long()).movedim(-1, 1)


def squeezed(layer: Any, x: Tensor) -> Tensor:
    """`squeeze` drops the channel axis too if there is one channel."""
    return layer(F.adaptive_avg_pool2d(x, 1).squeeze())[..., None, None]


def pointwise(incoming: int, outgoing: int) -> nn.Conv2d:
    return nn.Conv2d(incoming, outgoing, 1)


LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any, Tensor], Tensor], int]] = {
    "even and odd": (lambda: nn.ModuleList([pointwise(3, 2), pointwise(2, 2)]), interleaved, 5),
    "even and odd of four": (lambda: nn.ModuleList([pointwise(2, 2), pointwise(2, 2)]), interleaved, 4),
    "unequal chunks": (lambda: pointwise(3, 2), unequal_chunks, 5),
    "parts of two": (lambda: nn.ModuleList([pointwise(2, 2)]), parts(2), 4),
    "parts of three": (lambda: nn.ModuleList([pointwise(3, 3)]), parts(3), 6),
    "written into zeros": (lambda: pointwise(4, 2), written_into_zeros, 4),
    "added into zeros": (lambda: pointwise(4, 2), added_into_zeros, 4),
    "embedded by one": (lambda: nn.Embedding(2, 4), embedded_by_one, 4),
    # A sum over a weight includes the rows of masked channels.
    "norm of the weight": (lambda: pointwise(3, 4), lambda layer, x: layer(x) / layer.weight.norm(), 3),
    "squeezed": (lambda: nn.Linear(4, 3), squeezed, 4),
}


def with_layer(build: Callable[[], nn.Module], code: Callable[[Any, Tensor], Tensor]) -> type[nn.Module]:
    class Made(WithLayer):
        def __init__(self) -> None:
            super().__init__(build(), code)

    return Made


EXACT |= {name: (with_layer(build, code), width) for name, (build, code, width) in LAYERS.items()}


@exact(4)
class TransposedKernel(nn.Module):
    """The input axis is the first axis of the parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.kernel = nn.Parameter(torch.empty(4, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + F.conv2d(x, self.kernel.transpose(0, 1))


@exact(4)
class TransposedKernelWithoutShortcut(TransposedKernel):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernel.transpose(0, 1))


@exact(4)
class ModeKeptUnderAnotherName(nn.Module):
    """A branch that runs in training, behind a hidden condition."""

    def __init__(self) -> None:
        super().__init__()
        self.slow, self.layer = False, nn.Conv2d(4, 4, 1)

    def train(self, mode: bool = True) -> ModeKeptUnderAnotherName:
        self.slow = mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.layer(x.mean(1, keepdim=True).expand_as(x)) if self.slow else x
