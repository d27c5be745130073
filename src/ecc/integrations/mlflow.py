"""Logger for MLflow."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_FORBIDDEN = re.compile(r"[^\w\-. :/]")  # in the name of a metric


class MlflowLogger:
    """Logs metrics to a run of MLflow.

        logger = MlflowLogger(mlflow.MlflowClient(), mlflow.start_run().info.run_id)

    Args:
        client: An `MlflowClient`.
        run_id: Id of the run; `close` ends it.
    """

    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name at a step; characters that MLflow forbids in names become `_`."""
        for name, value in values.items():
            self._client.log_metric(self._run_id, _FORBIDDEN.sub("_", name), float(value), step=step)

    def close(self) -> None:
        """End the run."""
        self._client.set_terminated(self._run_id)
