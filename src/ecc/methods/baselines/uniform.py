"""Uniform width scaling: every group keeps the same share of its channels, those of largest magnitude.

The plainest control. MobileNet's width multiplier does so before training; here the kept channels are those of the
trained network, and tuning follows as for every method.

Changed for energy: the share is the largest whose rounded widths meet the targets.
"""

from __future__ import annotations

from ecc.methods.base import OneShotMethod, magnitudes

_BISECTIONS = 40


class Uniform(OneShotMethod):
    """Cuts all groups to one share."""

    name = "uniform"

    def step(self) -> None:
        """Finds the share, and cuts."""
        work = self._context
        full = [group.width for group in work.graph.groups]
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            share = 0.5 * (low + high)
            if work.constraint_violation(work.round_widths([share * width for width in full])) <= 0:
                low = share
            else:
                high = share
        widths = work.round_widths([low * width for width in full])
        work.model.load_state_dict(self._dense)
        work.keep_channels_(work.model, magnitudes(work), widths)
        work.log({"phase": "uniform", "share": low, "widths": widths})
