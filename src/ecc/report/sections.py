"""The body of a page: headline, figures and tables, as HTML made from facts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from .charts import SHAPES
from .figures import energy_row, first_budget
from .markup import Html, amount, exact, join, more, pairs, percent, score, section, table, tag, text

Facts = Mapping[str, Any]

_GLYPHS = {"circle": "●", "square": "■", "triangle-up": "▲", "cross": "✚", "diamond": "◆", "triangle-down": "▼"}
_GLYPHS |= {"triangle-right": "▶", "stroke": "━"}
_SETTINGS = "settings of the run"


def body_of(facts: Facts, figures: Sequence[Mapping[str, Any]]) -> Html:
    """Everything inside `main`."""
    drawn = {one["name"]: one for one in figures}
    parts = [
        _headline_of_run(facts["cells"][0]) if facts["kind"] == "run" else _headline_of_grid(facts),
        _controls(facts),
        _tradeoff(facts, drawn),
        _resources(facts),
        _widths(facts, drawn),
        _layers(facts, drawn),
        _time(facts, drawn),
        _model(facts, drawn),
        _environment(facts),
        _reproduce(facts),
    ]
    return join(part for part in parts if part)


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


# ---------------------------------------------------------------- headline


def _card(name: str, big: object, *small: object, mood: str | None = None) -> Html:
    words = [tag("p", line, class_="small") for line in small if line]
    return tag("div", tag("h2", name), tag("p", big, class_="big"), *words, class_="card", data_mood=mood)


def _arrow(before: Html, after: Html) -> Html:
    return join([before, tag("span", "→", class_="arrow", aria_label="to"), after], " ")


def _headline_of_run(cell: Facts) -> Html:
    row = energy_row(cell)
    device = " · ".join(
        part for part in (cell["method"].upper() if cell["method"] == "ecc" else cell["method"], cell["device"]) if part
    )
    where = f"{device} · batch of {cell['batch']}" if cell["batch"] else device
    running = cell["status"] == "running"
    title = cell["task"]
    if row is not None and row["result"] is not None and not running:
        title = f"{cell['task']} at {percent(row['result'] / row['dense'])} of its {row['resource']}"
    elif running:
        title = f"{cell['task']}, still running"
    cards = [] if row is None else [_energy_card(cell, row)]
    cards += [_score_card(cell)] if not running else [_now_card(cell)]
    cards += [] if row is None else [_budget_card(cell, row)]
    lines = [tag("p", "Note: ", cell["note"], class_="note")] if cell["note"] else []
    lines += [tag("p", "The estimate takes for granted that ", cell["assumes"], ".", class_="note")] if cell["assumes"] else []
    return tag("section", tag("p", where, class_="eyebrow"), tag("h1", title), tag("div", *cards, class_="cards"),
               *lines, class_="headline", id="headline")  # fmt: skip


def _energy_card(cell: Facts, row: Facts) -> Html:
    each = cell["batch"] if row["resource"] == "energy" and cell["batch"] else 1
    before = exact(row["dense"] / each, amount(row["dense"] / each, row["unit"]))
    name = f"{row['resource'].capitalize()} an item" if each > 1 else row["resource"].capitalize()
    label = tag("span", row["label"], class_="label")
    if row["result"] is None:
        return _card(name, before, label)
    after = exact(row["result"] / each, amount(row["result"] / each, row["unit"]))
    change = exact(row["result"] / row["dense"] - 1, percent(row["result"] / row["dense"] - 1, sign=True))
    sure = "" if cell["relative_ci"] is None else f"±{percent(cell['relative_ci'])} on the scales"
    whole = f"{amount(row['dense'], row['unit'])} → {amount(row['result'], row['unit'])} a batch" if each > 1 else ""
    return _card(name, _arrow(before, after), join([change, " ", label]), ", ".join(part for part in (whole, sure) if part))


def _score_card(cell: Facts) -> Html:
    scores = cell["scores"]
    final = scores.get("after", scores.get("before"))
    if final is None:
        return _card("Test score", "–", "the task has no evaluation")
    shown = exact(final, score(final))
    if "dense" not in scores:
        return _card("Test score", shown)
    change = final - scores["dense"]
    words = f"{change:+.4f}".replace("-", "\N{MINUS SIGN}") if abs(change) >= 5e-5 else "unchanged"
    tuned = f"before fine-tuning {score(scores['before'])}" if {"before", "after"} <= set(scores) else ""
    return _card("Test score", _arrow(exact(scores["dense"], score(scores["dense"])), shown), words, tuned)


def _now_card(cell: Facts) -> Html:
    now = cell["now"]
    if now is None:
        return _card("Now", "starting")
    return _card("Now", f"{now['phase']}, step {now['step']}", "as far as the history tells")


def _budget_card(cell: Facts, row: Facts) -> Html:
    if row["limit"] is None:
        return _card("Budget", "none", "nothing was asked of this resource")
    asked = f"{amount(row['limit'], row['unit'])} a batch allowed" if cell["batch"] else amount(row["limit"], row["unit"])
    if row["result"] is None or cell["met"] is None:
        return _card("Budget", exact(row["limit"], amount(row["limit"], row["unit"])), f"asked for: {cell['budget']}")
    spare = 1 - row["result"] / row["limit"]
    words = f"{percent(abs(spare))} {'to spare' if spare >= 0 else 'over'}"
    big = join([tag("span", "met" if cell["met"] else "not met", class_="verdict"), exact(spare, words)], ", ")
    others = [one for one in cell["resources"] if one["limit"] is not None]
    several = f"{sum(bool(one['met']) for one in others)} of {len(others)} budgets met" if len(others) > 1 else ""
    return _card("Budget", big, f"{asked}, asked for: {cell['budget']}", several, mood="good" if cell["met"] else "bad")


def _headline_of_grid(facts: Facts) -> Html:
    done = [cell for cell in facts["cells"] if cell["status"] == "finished"]
    counts = f"{len(facts['methods'])} methods at {len(facts['budgets'])} budgets"
    where = " · ".join([*([facts["device"]] if facts["device"] else []), f"batch of {facts['batch']}"])
    cards = []
    if done and (row := energy_row(done[0])) is not None:
        each = facts["batch"] if row["resource"] == "energy" and facts["batch"] else 1
        dense = [cell["scores"]["dense"] for cell in done if "dense" in cell["scores"]]
        words = f"test score {score(statistics.fmean(dense))}" if dense else ""
        big = exact(row["dense"] / each, amount(row["dense"] / each, row["unit"]))
        cards.append(_card("Dense network, an item", big, tag("span", row["label"], class_="label"), words))
    met = sum(bool(cell["met"]) for cell in done)
    cards.append(_card("Budget met", f"{met} of {len(done)}", "finished runs", mood="good" if met == len(done) else "bad"))
    states = [f"{facts['running']} still running"] if facts["running"] else []
    states += [f"{len(facts['failed'])} failed"] if facts["failed"] else []
    seeds = f"{len(facts['seeds'])} seed{'s' if len(facts['seeds']) != 1 else ''}"
    cards.append(_card("Runs", len(facts["cells"]) + len(facts["failed"]), seeds, ", ".join(states) or "all finished"))
    return tag("section", tag("p", where, class_="eyebrow"), tag("h1", f"{facts['task']}: {counts}"),
               tag("div", *cards, class_="cards"), class_="headline", id="headline")  # fmt: skip


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
        (when, budget): max((row[when][0] for key, row in found.items() if key[1] == budget and row[when]), default=None)
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
        return tag("span", "–", data_when=when)
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
                "–" if share is None else exact(share[0], percent(share[0])),
                "yes" if row["met"] else "no",
                row["seeds"],
                "–" if row["batches_total"] is None else f"{row['batches_total']:,.0f}",
                "–" if row["batches_lineage"] is None else f"{row['batches_lineage']:,.0f}",
                "–" if seconds is None else f"{seconds:,.0f}",
                "–" if row["p_value"] is None else exact(row["p_value"], f"{row['p_value']:.3f}"),
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
                "–" if change is None else exact(change, percent(change, sign=True)),
                "–" if row["limit"] is None else exact(row["limit"], amount(row["limit"], row["unit"])),
                "–" if of_budget is None else exact(of_budget, percent(of_budget)),
                "–" if row["met"] is None else "met" if row["met"] else "not met",
            )
        )
    if not rows:
        return None
    heads = ("resource", "how known", "before", "after", "change", "budget", "of budget", "")
    return section("costs", "Before and after", table("For one inference of the whole batch", heads, rows, left=2))


def _widths(facts: Facts, drawn: Mapping[str, Any]) -> Html:
    title = "Where channels went" if not facts["cells"] or facts["cells"][0]["what"] == "channels" else "Where weights went"
    if "widths" not in drawn:
        return section("widths", title, _lacking("no widths were written yet."))
    parts = [_plot(drawn, "widths")]
    if facts["kind"] == "run":
        cell = facts["cells"][0]
        rows = [
            (row["group"], f"{row['full']:,}", f"{row['kept']:,}", percent(row["kept"] / row["full"]))
            for row in cell["widths"]
        ]
        parts.append(more("Numbers", table(f"{cell['what'].capitalize()} of each group", ("group", "before", "after", "kept"), rows)))
        if cell["slim_gap"] is not None:
            parts.append(tag("p", f"The cut and the masked network agree to {cell['slim_gap']:.1g} of the largest output."))
    return section("widths", title, *parts)


def _layers(facts: Facts, drawn: Mapping[str, Any]) -> Html:
    if "layers" not in drawn:
        return section("layers", "Where the energy went", _lacking(facts["missing"].get("layers", "it is not known yet.")))
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


def _time(facts: Facts, drawn: Mapping[str, Any]) -> Html:
    shown = [name for name in ("descent", "loss", "duals", "width-duals") if name in drawn]
    if not shown:
        return section("time", "The run over time", _lacking("the history has too few lines yet."))
    parts: list[Html] = []
    if "descent" not in drawn:
        parts.append(_lacking("the descent of the energy; this method takes its steps outside the training loop."))
    return section("time", "The run over time", _plot(drawn, *shown), *parts, _scores(facts))


def _scores(facts: Facts) -> Html:
    cell = facts["cells"][0]
    if facts["kind"] != "run" or not cell["scores"]:
        return Html("")
    names = {"dense": "dense network", "before": "cut, before fine-tuning", "after": "after fine-tuning"}
    rows = [(names[name], exact(value, score(value))) for name, value in cell["scores"].items()]
    return table("Test score along the run", ("when", "score"), rows)


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
                "–" if row["relative_ci"] is None else f"±{percent(row['relative_ci'], 2)}",
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
    noise = "repeats were not measured" if model["noise"] is None else f"one measurement scatters by {percent(model['noise'], 2)}"
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
        rows = [[one.get(key, "–") for key in heads] for one in facts["environments"]]
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
    parts.append(more(_SETTINGS.capitalize(), pairs(items)))
    words = "Everything on this page comes from the files of the folder; the same numbers are embedded as JSON."
    save = tag("button", "Save the facts as JSON", type="button", id="save-facts")
    return section("reproduce", "To do it again", *parts, tag("p", words), tag("p", save))
