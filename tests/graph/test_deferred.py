from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ecc.graph import trace_channels
from ecc.graph.labels import ChannelLabels, Deferred


class Embedded(nn.Module):
    """A convolution whose channels meet a parameter of several axes, changed by `way` first."""

    def __init__(self, shape: tuple[int, ...], way: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.table = nn.Parameter(torch.randn(shape))
        self.head = nn.Conv2d(6, 4, 1)
        self.way = way

    def forward(self, images: Tensor) -> Tensor:
        table: Tensor = self.table
        if self.way == "scaled":
            table = table * 2
        elif self.way == "permuted":
            table = table.permute(0, 3, 1, 2)
        elif self.way == "part":
            table = table[:, :, :5, :5]
        elif self.way == "mean":
            table = table.mean()
        out: Tensor = self.head(self.stem(images) + table)
        return out


@pytest.mark.parametrize(
    ("shape", "way", "axis"),
    [
        ((1, 6, 5, 5), "as it is", 1),
        ((1, 6, 5, 5), "scaled", 1),
        ((1, 5, 5, 6), "permuted", 3),
        ((1, 6, 8, 8), "part", 1),
    ],
)
def test_the_axis_that_meets_channels_is_cut_with_them(shape: tuple[int, ...], way: str, axis: int) -> None:
    graph = trace_channels(Embedded(shape, way), torch.randn(2, 3, 5, 5))
    group = graph["stem"]
    assert group.frozen is None
    assert ("table", axis) in {(place.tensor, place.axis) for place in group.slices}
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff <= 1e-5


def test_one_value_for_all_channels_is_not_cut() -> None:
    graph = trace_channels(Embedded((1, 1, 5, 5), "as it is"), torch.randn(2, 3, 5, 5))
    assert graph["stem"].frozen is None
    assert all(place.tensor != "table" for group in graph.groups for place in group.slices)


def test_a_parameter_looked_at_as_a_whole_stays_whole() -> None:
    graph = trace_channels(Embedded((1, 6, 5, 5), "mean"), torch.randn(2, 3, 5, 5))
    assert graph["stem"].frozen is None
    assert all(place.tensor != "table" for group in graph.prunable for place in group.slices)


def test_elements_are_numbered_in_the_order_of_memory() -> None:
    parameter = Deferred("w", torch.Size([2, 3]), (1, 0))
    assert parameter.elements().tolist() == [[0, 3], [1, 4], [2, 5]]
    assert parameter.scaled().index is not None


def test_freezing_names_the_parameter() -> None:
    book = ChannelLabels()
    Deferred("w", torch.Size([2, 1]), (0, 1)).freeze(book, "head (norm)")
    ((labels, why),) = book.freezes()
    assert labels.numel() == 2
    assert why == "head (norm) uses all values of w"
