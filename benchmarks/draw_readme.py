"""The picture of the README, from one file in results/: what a compression does to the energy and to the widths.

    PYTHONPATH=src python3 benchmarks/draw_readme.py [RUN.json] [--out PICTURE]

Measured numbers are dots, predicted ones a line. Nothing is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from plotting import pyplot, save_figure

ROOT = Path(__file__).resolve().parent.parent
RUN, PICTURE = ROOT / "results" / "compress_imagenette.json", ROOT / "results" / "figures" / "readme.svg"
TEAL, GREY, RED = "#00796b", "#b0b7bd", "#c0392b"


def draw(run: dict[str, Any], out: Path) -> Path:
    plots = pyplot()
    summary, energy = run["summary"], run["summary"]["budgets"]["energy"]
    figure, (left, right) = plots.subplots(1, 2, figsize=(9.6, 3.4), width_ratios=(1.15, 1), layout="constrained")

    solver, checks = run["solver"], run["cost_checks"]
    steps = [0, *(line["step"] for line in solver)]
    left.plot(steps, [energy["dense"], *(line["cost"]["energy"] for line in solver)], color=TEAL, label="predicted")
    # The dense network is measured before the first step, the others during pruning.
    dots = [(0, energy["dense"]), *((line["step"], line["measured"]["energy"]) for line in checks)]
    left.plot(*zip(*dots, strict=True), "o", color="black", label=summary["label"], zorder=3)
    left.axhline(energy["limit"], color=RED, linestyle="--", linewidth=1, label=f"budget, {energy['limit']:.3f} J")
    left.set(xlabel="training step", ylabel=f"J per batch of {summary['batch']}", ylim=(0, None))
    left.set_title(f"{energy['dense']:.3f} J → {energy['result']:.3f} J, {summary['label']}", loc="left", fontsize=10)
    left.legend(frameon=False, loc="upper right")

    shares = [100 * summary["widths"][name] / full for name, full in summary["full_widths"].items()]
    right.bar(range(len(shares)), 100, color=GREY)
    right.bar(range(len(shares)), shares, color=TEAL)
    right.set_xticks([0, len(shares) - 1], ["first layer", "outputs"])
    right.set(ylabel="% of channels kept", ylim=(0, 100))
    scores = summary["scores"]
    title = f"accuracy {scores['dense']:.1%} → {scores['finetuned']:.1%}"
    right.set_title(title, loc="left", fontsize=10)

    when = run["environment"]["date"]
    figure.suptitle(f"{run['what']}; {summary['device']}, {summary['label']} {when}", x=0.01, ha="left", fontsize=10)
    figure.set_facecolor("white")  # a page may be dark
    return save_figure(figure, out, plots)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=RUN)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    print(draw(json.loads(options.run.read_text(encoding="utf-8")), options.out))


if __name__ == "__main__":
    main()
