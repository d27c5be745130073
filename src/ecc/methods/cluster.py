"""A grid on the machines of a Ray cluster: one task a cell, and the folders are as of a local run.

Workers are told plain values and build task, energy models and meter themselves. What they give back is in the run
folders, so a cell that is finished is finished for good, whatever becomes of its machine.

Assumed of the file system: all machines see the folder of the grid, and the folder that the command was started in,
under the same path; a file that was renamed into place is seen whole; `flock` works across machines. A process that
dies gives its locks back at once where the kernel holds them. On a network file system the server holds them until it
notices that the machine is gone (about 90 seconds with NFS 4), so a cell that is tried again waits for its lock
(`LOCK_SECONDS`). A machine that was only cut off, and goes on with its cell, keeps the lock and finishes the cell: the
second try finds it finished. Where `flock` is switched off, nothing tells the two apart.
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

from ecc.errors import BadFile, EccError
from ecc.training import Interrupted, RunInUse, StopRequests

from .grid import Comparison, GridRun, told

LOCK_SECONDS = 240.0
"""How long a task waits for a folder that a dead machine may still hold."""
GRACE_SECONDS = 15.0
"""How long those who are asked to stop may take to save their state; they are asked three times."""
RETRIES = 3
"""Of a task whose process or machine died."""

Opened = Callable[[], AbstractContextManager[Comparison]]
"""Builds the grid in another process. It travels by its name, with the plain values that it holds."""


class Outcome(NamedTuple):
    """How a task ended."""

    error: str = ""
    """Why it has no result; empty if it has one."""
    is_fatal: bool = False
    """Whether the others would end alike, so that the whole must stop."""


# ---------------------------------------------------------------- any work on a cluster


class Cluster:
    """A Ray cluster that is connected. Made by `open_cluster`.

    Args:
        ray: The module.
        device: Where tasks compute; None for a GPU each, if the cluster has any.

    Raises:
        EccError: If no machine of the cluster has such a device, or the device is a numbered one.
    """

    def __init__(self, ray: Any, device: str | None) -> None:
        self._ray = ray
        have = ray.cluster_resources()
        self.cpus, self.gpus = int(have.get("CPU", 0)), int(have.get("GPU", 0))
        self.machines = sum(bool(node["Alive"]) for node in ray.nodes())
        if device is not None and device.startswith("cuda:"):
            raise EccError(f"device {device} was asked for, but Ray gives each task a GPU of its own; say cuda.")
        if device == "cuda" and not self.gpus:
            raise EccError("no machine of the Ray cluster has a GPU that Ray knows of; say --device cpu, or add one.")
        self.device = device or ("cuda" if self.gpus else "cpu")
        """Where tasks are to compute."""
        self._needs = {"num_cpus": 1, "num_gpus": int(self.device == "cuda")}

    def __str__(self) -> str:
        """What there is."""
        return f"{self.machines} machines, {self.cpus} CPUs and {self.gpus} GPUs"

    def start(self, work: Callable[..., Outcome], *values: Any) -> Any:
        """Has `work` done somewhere.

        Args:
            work: A function of a module, which the workers import. It runs again, elsewhere, if its machine dies.
            *values: Plain ones. Those that `start` gave are awaited, and handed over as their outcome.

        Returns:
            A ticket for `outcomes`.
        """
        remote = self._ray.remote(max_retries=RETRIES, **self._needs)(_at_home)
        return remote.remote(str(Path.cwd()), work, *values)

    def outcomes(self, tickets: list[Any]) -> Iterator[tuple[Any, Outcome]]:
        """(ticket, outcome), as they come. Whatever ends this before its end, the tasks that are left are cancelled.

        Raises:
            EccError: If an outcome is fatal.
            Interrupted: If this process was asked to stop.
        """
        left = list(tickets)
        try:
            with StopRequests() as stop:
                while left:
                    ready, left = self._ray.wait(left, timeout=0.5)
                    if stop.signum:
                        left += ready
                        raise Interrupted(
                            f"stopped with {len(tickets) - len(left)} of {len(tickets)} tasks done. "
                            "The same command goes on from here.",
                            stop.signum,
                        )
                    for ticket in ready:
                        outcome = self._outcome(ticket)
                        if outcome.is_fatal:
                            raise EccError(outcome.error)
                        yield ticket, outcome
        finally:
            for _ in range(3):  # one that had not quite begun does not hear the first call
                for ticket in left:
                    self._ray.cancel(ticket)
                if left:
                    _, left = self._ray.wait(left, num_returns=len(left), timeout=GRACE_SECONDS)

    def _outcome(self, ticket: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            return Outcome(*self._ray.get(ticket))
        except errors.RayError as error:
            last = (str(error).strip().splitlines() or [type(error).__name__])[-1]
            reason = error.cause if isinstance(error, errors.RayTaskError) else error
            if isinstance(reason, errors.RaySystemError) or "failed to import on the worker" in str(reason):
                return Outcome(
                    f"a worker cannot begin: {last}. Every machine needs the same ecc as here.", is_fatal=True
                )
            if isinstance(reason, errors.RayError):
                return Outcome(f"its process or machine died {RETRIES + 1} times; Ray says: {last}")
            raise  # an error of our code or the user's, with its traceback


@contextmanager
def open_cluster(device: str | None = None) -> Iterator[Cluster]:
    """Connects to the cluster that RAY_ADDRESS names or that runs here; without one, this machine is the cluster.

    Args:
        device: Where tasks compute; None for a GPU each, if there are any.

    Raises:
        EccError: If Ray is missing, or its cluster does not answer.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError:
        raise EccError("Ray is not installed here, and several machines need it: pip install ray") from None
    if ray.is_initialized():
        yield Cluster(ray, device)
        return
    where = os.environ.get("RAY_ADDRESS", "")
    try:
        _knock(where)
        ray.init(log_to_driver=False, logging_level="warning")
    except (OSError, RuntimeError, ValueError) as error:  # ConnectionError is an OSError
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise EccError(
            f"the Ray cluster at {where or 'this machine'} does not answer ({first}); start it: `ray start --head`, "
            "or set RAY_ADDRESS to one that runs."
        ) from None
    try:
        yield Cluster(ray, device)
    finally:
        ray.shutdown()


