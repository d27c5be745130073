"""matplotlib for the figures of the benchmarks: without a screen, in one style, and the same file for the same data."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def pyplot() -> Any:
    """`matplotlib.pyplot`, set up for files."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {"svg.hashsalt": "ecc", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}
    )
    from matplotlib import pyplot as plots

    return plots


def save_figure(figure: Any, path: Path, plots: Any) -> Path:
    """Write a figure without a date, and close it."""
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plots.close(figure)
    return path
