"""LLM-Pruner: prune coupled structures by the first-order Taylor criterion, except in the first and last blocks.

Ma et al., LLM-Pruner: On the Structural Pruning of Large Language Models, NeurIPS 2023. A head or hidden unit has the
sum of |w g| over all its weights, of the layers before and after it (the paper's element-wise first-order criterion,
the best one in its Table 1). The first four and the last two of 32 blocks are not pruned, and the others lose the same
fraction; here these are an eighth and a sixteenth of the blocks. The paper then trains LoRA adapters; here finetuning
follows as for every method. Changed for energy: the fraction is the smallest one whose widths meet the targets; if the
middle blocks do not suffice, all blocks are pruned.
"""

from __future__ import annotations

import math

from ecc.methods.base import OneShotMethod, PruningContext
from ecc.methods.calibration import calibration_batches, find_blocks, mask_, taylor_elements

from .widths import uniform_widths

FIRST, LAST = 1 / 8, 1 / 16
"""Shares of the blocks at the beginning and at the end that are not pruned."""


class LlmPruner(OneShotMethod):
    """Prunes the middle blocks by one ratio, by the Taylor criterion."""

    name = "llm_pruner"

    def start(self, context: PruningContext) -> None:
        """Compute the importance on calibration batches."""
        super().start(context)
        self._importance = taylor_elements(context, calibration_batches(context))
        blocks = list(find_blocks(context.model))
        ends = blocks[: math.ceil(FIRST * len(blocks))] + blocks[len(blocks) - math.ceil(LAST * len(blocks)) :]
        self._middle = [
            name for name in self._importance if not any(name == end or name.startswith(f"{end}.") for end in ends)
        ]

    def step(self) -> None:
        """Find the ratio, and prune."""
        context = self.context
        ratio, widths = uniform_widths(context, self._middle)
        if context.constraint_violation(list(widths.values())) > 0:
            ratio, widths = uniform_widths(context, list(self._importance))
        context.model.load_state_dict(self.dense_state)
        mask_(context, self._importance, widths)
        self.pruned_for = list(self.context.targets)
        context.log({"phase": self.name, "ratio": ratio, "widths": widths})
