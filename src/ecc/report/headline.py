"""The top of a page: what came out, in three numbers."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from .markup import NOTHING, Html, amount, exact, join, percent, score, tag
from .page import energy_row

Facts = Mapping[str, Any]


def _card(name: str, big: object, *small: object, mood: str | None = None) -> Html:
    words = [tag("p", line, class_="small") for line in small if line]
    return tag("div", tag("h2", name), tag("p", big, class_="big"), *words, class_="card", data_mood=mood)


def _arrow(before: Html, after: Html) -> Html:
    return join([before, tag("span", "→", class_="arrow", aria_label="to"), after], " ")


def headline_of_run(cell: Facts) -> Html:
    """Joules, score and budget of one run, or how far it is."""
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
        title = f"{cell['task']}, not finished"
    cards = [] if row is None else [_energy_card(cell, row)]
    cards += [_score_card(cell)] if not running else [_now_card(cell)]
    cards += [] if row is None else [_budget_card(cell, row)]
    lines = [tag("p", "Note: ", cell["note"], class_="note")] if cell["note"] else []
    lines += (
        [tag("p", "The estimate takes for granted that ", cell["assumes"], ".", class_="note")]
        if cell["assumes"]
        else []
    )
    return tag("section", tag("p", where, class_="eyebrow"), tag("h1", title), tag("div", *cards, class_="cards"),
               *lines, class_="headline", id="headline")  # fmt: skip


def _energy_card(cell: Facts, row: Facts) -> Html:
    each = cell["batch"] if row["resource"] == "energy" and cell["batch"] else 1
    before = exact(row["dense"] / each, amount(row["dense"] / each, row["unit"]))
    name = f"{row['resource'].capitalize()} per item" if each > 1 else row["resource"].capitalize()
    label = tag("span", row["label"], class_="label")
    if row["result"] is None:
        return _card(name, before, label)
    after = exact(row["result"] / each, amount(row["result"] / each, row["unit"]))
    change = exact(row["result"] / row["dense"] - 1, percent(row["result"] / row["dense"] - 1, sign=True))
    sure = "" if cell["relative_ci"] is None else f"±{percent(cell['relative_ci'])} on the scales"
    whole = f"{amount(row['dense'], row['unit'])} → {amount(row['result'], row['unit'])} per batch" if each > 1 else ""
    return _card(
        name, _arrow(before, after), join([change, " ", label]), ", ".join(part for part in (whole, sure) if part)
    )


def _score_card(cell: Facts) -> Html:
    scores = cell["scores"]
    final = scores.get("after", scores.get("before"))
    if final is None:
        return _card("Test score", NOTHING, "the task has no evaluation")
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
    allowed = amount(row["limit"], row["unit"]) + (" per batch" if (cell["batch"] or 1) > 1 else "")
    if row["result"] is None or cell["met"] is None:
        return _card("Budget", exact(row["limit"], amount(row["limit"], row["unit"])), f"asked for: {cell['budget']}")
    spare = 1 - row["result"] / row["limit"]
    words = f"{percent(abs(spare))} {'to spare' if spare >= 0 else 'over'}"
    big = join([tag("span", "met" if cell["met"] else "not met", class_="verdict"), exact(spare, words)], ", ")
    others = [one for one in cell["resources"] if one["limit"] is not None]
    several = f"{sum(bool(one['met']) for one in others)} of {len(others)} budgets met" if len(others) > 1 else ""
    return _card(
        "Budget", big, f"{cell['budget']} asked for: {allowed}", several, mood="good" if cell["met"] else "bad"
    )


def headline_of_grid(facts: Facts) -> Html:
    """The dense network, and how many of the runs met their budget."""
    done = [cell for cell in facts["cells"] if cell["status"] == "finished"]
    counts = f"{len(facts['methods'])} methods at {len(facts['budgets'])} budgets"
    where = " · ".join([*([facts["device"]] if facts["device"] else []), f"batch of {facts['batch']}"])
    cards = []
    if done and (row := energy_row(done[0])) is not None:
        each = facts["batch"] if row["resource"] == "energy" and facts["batch"] else 1
        dense = [cell["scores"]["dense"] for cell in done if "dense" in cell["scores"]]
        words = f"test score {score(statistics.fmean(dense))}" if dense else ""
        big = exact(row["dense"] / each, amount(row["dense"] / each, row["unit"]))
        cards.append(_card("Dense network, per item", big, tag("span", row["label"], class_="label"), words))
    met = sum(bool(cell["met"]) for cell in done)
    cards.append(
        _card("Budget met", f"{met} of {len(done)}", "finished runs", mood="good" if met == len(done) else "bad")
    )
    states = [f"{facts['running']} not finished"] if facts["running"] else []
    states += [f"{len(facts['failed'])} failed"] if facts["failed"] else []
    seeds = f"{len(facts['seeds'])} seed{'s' if len(facts['seeds']) != 1 else ''}"
    cards.append(_card("Runs", len(facts["cells"]) + len(facts["failed"]), seeds, ", ".join(states) or "all finished"))
    return tag("section", tag("p", where, class_="eyebrow"), tag("h1", f"{facts['task']}: {counts}"),
               tag("div", *cards, class_="cards"), class_="headline", id="headline")  # fmt: skip
