"""The section of RESULTS.md about which runs on real devices meet their budgets, with and without the measured loop."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from evidence_data import LOOP, SHORT, Experiment, experiments
from resnet56_table import DENSE
from result_tables import RESULTS, load, origin, table

from ecc.methods.budget_controller import TOLERANCE_BAND

LATENCY, LATENCY_TITLE = "measured_budgets.json", "latency on a CPU"
RESNET = ("resnet56_energy.json", "resnet56_front.json")
DEPTH = ("depth_resnet56.json", "depth_vit_tiny.json")


@dataclass(frozen=True)
class Runs:
    """Runs of one experiment."""

    title: str
    is_loop: bool
    """Whether the network was measured during the runs."""
    shares: Sequence[float]
    """Measured cost relative to the budget."""

    def row(self) -> list[str]:
        """Their line in the table."""
        low, high = TOLERANCE_BAND
        above = sum(share > high for share in self.shares)
        within = sum(low <= share <= high for share in self.shares)
        count = len(self.shares)
        return [
            self.title,
            "yes" if self.is_loop else "no",
            str(count),
            f"{above} ({above / count:.0%})",
            f"{within} ({within / count:.0%})",
            f"{min(self.shares):.1%} to {max(self.shares):.1%}",
        ]


def all_runs() -> list[Runs]:
    """Runs with a measured cost: first those without the loop, then those with it."""
    grids = [*experiments(RESULTS / "evidence"), *experiments(RESULTS / "evidence" / SHORT)]
    found = [*_grids(grids), _resnet(), *_single(), _language(), *_latency()]
    return sorted((one for one in found if one.shares), key=lambda one: one.is_loop)


def total(runs: Sequence[Runs], is_loop: bool) -> Runs:
    """All runs with or without the loop."""
    shares = [share for one in runs if one.is_loop == is_loop for share in one.shares]
    return Runs("all", is_loop, shares)


def budget_runs_section() -> str:
    """The section. The first line of each half of the table is its sum."""
    runs = all_runs()
    rows = []
    for is_loop in (False, True):
        rows += [one.row() for one in (total(runs, is_loop), *(one for one in runs if one.is_loop == is_loop))]
    latency = f"\n{_latency_note(load(LATENCY))}\n" if (RESULTS / LATENCY).exists() else ""
    source = f"\n{origin(LATENCY)}\n" if latency else ""
    return f"""### Runs on real devices

The runs of these experiments whose cost was measured, of all methods. Without the loop, the budget is met by the predictions of the cost
model, and the result is measured afterwards. With it, the network is measured while it is pruned, and the targets are corrected;
the reading is that at the end of the run, except for *latency on a CPU*, where other programs used the machine and every result
was measured anew, longer. Other experiments than that one have runs of one kind only, so that the two sums differ in networks and
methods as well. In E1 to E4 of version 0.1 (all but E1 and E3 with longer trainings) some runs with a large error were repeated
with a better model.

{table(["experiment", "loop", "runs", "above the budget", "within 98 to 100 %", "of the budget"], rows)}
{latency}{source}
"""


def budget_runs_sentence() -> str:
    """For the summary page: how many runs exceed their budget without the loop and with it."""
    runs = all_runs()
    without, loop = (total(runs, is_loop).shares for is_loop in (False, True))
    exceed = [sum(share > 1 for share in shares) for shares in (without, loop)]
    text = (
        f"Of the runs on real devices {exceed[0]} of {len(without)} exceed their budget with predictions alone, by up to "
        f"{max(without) - 1:.1%}, and {exceed[1]} of {len(loop)} with measurements during pruning, by up to {max(loop) - 1:.1%}"
    )
    both = [one.shares for one in runs if one.title == LATENCY_TITLE]
    if len(both) == 2:
        above = [sum(share > 1 for share in shares) for shares in both]
        text += (
            f"; of {len(both[0])} runs that were made both ways (latency on a CPU), {above[0]} and {above[1]} exceed it"
        )
    return f"{text}."


def _grids(found: Sequence[Experiment]) -> list[Runs]:
    runs = []
    for one in found:
        for is_loop in (False, True):
            cells = [cell for cell in one.cells if (LOOP in cell.row) == is_loop]
            shares = [share for cell in cells if (share := cell.of_budget) is not None]
            runs.append(Runs(one.title, is_loop, shares))
    return runs


def _resnet() -> Runs:
    """ResNet-56 over 30 epochs, measured afterwards, relative to the mean of the dense networks of the same record."""
    shares = []
    for record in (load(name) for name in RESNET):
        cells = [cell for cell in record["cells"] if "joules" in cell]
        dense = [cell["joules"] for cell in cells if cell["method"] in DENSE]
        if dense:
            pruned = [cell for cell in cells if cell["method"] not in DENSE]
            shares += [cell["joules"] / statistics.fmean(dense) / cell["share"] for cell in pruned]
    return Runs("ResNet-56, 30 epochs, shares of the energy", False, shares)


def _single() -> list[Runs]:
    """Compressions of one network each."""
    depth = [run for name in DEPTH for run in load(name)["runs"] if run.get("label") == "measured"]
    encoder = [cell["of_budget"] for cell in load("encoder.json")["cells"] if "of_budget" in cell]
    return [
        Runs("MobileNet v1, half of the energy", True, [load("compress_imagenette.json")["budget_share_reached"]]),
        Runs("ResNet-56 and ViT-Tiny, with and without branches", True, [run["share_of_budget"] for run in depth]),
        Runs("MiniLM", True, encoder),
        Runs("`ecc compress` in `make gpu`", True, [_acceptance()["share_of_budget"]]),
    ]


def _acceptance() -> dict[str, Any]:
    numbers: dict[str, Any] = load("gpu_acceptance.json")["checks"]["command_line"]["numbers"]
    return numbers


def _language() -> Runs:
    cells = [cell for cell in load("llm.json")["cells"] if "of_budget" in cell]
    return Runs("SmolLM2-135M, joules per token", True, [cell["of_budget"] for cell in cells])


def _latency() -> list[Runs]:
    if not (RESULTS / LATENCY).exists():
        return []
    cells = [cell for cell in load(LATENCY)["cells"] if "fresh" in cell]
    return [
        Runs(LATENCY_TITLE, is_loop, [cell["fresh"] for cell in cells if (cell["loop"] == "measured") == is_loop])
        for is_loop in (False, True)
    ]


def _latency_note(record: dict[str, Any]) -> str:
    """The cost models of the runs on a CPU, and the intervals of their last measurements."""
    errors = ", ".join(f"{case} {one['mean']:.1%}" for case, one in record["errors"].items())
    widths = [cell["fresh_relative_ci"] for cell in record["cells"] if "fresh" in cell]
    above = [cell for cell in record["cells"] if cell.get("fresh", 0) > 1 and cell["loop"] == "measured"]
    unclear = sum(cell["fresh"] * (1 - cell["fresh_relative_ci"]) <= 1 for cell in above)
    text = (
        f"Cross-validated errors of the latency models on a CPU: {errors}. The 95 % interval of a new measurement is "
        f"± {statistics.median(widths):.1%} (median)."
    )
    if above:
        text += f" Of the {len(above)} runs with the loop that are above the budget, {unclear} have an interval that contains it."
    return text
