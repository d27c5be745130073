"""Run folders and grids as ECC writes them, without the hours of training."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ecc.energy import EnergyModel, fit
from ecc.records import to_json, write_record
from ecc.run_records import (
    FRONT_FILE,
    BatchCount,
    BudgetResult,
    CostCheck,
    DenseAndResult,
    Feasibility,
    Front,
    FrontRow,
    GridFailure,
    GridRunInfo,
    RunSummary,
    ScoreLine,
    SolverLine,
    SparseSummary,
    TrainLine,
)
from methods.jobs import digits_profile

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u2028\u2029&amp;\"'"
"""A name that would run if it were not escaped somewhere."""

BATCH = 256
GRID_SCORES = {"ecc": (0.95, 0.97), "uniform": (0.90, 0.93), "netadapt": (0.92, 0.92)}


@dataclass(frozen=True)
class Budgeted(Feasibility):
    """A budget and what is reachable, as `check_feasibility` returns it."""

    resource: str = "energy"
    unit: str = "J"
    label: str = "estimated"
    dense: float = 0.01898
    min_cost: float = 0.0029
    limit: float = 0.00949
    uniform_ratio: float | None = 0.613


@cache
def energy_model() -> EnergyModel:
    return fit(digits_profile(), curve=True)


def write_run(
    folder: Path,
    *,
    method: str = "ecc",
    ratio: float = 0.5,
    seed: int = 0,
    task: str = "digits",
    device: str = "NVIDIA Jetson TX2",
    note: str = "",
    score: float = 0.95,
    scores: dict[str, float] | None = None,
    met: bool = True,
    finished: bool = True,
    model: bool = True,
    unstructured: bool = False,
    relative_ci: float | None = None,
) -> Path:
    """A run of digits at a ratio of its dense energy."""
    energy = energy_model()
    limit = ratio * energy.dense
    folder.mkdir(parents=True)
    config: dict[str, object] = {
        "verb": "compress",
        "task": task,
        "budgets": [f"energy {100 * ratio:.4g}% of dense"],
        "limits": [limit],
        "meter": device,
        "method": {"name": method},
        "settings": {"prune_steps": 40, "pretrain_steps": 20, "finetune_steps": 10, "seed": seed},
    }
    if unstructured:
        config["unstructured"] = True
    write_record(folder / "config.json", {"format": "ecc run", "version": 1, "config": config})
    session = {"started": "2026-01-01T00:00:00+00:00", "pid": 1, "device": "cpu", "ecc": "0.2.0", "torch": "2.9"}
    session["command"] = f"ecc compress {task} --budget 50% -o {folder.name}"
    write_record(folder / "environment.json", {"sessions": [session]})
    if model:
        energy.save(folder / "energy.json")
    widths = {name: max(1, round(ratio * full)) for name, full in full_widths().items()}
    lines = history_lines(method, limit, widths, finished)
    (folder / "history.jsonl").write_bytes(b"".join(to_json(line) + b"\n" for line in lines))
    if finished:
        result = limit * (0.99 if met else 1.05)
        summary = make_summary(
            task=task,
            method=method,
            device=device,
            note=note,
            met=met,
            result=result,
            limit=limit,
            widths=widths,
            relative_ci=relative_ci,
            scores={"dense": 0.98, "pruned": score - 0.1, "finetuned": score} if scores is None else scores,
        )
        write_record(folder / "summary.json", sparse_summary() if unstructured else summary)
    return folder


def full_widths() -> dict[str, int]:
    return dict(zip(energy_model().groups, energy_model().full_widths, strict=True))


def history_lines(method: str, limit: float, widths: dict[str, int], finished: bool) -> list[Any]:
    dense = energy_model().dense
    lines: list[Any] = [
        TrainLine(phase="pretrain", step=step, loss=1.0 / step, lr=1e-3, total=step, lineage=step) for step in (10, 20)
    ]
    lines.append(ScoreLine(name="dense", score=0.98, total=20))
    for step in (10, 20, 30, 40) if method == "ecc" else ():
        target = max(limit / dense, 1 - step / 40)
        lines += [
            SolverLine(
                step=step,
                cost={"energy": 0.99 * target * dense},
                target=target * dense,
                energy_dual=100.0 * step,
                width_duals=dict.fromkeys(widths, 0.1 * step),
                widths=widths,
                total=20 + step,
            ),
            TrainLine(phase="prune", step=step, loss=0.5, lr=1e-4, total=20 + step, lineage=20 + step),
        ]
    lines += [
        CostCheck(
            step=15 * number,
            progress=0.4 * number,
            widths=widths,
            predicted={"energy": 1.1 * limit / number},
            measured={"energy": limit / number},
            label="estimated",
            relative_ci=None,
            targets={"energy": limit},
            total=20 + 15 * number,
        )
        for number in (1, 2)
    ]
    if method != "ecc":
        lines.append({"phase": method, "values": {"ratio": 0.5}, "total": 40})
    if finished:
        lines += [
            TrainLine(phase="finetune", step=step, loss=0.2, lr=1e-4, total=60 + step, lineage=60 + step)
            for step in (5, 10)
        ]
    return lines


def make_summary(**changes: Any) -> RunSummary:
    """A finished run; `result` and `limit` are those of the energy."""
    model = energy_model()
    limit, result = changes.pop("limit", 0.5 * model.dense), changes.pop("result", 0.495 * model.dense)
    met = result <= limit
    row = BudgetResult(
        budget="50%", limit=limit, unit="J", dense=model.dense, result=result, label="estimated", met=met
    )
    facts: dict[str, Any] = {
        "task": "digits",
        "method": "ecc",
        "device": "NVIDIA Jetson TX2",
        "batch": BATCH,
        "label": "estimated",
        "budgets": {"energy": row},
        "met": met,
        "measured": {
            "energy": DenseAndResult(dense=model.dense, result=result),
            "latency": DenseAndResult(dense=0.004, result=0.003),
        },
        "widths": {name: width // 2 for name, width in full_widths().items()},
        "full_widths": full_widths(),
        "macs": DenseAndResult(dense=2e8, result=5e7),
        "parameters": DenseAndResult(dense=4e4, result=6e3),
        "scores": {"dense": 0.98, "pruned": 0.85, "finetuned": 0.95},
        "max_relative_diff": 2e-9,
        "batches": BatchCount(total=70, lineage=70),
    }
    return RunSummary(**facts | changes)


def write_front(folder: Path, **more: Any) -> Path:
    """A run with two budgets."""
    folder.mkdir()
    rows = []
    for ratio, score in ((0.8, 0.97), (0.5, 0.93)):
        place = write_run(folder / f"energy_{100 * ratio:.0f}pct", ratio=ratio, score=score, **more)
        energy = energy_model()
        rows.append(
            FrontRow(
                folder=place.name, budget=f"energy {100 * ratio:.0f}% of dense", limit=ratio * energy.dense, unit="J",
                dense=energy.dense, result=0.99 * ratio * energy.dense, label="estimated", met=True, score=score,
                macs=DenseAndResult(dense=2e8, result=2e8 * ratio), batches=70,
            )
        )  # fmt: skip
    write_record(folder / "config.json", {"format": "ecc run", "version": 2, "config": {"verb": "compress"}})
    front = Front(task="digits", resource="energy", metric="score", dense_score=0.98, batches=140, rows=rows)
    write_record(folder / FRONT_FILE, front)
    return folder


def sparse_summary() -> RunSummary:
    sparse = SparseSummary(
        assumes="the hardware skips zeros",
        base=1e-4,
        coefficients={"conv.weight": 1e-6, "fc.weight": 2e-6},
        weights={"conv.weight": 900, "fc.weight": 640},
        nonzeros={"conv.weight": 300, "fc.weight": 64},
    )
    return make_summary(sparse=sparse, widths={}, full_widths={}, max_relative_diff=None)


def write_grid(root: Path, *, budgets: tuple[str, ...] = ("65%", "40%"), task: str = "digits") -> Path:
    """Three methods, two budgets, two seeds, and one run that failed."""
    root.mkdir()
    (root / "grid.json").write_text(json.dumps({"task": task, "settings": {}}))
    for method, scores in GRID_SCORES.items():
        for seed, score in enumerate(scores):
            for number, budget in enumerate(budgets):
                folder = root / f"seed-{seed}" / f"{method}-{budget.rstrip('%')}"
                ratio = float(budget.rstrip("%")) / 100
                write_run(folder, method=method, ratio=ratio, seed=seed, score=score - 0.1 * number, task=task)
                info = GridRunInfo(method=method, budget=budget, seed=seed, seconds=2.0, peak_bytes=10**6)
                write_record(folder / "cell.json", info)
    failure = GridFailure(method="amc", budget="65%", seed=1, error="no <luck>")
    write_record(root / "seed-1" / "amc-65.failed.json", failure)
    return root
