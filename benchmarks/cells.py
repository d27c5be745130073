"""Cells of a benchmark: which are done, which run now, when to stop, and the JSON that they are kept in.

A benchmark is a list of cells, the most important first. A cell is identified by its key, such as method, budget and
seed, and is run on its own. `Cells` holds the record: the file is replaced atomically after each cell, and cells that
`--out` or `--earlier` has for the same settings are not repeated. After `--seconds` no cell starts. A cell that runs
then saves its state (`Pause.save`) and raises `Paused`; the next call continues it from that file.

Every cell has the commit, device, date, command, seconds, batches and, where it was measured, joules with the confidence
interval; `problems` says what a cell lacks. `command` re-runs this cell alone. A cell with `is_partial` is run again.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from machine import machine, write_record

from ecc.errors import EccError
from ecc.records import to_builtins
from ecc.run_records import RunSummary
from ecc.training import Interrupted, load_state, save_state

Key = dict[str, Any]
STAMPS = ("commit", "device", "date", "command", "seconds", "batches")
"""What every cell has besides its key and its result; batches are 0 where nothing is trained."""
SAVING = 20.0
"""Seconds that processes have to save their state after the deadline."""
STOPPING = 8.0
"""Seconds that processes have to end after the last cell, or after SIGTERM."""
_PIPES = "CUDA_MPS_PIPE_DIRECTORY"


class Paused(Exception):
    """The time is over, and the state of the cell is saved."""


@dataclass(frozen=True)
class Deadline:
    """A time after which no cell starts. All processes of a machine have the same clock."""

    end: float

    @classmethod
    def after(cls, seconds: float) -> Deadline:
        """The time in so many seconds."""
        return cls(time.monotonic() + seconds)

    @property
    def left(self) -> float:
        """Seconds until then."""
        return self.end - time.monotonic()

    @property
    def is_over(self) -> bool:
        """Whether the time is over."""
        return self.left <= 0


@dataclass(frozen=True)
class Pause:
    """Where one cell saves its state, and when it has to."""

    file: Path
    deadline: Deadline
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the benchmark: a state that was saved with others is not continued."""

    @property
    def is_due(self) -> bool:
        """Whether the cell has to call `save`."""
        return self.deadline.is_over

    def save(self, state: Any) -> None:
        """Write the state of the cell.

        Raises:
            Paused: If the time is over.
        """
        save_state(self.file, {"settings": json.dumps(self.settings), "state": state})
        if self.is_due:
            raise Paused(self.file.name)

    def load(self) -> Any:
        """The saved state; None if there is none of these settings."""
        found = load_state(self.file) if self.file.is_file() else {}
        return found["state"] if found.get("settings") == json.dumps(self.settings) else None


