"""The body of a page: headline, figures and tables, as HTML made from facts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import SHAPES
from .headline import headline_of_grid, headline_of_run
from .markup import NOTHING, Html, amount, exact, join, more, pairs, percent, section, table, tag, text
from .page import first_budget

Facts = Mapping[str, Any]

_GLYPHS = {"circle": "●", "square": "■", "triangle-up": "▲", "cross": "✚", "diamond": "◆", "triangle-down": "▼"}
_GLYPHS |= {"triangle-right": "▶", "triangle-left": "◀"}
_LINKS = {
    "comparison": "Comparison",
    "costs": "Before and after",
    "widths": "Widths",
    "layers": "Energy by layer",
    "time": "Over time",
    "model": "Energy model",
    "environment": "Environment",
    "reproduce": "Do it again",
}


def body_of(facts: Facts, figures: Sequence[Mapping[str, Any]]) -> Html:
    """Everything inside `main`."""
    drawn = {one["name"]: one for one in figures}
    parts = [
        headline_of_run(facts["cells"][0]) if facts["kind"] == "run" else headline_of_grid(facts),
        _controls(facts),
        _tradeoff(facts, drawn),
        _resources(facts),
        _widths(facts, drawn),
        _layers(facts, drawn),
        _time(drawn),
        _model(facts, drawn),
        _environment(facts),
        _reproduce(facts),
    ]
    shown = [part for part in parts if part]
    shown.insert(1, _contents(shown))
    return join(shown)


def _contents(parts: Sequence[Html]) -> Html:
    """Links to the sections that there are."""
    links = [
        tag("a", words, href=f"#{name}") for name, words in _LINKS.items() if any(f' id="{name}">' in p for p in parts)
    ]
    return tag("nav", *links, aria_label="On this page")


def _plot(drawn: Mapping[str, Mapping[str, Any]], *names: str) -> Html:
    """Figures by name, those that there are."""
    return join(
        tag(
            "figure",
            tag("div", tag("h3", one["title"]), tag("button", "SVG", type="button", class_="save",
                aria_label=f"Save the figure {one['title']} as SVG", data_save=name), class_="bar"),
            tag("div", class_="plot", data_figure=name, style=f"min-height:{one['height']:.0f}px"),
            tag("figcaption", one["caption"]),
            id=f"figure-{name}",
        )
        for name in names
        if (one := drawn.get(name)) is not None
    )  # fmt: skip


def _lacking(why: str) -> Html:
    return tag("p", "Not shown: ", why, class_="lacking")


# ---------------------------------------------------------------- choosing


def swatch(method: str) -> Html:
    """The mark that a method has in every figure."""
    known = method if method in SHAPES else "other"
    return tag("span", _GLYPHS[SHAPES.get(method, "square")], class_=f"mark m-{known}", aria_hidden="true")


def _controls(facts: Facts) -> Html | None:
    if facts["kind"] != "grid":
        return None
    methods = [
        tag("label", Html(f'<input type="checkbox" name="method" value="{text(name)}" checked>'), swatch(name),
            tag("span", name))
        for name in facts["methods"]
    ]  # fmt: skip
    parts = [tag("fieldset", tag("legend", "Methods"), *methods)]
    when = (("after", "after fine-tuning"), ("before", "before"))
    parts.append(tag("fieldset", tag("legend", "Score"), *(_radio("when", *one, "after") for one in when)))
    if len(facts["budgets"]) > 1:
        budgets = [_radio("budget", name, name, first_budget(facts)) for name in facts["budgets"]]
        parts.append(tag("fieldset", tag("legend", "Budget, for widths, layers and time"), *budgets))
    return tag("form", *parts, class_="controls", aria_label="What the figures show")


def _radio(group: str, value: str, shown: str, checked: str | None) -> Html:
    mark = " checked" if value == checked else ""
    return tag("label", Html(f'<input type="radio" name="{group}" value="{text(value)}"{mark}>'), tag("span", shown))


# ---------------------------------------------------------------- results


def _tradeoff(facts: Facts, drawn: Mapping[str, Any]) -> Html | None:
    if facts["kind"] != "grid":
        return None
    parts: list[Html] = [_plot(drawn, "tradeoff"), _matrix(facts), _grid_table(facts)]
    if facts["failed"]:
        rows = [(one["method"], one["budget"], one["seed"], one["error"]) for one in facts["failed"]]
        parts.append(table("Runs that failed", ("method", "budget", "seed", "why"), rows, left=4))
    return section("comparison", "Comparison", *parts)


def _matrix(facts: Facts) -> Html:
    """Scores, methods down and budgets across; the best of each column stands out."""
    found = {(row["method"], row["budget"]): row for row in facts["rows"]}
    best = {
        (when, budget): max(
            (row[when][0] for key, row in found.items() if key[1] == budget and row[when]), default=None
        )
        for when in ("before", "after")
        for budget in facts["budgets"]
    }
    rows = []
    for method in facts["methods"]:
        cells: list[object] = [join([swatch(method), method], " ")]
        for budget in facts["budgets"]:
            row = found.get((method, budget))
            cells.append(join(_score_of(row, when, best[when, budget]) for when in ("after", "before")))
        rows.append(cells)
    caption = "Test score, mean ± spread over seeds; the best of each budget in bold"
    made = table(caption, ("method", *facts["budgets"]), rows)
    for method in facts["methods"]:  # rows are named, for the filter
        head = f'<tr><th scope="row">{join([swatch(method), method], " ")}'
        made = Html(made.replace(head, f'<tr data-method="{text(method)}">{head[4:]}'))
    return made


def _score_of(row: Mapping[str, Any] | None, when: str, best: float | None) -> Html:
    if row is None or row[when] is None:
        return tag("span", NOTHING, data_when=when)
    mean, spread = row[when]
    shown = exact(mean, f"{mean:.4f}")
    over = "" if row["met"] else " over"
    spread_words = tag("span", f" ±{spread:.4f}" if spread else "", over, class_="spread")
    return tag("span", tag("b", shown) if mean == best else shown, spread_words, data_when=when)


def _grid_table(facts: Facts) -> Html:
    rows = []
    order = {name: number for number, name in enumerate(facts["budgets"])}
    for row in sorted(facts["rows"], key=lambda row: (order.get(row["budget"], len(order)), row["method"] != "ecc")):
        share = row["share_of_dense"]
        seconds = row["seconds"]
        rows.append(
            (
                join([swatch(row["method"]), row["method"]], " "),
                row["budget"],
                NOTHING if share is None else exact(share[0], percent(share[0])),
                NOTHING if row["met"] is None else "yes" if row["met"] else "no",
                row["seeds"],
                NOTHING if row["batches_total"] is None else f"{row['batches_total']:,.0f}",
                NOTHING if row["batches_lineage"] is None else f"{row['batches_lineage']:,.0f}",
                NOTHING if seconds is None else f"{seconds:,.0f}",
                NOTHING if row["p_value"] is None else exact(row["p_value"], f"{row['p_value']:.3f}"),
            )
        )
    heads = ("method", "budget", "of dense", "met", "seeds", "batches", "of the winner", "seconds", "p to ecc")
    caption = "Price of each method; p is of a paired t-test of the scores over seeds, against ecc"
    return more("What it cost: batches, seconds, significance", table(caption, heads, rows, left=2))


def _resources(facts: Facts) -> Html | None:
    if facts["kind"] != "run":
        return None
    rows = []
    for row in facts["cells"][0]["resources"]:
        change = None if row["result"] is None else row["result"] / row["dense"] - 1
        of_budget = None if row["limit"] is None or row["result"] is None else row["result"] / row["limit"]
        rows.append(
            (
                row["resource"],
                row["label"],
                exact(row["dense"], amount(row["dense"], row["unit"])),
                exact(row["result"], amount(row["result"], row["unit"])),
                NOTHING if change is None else exact(change, percent(change, sign=True)),
                NOTHING if row["limit"] is None else exact(row["limit"], amount(row["limit"], row["unit"])),
                NOTHING if of_budget is None else exact(of_budget, percent(of_budget)),
                NOTHING if row["met"] is None else "met" if row["met"] else "not met",
            )
        )
    if not rows:
        return None
    heads = ("resource", "how known", "before", "after", "change", "budget", "of budget", "")
    return section("costs", "Before and after", table("For one inference of the whole batch", heads, rows, left=2))


def _widths(facts: Facts, drawn: Mapping[str, Any]) -> Html:
    title = (
        "Where channels went" if not facts["cells"] or facts["cells"][0]["what"] == "channels" else "Where weights went"
    )
    if "widths" not in drawn:
        return section("widths", title, _lacking("no widths were written yet."))
    parts = [_plot(drawn, "widths")]
    if facts["kind"] == "run":
        cell = facts["cells"][0]
        rows = [
            (row["group"], f"{row['full']:,}", f"{row['kept']:,}", percent(row["kept"] / row["full"]))
            for row in cell["widths"]
        ]
        parts.append(
            more(
                "Numbers",
                table(f"{cell['what'].capitalize()} of each group", ("group", "before", "after", "kept"), rows),
            )
        )
        if cell["max_relative_diff"] is not None:
            parts.append(
                tag(
                    "p",
                    f"The cut and the masked network agree to {cell['max_relative_diff']:.1g} of the largest output.",
                )
            )
    return section("widths", title, *parts)


def _layers(facts: Facts, drawn: Mapping[str, Any]) -> Html:
    if "layers" not in drawn:
        return section(
            "layers", "Where the energy went", _lacking(facts["missing"].get("layers", "it is not known yet."))
        )
    parts = [_plot(drawn, "layers")]
    if facts["kind"] == "run":
        rows = [
            (
                row["layer"],
                exact(row["dense"], amount(row["dense"], "J")),
                exact(row["result"], amount(row["result"], "J")),
                percent(row["result"] / row["dense"] - 1 if row["dense"] else None, sign=True),
            )
            for row in facts["cells"][0]["layers"]
        ]
        caption = "Joules of each layer for the whole batch, predicted"
        parts.append(more("Numbers", table(caption, ("layer", "before", "after", "change"), rows)))
    return section("layers", "Where the energy went", *parts)


def _time(drawn: Mapping[str, Any]) -> Html:
    shown = [name for name in ("descent", "loss", "score", "duals", "width-duals") if name in drawn]
    if not shown:
        return section("time", "The run over time", _lacking("the history has too few lines yet."))
    parts: list[Html] = []
    if "descent" not in drawn:
        parts.append(_lacking("the descent of the energy; this method takes its steps outside the training loop."))
    return section("time", "The run over time", _plot(drawn, *shown), *parts)


# ---------------------------------------------------------------- the energy model


def _model(facts: Facts, drawn: Mapping[str, Any]) -> Html:
    model = facts["model"]
    parts = [tag("div", _plot(drawn, "predictions", "learning"), class_="pair")]
    if model is None:
        parts.append(_lacking(facts["missing"].get("model", "no energy model belongs to a run of single weights.")))
    else:
        if model["advice"]:
            parts.append(tag("p", model["advice"]))
        if not model["learning_curve"]:
            parts.append(_lacking("the learning curve; `ecc fit` writes it since version 0.1."))
        parts.append(_families(model))
    cell = facts["cells"][0]
    if facts["kind"] == "run" and cell["weighings"]:
        rows = [
            (
                f"step {row['step']}",
                row["label"],
                exact(row["predicted"], amount(row["predicted"], "J")),
                exact(row["weighed"], amount(row["weighed"], "J")),
                exact(row["error"], percent(row["error"], 2, sign=True)),
                NOTHING if row["relative_ci"] is None else f"±{percent(row['relative_ci'], 2)}",
            )
            for row in cell["weighings"]
        ]
        heads = ("weighing", "how known", "predicted", "on the scales", "error", "scatter")
        parts.append(table("What the model said and what the scales said, for the whole batch", heads, rows, left=2))
    return section("model", "How far the energy model can be trusted", *parts)


def _families(model: Mapping[str, Any]) -> Html:
    heads = ("family", "mean error", "9 in 10 below", "largest", "bias", "at dense")
    rows = [
        (
            f"{name} (chosen)" if name == model["kind"] else name,
            *(percent(found.get(key), 2) for key in ("mean", "ninetieth", "largest")),
            *(percent(found.get(key), 2, sign=True) for key in ("bias", "dense")),
        )
        for name, found in model["families"].items()
    ]
    noise = (
        "repeats were not measured"
        if model["noise"] is None
        else f"one measurement scatters by {percent(model['noise'], 2)}"
    )
    return table(f"Errors on networks that were not in the fit, of {model['rows']} ({noise})", heads, rows)


# ---------------------------------------------------------------- where, and how again


def _environment(facts: Facts) -> Html:
    model = facts["model"]
    items: list[tuple[object, object]] = [("device", facts["device"] or "not told yet")]
    items.append(("energy is", ", ".join(facts["labels"])))
    if model:
        items += [("meter", f"{model['meter']}: {model['reads']}, {model['scope']}")]
        items += [("source", model["source"])] if model["source"] else []
        items += [("profile", f"{model['rows']} networks, batch of {model['batch']}")]
        items += [("note", note) for note in model["notes"]]
        if model["measuring"]:
            items.append(("measured with", ", ".join(f"{key} {value}" for key, value in model["measuring"].items())))
    parts = [pairs(items)]
    if facts["environments"]:
        heads = list(dict.fromkeys(key for one in facts["environments"] for key in one))
        rows = [[one.get(key, NOTHING) for key in heads] for one in facts["environments"]]
        parts.append(table("Software of every session", heads, rows, left=len(heads)))
    else:
        parts.append(_lacking(facts["missing"].get("environment", "the sessions are not known.")))
    return section("environment", "Device and environment", *parts)


def _reproduce(facts: Facts) -> Html:
    parts: list[Html] = []
    if facts["commands"]:
        for command in facts["commands"]:
            copy = tag("button", "Copy", type="button", class_="copy", aria_label="Copy the command")
            parts.append(tag("div", tag("pre", tag("code", command), tabindex="0"), copy, class_="command"))
    else:
        parts.append(_lacking(facts["missing"].get("command", "no command is known.")))
    settings = facts["cells"][0]["settings"] if facts["cells"] else {}
    items = [(name.replace("_", " "), "default" if value is None else value) for name, value in settings.items()]
    parts.append(more("Settings of the run", pairs(items)))
    words = "Everything on this page comes from the files of the folder; the same numbers are embedded as JSON."
    save = tag("button", "Save the facts as JSON", type="button", id="save-facts")
    return section("reproduce", "To do it again", *parts, tag("p", words), tag("p", save))
