"""Uniform width scaling: every group keeps the same share of its channels, those of largest magnitude.

The plainest control. MobileNet's width multiplier does so before training; here the kept channels are those of the
trained network, and tuning follows as for every method.

Changed for energy: the share is the largest whose rounded widths meet the aims.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from .base import Work, magnitudes

_BISECTIONS = 40


class Uniform:
    """Cuts all groups to one share."""

    name = "uniform"

    def asked(self) -> dict[str, Any]:
        """Nothing can be set."""
        return {}

    def start(self, work: Work) -> None:
        """Remembers the dense weights, from which it cuts whenever it is asked."""
        self._work = work
        self._dense = copy.deepcopy(work.model.state_dict())

    @property
    def is_done(self) -> bool:
        """Whether the aims are met."""
        return self._work.excess(self._work.widths()) <= 0

    def step(self) -> None:
        """Finds the share, and cuts."""
        work = self._work
        full = [group.width for group in work.graph.groups]
        low, high = 0.0, 1.0
        for _ in range(_BISECTIONS):
            share = 0.5 * (low + high)
            if work.excess(work.rounded([share * width for width in full])) <= 0:
                low = share
            else:
                high = share
        widths = work.rounded([low * width for width in full])
        work.model.load_state_dict(self._dense)
        work.keep_(work.model, magnitudes(work), widths)
        work.log({"phase": "uniform", "share": low, "widths": widths})

    def state_dict(self) -> dict[str, Any]:
        """The dense weights."""
        return {"dense": self._dense}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts them back."""
        self._dense = dict(state["dense"])
