from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ecc.errors import BadFile
from ecc.report.cell import cell_facts, is_run
from methods.jobs import digits_job
from report.folders import energy_model, write_run


def test_the_facts_are_those_of_the_files(tmp_path: Path) -> None:
    cell = cell_facts(write_run(tmp_path / "run"))
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (cell["status"], cell["method"], cell["seed"], cell["what"]) == ("finished", "ecc", 0, "channels")
    rows = {row["resource"]: row for row in cell["resources"]}
    assert list(rows) == ["energy", "latency", "macs", "parameters"]
    energy = summary["budgets"]["energy"]
    assert {key: rows["energy"][key] for key in ("dense", "result", "limit", "met", "label")} == {
        key: energy[key] for key in ("dense", "result", "limit", "met", "label")
    }
    assert (rows["macs"]["label"], rows["latency"]["unit"], rows["latency"]["limit"]) == ("counted", "s", None)
    assert cell["scores"] == {"dense": 0.98, "before": 0.95 - 0.1, "after": 0.95}
    assert {row["group"]: row["kept"] for row in cell["widths"]} == summary["widths"]
    assert cell["missing"] == {}


def test_layers_add_up_to_what_the_model_predicts(tmp_path: Path) -> None:
    cell = cell_facts(write_run(tmp_path / "run"))
    model = energy_model()
    widths = {row["group"]: row["kept"] for row in cell["widths"]}
    assert sum(row["dense"] for row in cell["layers"]) == pytest.approx(model.dense)
    assert sum(row["result"] for row in cell["layers"]) == pytest.approx(model.at(widths))
    assert cell["layers"][-1]["layer"] == "(outside any layer)"
    assert cell["model"]["learning_curve"] == model.quality["learning_curve"]
    assert len(cell["model"]["held_out"]) == model.quality["rows"]


def test_time_is_in_batches_and_phases_follow_each_other(tmp_path: Path) -> None:
    cell = cell_facts(write_run(tmp_path / "run"))
    assert cell["phases"] == [
        {"phase": "pretrain", "start": 0.0, "end": 20.0},
        {"phase": "prune", "start": 20.0, "end": 60.0},
        {"phase": "finetune", "start": 60.0, "end": 70.0},
    ]
    assert [row["batches"] for row in cell["descent"]] == [20, 30, 35, 40, 50, 60]
    assert cell["descent"][0]["spent"] == energy_model().dense
    assert [row["batches"] for row in cell["duals"]] == [30, 40, 50, 60]
    assert [row["error"] for row in cell["weighings"]] == pytest.approx([0.1, 0.1])


def test_a_rival_solves_without_a_loss(tmp_path: Path) -> None:
    cell = cell_facts(write_run(tmp_path / "run", method="uniform"))
    assert [phase["phase"] for phase in cell["phases"]] == ["dense", "solve", "tune"]
    assert (cell["method"], cell["descent"], len(cell["weighings"])) == ("uniform", [], 2)


def test_a_run_at_work_tells_where_it_is(tmp_path: Path) -> None:
    cell = cell_facts(write_run(tmp_path / "run", finished=False))
    assert (cell["status"], cell["met"], cell["now"]) == ("running", None, {"phase": "prune", "step": 40})
    (row,) = cell["resources"]
    assert (row["label"], row["dense"]) == ("predicted", energy_model().dense)
    assert cell["widths"][0]["full"] == energy_model().full_widths[0]
    (tmp_path / "run" / "history.jsonl").write_text("")
    assert cell_facts(tmp_path / "run")["now"] is None


def test_an_older_folder_says_what_it_lacks(tmp_path: Path) -> None:
    cell = cell_facts(write_run(tmp_path / "run", model=False, command=False))
    assert set(cell["missing"]) == {"layers", "model", "command"}
    assert (cell["layers"], cell["model"]) == ([], None)
    (tmp_path / "run" / "environment.json").unlink()
    assert "environment" in cell_facts(tmp_path / "run")["missing"]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("summary.json", "{"),
        ("summary.json", '{"budgets": 3}'),
        ("summary.json", '{"budgets": {"energy": {"unit": "J", "dense": null}}}'),
        ("history.jsonl", "nonsense\n{}\n"),
        ("history.jsonl", '{"phase": "prune", "step": "x", "loss": 1, "lineage": 2}\n'),
        ("history.jsonl", '{"phase": "cost_check", "step": 1, "weighed": 3}\n'),
        ("config.json", '{"config": {"verb": "compress"}}'),
        ("config.json", '{"config": {"verb": "dense"}}'),
        ("environment.json", '{"sessions": 3}'),
        ("energy.json", "{}"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str, data: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(data)
    with pytest.raises(BadFile, match=name.replace(".", r"\.")) as error:
        cell_facts(folder)
    assert "\n" not in str(error.value)


def test_another_folder_is_no_run(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(BadFile, match="holds no run"):
        cell_facts(tmp_path)


def test_single_weights_are_priced_by_the_summary(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", model=False)
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    config["config"] |= {"granularity": "weight", "energy": {}}
    (folder / "config.json").write_text(json.dumps(config))
    summary = json.loads((folder / "summary.json").read_text())
    summary |= {
        "weights": {"a.weight": 10},
        "nonzeros": {"a.weight": 4},
        "coefficients": {"a.weight": 0.5},
        "base": 1.0,
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    cell = cell_facts(folder)
    assert cell["layers"][0] == {"layer": "a", "dense": 5.0, "result": 2.0}
    assert (cell["what"], cell["model"]) == ("weights", None)


@pytest.mark.slow
def test_a_real_run_has_all_of_it(tmp_path: Path) -> None:
    job = digits_job("50%")
    result = job.run(tmp_path / "run")
    cell = cell_facts(tmp_path / "run")
    assert cell["missing"] == {}
    assert {row["group"]: row["kept"] for row in cell["widths"]} == result.widths
    assert cell["resources"][0]["result"] == result.summary["budgets"]["energy"]["result"]
    assert cell["descent"]
    assert cell["width_duals"]
    assert cell["sessions"][0]["command"]
