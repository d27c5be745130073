"""Experiment trackers by name: TensorBoard, Weights & Biases and MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from ecc.errors import EccError

if TYPE_CHECKING:
    from ecc.training import Logger

TRACKERS = {"tensorboard": "FOLDER", "wandb": "PROJECT", "mlflow": "URI"}
"""Names, and what follows the colon."""

MLFLOW_EXPERIMENT = "ecc"


class Tracker:
    """A logger that opens an experiment tracker when the first numbers arrive, so that a refused run leaves no trace.

        Tracker("tensorboard:FOLDER"), Tracker("wandb:PROJECT"), Tracker("mlflow:URI") or Tracker("mlflow")

    A resumed run logs its whole history again, to a new run of Weights & Biases or MLflow. Accounts and servers are
    configured as for these packages: `wandb login` or WANDB_MODE=offline, and MLFLOW_TRACKING_URI.

    Args:
        spec: Name and place of the tracker.

    Raises:
        EccError: If the name is unknown, the place is missing, or the package is not installed.
    """

    def __init__(self, spec: str) -> None:
        self._name, self._place = parse_tracker(spec)
        self._logger: Logger | None = None
        package = "torch.utils.tensorboard" if self._name == "tensorboard" else self._name
        try:
            import_module(package)
        except ImportError as error:
            raise EccError(
                f"{self._name} cannot be imported ({error}); pip install {self._name}, or leave out --tracker {spec}."
            ) from None

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Log numbers by name at a step."""
        if self._logger is None:
            self._logger = self._open()
        self._logger.log(values, step)

    def close(self) -> None:
        """Finish the run of the tracker."""
        if self._logger is not None:
            self._logger.close()
            self._logger = None

    def _open(self) -> Logger:
        if self._name == "tensorboard":
            from ecc.training import TensorBoardLogger

            return TensorBoardLogger(self._place)
        try:
            return _open_wandb(self._place) if self._name == "wandb" else _open_mlflow(self._place)
        except Exception as error:  # noqa: BLE001 - each package has its own: no account, no server, a wrong address
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
            remedy = {
                "wandb": "Run `wandb login`, or set WANDB_MODE=offline",
                "mlflow": "Give the address of a server or a database, such as mlflow:sqlite:///runs.db",
            }[self._name]
            raise EccError(f"{self._name} did not start: {reason}. {remedy}.") from None


def parse_tracker(spec: str) -> tuple[str, str]:
    """Name and place of a tracker."""
    name, _, place = spec.partition(":")
    if name not in TRACKERS:
        known = ", ".join(f"{one}:{what}" for one, what in TRACKERS.items())
        raise EccError(f"tracker {spec!r} is unknown; give one of {known}.")
    if not place and name != "mlflow":
        raise EccError(f"tracker {spec!r} needs a place: {name}:{TRACKERS[name]}.")
    return name, place


def _open_wandb(project: str) -> Logger:
    from .wandb import WandbLogger

    return WandbLogger(import_module("wandb").init(project=project))


def _open_mlflow(uri: str) -> Logger:
    from .mlflow import MlflowLogger

    client = import_module("mlflow").MlflowClient(tracking_uri=uri or None)
    found = client.get_experiment_by_name(MLFLOW_EXPERIMENT)
    experiment = client.create_experiment(MLFLOW_EXPERIMENT) if found is None else found.experiment_id
    return MlflowLogger(client, client.create_run(experiment).info.run_id)
