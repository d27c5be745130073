"""A comparison, from its folders alone: who is how good at which budget, at which price, and how sure that is."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from ecc.errors import BadFile
from ecc.io import read_bytes

from .fit_figures import pyplot, save_figure
from .reading import parsed

COLOURS = ("#0b6e99", "#c2571a", "#7b4fa3", "#3a7d44", "#9a6b00", "#777777", "#b03060", "#4c6a92")


@dataclass(frozen=True)
class Entry:
    """One method at one budget, over its seeds."""

    method: str
    budget: str
    cells: tuple[dict[str, Any], ...]
    failures: tuple[str, ...]

    def scores(self, when: str = "finetuned") -> dict[int, float]:
        """By seed."""
        found = {cell["seed"]: cell["summary"]["scores"].get(when) for cell in self.cells}
        return {seed: float(score) for seed, score in found.items() if score is not None}

    def amounts(self) -> list[tuple[float, float]]:
        """(result, result / dense) of the first budget of each cell."""
        rows = [next(iter(cell["summary"]["budgets"].values())) for cell in self.cells]
        return [(row["result"], row["result"] / row["dense"]) for row in rows]


def load_grid(root: str | Path) -> list[Entry]:
    """What the folders of a grid say, methods and budgets in the order in which they were first met.

    Raises:
        BadFile: If it is no grid, or a file in it is damaged.
    """
    root = Path(root)
    if not (root / "grid.json").exists():
        raise BadFile(f"{root} holds no grid of runs; give the folder of `ecc compare`.")
    cells: dict[tuple[str, str], list[dict[str, Any]]] = {}
    failures: dict[tuple[str, str], list[str]] = {}
    for file in sorted(root.glob("seed-*/*/cell.json")):
        facts = _json(file, method=str, budget=str, seed=int, seconds=float, peak_bytes=int)
        wanted = {"scores": dict, "budgets": dict, "batches": dict, "label": str, "met": bool}
        facts["summary"] = summary = _json(file.parent / "summary.json", **wanted)
        try:
            Entry("", "", (facts,), ()).scores("pruned")
            Entry("", "", (facts,), ()).scores()
            Entry("", "", (facts,), ()).amounts()
            _ = float(summary["batches"]["total"]), float(summary["batches"]["lineage"])
        except (LookupError, StopIteration, TypeError, ValueError, ArithmeticError) as error:
            raise BadFile(f"{file.parent / 'summary.json'} is damaged ({error!r}); run its cell again.") from None
        cells.setdefault((facts["method"], facts["budget"]), []).append(facts)
    for file in sorted(root.glob("seed-*/*.failed.json")):
        facts = _json(file, method=str, budget=str, seed=int, error=str)
        failures.setdefault((facts["method"], facts["budget"]), []).append(f"seed {facts['seed']}: {facts['error']}")
    keys = dict.fromkeys([*cells, *failures])
    return [Entry(*key, tuple(cells.get(key, ())), tuple(failures.get(key, ()))) for key in keys]


def _json(path: Path, **fields: type) -> dict[str, Any]:
    """The facts in a file, after a look at the types of some; whole numbers may be real, and bytes unknown."""
    try:
        found = parsed(read_bytes(path))
    except (ValueError, RecursionError) as error:
        raise BadFile(f"{path} cannot be read ({type(error).__name__}); run its cell again.") from None
    if not isinstance(found, dict):
        raise BadFile(f"{path} is damaged; run its cell again.")
    for name, kind in fields.items():
        value = found.get(name)
        allowed = (int, float) if kind is float else (int, type(None)) if name == "peak_bytes" else kind
        odd = isinstance(value, str) and not (len(value) <= 4000 and value.replace("\n", " ").isprintable())
        if name not in found or not isinstance(value, allowed) or odd:  # what is odd, no table could show
            raise BadFile(f"{path} is damaged: its {name} is {value!r}; run its cell again.")
    return found


def p_value(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Of a paired t-test over the seeds that both have; None with fewer than two, or without any difference."""
    seeds = sorted(set(one) & set(other))
    pairs = [(one[seed], other[seed]) for seed in seeds]
    if len(pairs) < 2 or len({a - b for a, b in pairs}) == 1:
        return None
    from scipy.stats import ttest_rel  # half a second, at the start of every command

    return float(ttest_rel([a for a, _ in pairs], [b for _, b in pairs]).pvalue)


