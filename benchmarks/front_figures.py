"""Figures of two experiments at several energy budgets: ResNet-56 with long trainings, and SmolLM2.

PYTHONPATH=src python3 benchmarks/front_figures.py    # as benchmarks/write_results.py does
"""

from __future__ import annotations

import statistics
from collections.abc import Collection
from pathlib import Path
from typing import Any

import altair as alt
from llm_table import FIGURES as LLM_FIGURES
from llm_table import FILE as LLM_FILE
from plotting import GREY, save_figure, scale_of
from resnet56_table import FRONT_FIGURE, energy_shares, front_cells
from result_tables import RESULTS, load

from ecc.report.chart_parts import COLOURS, Row, make_chart, x_axis, y_axis

STYLES = {
    "ECC": (COLOURS["ecc"][0], "circle"),
    "greedy, branches, one shot": (COLOURS["greedy"][0], "triangle-right"),
    "greedy, widths, one shot": (COLOURS["netadapt"][0], "square"),
    "uniform": (COLOURS["uniform"][0], "triangle-down"),
    "FLAP": (COLOURS["lcp"][0], "diamond"),
    "Wanda-sp": (COLOURS["netadapt"][0], "square"),
    "LLM-Pruner": (COLOURS["amc"][0], "triangle-up"),
    "ShortGPT": (COLOURS["eap"][0], "cross"),
    "2SSP": (COLOURS["scratch"][0], "triangle-left"),
}
"""Colour and shape of each method."""
RESNET_NAMES = {
    "ecc": "ECC",
    "greedy_branches": "greedy, branches, one shot",
    "greedy_taylor": "greedy, widths, one shot",
    "uniform": "uniform",
}
LLM_NAMES = {
    "one_shot": "ECC",
    "flap": "FLAP",
    "wanda_sp": "Wanda-sp",
    "llm_pruner": "LLM-Pruner",
    "shortgpt": "ShortGPT",
    "2ssp": "2SSP",
    "uniform": "uniform",
}
MOST = 150.0
"""Perplexity above which networks are not drawn; the table has them."""


def panel(rows: list[Row], x: Any, y: Any, dense: float, title: str, methods: Collection[str]) -> Any:
    """Points and lines of the methods, and the dense network as a line; panels of one figure have the same methods."""
    named = {name: style for name, style in STYLES.items() if name in methods}
    colour = alt.Color("method", type="nominal", scale=scale_of({name: one[0] for name, one in named.items()}))
    shape = alt.Shape("method", type="nominal", scale=scale_of({name: one[1] for name, one in named.items()}))
    chart, line = make_chart(rows), make_chart([{"score": dense, "text": "dense"}])
    return alt.layer(
        line.mark_rule(strokeDash=[2, 3], stroke=GREY).encode(y),
        line.mark_text(align="left", dy=-6, fill=GREY).encode(y, x=alt.value(2), text="text:N"),
        chart.mark_line(strokeWidth=1.6).encode(x, y, colour),
        chart.mark_point(filled=True, size=55, opacity=1).encode(x, y, colour, shape),
    ).properties(title=title, width=400, height=280)


def resnet56_figure(folder: Path) -> Path | None:
    """Top-1 accuracy against measured energy, means over seeds."""
    cells = front_cells()
    dense = [cell for cell in cells if cell["share"] == 1]
    if not dense:
        return None
    rows: list[Row] = []
    for method, share in dict.fromkeys((cell["method"], cell["share"]) for cell in cells if cell["share"] < 1):
        mine = [cell for cell in cells if (cell["method"], cell["share"]) == (method, share)]
        if shares := energy_shares(mine, cells):
            energy = 100 * statistics.fmean(shares)
            score = 100 * statistics.fmean(cell["accuracy"] for cell in mine)
            rows.append({"method": RESNET_NAMES[method], "share": energy, "score": score})
    x = x_axis("share", "joules, % of dense (measured)", scale=alt.Scale(zero=False))
    y = y_axis("score", "top-1 accuracy [%]", scale=alt.Scale(zero=False))
    level = 100 * statistics.fmean(cell["accuracy"] for cell in dense)
    return save_figure(
        panel(rows, x, y, level, "", {row["method"] for row in rows}),
        folder / FRONT_FIGURE,
        "ResNet-56 on CIFAR-10, 30 epochs",
    )


def llm_figure(folder: Path, resource: str) -> Path | None:
    """Perplexity against measured decode or prefill energy, without training and healed."""
    if not (RESULTS / LLM_FILE).exists():
        return None
    record = load(LLM_FILE)
    dense, panels = record["dense"]["perplexity"], []
    titles = {"perplexity": "without training", "healed_perplexity": "healed"}
    shown = {
        key: [
            {"method": LLM_NAMES[one["method"]], "share": 100 * one["of_dense"], "score": one[key]}
            for one in record["cells"]
            if one["resource"] == resource and one["seed"] == 0 and one.get(key, MOST) < MOST
        ]
        for key in titles
    }
    methods = {row["method"] for rows in shown.values() for row in rows}
    words = {"decode": "joules per decoded token", "prefill": "joules per token of a prompt"}[resource]
    for key, title in titles.items():
        x = x_axis("share", f"{words}, % of dense (measured)", scale=alt.Scale(zero=False))
        y = y_axis("score", "perplexity, WikiText-2 test", scale=alt.Scale(type="log", nice=False))
        panels.append(panel(shown[key], x, y, dense, title, methods))
    chart = alt.hconcat(*panels).resolve_scale(y="independent")
    return save_figure(
        chart,
        folder / LLM_FIGURES[resource],
        f"SmolLM2-135M, {record['device']}; above {MOST:,.0f}: in the table",
    )


def main() -> None:
    folder = RESULTS / "figures"
    made = [resnet56_figure(folder), *(llm_figure(folder, resource) for resource in LLM_FIGURES)]
    print(*(path for path in made if path is not None), sep="\n")


if __name__ == "__main__":
    main()
