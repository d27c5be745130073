"""The cases of `scale.py`, each at one size in a process of its own. See there."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402 - the tests' folder must be on the path first
import torch.nn.functional as F  # noqa: E402
from click.testing import CliRunner  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from trace_scaling import plain, reset_peak_memory, status  # noqa: E402

import ecc  # noqa: E402
from ecc.cli.app import app  # noqa: E402
from ecc.energy import EnergyModel, counted_cost, fit  # noqa: E402
from ecc.io import write_text  # noqa: E402
from ecc.measure import MeasureSettings, Profile, measure, profile  # noqa: E402
from ecc.measure.counter import probe_counter  # noqa: E402
from ecc.measure.workload import make_workload  # noqa: E402
from ecc.methods import EccSolver  # noqa: E402
from ecc.methods.grid import GridRun  # noqa: E402
from ecc.report.history import Follower  # noqa: E402
from ecc.report.load import load_report  # noqa: E402
from ecc.report.page import page_content, render_page  # noqa: E402
from ecc.training.run_dir import RunDir, open_run  # noqa: E402
from ecc.zoo import find_task  # noqa: E402
from measure.fakes import FakeBoard, FakeMeter  # noqa: E402
from measure.profile_cases import DriftingBoard, Link  # noqa: E402

T = TypeVar("T")
Point = dict[str, Any]
ESTIMATE = "platform:jetson-tx2"
EVERY = 1_000  # steps from one look at the memory to the next


class Notes:
    """Seconds, and the memory that was needed beyond what was there, of each part of a case."""

    def __init__(self) -> None:
        self.parts: dict[str, dict[str, float]] = {}
        self.facts: dict[str, float] = {}

    def timed(self, name: str, function: Callable[[], T], *, times: int = 1) -> T:
        """Of several times the mean; the process's own seconds, so that others on the machine do not count."""
        gc.collect()
        before = reset_peak_memory()
        started = time.process_time()
        for _ in range(times):
            result = function()
        self.parts[name] = {"seconds": (time.process_time() - started) / times}
        if before is not None:
            self.parts[name]["peak_bytes"] = max(0, status("VmHWM") - before)
        return result

    @contextmanager
    def opened(self, name: str, path: Path, config: dict[str, Any]) -> Iterator[RunDir]:
        """A run that is taken up again; opening it is the part."""
        stack = ExitStack()
        with stack:
            yield self.timed(name, lambda: stack.enter_context(open_run(path, config)))

    def point(self, size: int) -> Point:
        """All that was noted."""
        return {"size": size, "parts": self.parts, **self.facts}


# ---------------------------------------------------------------- rows of a profile


class BoardNet(nn.Module):
    """Three groups of 64 channels, enough for many widths; on a board, an inference takes the time of its widths."""

    def __init__(self, board: FakeBoard) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 64, 1), nn.Conv2d(64, 64, 1)
        self.third, self.head = nn.Conv2d(64, 64, 1), nn.Conv2d(64, 4, 1)
        self.link = Link(board)

    def forward(self, x: Tensor) -> Tensor:
        """Takes its time, and computes nothing while it is measured."""
        if x.device.type != "meta":
            work = self.second.in_channels * self.second.out_channels + self.third.in_channels * self.third.out_channels
            assert self.link.board is not None
            self.link.board.work(0.02 * (1 + work / 4096))
            return x
        scores: Tensor = self.head(torch.relu(self.third(torch.relu(self.second(torch.relu(self.first(x)))))))
        return scores