def grid_facts(entries: Sequence[Entry], reference: str = "ecc") -> list[dict[str, Any]]:
    """One row a method and budget, for programs and tables.

    Seconds are of cells that ran in one go: of one that was interrupted, only the last session is known.
    """
    base = {entry.budget: entry for entry in entries if entry.method == reference}
    rows = []
    for entry in entries:
        before, after = entry.scores("pruned"), entry.scores()
        against = base.get(entry.budget)
        rows.append(
            {
                "method": entry.method,
                "budget": entry.budget,
                "seeds": len(entry.cells),
                "failed": list(entry.failures),
                "label": sorted({cell["summary"]["label"] for cell in entry.cells}),
                "before": _mean_and_spread(before.values()),
                "after": _mean_and_spread(after.values()),
                "share_of_dense": _mean_and_spread(share for _, share in entry.amounts()),
                "met": all(cell["summary"]["met"] for cell in entry.cells) if entry.cells else None,
                "batches_total": _mean(cell["summary"]["batches"]["total"] for cell in entry.cells),
                "batches_lineage": _mean(cell["summary"]["batches"]["lineage"] for cell in entry.cells),
                "seconds": _mean(cell["seconds"] for cell in entry.cells if cell.get("sessions", 1) == 1),
                "peak_bytes": max((c["peak_bytes"] for c in entry.cells if c["peak_bytes"] is not None), default=None),
                "p_value": None if against is None or entry.method == reference else p_value(against.scores(), after),
            }
        )
    return rows


def grid_view(entries: Sequence[Entry]) -> RenderableType:
    """The table, and what failed."""
    labels = ", ".join(sorted({label for row in grid_facts(entries) for label in row["label"]}))
    title = f"Score after and before tuning, mean and spread over seeds; cost {labels}"
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for name in ("budget", "method", "after", "before", "of dense", "batches", "seconds", "peak MB", "p"):
        table.add_column(name, justify="left" if name in ("budget", "method") else "right", no_wrap=True)
    failed: list[str] = []
    for row in sorted(grid_facts(entries), key=lambda row: row["budget"], reverse=True):
        share = row["share_of_dense"]
        table.add_row(
            row["budget"],
            row["method"] + ("" if row["met"] else " (over)"),
            _shown(row["after"]),
            _shown(row["before"]),
            "-" if share is None else f"{share[0]:.1%}",
            "-" if row["batches_total"] is None else f"{row['batches_lineage']:.0f}/{row['batches_total']:.0f}",
            "-" if row["seconds"] is None else f"{row['seconds']:.0f}",
            "-" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.0f}",
            "" if row["p_value"] is None else f"{row['p_value']:.3f}",
        )
        failed += [f"{row['method']} {row['budget']} {reason}" for reason in row["failed"]]
    legend = "batches: those that led to the result / all; p: paired t-test against ecc"
    return Group(title, table, legend, *(f"failed: {line}" for line in failed))


def draw_grid(entries: Sequence[Entry], path: str | Path) -> Path:
    """Score against the share of the dense network's cost, before (dashed) and after tuning.

    Raises:
        BadFile: If matplotlib is not installed, or the file cannot be written.
    """
    plots = pyplot()
    figure, axis = plots.subplots(figsize=(6.4, 4.2), layout="constrained")
    facts = grid_facts(entries)
    methods = list(dict.fromkeys(row["method"] for row in facts))
    for colour, method in zip(COLOURS * len(methods), methods, strict=False):
        rows = [row for row in facts if row["method"] == method and row["after"] and row["share_of_dense"]]
        rows.sort(key=lambda row: row["share_of_dense"][0])
        shares = [100 * row["share_of_dense"][0] for row in rows]
        after, spread = [row["after"][0] for row in rows], [row["after"][1] for row in rows]
        axis.errorbar(shares, after, spread, fmt="o-", ms=4, capsize=2, color=colour, label=method)
        pairs = [(share, row["before"][0]) for share, row in zip(shares, rows, strict=True) if row["before"]]
        axis.plot([x for x, _ in pairs], [y for _, y in pairs], "--", lw=0.8, color=colour)
    labels = sorted({label for row in facts for label in row["label"]})
    axis.set(xlabel=f"cost, % of dense ({', '.join(labels)})", ylabel="score; dashed: before tuning")
    figure.legend(loc="outside right upper", frameon=False)
    return save_figure(figure, Path(path), plots)


def _mean(values: Any) -> float | None:
    found = [float(value) for value in values]
    return statistics.fmean(found) if found else None


def _mean_and_spread(values: Any) -> tuple[float, float] | None:
    found = [float(value) for value in values]
    if not found:
        return None
    return statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0


def _shown(pair: tuple[float, float] | None) -> str:
    if pair is None:
        return "-"
    return f"{pair[0]:.3f}" + (f"±{pair[1]:.3f}" if pair[1] else "")
