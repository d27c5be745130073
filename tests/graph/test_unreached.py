from __future__ import annotations

import torch
from torch import Tensor, nn

from ecc.graph import trace_channels
from graph.cases import conv


class Mixture(nn.Module):
    """The first expert of four takes every item."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.wide = nn.Linear(6, 8), nn.Linear(8, 12)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.Linear(10, 12)) for _ in range(4))
        self.narrow, self.head = nn.Linear(12, 11), nn.Linear(11, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.wide(torch.relu(self.stem(x))))
        return self.head(torch.relu(self.narrow(self.experts[0](x))))  # type: ignore[no-any-return]


def test_idle_experts_are_named_and_what_may_feed_them_is_not_prunable() -> None:
    graph = trace_channels(Mixture(), torch.randn(4, 6))
    (note,) = graph.notes
    assert "the example input did not reach experts.1, experts.2, experts.3: they are not pruned" in note
    assert graph["wide"].frozen == "it may feed experts.1.0, which the example input did not reach"
    assert {group.name for group in graph.prunable} == {"stem", "narrow"}  # whose sizes fit no expert


def test_an_idle_layer_behind_a_flattening_keeps_what_its_input_is_a_multiple_of() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.head = conv(3, 5), conv(5, 8), conv(8, 4, 1)
            self.late = nn.Linear(8 * 16, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.body(torch.relu(self.stem(x)))))  # type: ignore[no-any-return]

    graph = trace_channels(Late(), torch.randn(2, 3, 4, 4))
    assert graph["body"].frozen == "it may feed late, which the example input did not reach"
    assert [group.name for group in graph.prunable] == ["stem"]


def test_an_idle_layer_of_other_sizes_freezes_nothing() -> None:
    class Idle(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.stem, self.head = nn.Linear(7, 7), conv(3, 8), conv(8, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.relu(self.stem(x)))  # type: ignore[no-any-return]

    graph = trace_channels(Idle(), torch.randn(2, 3, 4, 4))
    (note,) = graph.notes
    assert "did not reach unused:" in note
    assert [group.name for group in graph.prunable] == ["stem"]
    assert graph.full_shapes["unused.weight"] == (7, 7)


def test_layers_that_run_in_train_mode_only_are_reached() -> None:
    class Auxiliary(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head, self.auxiliary = conv(3, 8), conv(8, 4, 1), conv(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
            x = torch.relu(self.stem(x))
            return (self.head(x), self.auxiliary(x)) if self.training else self.head(x)

    graph = trace_channels(Auxiliary(), torch.randn(2, 3, 4, 4))
    assert graph.notes == ()
    assert graph["stem"].frozen is None
    assert "auxiliary.weight" in {place.tensor for place in graph["stem"].slices}
