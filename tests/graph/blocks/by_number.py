"""Code that treats channels by their number.

What such code computes depends on how many channels there are, or on which one comes first. Whether it can be cut
is for the tracer to decide; if it says so, the cut must be exact.
"""

from __future__ import annotations

from hypothesis import strategies as st
from torch import Tensor

from graph.blocks.base import HARD, Block, Shape, block
from graph.once_wrong import BY_NUMBER


@block(HARD, code=st.sampled_from(sorted(BY_NUMBER)))
class ByNumber(Block):
    def __init__(self, shape: Shape, code: str) -> None:
        super().__init__(shape)
        if self.dims != 2 or self.channels < 2:  # some of the code is for images, and some for two channels or more
            code = "divided by the width"
        self.code, _ = BY_NUMBER[code]
        self.expects = {}

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.code(x.clone())
        return result
