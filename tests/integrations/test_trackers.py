"""Experiment trackers by name."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from ecc.errors import EccError
from ecc.integrations.mlflow import MlflowLogger
from ecc.integrations.trackers import Tracker, parse_tracker
from ecc.integrations.wandb import WandbLogger


def test_names_and_places() -> None:
    assert parse_tracker("tensorboard:C:/runs") == ("tensorboard", "C:/runs")
    assert parse_tracker("mlflow") == ("mlflow", "")
    assert parse_tracker("mlflow:http://host:5000") == ("mlflow", "http://host:5000")
    for bad, part in (("nothing", "is unknown"), ("", "is unknown"), ("wandb:", "needs a place: wandb:PROJECT")):
        with pytest.raises(EccError, match=part):
            parse_tracker(bad)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(EccError, match=f"pip install {name}"):
        Tracker(f"{name}:x")


def test_nothing_is_opened_before_the_first_number(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    Tracker(f"tensorboard:{tmp_path / 'none'}").close()
    assert not (tmp_path / "none").exists()
    tracker = Tracker(f"tensorboard:{tmp_path / 'board'}")
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert list((tmp_path / "board").iterdir())


def test_an_error_of_a_package_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("wandb")

    def init(project: str) -> SimpleNamespace:
        raise RuntimeError(f"no API key for {project}\nmore lines")

    package.init = init
    monkeypatch.setitem(sys.modules, "wandb", package)
    with pytest.raises(EccError, match=r"^wandb did not start: no API key for mine\. Run `wandb login`"):
        Tracker("wandb:mine").log({"loss": 1.0}, 1)


class Told:
    """Notes the calls of a run of Weights & Biases or a client of MLflow."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **named: self.calls.append((name, *args, *named.items()))


def test_wandb_gets_steps_beside_the_numbers() -> None:
    run = Told()
    logger = WandbLogger(run)
    logger.log({"solve/loss": 0.5}, 64)
    logger.log({"solve/loss": 0.7}, 32)  # told anew after a resume
    logger.close()
    assert run.calls == [
        ("define_metric", "batches", ("hidden", True)),
        ("define_metric", "*", ("step_metric", "batches")),
        ("log", {"solve/loss": 0.5, "batches": 64}),
        ("log", {"solve/loss": 0.7, "batches": 32}),
        ("finish",),
    ]


def test_mlflow_gets_names_that_are_allowed() -> None:
    client = Told()
    logger = MlflowLogger(client, "abc")
    logger.log({"solve/loss": 0.5, "widths/conv1[0]+conv2": 3}, 64)
    logger.close()
    assert client.calls == [
        ("log_metric", "abc", "solve/loss", 0.5, ("step", 64)),
        ("log_metric", "abc", "widths/conv1_0__conv2", 3.0, ("step", 64)),
        ("set_terminated", "abc"),
    ]


def test_the_real_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.chdir(tmp_path)
    tracker = Tracker("wandb:mine")
    tracker.log({"loss": 1.0}, 1)
    tracker.close()
    assert list(tmp_path.rglob("*.wandb"))


def test_the_real_mlflow_in_a_file(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    pytest.importorskip("sqlalchemy", reason="mlflow keeps runs in a database")
    uri = f"sqlite:///{tmp_path / 'runs.db'}"
    for _ in range(2):  # the experiment exists the second time
        tracker = Tracker(f"mlflow:{uri}")
        tracker.log({"prune/loss": 1.0}, 1)
        tracker.log({"prune/loss": 0.5}, 2)
        tracker.close()
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("ecc").experiment_id])
    assert len(runs) == 2
    assert [one.value for one in client.get_metric_history(runs[0].info.run_id, "prune/loss")] == [1.0, 0.5]
    assert {run.info.status for run in runs} == {"FINISHED"}
