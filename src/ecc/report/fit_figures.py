"""Figures of a fit, drawn from what `ecc.energy.ablation` found: for the README, for papers, for a doubtful reader."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ecc.errors import BadFile
from ecc.io import refuse_other_file

COLOURS = {"bilinear": "#9a6b00", "physical": "#0b6e99", "measured": "#777777"}
PAPER_COLOURS = ("#0b6e99", "#c2571a", "#7b4fa3", "#3a7d44")

_MARKS = {".svg": "<svg", ".png": "PNG", ".pdf": "%PDF"}  # what is in the first lines of such files


def draw_fit(found: Mapping[str, Any], title: str, folder: str | Path, stem: str) -> list[Path]:
    """Draws predicted against measured, errors over widths, learning curves and the paper's figures.

    Args:
        found: From `study`.
        title: Network and device.
        folder: Where the files go; made if needed.
        stem: Their names begin with it.

    Returns:
        The files.

    Raises:
        BadFile: If matplotlib is not installed, or the folder cannot be written to.
    """
    plots = pyplot()
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadFile(f"cannot write to {folder}: {error.strerror}.") from None
    drawn = [save_figure(_prediction(plots, found, title), folder / f"{stem}-prediction.svg", plots)]
    if found["paper"]:
        drawn.append(save_figure(_paper(plots, [(title, found)]), folder / f"{stem}-paper.svg", plots))
    return drawn


def draw_paper(found: Sequence[tuple[str, Mapping[str, Any]]], path: Path) -> Path:
    """The paper's Figures 2 and 3 for several profiles side by side."""
    plots = pyplot()
    return save_figure(_paper(plots, found), path, plots)


def _prediction(plots: Any, found: Mapping[str, Any], title: str) -> Any:
    figure, (left, middle, right) = plots.subplots(1, 3, figsize=(12.5, 3.9), layout="constrained")
    unit, values = found["unit"], found["values"]
    for name, family in found["families"].items():
        predicted = [value * (1 + error) for value, error in zip(values, family["errors"], strict=True)]
        label = f"{name}: {family['mean']:.2%}"
        left.scatter(values, predicted, s=9, alpha=0.6, color=COLOURS[name], label=label, linewidths=0)
        percent = [100 * error for error in family["errors"]]
        middle.scatter(found["mean_share"], percent, s=9, alpha=0.6, color=COLOURS[name], linewidths=0)
        curve = family["learning_curve"]
        right.plot([n for n, _ in curve], [100 * e for _, e in curve], "o-", ms=3, color=COLOURS[name], label=name)
    ends = [min(values), max(values)]
    left.plot(ends, ends, color=COLOURS["measured"], lw=0.8, zorder=0)
    left.set(xscale="log", yscale="log", xlabel=f"{found['label']} [{unit}]", ylabel=f"predicted, unseen [{unit}]")
    left.legend(frameon=False, title="mean error")
    middle.axhline(0, color=COLOURS["measured"], lw=0.8, zorder=0)
    middle.set(xlabel="mean share of widths kept", ylabel="error [%]")
    right.set(xlabel="networks measured", ylabel="mean error, unseen [%]", ylim=(0, None))
    if found["noise"] is not None:
        right.axhline(100 * found["noise"], color=COLOURS["measured"], lw=0.8, ls="--")
        right.annotate("noise of one measurement", (0.98, 100 * found["noise"]), xycoords=("axes fraction", "data"),
                       ha="right", va="bottom", fontsize=8, color=COLOURS["measured"])  # fmt: skip
    right.legend(frameon=False)
    figure.suptitle(f"{title}: {found['resource']}, {found['label']} on {found['device']}, batch {found['batch']}")
    return figure


def _paper(plots: Any, found: Sequence[tuple[str, Mapping[str, Any]]]) -> Any:
    figure, axes = plots.subplots(
        1, len(found), figsize=(4.2 * len(found) + 0.6, 3.4), layout="constrained", squeeze=False
    )
    for axis, (title, one) in zip(axes[0], found, strict=True):
        for colour, (layers, curve) in zip(PAPER_COLOURS, one["paper"].items(), strict=False):
            label = "bilinear" if layers == "0" else f"MLP, {layers} hidden"
            axis.plot([i for i, _ in curve], [e for _, e in curve], color=colour, lw=1.2, label=label)
        axis.set(title=title, xlabel="iterations of Adam", ylim=(0, 0.2))
    axes[0][0].set_ylabel("relative test error")
    axes[0][-1].legend(frameon=False, fontsize=8)
    return figure


def save_figure(figure: Any, path: Path, plots: Any) -> Path:
    """Writes a figure and lets go of it.

    Raises:
        BadFile: If it cannot be written.
    """
    # Without a date, and with ids that depend on the figure alone, equal figures give equal files.
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise BadFile(f"cannot write {path}: {error.strerror}.") from None
    finally:
        plots.close(figure)
    return path


def refuse_undrawable(path: Path) -> None:
    """Refuses the file of a figure that cannot be drawn there, before the long work.

    Raises:
        BadFile: If its ending is no format of matplotlib's, that is not installed, its folder cannot be written to, or
            a file of another kind is there.
    """
    known = pyplot().figure().canvas.get_supported_filetypes()
    pyplot().close("all")
    if path.suffix.lower().lstrip(".") not in known:
        raise BadFile(f"{path} names no format by its ending; end it in .svg, .png or .pdf.")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise BadFile(f"cannot write {path}: there is no folder {path.parent}.")
    if not os.access(folder, os.W_OK):
        raise BadFile(f"cannot write {path}: the folder {path.parent} may not be written to.")
    refuse_other_file(path, _MARKS.get(path.suffix.lower(), ""), "figure")


def pyplot() -> Any:
    """matplotlib without a screen, in the house's style.

    Raises:
        BadFile: If it is not installed.
    """
    try:
        matplotlib = importlib.import_module("matplotlib")
    except ImportError:
        raise BadFile("figures need matplotlib; install it with: pip install matplotlib.") from None
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "ecc", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    return importlib.import_module("matplotlib.pyplot")