def _knock(address: str) -> None:
    """Whether anyone is there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=5.0).close()


def _at_home(folder: str, work: Callable[..., Outcome], *values: Any) -> Outcome:
    """In a worker: the same folder and number of threads wherever it is, and plain values back."""
    try:
        os.chdir(folder)
    except OSError:
        return Outcome(_unshared(folder), is_fatal=True)
    torch.set_num_threads(1)  # as many as it has CPUs; sums over more threads differ in their last bits
    try:
        return _when_free(work, *values)
    except Interrupted as stop:
        if stop.signum == signal.SIGTERM:
            os._exit(128 + signal.SIGTERM)  # the machine goes down: Ray sees a death, and tries elsewhere
        raise KeyboardInterrupt from None  # cancelled
    except EccError as error:
        return Outcome(str(error), is_fatal=True)


def _when_free(work: Callable[..., Outcome], *values: Any) -> Outcome:
    """Does the work once nobody else is at it; see above about locks that outlive their machine."""
    until = time.monotonic() + LOCK_SECONDS
    while time.monotonic() < until:
        with suppress(RunInUse):
            return work(*values)
        time.sleep(0.5)
    return work(*values)


def _unshared(path: str | Path) -> str:
    return f"machine {platform.node()} does not see {path}; it must lie on a file system that all machines share."


# ---------------------------------------------------------------- a grid


def run_on_cluster(
    grid: Comparison,
    opened: Opened,
    root: str | Path,
    cluster: Cluster,
    progress: Callable[[str], None] | None = None,
) -> list[GridRun]:
    """As `Comparison.run`, with one task a cell; results are the same, on a CPU bit for bit with one thread.

    Args:
        grid: Says which cells there are; nothing is computed with it here.
        opened: Builds the same grid in a worker.
        root: The folder of the grid, which all machines share.
        cluster: Where.
        progress: Is told about each cell.

    Returns:
        The cells that failed; their folders hold the reason.

    Raises:
        BadFile: If the folder holds another grid.
        EccError: If a worker cannot build the grid, such as for want of the meter, or does not see the folder.
        Interrupted: If it was asked to stop; the same call goes on.
    """
    root, tell = Path(root).resolve(), progress or (lambda _: None)
    grid.begin(root)
    missing = grid.missing(root)
    dense = {
        seed: cluster.start(_dense, opened, root, seed)
        for seed in dict.fromkeys(cell.seed for cell in missing)
        if grid.needs_dense(seed, root)
    }
    tickets: dict[Any, GridRun] = {}
    of: dict[GridRun, Any] = {}
    for cell in missing:
        first = grid.built_on(cell)
        awaited = None if first is None else of.get(first)
        ticket = cluster.start(_cell, opened, root, cell, dense.get(cell.seed, Outcome()), awaited)
        tickets[ticket], of[cell] = cell, ticket
    failed = []
    for ticket, outcome in cluster.outcomes([*dense.values(), *tickets]):
        if ticket not in tickets:
            continue
        cell = tickets[ticket]
        if outcome.error:
            grid.note_failure(cell, root, outcome.error)
            failed.append(cell)
        tell(told(cell, outcome.error or None))
    return failed


def _dense(opened: Opened, root: Path, seed: int) -> Outcome:
    with _joined(opened, root) as grid:
        try:
            grid.train_dense(seed, root)
        except (BadFile, Interrupted):
            raise
        except EccError as error:
            return Outcome(str(error))  # every cell of the seed will say so
    return Outcome()


def _cell(opened: Opened, root: Path, cell: GridRun, dense: Outcome, awaited: Outcome | None) -> Outcome:
    del awaited  # was awaited, which is all
    if dense.error:
        return dense
    with _joined(opened, root) as grid:
        if cell not in grid.missing(root):  # finished by a machine that was taken for dead
            return Outcome()
        return Outcome(grid.run_cell(cell, root) or "")


@contextmanager
def _joined(opened: Opened, root: Path) -> Iterator[Comparison]:
    if not (root / "grid.json").exists():
        raise BadFile(_unshared(root))
    with opened() as grid:
        yield grid
