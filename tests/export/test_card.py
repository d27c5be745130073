"""The model card says what the run wrote down, and lets no string of a user end a table, a heading or the front."""

from __future__ import annotations

import json

import yaml

from ecc.export.card import escaped, model_card
from export.runs import small_task, summary_of

CONFIG = {"task": "small", "budgets": ["50%"], "network": "abc", "settings": {"steps": 10}}


def front_of(card: str) -> dict[str, object]:
    _, front, _ = card.split("---\n", 2)
    found: dict[str, object] = yaml.safe_load(front)
    return found


def test_the_card_has_joules_scores_budget_device_and_licence() -> None:
    card = model_card(summary_of(small_task()), CONFIG, licence="apache-2.0")
    assert front_of(card)["license"] == "apache-2.0"
    assert "energy" in front_of(card)["tags"]  # type: ignore[operator]
    assert "| energy (estimated) | 1 J | 0.49 J | 0.5 J | met |" in card
    assert "| score | 0.9000 | 0.8750 |  |  |" in card
    assert "meets its budget on NVIDIA Jetson TX2; energy is **estimated**" in card
    assert "batch of 2" in card
    assert 'ecc.load_slim(YourNetwork(), "slim.safetensors")' in card
    assert '"steps": 10' in card
    assert "abc" not in card


def test_a_budget_that_is_not_met_is_not_hidden() -> None:
    summary = summary_of(small_task(), met=False, note="the solve ended early")
    summary["budgets"]["energy"]["met"] = False
    card = model_card(summary, CONFIG)
    assert "does NOT meet its budget" in card
    assert "| NOT met |" in card
    assert "Note: the solve ended early" in card
    assert front_of(card)["license"] == "unknown"


def test_single_weights_say_what_the_estimate_assumes() -> None:
    summary = {"granularity": "weight", "task": "t", "assumes": "zeros cost nothing", "budgets": {}, "scores": {}}
    card = model_card(summary, {})
    assert "The estimate assumes: zeros cost nothing." in card
    assert '"sparse.safetensors"' in card


def test_strings_of_users_stay_text() -> None:
    evil = "a | b\n---\n# <script>alert(1)</script> [x](javascript:y) `c`"
    summary = summary_of(small_task(name=evil), device=evil, note=evil)
    card = model_card(summary, {"task": evil + "\n```"}, licence='x"\ntags: [evil]\n---')
    front = front_of(card)
    assert front["license"] == 'x"\ntags: [evil]\n---'
    assert front["tags"] == ["pruning", "model-compression", "energy", "ecc"]
    lines = card.splitlines()
    assert [line for line in lines if line.startswith("#")] == [
        f"# {escaped(evil)}, compressed by ecc",
        "## How to load",
        "## How it was made",
    ]
    assert lines.count("---") == 2
    assert "<script>" not in "\n".join(line for line in lines if not line.startswith("    "))
    shown = card.split("was asked for:\n\n")[1]
    assert all(line.startswith("    ") for line in shown.splitlines())
    assert json.loads(shown)["task"] == evil + "\n```"


def test_escaping_is_on_one_line() -> None:
    assert escaped("a\n\tb|c*d_e") == r"a b\|c\*d\_e"
