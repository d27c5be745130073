"""Recurrent layers along the last spatial axis."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from graph.blocks.base import FLAG, LEAVES, WIDTHS, Block, Shape, block, one_of


def as_sequence(x: Tensor) -> Tensor:
    """(batch, channels, ..., steps) as (batch, steps, channels): the mean over the other spatial axes."""
    return (x if x.dim() == 3 else x.flatten(2, -2).mean(2)).transpose(1, 2)


def over(x: Tensor, out: Tensor) -> Tensor:
    """(batch, steps, channels) as a feature map with the spatial axes of x."""
    return out.transpose(1, 2).reshape(*out.transpose(1, 2).shape[:2], *[1] * (x.dim() - 3), x.shape[-1])


@block(
    LEAVES,
    kind=one_of("LSTM", "GRU", "RNN"),
    hidden=WIDTHS,
    layers=one_of(1, 2),
    bidirectional=FLAG,
    bias=FLAG,
    batch_first=FLAG,
)
class Recurrent(Block):
    """The output at each step, repeated over the other spatial axes."""

    is_plain = False

    def __init__(self, shape: Shape, kind: str, hidden: int, **options: Any) -> None:
        super().__init__(shape)
        self.layer = getattr(nn, kind)(self.channels, hidden, options.pop("layers"), **options)
        self.expects["layer.weight_hh_l0:1"] = hidden

    def forward(self, x: Tensor) -> Tensor:
        steps = as_sequence(x)
        out, _ = self.layer(steps if self.layer.batch_first else steps.transpose(0, 1))
        out = over(x, out if self.layer.batch_first else out.transpose(0, 1))
        return out.expand(*out.shape[:2], *x.shape[2:])


@block(LEAVES, kind=one_of("LSTM", "GRU", "RNN"), hidden=WIDTHS)
class FinalState(Block):
    """A gate for each channel from the final state."""

    is_plain = False

    def __init__(self, shape: Shape, kind: str, hidden: int) -> None:
        super().__init__(shape)
        self.layer = getattr(nn, kind)(self.channels, hidden, batch_first=True)
        self.gate = nn.Linear(hidden, self.channels)
        self.expects["layer.weight_hh_l0:1"] = hidden

    def forward(self, x: Tensor) -> Tensor:
        _, state = self.layer(as_sequence(x))
        state = state[0] if isinstance(state, tuple) else state
        return x * self.over_space(self.gate(state[-1]).sigmoid())


@block(LEAVES, kind=one_of("LSTMCell", "GRUCell", "RNNCell"), hidden=WIDTHS)
class Cell(Block):
    """A loop over the steps."""

    is_plain = False

    def __init__(self, shape: Shape, kind: str, hidden: int) -> None:
        super().__init__(shape)
        self.cell = getattr(nn, kind)(self.channels, hidden)
        self.expects["cell.weight_hh:1"] = hidden

    def forward(self, x: Tensor) -> Tensor:
        state: Any = None
        for step in as_sequence(x).unbind(1):
            state = self.cell(step, state)
        out = self.over_space(state[0] if isinstance(state, tuple) else state)
        return out.expand(*out.shape[:2], *x.shape[2:])
