"""Uniform pruning: every group keeps the same fraction of its channels, those of largest magnitude.

The simplest control. MobileNet's width multiplier scales widths before training; here the kept channels are those of
the trained network, and finetuning follows as for every method. Changed for energy: the fraction is the largest one
whose rounded widths meet the targets.
"""

from __future__ import annotations

from ecc.methods.base import OneShotMethod, magnitudes

from .widths import uniform_widths


class Uniform(OneShotMethod):
    """Prunes all groups by one ratio."""

    name = "uniform"

    def step(self) -> None:
        """Find the ratio, and prune."""
        context = self.context
        ratio, widths = uniform_widths(context, list(context.graph.full_widths))
        context.model.load_state_dict(self.dense_state)
        context.keep_channels_(context.model, magnitudes(context), list(widths.values()))
        self.pruned_for = list(context.targets)
        context.log({"phase": self.name, "ratio": ratio, "widths": list(widths.values())})
