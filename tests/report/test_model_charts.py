from __future__ import annotations

from pathlib import Path

import pytest

from ecc.report.model_charts import learning, predictions
from ecc.report.page import page_facts
from report.folders import BATCH, energy_model, write_run


def test_predictions_are_those_of_profile_and_scales(tmp_path: Path) -> None:
    facts = page_facts(write_run(tmp_path / "run"))
    made = predictions(facts)
    assert made is not None
    assert made["title"] == "Predicted against estimated"
    _, profile, weighed = (layer["data"]["values"] for layer in made["spec"]["layer"])
    values = [value / BATCH * 1e6 for value, _ in energy_model().quality.held_out]
    assert [row["value"] for row in profile] == pytest.approx(values)
    assert [row["error"] for row in weighed] == pytest.approx([0.1, 0.1])


def test_without_a_model_only_the_scales_speak(tmp_path: Path) -> None:
    facts = page_facts(write_run(tmp_path / "run", model=False))
    made = predictions(facts)
    assert made is not None
    assert len(made["spec"]["layer"]) == 2  # the diagonal, and the run's own
    assert learning(facts) is None
    facts["cells"][0]["weighings"] = []
    assert predictions(facts) is None


def test_the_learning_curve_and_the_noise(tmp_path: Path) -> None:
    facts = page_facts(write_run(tmp_path / "run"))
    made = learning(facts)
    assert made is not None
    line, _ = made["spec"]["layer"]
    assert [(row["rows"], row["error"]) for row in line["data"]["values"]] == list(
        energy_model().quality.learning_curve
    )
    facts["model"]["noise"] = 0.01
    made = learning(facts)
    assert made is not None
    assert made["spec"]["layer"][-1]["data"]["values"][0]["text"] == "noise of one measurement"
