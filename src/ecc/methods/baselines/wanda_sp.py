"""Wanda-sp: structured pruning by |weight| times the norm of the activation, the same ratio in every layer.

Sun et al., A Simple and Effective Pruning Approach for Large Language Models, ICLR 2024, in the structured form that
An et al. (FLAP, AAAI 2024) compare with: a channel has the sum of |w| * ||x|| over the weights that consume it, and
every layer loses the same fraction of its heads and hidden units. Changed for energy: the fraction is the smallest
one whose widths meet the targets.
"""

from __future__ import annotations

from torch import Tensor

from ecc.methods.base import OneShotMethod, PruningContext
from ecc.methods.calibration import activation_statistics, batch_inputs, calibration_batches, mask_

from .widths import uniform_widths


class WandaSp(OneShotMethod):
    """Prunes all groups by one ratio, by weights and activations."""

    name = "wanda_sp"

    def start(self, context: PruningContext) -> None:
        """Compute the importance on calibration batches."""
        super().start(context)
        inputs = batch_inputs(context, calibration_batches(context))
        statistics = activation_statistics(context.model, context.graph, inputs)
        self._importance: dict[str, Tensor] = {}
        for name, parts in statistics.items():
            terms = [one.absolute_weights * one.square_sums.sqrt() for one in parts]
            self._importance[name] = sum(term.sum(1) for term in terms)  # type: ignore[assignment]  # not empty

    def step(self) -> None:
        """Find the ratio, and prune."""
        context = self.context
        ratio, widths = uniform_widths(context, list(self._importance))
        context.model.load_state_dict(self.dense_state)
        mask_(context, self._importance, widths)
        self.pruned_for = list(self.context.targets)
        context.log({"phase": self.name, "ratio": ratio, "widths": widths})
