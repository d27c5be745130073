"""`ecc fit`, run as a user runs it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from ecc.cli.app import app
from ecc.energy import EnergyModel
from ecc.measure import Profile

PROFILE = Path(__file__).resolve().parent.parent.parent / "profiles" / "h200" / "mobilenet_v1-b1.profile.gz"


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["fit", *words])
    return result.exit_code, result.output


@pytest.mark.thorough  # the help's own example fits as well
def test_a_profile_is_fitted_and_the_model_written(tmp_path: Path) -> None:
    code, text = run(str(PROFILE), "-o", str(tmp_path / "energy.json"), "--budget", "5%")
    assert code == 0
    assert "<- chosen" in text
    assert "is below" in text  # the budget
    model = EnergyModel.load(tmp_path / "energy.json")
    assert model.origin.meter.device == "NVIDIA H200"
    assert json.loads((tmp_path / "energy.json").read_text())["label"] == "measured"


def test_facts_for_programs(tmp_path: Path) -> None:
    code, text = run(str(PROFILE), "--json", "--resource", "latency", "--family", "bilinear")
    assert code == 0
    facts = json.loads(text)
    assert (facts["resource"], facts["kind"]) == ("latency", "bilinear")


def test_a_refused_profile_names_the_option_that_accepts_it(tmp_path: Path) -> None:
    whole = Profile.load(PROFILE)
    references = [row for row in whole.samples if row.is_reference]
    dearer = {id(row): replace(row, joules=1.2 * row.joules) for row in references[::2]}
    Profile(whole.header, tuple(dearer.get(id(row), row) for row in whole.samples)).save(tmp_path / "a.profile")
    code, text = run(str(tmp_path / "a.profile"))
    assert code == 2
    said = " ".join(text.split())
    assert "the joules of the dense reference varied by" in said
    assert "ecc profile --window 2, window_seconds=2" in said
    assert "ecc fit --allow-drift (allow_drift=True)" in said


@pytest.mark.thorough  # the help's own example draws them as well
def test_figures_and_their_data_are_written(tmp_path: Path) -> None:
    code, text = run(str(PROFILE), "--figures", str(tmp_path / "figures"))
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [
        "mobilenet_v1-b1-fit.json",
        "mobilenet_v1-b1-prediction.svg",
    ]
    assert "wrote" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["missing.profile"], "cannot read missing.profile"),
        ([str(PROFILE), "--family", "magic"], "there is no family 'magic' of models; there are auto, bilinear"),
        ([str(PROFILE), "--resource", "money"], "a profile knows nothing of 'money'; it knows energy and latency"),
        ([str(PROFILE), "--budget", "sixty"], "budget 'sixty' starts with no number"),
        ([str(PROFILE), "--budget", "-5%"], "is not above 0"),
        ([str(PROFILE), "--budget", "5 kg"], "has the unit 'kg'"),
        ([str(PROFILE), "-o", "/no/such/folder/e.json"], "cannot write"),
        ([__file__], "is not"),
        ([str(PROFILE), "--paper", "100"], "--paper 100 is a number of iterations to draw"),
        ([str(PROFILE), "--paper", "-1", "--figures", "figures"], "give at least 1, and --figures FOLDER"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(words: list[str], message: str) -> None:
    code, text = run(*words)
    assert code == 2
    assert message in " ".join(text.split())
    assert "Traceback" not in text


def test_figures_of_two_resources_and_files_of_others_stay(tmp_path: Path) -> None:
    folder = tmp_path / "figures"
    folder.mkdir()
    mine = folder / "mobilenet_v1-b1-latency-fit.json"
    mine.write_text('{"precious": 1}')
    code, text = run(str(PROFILE), "--resource", "latency", "--figures", str(folder))
    assert code == 2
    assert "is there and is no data of a fit" in " ".join(text.split())
    assert mine.read_text() == '{"precious": 1}'


def test_a_model_in_place_of_a_profile_is_told(tmp_path: Path) -> None:
    file = tmp_path / "energy.json"
    file.write_text('{\n "format": "ecc energy model, version 1"\n}')
    code, text = run(str(file))
    assert code == 2
    assert "is no profile, but another JSON file; give one that `ecc profile` wrote." in " ".join(text.split())
