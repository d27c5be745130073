"""The picture of the README, from one file in results/: what a compression does to the energy and to the widths.

    PYTHONPATH=src python3 benchmarks/draw_readme.py [RUN.json] [--out PICTURE]

Measured numbers are dots, predicted ones a line. Nothing is typed by hand.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import altair as alt
from plotting import save_figure, scale_of

from ecc.report.chart_parts import make_chart, x_axis, y_axis

ROOT = Path(__file__).resolve().parent.parent
RUN, PICTURE = ROOT / "results" / "compress_imagenette.json", ROOT / "results" / "figures" / "readme.svg"
TEAL, GREY, RED = "#00796b", "#b0b7bd", "#c0392b"


def draw(run: dict[str, Any], out: Path) -> Path:
    summary, energy = run["summary"], run["summary"]["budgets"]["energy"]
    solver, checks = run["solver"], run["cost_checks"]
    # The dense network is measured before the first step, the others during pruning.
    costs = [(0, energy["dense"]), *((line["step"], line["cost"]["energy"]) for line in solver)]
    dots = [(0, energy["dense"]), *((line["step"], line["measured"]["energy"]) for line in checks)]
    budget = f"budget, {energy['limit']:.3f} J"
    scale = scale_of({"predicted": TEAL, summary["label"]: "black", budget: RED})
    x, colour = x_axis("step", "training step"), alt.Color("what", type="nominal", scale=scale)
    y = y_axis("joules", f"J per batch of {summary['batch']}", scale=alt.Scale(zero=True))

    def rows(what: str, points: list[tuple[int, float]]) -> alt.Chart:
        return make_chart([{"what": what, "step": step, "joules": joules} for step, joules in points])

    title = f"{energy['dense']:.3f} J → {energy['result']:.3f} J, {summary['label']}"
    left = alt.layer(
        rows("predicted", costs).mark_line().encode(x, y, colour),
        rows(summary["label"], dots).mark_point(filled=True, size=50, opacity=1).encode(x, y, colour),
        rows(budget, [(0, energy["limit"])]).mark_rule(strokeDash=[5, 4]).encode(y, colour),
    ).properties(title=title, width=380, height=240)

    shares = [summary["widths"][name] / full for name, full in summary["full_widths"].items()]
    bars = make_chart([{"layer": number, "kept": share, "full": 1} for number, share in enumerate(shares)])
    layers = alt.X(
        "layer", type="ordinal", title="layers, from the first one to the outputs", axis=alt.Axis(labels=False)
    )
    axis = alt.Axis(format="%")
    scores = summary["scores"]
    right = alt.layer(
        bars.mark_bar(fill=GREY).encode(layers, y_axis("full", "channels kept", axis=axis)),
        bars.mark_bar(fill=TEAL).encode(layers, y_axis("kept", "channels kept", axis=axis)),
    ).properties(title=f"accuracy {scores['dense']:.1%} → {scores['finetuned']:.1%}", width=330, height=240)
    when = run["environment"]["date"]
    return save_figure(left | right, out, f"{run['what']}; {summary['device']}, {summary['label']} {when}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, nargs="?", default=RUN)
    parser.add_argument("--out", type=Path, default=PICTURE)
    options = parser.parse_args()
    print(draw(json.loads(options.run.read_text(encoding="utf-8")), options.out))


if __name__ == "__main__":
    main()
