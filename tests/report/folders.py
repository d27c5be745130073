"""Run folders and grids as ecc writes them, without the hours: for the tests of pages."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from ecc.energy import EnergyModel, fit
from methods.jobs import digits_profile

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror='window.hacked=1'>\u2028\u2029&amp;\"'"
"""A name that would run if it were not escaped somewhere."""

BATCH = 256


@cache
def energy_model() -> EnergyModel:
    return fit(digits_profile(), curve=True)


def write_run(folder: Path, **options: Any) -> Path:
    """A run of digits. Options: method, share, seed, task, score, finished, model, command, met, scores."""
    asked = {"method": None, "share": 0.5, "seed": 0, "task": "digits", "score": 0.95} | options
    model = energy_model()
    folder.mkdir(parents=True)
    limit = asked["share"] * model.dense
    config = {
        "verb": "compress",
        "task": asked["task"],
        "budgets": [f"energy {asked['share']:.4g} of dense"],
        "limits": [limit],
        "energy": {"energy": [model.kind, model.dense]},
        "meter": "NVIDIA Jetson TX2",
        "method": None if asked["method"] is None else {"name": asked["method"]},
        "settings": {
            "steps": 40,
            "pretrain_steps": 20,
            "finetune_steps": 10,
            "seed": asked["seed"],
            "width_multiple": None,
        },
    }
    _dump(folder / "config.json", {"format": "ecc run", "version": 1, "config": config})
    session = {"started": "2026-01-01T00:00:00+00:00", "pid": 1, "device": "cpu", "ecc": "0.1.0", "torch": "2.9"}
    if asked.get("command", True):
        session["command"] = f"ecc compress {asked['task']} --budget 50% -o {folder.name}"
    _dump(folder / "environment.json", {"sessions": [session]})
    if asked.get("model", True):
        model.save(folder / "energy.json")
    widths = {
        name: max(least, round(asked["share"] * full))
        for name, full, least in zip(model.groups, model.full_widths, model.min_widths, strict=True)
    }
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in _history(asked, limit, widths)))
    if asked.get("finished", True):
        _dump(folder / "summary.json", _summary(asked, limit, widths))
    return folder


def _history(asked: dict[str, Any], limit: float, widths: dict[str, int]) -> list[dict[str, Any]]:
    dense = energy_model().dense
    lines: list[dict[str, Any]] = [
        {"phase": "pretrain", "step": step, "loss": 1.0 / step, "total": step, "lineage": step} for step in (10, 20)
    ]
    for step in (10, 20, 30, 40):
        if asked["method"] is None:
            spent = max(limit, dense * (1 - step / 40))
            facts = {"spent": {"energy": spent}, "target": spent * 1.01, "energy_dual": 100.0 * step}
            duals = dict.fromkeys(widths, 0.1 * step)
            lines.append({"phase": "solver", "step": step, **facts, "width_duals": duals, "widths": widths})
            lines.append({"phase": "prune", "step": step, "loss": 0.5, "total": 20 + step, "lineage": 20 + step})
    for number in (1, 2):
        scales = {"predicted": {"energy": limit * 1.1 / number}, "weighed": {"energy": limit / number}}
        lines.append(
            {"phase": "cost_check", "step": 15 * number, **scales, "label": "estimated", "relative_ci": None,
             "descent": 0.5, "widths": widths, "aims": {"energy": limit}}
        )  # fmt: skip
    if asked.get("finished", True):
        lines += [
            {"phase": "finetune", "step": step, "loss": 0.2, "total": 60 + step, "lineage": 60 + step} for step in (5, 10)
        ]
    return lines


def _summary(asked: dict[str, Any], limit: float, widths: dict[str, int]) -> dict[str, Any]:
    model, met = energy_model(), asked.get("met", True)
    result = limit * (0.99 if met else 1.05)
    row = {"budget": f"energy {asked['share']} of dense", "limit": limit, "unit": "J", "dense": model.dense}
    score = asked["score"]
    return {
        "task": asked["task"],
        "method": asked["method"] or "ecc",
        "device": asked.get("device", "NVIDIA Jetson TX2"),
        "batch": BATCH,
        "label": "estimated",
        "budgets": {"energy": {**row, "result": result, "label": "estimated", "met": met}},
        "met": met,
        "note": asked.get("note", ""),
        "weighed": {"dense": {"energy": model.dense, "latency": 0.004}, "result": {"energy": result, "latency": 0.003}},
        "relative_ci": None,
        "widths": widths,
        "full_widths": dict(zip(model.groups, model.full_widths, strict=True)),
        "macs": {"dense": 2e8, "result": 5e7},
        "parameters": {"dense": 4e4, "result": 6e3},
        "scores": asked.get("scores", {"dense": 0.98, "pruned": score - 0.1, "finetuned": score}),
        "max_relative_diff": 2e-9,
        "batches": {"total": 70, "lineage": 70},
    }


SCORES = {"ecc": (0.95, 0.97), "uniform": (0.90, 0.93), "netadapt": (0.92, 0.92)}


def write_grid(root: Path, *, budgets: tuple[str, ...] = ("65%", "40%"), task: str = "digits") -> Path:
    """Three methods, two budgets, two seeds, and one run that failed."""
    root.mkdir()
    _dump(root / "grid.json", {"task": task, "settings": {}})
    for method, scores in SCORES.items():
        for seed, score in enumerate(scores):
            for number, budget in enumerate(budgets):
                folder = root / f"seed-{seed}" / f"{method}-{budget.rstrip('%')}"
                share = float(budget.rstrip("%")) / 100
                rival = None if method == "ecc" else method
                write_run(folder, method=rival, share=share, seed=seed, score=score - 0.1 * number, task=task)
                facts = {"method": method, "budget": budget, "seed": seed, "seconds": 2.0, "peak_bytes": 1000}
                _dump(folder / "cell.json", facts)
    _dump(root / "seed-1" / "amc-65.failed.json", {"method": "amc", "budget": "65%", "seed": 1, "error": "no <luck>"})
    return root


def _dump(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data))