@dataclass
class Cells:
    """The record of a benchmark.

    Args:
        out: The JSON. Saved states of cells are beside it.
        header: What the record has besides its cells; `settings` is what all cells depend on.
        earlier: Other records, whose cells are taken over if they have the same settings.
        again: Whether known cells of this call are repeated.
        only: Values that a key must have; all cells by default.
    """

    out: Path
    header: dict[str, Any]
    earlier: Sequence[Path] = ()
    again: bool = False
    only: Mapping[str, str] = field(default_factory=dict)
    cells: list[dict[str, Any]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.header.setdefault("environment", machine())
        self.header["settings"] = json.loads(json.dumps(self.header.get("settings", {}), default=str))
        found: dict[str, dict[str, Any]] = {}
        for file in [*self.earlier, self.out]:
            if not file.is_file():
                continue
            record = json.loads(file.read_text(encoding="utf-8"))
            if record.get("settings", {}) != self.header["settings"]:
                print(f"{file.name} has other settings; its cells are left out", flush=True)
                continue
            for cell in record["cells"]:
                if "error" not in cell and "key" in cell:
                    found[name_of(cell["key"])] = cell
        self.cells = list(found.values())

    def wanted(self, keys: Iterable[Key]) -> list[Key]:
        """The keys that this call has to run, in their order."""
        known = set() if self.again else {name_of(cell["key"]) for cell in self.cells if not cell.get("is_partial")}
        return [key for key in keys if is_selected(key, self.only) and name_of(key) not in known]

    def pause(self, key: Key, deadline: Deadline) -> Pause:
        """Where the state of a cell is kept."""
        return Pause(self.out.parent / f"{self.out.stem}.{name_of(key)}.state", deadline, self.header["settings"])

    def add(self, key: Key, values: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        """Add a finished or failed cell and write the file.

        Args:
            key: Of the cell.
            values: Its result; `device` and `batches` where the header does not say so, `error` if it failed.
            seconds: That this call took; those of earlier calls, if it was continued, are in `values`.
        """
        about = self.header["environment"]
        stamps = {
            "commit": about["commit"],
            "device": self.header.get("device", about.get("device", about["cpu"])),
            "date": about["date"],
            "command": command_of(key),
            "batches": 0,
        }
        before = float(values.get("seconds_before", 0.0))
        cell = {"key": key, **key, **stamps, **values, "seconds": round(seconds + before, 2)}
        name = name_of(key)
        before_it = next((one for one in self.cells if name_of(one["key"]) == name), None)
        if "error" not in cell or before_it is None:
            if before_it is not None and not before_it.get("is_partial"):  # to see whether it was reproduced
                numbers = {one: value for one, value in before_it.items() if isinstance(value, float)}
                cell["previous"] = {"commit": before_it.get("commit"), **numbers}
            self.cells[:] = [one for one in self.cells if one is not before_it] + [cell]
        if "error" not in cell:
            self.pause(key, Deadline(0)).file.unlink(missing_ok=True)
        self.write()
        return cell

    def write(self) -> None:
        """Replace the file."""
        write_record({**self.header, "cells": self.cells, "skipped": self.skipped}, self.out)


def name_of(key: Key) -> str:
    """The key as a part of a file name."""
    text = "-".join(str(value) for value in key.values())
    return "".join(letter if letter.isalnum() or letter in ".-_" else "_" for letter in text)


def is_selected(key: Key, only: Mapping[str, str]) -> bool:
    """Whether a key has all given values."""
    return all(str(key.get(name)) in value.split("+") for name, value in only.items())


def command_of(key: Key) -> str:
    """The command that runs one cell again; folders of this machine are left out."""
    words, arguments = [], iter(sys.argv[1:])
    for word in arguments:
        if word in ("--only", "--out", "--seconds"):
            next(arguments, None)
        elif word != "--again":
            words.append(Path(word).name if Path(word).is_absolute() else word)
    only = ",".join(f"{name}={value}" for name, value in key.items())
    script = Path(sys.argv[0]).name or "python"
    return " ".join([f"benchmarks/{script}", *map(shlex.quote, words), "--only", shlex.quote(only), "--again"])


def add_options(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Options that all benchmarks with cells have."""
    parser.add_argument("--out", type=Path, required=True, help="JSON; cells that it has are kept")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="JSON of earlier calls, to continue")
    parser.add_argument("--seconds", type=float, default=seconds, help="no cell starts later; running ones are saved")
    parser.add_argument(
        "--only", type=selection, default={}, metavar="KEY=VALUE,...", help="cells with these values; + for several"
    )
    parser.add_argument("--again", action="store_true", help="repeat cells that are known")
    parser.add_argument("--list", action="store_true", help="print the cells and whether they are known, and end")


def selection(text: str) -> dict[str, str]:
    """`method=ecc,seed=0+1` as a dict.

    Raises:
        argparse.ArgumentTypeError: If a part has no `=`.
    """
    parts = [part for part in text.split(",") if part]
    if wrong := [part for part in parts if "=" not in part]:
        raise argparse.ArgumentTypeError(f"{wrong[0]!r} is not of the form KEY=VALUE")
    return {name.strip(): value.strip() for name, _, value in (part.partition("=") for part in parts)}


def print_cells(cells: Cells, keys: Sequence[Key]) -> None:
    """List the cells with their state: done, saved or missing."""
    known = {name_of(cell["key"]): cell for cell in cells.cells}
    for key in keys:
        cell, saved = known.get(name_of(key)), cells.pause(key, Deadline(0)).file.is_file()
        state = "missing" if cell is None else f"done, {cell['seconds']:.0f} s, {str(cell['commit'])[:10]}"
        print(f"{name_of(key):50} {'saved state' if saved else state}", flush=True)
    print(f"{sum(name_of(key) in known for key in keys)} of {len(keys)} cells done", flush=True)


def problems(cell: Mapping[str, Any]) -> list[str]:
    """What a cell lacks: the reason why it failed, or fields that every cell has."""
    if "error" in cell:
        return [f"failed: {cell['error']}"]
    found = [f"no {name}" for name in STAMPS if cell.get(name) in (None, "")]
    if "joules" in cell and cell.get("relative_ci") is None:
        found.append("joules without their interval")
    return found


# ---------------------------------------------------------------- running cells


def run_in_turn(
    cells: Cells,
    keys: Iterable[Key],
    run: Callable[[Key], Mapping[str, Any]],
    deadline: Deadline,
    *,
    estimate: Callable[[Key], float] | float = 0.0,
    show: Sequence[str] = (),
) -> None:
    """Run cells one after the other.

    Args:
        cells: The record.
        keys: Cells in order; known ones are left out.
        run: Returns the result of a cell.
        deadline: A cell that would not end in time is listed under `skipped`.
        estimate: Seconds of a cell before one with the same first value of the key has run; afterwards what that took.
        show: Fields of the result that are printed.
    """
    took: dict[str, float] = {}
    cells.skipped.clear()
    for key in cells.wanted(keys):
        kind = str(next(iter(key.values())))
        if deadline.left < took.get(kind, estimate(key) if callable(estimate) else estimate):
            cells.skipped.append(name_of(key))
            continue
        started = time.monotonic()
        try:
            values: Mapping[str, Any] = run(key)
        except Paused:
            print(f"{name_of(key)}: saved", flush=True)
            continue
        except Interrupted as error:  # by a signal, which is for the whole call
            cells.write()
            raise SystemExit(f"{name_of(key)}: {error}") from None
        except (EccError, RuntimeError, OSError, ValueError) as error:  # the other cells go on
            values = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
        seconds = time.monotonic() - started
        took[kind] = max(0.8 * took.get(kind, 0.0), seconds)
        cell = cells.add(key, values, seconds)
        shown = {name: cell[name] for name in (*show, "error") if name in cell}
        print(f"{deadline.left:5.0f} s left  {name_of(key)}  {shown}  {cell['seconds']} s", flush=True)
    cells.write()
    if cells.skipped:
        print(f"no time for {len(cells.skipped)} cells: {', '.join(cells.skipped[:5])} ...", flush=True)


class Service(Protocol):
    """What the first process does for the others while it waits for their results."""

    def serve(self, alive: Sequence[bool], end: float) -> None:
        """Do what the processes wait for.

        Args:
            alive: Whether each process still runs.
            end: Time of the monotonic clock after which nothing long begins.
        """

    def stop(self) -> None:
        """Let processes that wait end."""


def run_in_processes(
    cells: Cells,
    keys: Iterable[Key],
    work: Callable[..., Any],
    arguments: Sequence[tuple[Any, ...]],
    deadline: Deadline,
    *,
    service: Service | None = None,
    estimate: Callable[[], float] = lambda: 0.0,
    saving: float = SAVING,
) -> None:
    """Run cells in several processes at the same time.

    Args:
        cells: The record.
        keys: Cells in order; known ones are left out.
        work: Called as `work(next_cell, *arguments)` in each process, where `next_cell()` gives a key and its `Pause`, or
            None, and `next_cell.done(key, values, seconds)` hands a result back.
        arguments: Those of each process, of which there are as many; they must be picklable.
        deadline: After it no cell starts.
        service: What this process does meanwhile.
        estimate: Seconds that a cell may take, asked after each one; none starts with less left.
        saving: Seconds after the deadline after which processes are stopped. Their cells are listed under `skipped`.
    """
    wanted = cells.wanted(keys)
    if not wanted:
        return
    spawn = torch.multiprocessing.get_context("spawn")
    waiting, found = spawn.Queue(), spawn.SimpleQueue()  # what a process has put there stays when it dies
    for key in wanted:
        waiting.put((key, cells.pause(key, deadline)))
    expected = spawn.Value("d", estimate(), lock=False)
    supply = Supply(waiting, found, deadline, expected)
    workers = [
        spawn.Process(target=work, args=(supply, *own)) for own in arguments[: len(wanted)]
    ]  # compilers may start others
    left = {name_of(key) for key in wanted}
    try:
        for process in workers:
            process.start()
        while left:
            alive = [process.is_alive() for process in workers]
            if found.empty():  # looked at after them: a process that has ended puts nothing more there
                if not any(alive) or deadline.left < -saving:
                    break
                if service is not None:
                    service.serve(alive, deadline.end)
                time.sleep(0.05)
                continue
            key, values, seconds = found.get()
            left.discard(name_of(key))
            if values is None:
                print(f"{name_of(key)}: saved", flush=True)
            else:
                cell = cells.add(key, values, seconds)
                expected.value = estimate()
                shown = {name: one for name, one in cell.items() if name not in ("key", "widths", "group_widths")}
                print(json.dumps(shown), flush=True)
    finally:
        if service is not None:
            service.stop()
        if left:
            for process in workers:
                process.terminate()
        join(workers)
        waiting.cancel_join_thread()  # cells that nobody took must not keep this process
    cells.skipped[:] = sorted(left)
    cells.write()


def join(workers: Sequence[Any]) -> None:
    """Wait for processes, and kill those that do not end."""
    end = Deadline.after(STOPPING)
    for process in workers:
        process.join(max(0.0, end.left))
        if process.is_alive():
            process.kill()


class Supply:
    """Gives cells to the processes of `run_in_processes`."""

    def __init__(self, waiting: Any, found: Any, deadline: Deadline, expected: Any) -> None:
        self._waiting, self._found, self._deadline, self._expected = waiting, found, deadline, expected

    def __call__(self) -> tuple[Key, Pause] | None:
        """The next cell; None if there is none, or no time for it."""
        if self._deadline.left <= self._expected.value:
            return None
        try:
            found: tuple[Key, Pause] = self._waiting.get(timeout=2.0)  # `empty` may be wrong for a moment
        except queue.Empty:
            return None
        return found

    def run(self, run: Callable[[Key, Pause], Mapping[str, Any]]) -> None:
        """Run cells until there are none; results, failures and pauses are handed back."""
        while (one := self()) is not None:
            key, pause = one
            started = time.monotonic()
            values: Mapping[str, Any] | None
            try:
                values = run(key, pause)
            except Paused:
                values = None
            except Interrupted:  # by a signal, which is for the whole call
                return
            except Exception as error:  # noqa: BLE001 - the other cells go on
                values = {"error": f"{type(error).__name__}: {str(error)[:500]}"}
            self._found.put((key, values, time.monotonic() - started))
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()  # fails if this process cannot use its GPU any more, as further cells would


@contextmanager
def shared_gpu(is_on: bool, folder: Path) -> Iterator[None]:
    """Run CUDA MPS if requested, so that kernels of the processes that are started here run at the same time.

    Args:
        is_on: Whether it is requested.
        folder: For the files of MPS.
    """
    if not is_on:
        yield
        return
    pipes = folder / "mps"
    pipes.mkdir(parents=True, exist_ok=True)
    os.environ |= {_PIPES: str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"without MPS, processes take turns on the GPU: {error}", flush=True)
        os.environ.pop(_PIPES, None)
        yield
        return
    try:
        yield
    finally:
        with suppress(subprocess.TimeoutExpired):  # a process that was stopped in a kernel may keep it waiting
            subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True, check=False, timeout=20)
        os.environ.pop(_PIPES, None)


def facts_of(summary: RunSummary) -> dict[str, Any]:
    """What the cell of a compression with one budget records."""
    (row,) = summary.budgets.values()
    return {
        "of_budget": row.result / row.limit,
        "of_dense": row.result / row.dense,
        "joules": row.result,
        "relative_ci": summary.relative_ci,
        "met": row.met,
        "label": row.label,
        "scores": summary.scores,
        "batches": None if summary.batches is None else summary.batches.total,
        "parameters": to_builtins(summary.parameters),
        "widths": summary.widths,
    }


def device_name(device: torch.device | str) -> str:
    """Name of the GPU, or cpu."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