def rows(size: int, folder: Path) -> Point:
    """A profile of so many networks, measured row by row on a board that warms up, then read and fitted."""
    board = DriftingBoard(noise=0.002)
    board.drift_per_second = 0.02 / (size * 2.0)
    model, image, notes = BoardNet(board).eval(), torch.ones(1, 3, 4, 4), Notes()
    graph = ecc.trace_channels(model, image, verify=False)
    moments: list[float] = []
    notes.timed(
        "measure all rows",
        lambda: profile(
            model, graph, image, FakeMeter(board), folder / "a.profile", samples=size, clock=board.clock,
            progress=lambda _: moments.append(time.process_time()),
        ),
    )  # fmt: skip
    last = max(10, size // 10)
    notes.parts["one more row"] = {"seconds": (moments[-1] - moments[-1 - last]) / last}
    notes.facts["file_bytes"] = (folder / "a.profile").stat().st_size
    loaded = notes.timed("load", lambda: Profile.load(folder / "a.profile"))
    notes.timed("correct for drift", loaded.corrected)
    notes.timed("fit", lambda: fit(loaded, curve=True))
    return notes.point(size)


# ---------------------------------------------------------------- groups of a network


def groups(size: int, folder: Path) -> Point:
    """A chain of so many convolutions, each with a group of its own."""
    notes, image = Notes(), torch.randn(1, 3, 8, 8)
    ecc.trace_channels(plain(3, 8), image, verify=False)  # late imports are nobody's cost
    model = plain(size, 16).eval()
    graph = notes.timed("trace", lambda: ecc.trace_channels(model, image, verify=False))
    notes.timed("save the graph", lambda: graph.save(folder / "graph.json"))
    notes.timed("load the graph", lambda: ecc.ChannelGraph.load(folder / "graph.json"))
    notes.facts["file_bytes"] = (folder / "graph.json").stat().st_size
    rows = profile(model, graph, image, ecc.find_meter(ESTIMATE), folder / "a.profile", samples=60)
    energy = notes.timed("fit 60 rows", lambda: fit(rows))
    full = torch.tensor(energy.full_widths, dtype=torch.float64)
    notes.timed("first prediction", lambda: energy.value(full))
    notes.timed("prediction and gradient", lambda: (energy.value(full), energy.gradient(full)), times=100)
    solver = notes.timed("make a solver", lambda: EccSolver(model, graph, energy, "98%", 10, warm_up=0.0, ramp=1.0))
    F.cross_entropy(model.train()(torch.randn(2, 3, 8, 8)), torch.tensor([0, 1])).backward()
    solver.step()  # the optimizer makes its state
    notes.timed("solver step", solver.step, times=5)
    notes.timed("slim", lambda: ecc.slim(model.eval(), graph))
    with open_run(folder / "run", _config(energy, 0.98, 0, None)) as run:
        energy.save(run.path / "energy.json")
        _solve(run, energy, range(1, 101), 0.98)
        run.finish(_summary(energy, 0.98, None))
    _report(notes, folder / "run", folder / "page.html")
    return notes.point(size)


# ---------------------------------------------------------------- cells of a grid, lines of a history


def _energy(folder: Path) -> EnergyModel:
    task = find_task("digits")
    graph = ecc.trace_channels(task.model, task.example_input, verify=False)
    meter = ecc.find_meter(ESTIMATE)
    return fit(profile(task.model, graph, task.example_input, meter, folder / "a.profile", samples=60), curve=True)


def _config(energy: EnergyModel, share: float, seed: int, method: str | None) -> dict[str, Any]:
    return {
        "verb": "compress",
        "task": "made up for a benchmark",
        "budgets": [f"energy {share:.4g} of dense"],
        "limits": [share * energy.dense],
        "energy": {"energy": [energy.kind, energy.dense]},
        "meter": energy.origin.meter.device,
        "method": None if method is None else {"name": method},
        "settings": {"steps": 1000, "pretrain_steps": 0, "finetune_steps": 1000, "seed": seed},
    }


def _solve(run: RunDir, energy: EnergyModel, steps: range, share: float) -> None:
    """Two lines a step, as a solve logs them: what the solver says, and the loss."""
    widths = dict(zip(energy.groups, energy.full_widths, strict=True))
    for step in steps:
        spent = energy.dense * max(share, 1 - step / (steps.stop or 1))
        facts = {"spent": {"energy": spent}, "target": spent, "energy_dual": 0.1 * step, "widths": widths}
        run.log({"phase": "solver", "step": step, **facts, "width_duals": dict.fromkeys(widths, 0.1), "total": step})
        counted_ = {"step": step, "total": step, "lineage": step}
        run.log({"phase": "prune", **counted_, "loss": 1 / (1 + step), "lr": 1e-4, "wall": {"steps_per_second": 9.7}})


def _summary(energy: EnergyModel, share: float, method: str | None) -> dict[str, Any]:
    widths = dict(zip(energy.groups, energy.full_widths, strict=True))
    row = {"budget": f"energy {share} of dense", "limit": share * energy.dense, "unit": "J", "dense": energy.dense}
    result = {**row, "result": share * energy.dense, "label": energy.label, "met": True}
    return {
        "task": "made up for a benchmark",
        "method": method or "ecc",
        "device": energy.origin.meter.device,
        "batch": energy.origin.batch,
        "label": energy.label,
        "budgets": {"energy": result},
        "met": True,
        "widths": {name: max(1, round(share * width)) for name, width in widths.items()},
        "full_widths": widths,
        "scores": {"dense": 0.98, "pruned": 0.5 + share / 3, "finetuned": 0.6 + share / 3},
        "batches": {"total": 2000, "lineage": 2000},
    }


def cells(size: int, folder: Path) -> Point:
    """A grid of so many runs: four methods, five budgets, and seeds; 200 lines of history each."""
    notes, energy = Notes(), _energy(folder)
    root = folder / "grid"
    root.mkdir()
    write_text(root / "grid.json", json.dumps({"task": "made up for a benchmark", "quick": False, "settings": {}}))
    for number in range(size):
        method = ("ecc", "netadapt", "amc", "uniform")[number % 4]
        share = (0.3, 0.4, 0.5, 0.6, 0.7)[number // 4 % 5]
        cell = GridRun(method, f"{share:.0%}", number // 20)
        baseline = None if method == "ecc" else method
        with open_run(cell.folder(root), _config(energy, share, cell.seed, baseline)) as run:
            _solve(run, energy, range(1, 101), share)
            energy.save(run.path / "energy.json")
            run.finish(_summary(energy, share, baseline))
        facts = {**asdict(cell), "seconds": 60.0, "sessions": 1, "peak_bytes": 10**9}
        write_text(cell.folder(root) / "cell.json", json.dumps(facts) + "\n")
    _report(notes, root, folder / "page.html")
    return notes.point(size)


def _report(notes: Notes, root: Path, page: Path) -> None:
    render_page(load_report(next(iter(root.glob("seed-0/ecc-30")), root)))  # the plotting library is loaded once
    result = notes.timed("ecc report", lambda: CliRunner().invoke(app, ["report", str(root), "-o", str(page)]))
    assert result.exit_code == 0, result.output
    notes.facts["page_bytes"] = page.stat().st_size


def lines(size: int, folder: Path) -> Point:
    """A run with a history of so many lines, as a week of one line a second has."""
    notes, energy, path = Notes(), _energy(folder), folder / "run"
    config = _config(energy, 0.5, 0, None)
    with open_run(path, config) as run:
        energy.save(run.path / "energy.json")
        notes.timed("log all lines", lambda: _solve(run, energy, range(1, size // 2 + 1), 0.5))
        run.save({"phase": "prune"})
    notes.facts["file_bytes"] = (path / "history.jsonl").stat().st_size
    with notes.opened("resume", path, config) as run:
        notes.timed("tell loggers anew", lambda: sum(1 for _ in run.history()))
        follower = Follower()
        page_content(load_report(path, follower))
        _solve(run, energy, range(size // 2 + 1, size // 2 + 2), 0.5)
        notes.timed("follow one more line", lambda: page_content(load_report(path, follower)))
    _report(notes, path, folder / "page.html")
    return notes.point(size)


# ---------------------------------------------------------------- parameters on the meta device


def parameters(size: int, folder: Path) -> Point:
    """A trace of three square layers that have so many parameters, on the meta device."""
    del folder
    notes, width = Notes(), int((size / 3) ** 0.5)
    small = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    ecc.trace_channels(small, torch.randn(1, 8), verify=False)
    with torch.device("meta"):
        layers = [part for _ in range(3) for part in (nn.Linear(width, width, bias=False), nn.ReLU())]
        model = nn.Sequential(nn.Linear(16, width), nn.ReLU(), *layers, nn.Linear(width, 16))
    graph = notes.timed("trace", lambda: ecc.trace_channels(model, torch.randn(1, 16), verify=False))
    notes.facts["weight_bytes"] = 4 * int(graph.parameters())
    return notes.point(size)


# ---------------------------------------------------------------- leaks


def _watched(step: Callable[[], object], steps: int) -> Point:
    """Resident memory and open files after every thousand steps, or tenth of them if there are fewer."""
    every = min(EVERY, max(1, steps // 10))
    looks = []
    for number in range(1, steps + 1):
        step()
        if number % every == 0:
            gc.collect()
            looks.append([number, status("VmRSS"), len(list(Path("/proc/self/fd").iterdir()))])
    first, last = next(look for look in looks if look[0] >= steps / 5), looks[-1]
    growth = (last[1] - first[1]) / (last[0] - first[0]) * 1000
    return {
        "size": steps,
        "looks": [{"steps": number, "resident_bytes": resident, "files": files} for number, resident, files in looks],
        "bytes_per_1000_steps": round(growth),
        "more_files": last[2] - first[2],
    }


def steps(size: int, folder: Path) -> Point:
    """So many steps of a solver, which removes channels again and again."""
    del folder
    model, image = plain(3, 16), torch.randn(4, 3, 8, 8)
    graph = ecc.trace_channels(model, image, verify=False)
    solver = EccSolver(model, graph, counted_cost(graph, "macs"), "50%", size, lr=1e-4)

    def step() -> None:
        F.cross_entropy(model(image), torch.tensor([0, 1, 2, 3])).backward()
        solver.step()
        solver.zero_grad()

    return _watched(step, size)


def windows(size: int, folder: Path) -> Point:
    """So many measurements of one window on a board that counts joules."""
    del folder
    board = FakeBoard(noise=0.002)
    settings = MeasureSettings(min_ticks=5, min_repeats=1, max_repeats=1, warmup_seconds=0.03, warmup_runs=3)
    meter = FakeMeter(board)
    load, _ = make_workload(lambda: board.work(0.02), "cpu", board.clock)
    counter = probe_counter(meter, load, settings.probe_seconds, clock=board.clock)
    return _watched(
        lambda: measure(lambda: board.work(0.02), meter, settings, counter=counter, clock=board.clock), size
    )


CASES = {
    "rows": rows,
    "groups": groups,
    "cells": cells,
    "lines": lines,
    "parameters": parameters,
    "steps": steps,
    "windows": windows,
}


def in_own_process(case: str, size: int) -> Point:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with TemporaryDirectory() as folder:
        return CASES[case](size, Path(folder))
