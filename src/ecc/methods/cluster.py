"""A comparison on the machines of a Ray cluster: one Ray task per run. The folders are those of a local run.

Workers get plain values and build task, energy models and meter themselves. All results are in the run folders, so a
finished run stays finished, whatever happens to its machine.

The folder of the comparison and the working directory of the command must be on a file system that all machines share
under the same path, with atomic renames and `flock` across machines. A network file system may keep the lock of a dead
machine for a while (about 90 seconds with NFS 4), so a run that is retried waits for its lock (`LOCK_SECONDS`). A
machine that was only disconnected keeps the lock and finishes its run, and the retry finds it finished.
"""

from __future__ import annotations

import importlib
import os
import platform
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ecc.errors import BadFile, EccError, first_line
from ecc.training import Interrupted, RunInUse, StopRequests

from .grid import Comparison, GridRun

LOCK_SECONDS = 240.0
"""How long a task waits for a run folder that a dead machine may still lock."""
GRACE_SECONDS = 15.0
"""How long a cancelled task may take to save its state; it is cancelled up to three times."""
RETRIES = 3
"""Retries of a task whose process or machine died."""

ComparisonFactory = Callable[[], AbstractContextManager[Comparison]]
"""Builds the comparison in another process. It is sent by name, with the plain values that it holds."""


class Outcome(NamedTuple):
    """How a task ended."""

    error: str = ""
    """Why it has no result; empty if it has one."""
    is_fatal: bool = False
    """Whether all other tasks would fail alike, so that the comparison stops."""


# ---------------------------------------------------------------- tasks on a cluster


class Cluster:
    """A connected Ray cluster; made by `open_cluster`.

    Args:
        ray: The module.
        device: Where tasks compute; None for one GPU per task if the cluster has any.
    """

    def __init__(self, ray: Any, device: str | None) -> None:
        self._ray = ray
        resources = ray.cluster_resources()
        self.cpus, self.gpus = int(resources.get("CPU", 0)), int(resources.get("GPU", 0))
        self.machines = sum(bool(node["Alive"]) for node in ray.nodes())
        if device is not None and device.startswith("cuda:"):
            raise EccError(f"device {device!r} has a number, but Ray assigns the GPUs; use --device cuda.")
        if device == "cuda" and not self.gpus:
            raise EccError("the Ray cluster has no GPU; use --device cpu, or add a machine with a GPU.")
        self.device = device or ("cuda" if self.gpus else "cpu")
        """Where tasks compute."""
        self._needs = {"num_cpus": 1, "num_gpus": int(self.device == "cuda")}

    def __str__(self) -> str:
        """Its resources."""
        return f"{self.machines} machines, {self.cpus} CPUs and {self.gpus} GPUs"

    def start(self, function: Callable[..., Outcome], *values: Any) -> Any:
        """Run a function on some machine.

        Args:
            function: Of a module, which the workers import. If its machine dies, it runs again on another one.
            *values: Plain values. References that `start` returned are awaited and replaced by their outcome.

        Returns:
            A reference for `outcomes`.
        """
        remote = self._ray.remote(max_retries=RETRIES, **self._needs)(_run_task)
        return remote.remote(str(Path.cwd()), function, *values)

    def outcomes(self, references: list[Any]) -> Iterator[tuple[Any, Outcome]]:
        """(reference, outcome) in the order of completion. If this ends early, the other tasks are cancelled."""
        left = list(references)
        try:
            with StopRequests() as stop:
                while left:
                    ready, left = self._ray.wait(left, timeout=0.5)
                    if stop.signum:
                        left += ready
                        done = len(references) - len(left)
                        raise Interrupted(
                            f"stopped after {done} of {len(references)} tasks. Run the same command again to resume.",
                            stop.signum,
                        )
                    for reference in ready:
                        outcome = self._outcome(reference)
                        if outcome.is_fatal:
                            raise EccError(outcome.error)
                        yield reference, outcome
        finally:
            for _ in range(3):  # a task that is just starting ignores the first cancellation
                for reference in left:
                    self._ray.cancel(reference)
                if left:
                    _, left = self._ray.wait(left, num_returns=len(left), timeout=GRACE_SECONDS)

    def _outcome(self, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            return Outcome(*self._ray.get(reference))
        except errors.RayError as error:
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            cause = error.cause if isinstance(error, errors.RayTaskError) else error
            if isinstance(cause, errors.RaySystemError) or "failed to import on the worker" in str(cause):
                return Outcome(f"a worker cannot start: {last}. Every machine needs the same ecc as this one.", True)
            if isinstance(cause, errors.RayError):
                return Outcome(f"its process or machine died {RETRIES + 1} times. Ray reports: {last}")
            raise  # an error in our code or the user's, with its traceback


@contextmanager
def open_cluster(device: str | None = None) -> Iterator[Cluster]:
    """Connect to the cluster of RAY_ADDRESS or to the one on this machine; without one, this machine is the cluster.

    Args:
        device: Where tasks compute; None for one GPU per task if there are any.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise EccError("--backend ray needs Ray: pip install ray") from None
    if ray.is_initialized():
        yield Cluster(ray, device)
        return
    address = os.environ.get("RAY_ADDRESS", "")
    try:
        _check_address(address)
        ray.init(log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        raise EccError(
            f"the Ray cluster at {address or 'this machine'} does not answer ({first_line(error)}). Start it with "
            "`ray start --head`, or set RAY_ADDRESS to a running one."
        ) from None
    try:
        yield Cluster(ray, device)
    finally:
        ray.shutdown()


def _check_address(address: str) -> None:
    """Fail after seconds if nothing listens there; Ray would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=5.0).close()


