"""Logger for Weights & Biases."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

STEP = "batches"


class WandbLogger:
    """Logs metrics to a run of Weights & Biases; the x axis is `batches`.

        logger = WandbLogger(wandb.init(project="mine"))

    Weights & Biases accepts rising steps only, but a resumed run of ECC logs its history again. So the step is
    logged as a metric of its own, and no point is dropped.

    Args:
        run: The result of `wandb.init`; `close` finishes it.
    """

    def __init__(self, run: Any) -> None:
        self._run = run
        run.define_metric(STEP, hidden=True)
        run.define_metric("*", step_metric=STEP)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name at a step."""
        self._run.log({**values, STEP: step})

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
