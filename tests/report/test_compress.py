from __future__ import annotations

import io
import re
from dataclasses import dataclass
from typing import Any

import pytest
from rich.console import Console, RenderableType

from ecc.report.compress import compress_view, feasibility_table
from ecc.report.fit import si


def shown(what: RenderableType, width: int = 140) -> str:
    file = io.StringIO()
    Console(width=width, file=file).print(what)
    return file.getvalue()


def cells(line: str) -> list[str]:
    return re.split(r"\s{2,}", line.strip())


@dataclass(frozen=True)
class Feasibility:
    resource: str = "energy"
    unit: str = "J"
    label: str = "estimated"
    dense: float = 0.01898
    min_cost: float = 0.0029
    limit: float = 0.00949
    uniform_ratio: float | None = 0.613


def summary(**changes: Any) -> dict[str, Any]:
    energy = {"limit": 0.0095, "unit": "J", "dense": 0.019, "result": 0.00931, "label": "estimated", "met": True}
    found = {
        "task": "digits",
        "device": "NVIDIA Jetson TX2",
        "budgets": {"energy": energy},
        "note": "",
        "widths": {"stem": 12, "head": 10},
        "full_widths": {"stem": 16, "head": 10},
        "macs": {"dense": 236_576_768.0, "result": 47_992_832.0},
        "parameters": {"dense": 42_474.0, "result": 6_661.0},
        "max_relative_diff": 6.9e-08,
        "scores": {"dense": 0.98123, "pruned": 0.7, "finetuned": 0.97654},
    }
    return found | changes


# ---------------------------------------------------------------- before


def test_the_table_of_reach_has_the_numbers() -> None:
    latency = Feasibility("latency", "s", "measured", 0.0036, 0.0027, 0.0018, None)
    _, _, *lines = shown(feasibility_table([Feasibility(), latency])).splitlines()
    assert cells(lines[0]) == ["energy (estimated)", "19 mJ", "2.9 mJ", "9.49 mJ", "50%", "61%"]
    assert cells(lines[1]) == ["latency (measured)", "3.6 ms", "2.7 ms", "1.8 ms", "50%", "out of reach"]
    assert len(lines) == 2


# ---------------------------------------------------------------- after


def test_the_view_has_the_numbers_of_the_summary() -> None:
    facts = summary()
    lines = shown(compress_view(facts, "runs/a")).splitlines()
    assert lines[0].strip() == "digits by ecc on NVIDIA Jetson TX2"
    row = facts["budgets"]["energy"]
    amounts = [si(row[name], "J") for name in ("dense", "result", "limit")]
    assert cells(lines[2]) == ["energy (estimated)", *amounts, "98.0%", "met"]
    assert cells(lines[3]) == ["macs (counted)", "237 M", "48 M"]
    assert cells(lines[4]) == ["parameters (counted)", "42.5 k", "6.66 k"]
    assert cells(lines[5]) == ["score", "0.9812", "0.9765"]
    assert lines[6] == "Widths: stem 12/16."
    assert lines[7] == "Cut and masked networks agree to 7e-08 of the largest output."
    assert lines[8] == "runs/a: slim.safetensors, widths.json, summary.json, history.jsonl"
    assert len(lines) == 9


def test_a_budget_that_is_missed_is_hard_to_overlook() -> None:
    facts = summary(note="the result lies at 105.0% of the budget of energy after 6 descents.")
    facts["budgets"]["energy"] |= {"result": 0.009975, "met": False}
    text = shown(compress_view(facts, "run"))
    assert "105.0%  NOT MET" in text
    assert "Note: the result lies at 105.0% of the budget of energy after 6 descents." in text


def test_what_was_not_compared_is_not_claimed() -> None:
    assert "agree" not in shown(compress_view(summary(slim_gap=None), "run"))


def test_a_budget_of_parameters_is_shown_once() -> None:
    facts = summary()
    counts = {"limit": 7000.0, "unit": "", "dense": 42474.0, "result": 6661.0, "label": "counted", "met": True}
    facts["budgets"]["params"] = counts
    text = shown(compress_view(facts, "run"))
    assert text.count("6.66 k") == 1
    assert text.count("macs (counted)") == 1


@pytest.mark.parametrize(
    ("scores", "line"),
    [
        ({}, None),
        ({"dense": 0.5}, ["score", "0.5000"]),
        ({"dense": 0.5, "pruned": 0.25}, ["score", "0.5000", "0.2500"]),
    ],
)
def test_scores_that_are_not_there_are_left_out(scores: dict[str, float], line: list[str] | None) -> None:
    lines = shown(compress_view(summary(scores=scores), "run")).splitlines()
    found = [cells(text) for text in lines if text.startswith("score")]
    assert found == ([] if line is None else [line])


def test_many_widths_are_cut_short_and_none_is_said() -> None:
    full = {f"layer{number}": 8 for number in range(15)}
    many = summary(widths=dict.fromkeys(full, 4), full_widths=full)
    text = " ".join(shown(compress_view(many, "run")).split())
    assert "layer11 4/8 and 3 more." in text
    assert "layer12" not in text
    assert "Widths: all as before." in shown(compress_view(summary(widths=full, full_widths=full), "run"))


def test_names_and_paths_are_no_markup() -> None:
    facts = summary(task="net[b]", note="see [red]this[/red]", widths={"a[i]": 3}, full_widths={"a[i]": 4})
    text = shown(compress_view(facts, "run[bold]"))
    for word in ("net[b] by ecc on", "see [red]this[/red]", "a[i] 3/4", "run[bold]:"):
        assert word in text
