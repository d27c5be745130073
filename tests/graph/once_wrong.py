"""Code that was once pruned wrongly. `test_regressions.py` puts each piece between two convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Middle = Callable[[Tensor], Any]
EXACT: dict[str, tuple[Middle, int]] = {}
"""Code that may be pruned or not, but never wrongly, with the width of its input."""


def exact(width: int) -> Callable[[Any], Any]:
    def register(middle: Any) -> Any:
        EXACT[middle.__name__] = (middle, width)
        return middle

    return register


# --- channels by number: pruning must not change which ones an operator uses -------------------------------


@exact(6)
def some_are_set_in_place(x: Tensor) -> Tensor:
    x[:, :3] = 0
    return x


@exact(4)
def one_is_set_in_place(x: Tensor) -> Tensor:
    x[:, 0] = 0
    return x


@exact(4)
def one_is_changed_in_place(x: Tensor) -> Tensor:
    x[:, 1] += 1
    return x


@exact(6)
def some_are_scaled_in_place(x: Tensor) -> Tensor:
    x[:, :3] *= 0.5
    return x


@exact(6)
def some_are_activated_in_place(x: Tensor) -> Tensor:
    F.relu(x[:, :3], inplace=True)
    return x


@exact(6)
def the_first_two_are_activated(x: Tensor) -> Tensor:
    return torch.cat([F.relu(x[:, :2]), x[:, 2:]], 1)


@exact(4)
def a_third_is_activated(x: Tensor) -> Tensor:
    part = x.shape[1] // 3  # one of four, none of two
    return torch.cat([F.relu(x[:, :part]), x[:, part:]], 1)


@exact(5)
def the_last_is_activated(x: Tensor) -> Tensor:
    return torch.cat([x[:, :-1], F.relu(x[:, -1:])], 1)


@exact(4)
def each_is_scaled_by_its_number(x: Tensor) -> Tensor:
    return torch.cat([x[:, i : i + 1] * (i + 1) for i in range(x.shape[1])], 1)


@exact(6)
def some_are_shifted_in_space(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, :2, :, 1:] = x[:, :2, :, :-1]
    return y


@exact(5)
def rotated_by_one(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], x[:, :1]], 1)


@exact(4)
def rotated_by_one_of_four(x: Tensor) -> Tensor:
    return torch.cat([x[:, 1:], x[:, :1]], 1)


@exact(6)
def rotated_by_half(x: Tensor) -> Tensor:
    return torch.cat([x[:, 3:], x[:, :3]], 1)


@exact(4)
def rotated_by_half_of_four(x: Tensor) -> Tensor:
    return torch.cat([x[:, 2:], x[:, :2]], 1)


@exact(5)
class EvenAndOdd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.even, self.odd = nn.Conv2d(3, 2, 1), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.even(x[:, ::2]) - self.odd(x[:, 1::2])


@exact(4)
class EvenAndOddOfFour(EvenAndOdd):
    def __init__(self) -> None:
        super().__init__()
        self.even = nn.Conv2d(2, 2, 1)


@exact(5)
class UnequalChunks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, second = x.chunk(2, 1)
        return torch.cat([self.layer(first), second], 1)


@exact(4)
class PartsOfTwo(nn.Module):
    """A group of two units, pruned to one: then there is one part instead of two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(2, 2, 1)])

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.split(2, 1)
        return torch.cat([first, *(layer(part + first) for layer, part in zip(self.layers, rest, strict=False))], 1)


@exact(6)
class PartsOfThree(PartsOfTwo):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(3, 3, 1)])

    def forward(self, x: Tensor) -> Tensor:
        first, *rest = x.split(3, 1)
        return torch.cat([first, *(layer(part + first) for layer, part in zip(self.layers, rest, strict=False))], 1)


# --- the number of channels as a number --------------------------------------------------------------------------


@exact(4)
def divided_by_the_width(x: Tensor) -> Tensor:
    return x * x.shape[1] ** -0.5


@exact(4)
def divided_by_a_tensor_of_the_width(x: Tensor) -> Tensor:
    return x / torch.tensor(float(x.shape[1]))


@exact(4)
def divided_by_a_sum_of_ones(x: Tensor) -> Tensor:
    return x / torch.ones_like(x).sum(1, keepdim=True)


@exact(4)
def divided_by_the_number_of_elements(x: Tensor) -> Tensor:
    return x / x[0].numel()


@exact(4)
def branch_on_the_width(x: Tensor) -> Tensor:
    return F.relu(x) if x.shape[1] == 4 else x


# --- constants that are not the same everywhere -------------------------------------------------------------------


@exact(5)
def mask_by_cumsum(x: Tensor) -> Tensor:
    return x * x.new_ones(x.shape[1]).cumsum(0).view(-1, 1, 1)


@exact(5)
def mask_by_cat(x: Tensor) -> Tensor:
    return x * torch.cat([x.new_zeros(1), x.new_ones(x.shape[1] - 1)]).view(-1, 1, 1)


@exact(5)
def mask_by_pad(x: Tensor) -> Tensor:
    return x * F.pad(x.new_ones(x.shape[1] - 1), (1, 0)).view(-1, 1, 1)


@exact(5)
def mask_by_assignment(x: Tensor) -> Tensor:
    mask = x.new_ones(x.shape[1])
    mask[:1] = 0
    return x * mask.view(-1, 1, 1)


@exact(4)
class WrittenIntoZeros(nn.Module):
    """The zeros are as wide as what they are added to, and no longer zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        zeros.narrow(1, 0, 2).copy_(self.layer(x))
        return x + zeros


@exact(4)
class AddedIntoZeros(WrittenIntoZeros):
    def forward(self, x: Tensor) -> Tensor:
        zeros = torch.zeros_like(x)
        part = zeros[:, :2]
        part += self.layer(x)
        return x + zeros


# --- one channel decides for all ----------------------------------------------------------------------------------


@exact(4)
def scaled_by_the_value_of_one(x: Tensor) -> Tensor:
    return x * x[:, 0].mean().item()


@exact(4)
def branch_on_the_value_of_one(x: Tensor) -> Tensor:
    return x if x[:, 1].mean() > 0 else -x


@exact(4)
def gathered_by_one(x: Tensor) -> Tensor:
    order = x[:, :1].flatten(2).argsort(2).expand(-1, x.shape[1], -1)
    return x.flatten(2).gather(2, order).view(x.shape)


@exact(4)
def indexed_by_one(x: Tensor) -> Tensor:
    return x.flatten(2)[:, :, x[0, 0].flatten().argsort()].view(x.shape)


@exact(4)
def sampled_by_one(x: Tensor) -> Tensor:
    grid = torch.tanh(x[:, 0])[..., None].expand(-1, -1, -1, 2)
    return F.grid_sample(x, grid, align_corners=False)


@exact(4)
class EmbeddedByOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x[:, 0] > 0).long()).movedim(-1, 1)


# --- weights outside their layer ----------------------------------------------------------------------------------


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


@exact(3)
class NormOfTheWeight(nn.Module):
    """A sum over a weight includes the rows of masked channels."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) / self.layer.weight.norm()


@exact(4)
class Squeezed(nn.Module):
    """`squeeze` drops the channel axis too if there is one channel."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.adaptive_avg_pool2d(x, 1).squeeze())[..., None, None]


# --- training -----------------------------------------------------------------------------------------------------


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


def with_noise_in_training(module: nn.Module, x: Tensor) -> Tensor:
    return x - x.mean(1, keepdim=True) if module.training else x


@exact(4)
class ModeReadElsewhere(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return with_noise_in_training(self, x)
