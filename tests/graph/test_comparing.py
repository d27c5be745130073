from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.graph import trace_channels


class Between(nn.Module):
    """Two convolutions with some code between them."""

    def __init__(self, code: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 4, 1)
        self.code = code

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(self.code(self.stem(images)))
        return out


def rolled(x: Tensor) -> Tensor:
    return x.roll(1, 1)


def first_doubled(x: Tensor) -> Tensor:
    return torch.cat([x[:, :1] * 2, x[:, 1:]], 1)


def divided(x: Tensor) -> Tensor:
    return x / x.shape[1]


def divided_by_a_tensor(x: Tensor) -> Tensor:
    return x / torch.tensor(float(x.shape[1]))


def only_when_wide(x: Tensor) -> Tensor:
    return F.relu(x) if x.shape[1] == 6 else x


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (rolled, "takes fixed channels"),
        (first_doubled, "takes fixed channels"),
        (divided, "depends on its width"),
        (divided_by_a_tensor, "depends on its width"),
        (only_when_wide, "runs only at another width"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_labels_cannot_show_is_frozen_without_a_proof(code: Callable[[Tensor], Tensor], reason: str) -> None:
    graph = trace_channels(Between(code), torch.randn(2, 3, 4, 4), verify=False)
    frozen = graph["stem"].frozen
    assert frozen is not None
    assert reason in frozen


@pytest.mark.parametrize("code", [F.relu, lambda x: x * 0.5, lambda x: x.flip(1), lambda x: x - x.shape[2]])
def test_code_that_follows_its_widths_is_cut(code: Callable[[Tensor], Tensor]) -> None:
    graph = trace_channels(Between(code), torch.randn(2, 3, 4, 4))
    assert graph["stem"].frozen is None
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff <= 1e-5