def _run_task(folder: str, function: Callable[..., Outcome], *values: Any) -> Outcome:
    """In a worker: the same working directory and number of threads on every machine."""
    try:
        os.chdir(folder)
    except OSError:
        return Outcome(_not_shared(folder), is_fatal=True)
    torch.set_num_threads(1)  # sums over more threads differ in their last bits
    try:
        return _wait_for_lock(function, *values)
    except Interrupted as stop:
        if stop.signum == signal.SIGTERM:
            os._exit(128 + signal.SIGTERM)  # the machine goes down: Ray notices and retries on another one
        raise KeyboardInterrupt from None  # cancelled
    except EccError as error:
        return Outcome(str(error), is_fatal=True)


def _wait_for_lock(function: Callable[..., Outcome], *values: Any) -> Outcome:
    """Call a function, again and again while its run folder is locked."""
    until = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < until:
        with suppress(RunInUse):
            return function(*values)
        time.sleep(0.5)
    return function(*values)


def _not_shared(path: str | Path) -> str:
    return f"machine {platform.node()} does not see {path}; use a file system that all machines share."


# ---------------------------------------------------------------- a comparison


def run_on_cluster(
    grid: Comparison,
    make_grid: ComparisonFactory,
    root: str | Path,
    cluster: Cluster,
    progress: Callable[[str], None] | None = None,
) -> list[GridRun]:
    """`Comparison.run` with one task per run. With one thread on a CPU the results are the same, bit for bit.

    Returns:
        The runs that failed.
    """
    root = Path(root).resolve()
    grid.open(root)
    unfinished = grid.unfinished(root)
    dense = {
        seed: cluster.start(_pretrain, make_grid, root, seed)
        for seed in dict.fromkeys(one.seed for one in unfinished)
        if grid.needs_pretraining(seed, root)
    }
    references: dict[GridRun, Any] = {}
    for one in unfinished:
        first = grid.prerequisite(one)
        awaited = None if first is None else references.get(first)
        references[one] = cluster.start(_run_one, make_grid, root, one, dense.get(one.seed, Outcome()), awaited)
    runs, failed = {reference: one for one, reference in references.items()}, []
    for reference, outcome in cluster.outcomes([*dense.values(), *runs]):
        if reference not in runs:
            continue
        one = runs[reference]
        if outcome.error:
            grid.write_failure(one, root, outcome.error)
            failed.append(one)
        if progress is not None:
            progress(one.describe(outcome.error or None))
    return failed


def _pretrain(make_grid: ComparisonFactory, root: Path, seed: int) -> Outcome:
    with _open_grid(make_grid, root) as grid:
        try:
            grid.pretrain(seed, root)
        except (BadFile, Interrupted):
            raise
        except EccError as error:
            return Outcome(str(error))  # the error of every run of the seed
    return Outcome()


def _run_one(
    make_grid: ComparisonFactory, root: Path, one: GridRun, dense: Outcome, awaited: Outcome | None
) -> Outcome:
    del awaited  # only awaited
    if dense.error:
        return dense
    with _open_grid(make_grid, root) as grid:
        if one not in grid.unfinished(root):  # finished by a machine that seemed dead
            return Outcome()
        return Outcome(grid.run_one(one, root) or "")


@contextmanager
def _open_grid(make_grid: ComparisonFactory, root: Path) -> Iterator[Comparison]:
    if not (root / "grid.json").exists():
        raise BadFile(_not_shared(root))
    with make_grid() as grid:
        yield grid
