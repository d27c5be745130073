"""The sections of RESULTS.md about budgets: simulated runs, runs on real devices, several budgets in one run."""

from __future__ import annotations

from typing import Any

from budget_loop import reachable
from budget_runs import budget_runs_section
from paired import paired_interval
from result_tables import RESULTS, load, origin, table

ALONE, SHARED, SEVERAL = "budget_loop.json", "budget_loop_shared.json", "several_budgets.json"
WITHIN_GOAL = 0.95
READINGS_GOAL = (8, 14)  # mean and largest number in a run
BATCHES_GOAL, POINTS_GOAL = 2.2, 0.3


def budget_section() -> str:
    """All sections; empty as far as the benchmarks have not been run."""
    loop = _loop() + budget_runs_section() if (RESULTS / ALONE).exists() else ""
    return loop + (_several() if (RESULTS / SEVERAL).exists() else "")


def _loop() -> str:
    loop, shared = load(ALONE), load(SHARED)
    alone, beyond = loop["prediction_only"], loop["not_reachable"]
    shares = [alone[name] for name in ("within_98_to_100", "above_100", "smallest")]
    lines = [["none: predictions only", "", *(f"{share:.1%}" for share in shares), "", "", ""]]
    for kind in loop["by_device"]:
        lines += [_loop_row(kind, loop, kind), _loop_row(f"{kind}, shared readings", shared, kind)]
    found, readings = loop["reading"], _readings(loop)
    goals = {
        f"at least {WITHIN_GOAL:.0%} of the last readings within 98 to 100 %": found["within_98_to_100"] >= WITHIN_GOAL,
        "no result above 100 %": loop["result"]["above_100"] == 0,
        f"at most {READINGS_GOAL[0]} readings on average": readings["mean"] <= READINGS_GOAL[0],
        f"at most {READINGS_GOAL[1]} in a run": readings["max"] <= READINGS_GOAL[1],
    }
    text = f"""## The measured loop

{found["runs"]} simulated runs: the devices differ from the energy model by {loop["error"]:.0%} in common and by twice as much
in the errors of single widths, and a reading has a standard deviation of {loop["noise"]:.1%}. These errors are independent,
or those of kernels: they depend on the block of 8 channels and on the alignment of a width. With *shared readings* the runs are a
comparison on one device, and each knows the readings of those before it. *Reading* is the last
measurement, *result* the cost without noise. Readings include that of the dense network. Without the loop, with predictions
only, {alone["above_100"]:.0%} of the results exceed their budget, by up to {alone["largest"] - 1:.0%}. Goals: {_verdicts(goals)}.

{_beyond(beyond)}"""
    head = ["loop", "reading within 98 to 100 %", "result within 98 to 100 %", "result above 100 %", "smallest result"]
    head += ["readings: mean", "p90", "largest"]
    origins = [line for name in (ALONE, SHARED) for line in (origin(name), "")]
    return "\n".join([text, table(head, lines), "", *origins, ""])


def _beyond(found: dict[str, Any]) -> str:
    """The runs whose budget the minimum widths do not meet on the device."""
    if not found["runs"]:
        return ""
    missed = found["runs"] - found["met"]
    return (
        f"In {found['runs']} more runs the network with every group at its minimum width is above the budget on the device, although "
        f"the model\npredicts less. {found['met']} of them meet it with other widths, and {found['with_message']} of the other {missed} "
        "end with a message that says so.\n"
    )


def _loop_row(name: str, found: dict[str, Any], kind: str) -> list[str]:
    result, readings = found["by_device"][kind]["result"], _readings(found, kind)
    reading = found["by_device"][kind]["reading"]
    shares = [reading["within_98_to_100"], result["within_98_to_100"], result["above_100"], result["smallest"]]
    counts = [f"{readings['mean']:.1f}", f"{readings['p90']:.0f}", f"{readings['max']:.0f}"]
    return [name, *(f"{share:.1%}" for share in shares), *counts]


def _readings(found: dict[str, Any], kind: str = "") -> dict[str, float]:
    """Readings of a run, from the runs themselves; those of one kind of device if one is given."""
    rows = reachable(row for name, rows in found["runs"].items() if name.endswith(kind) for row in rows)
    counts = sorted(row["readings"] for row in rows)
    return {
        "mean": sum(counts) / len(counts),
        "p90": counts[-(-9 * len(counts) // 10) - 1],
        "max": counts[-1],
    }


def _several() -> str:
    record = load(SEVERAL)
    found, steps = record["summary"], record["steps"]
    worst = found["worst_points"]
    goals = {
        f"{len(found['budgets'])} budgets for at most {BATCHES_GOAL:g} times the batches of one": found["ratio"]
        <= BATCHES_GOAL,
        f"each at most {POINTS_GOAL:g} points below its own run": worst >= -POINTS_GOAL,
    }
    text = f"""## Several budgets in one run

Digits, {record["seeds"]} seeds, `{record["platform"]}` (estimated energy), {steps["prune"]} pruning and {steps["finetune"]} finetuning
steps. One run with all budgets takes {found["batches_of_several"]:,.0f} batches, {found["ratio"]:.2f} times the
{found["batches_of_one_run"]:,.0f} of a run with one budget. {found["within_98_to_100"]:.0%} of its results are within 98 to 100 %
of their budgets. The tightest budget is a run of its own in both; the others are a chain with fewer batches each. ± is the
95 % interval of paired differences. Goals: {_verdicts(goals)}.
"""
    head = ["budget", "batches", "run of its own", "several budgets", "difference in points"]
    cells = {(one["way"], one["budget"], one["seed"]): one for one in record["cells"]}
    lines = []
    for budget, row in found["budgets"].items():
        pairs = [[cells[way, budget, seed]["score"] for way in ("several", "own")] for seed in range(record["seeds"])]
        points = paired_interval([100 * (several - own) for several, own in pairs])
        batches = str(cells["several", budget, 0]["batches"])
        lines.append([budget, batches, f"{row['own']:.2%}", f"{row['several']:.2%}", str(points)])
    return "\n".join([text, table(head, lines), "", origin(SEVERAL), "", ""])


def _verdicts(goals: dict[str, bool]) -> str:
    return "; ".join(f"{goal}: {'met' if is_met else 'missed'}" for goal, is_met in goals.items())
