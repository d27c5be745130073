"""ShortGPT: remove whole blocks, those first that change their input least.

Men et al., ShortGPT: Layers in Large Language Models are More Redundant Than You Expect, 2024. The influence of a
block is 1 minus the cosine similarity of its input and output. Changed for energy: as many blocks are removed as the
targets need.
"""

from __future__ import annotations

from ecc.errors import EccError
from ecc.methods.base import OneShotMethod, PruningContext
from ecc.methods.calibration import batch_inputs, block_influence, branch_groups, calibration_batches, mask_


class ShortGpt(OneShotMethod):
    """Removes whole blocks."""

    name = "shortgpt"
    removes_branches = True

    def start(self, context: PruningContext) -> None:
        """Compute the influence of each block on calibration batches.

        Raises:
            EccError: If no block of the network can be removed.
        """
        super().start(context)
        inputs = batch_inputs(context, calibration_batches(context))
        influence = block_influence(context.model, inputs)
        branches = branch_groups(context)
        self._blocks = []
        for path in sorted(influence, key=influence.__getitem__):
            mine = [groups for name, groups in branches.items() if f"{name}.".startswith(f"{path}.")]
            if mine:
                self._blocks.append([name for groups in mine for name in groups])
        if not self._blocks:
            raise EccError("method 'shortgpt' removes whole blocks, and no block of this network can be removed.")

    def step(self) -> None:
        """Remove blocks until the targets are met."""
        context, widths = self.context, dict(self.context.graph.full_widths)
        for groups in self._blocks:
            if context.constraint_violation(list(widths.values())) <= 0:
                break
            widths.update(dict.fromkeys(groups, 0))
        context.model.load_state_dict(self.dense_state)
        mask_(context, {}, widths)
        self.pruned_for = list(self.context.targets)
        context.log({"phase": self.name, "widths": widths})
