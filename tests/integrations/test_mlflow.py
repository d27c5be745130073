"""The logger with MLflow itself, into a folder, where it is installed; and what it is told, where it is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ecc.integrations.mlflow import MlflowLogger


class Told:
    """Notes the calls of a client."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def log_metric(self, run_id: str, key: str, value: float, step: int | None = None) -> None:
        self.calls.append((run_id, key, value, step))

    def set_terminated(self, run_id: str) -> None:
        self.calls.append((run_id, "end"))


def test_numbers_go_to_the_run_under_names_that_are_allowed() -> None:
    client = Told()
    logger = MlflowLogger(client, "abc")
    logger.log({"solve/loss": 0.5, "widths/conv1[0]+conv2": 3}, 64)
    logger.close()
    assert client.calls == [
        ("abc", "solve/loss", 0.5, 64),
        ("abc", "widths/conv1_0__conv2", 3.0, 64),
        ("abc", "end"),
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of its dependencies
def test_the_real_library_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder is enough for a test
    client = mlflow.MlflowClient(tracking_uri=tmp_path.as_uri())
    run_id = client.create_run(client.create_experiment("ecc")).info.run_id
    logger = MlflowLogger(client, run_id)
    for step in (1, 2):
        logger.log({"solve/loss": 1 / step, "widths/a+b": 4}, step)
    logger.close()
    assert [(point.step, point.value) for point in client.get_metric_history(run_id, "solve/loss")] == [
        (1, 1),
        (2, 0.5),
    ]
    assert client.get_run(run_id).info.status == "FINISHED"
    assert client.get_run(run_id).data.metrics["widths/a_b"] == 4
