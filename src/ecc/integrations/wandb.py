"""Curves for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP = "batches"


class WandbLogger:
    """Sends curves to a run of Weights & Biases; the x axis is `batches`.

        logger = WandbLogger(wandb.init(project="mine"))

    A run of theirs takes steps in rising order only, and a resumed one of ours tells its history anew. So the step is
    a number beside the others: a curve may be drawn twice, and no point is dropped.

    Args:
        run: What `wandb.init` gave; it stays yours to name, and `close` finishes it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Takes numbers by name, at a step."""
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        """Finishes the run."""
        self._run.finish()
