"""The benchmark of energy models on random networks, on small networks and an analytic platform."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import unseen_networks as unseen
import unseen_table
from cells import problems
from torch import nn

from ecc.constants import BUNDLED_TASKS
from ecc.energy import fit
from ecc.measure import Profile
from ecc.zoo.image_task import seeded_images

METER = "platform:jetson-tx2,noise=0.02,seed=3"


def small(name: str) -> tuple[nn.Module, Any]:
    if name == "broken":
        raise TypeError("it needs | an option")
    width = 24 if name == "narrow" else 48
    layers = [nn.Conv2d(3, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3), nn.ReLU(), nn.Conv2d(width, 8, 3)]
    return nn.Sequential(*layers), seeded_images((3, 16, 16))


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    names = ["wide", "narrow", "broken"]
    monkeypatch.setitem(unseen.LIBRARIES, "zoo", unseen.Library(lambda: names, small, lambda: "tests 1.0"))
    out = tmp_path / "found.json"
    words = ["--out", str(out), "--networks", "zoo", "--meter", METER, "--samples", "30", "--held-out", "6"]

    def run(*more: str) -> Any:
        unseen.main([*words, "--batch", "4", *more])
        return json.loads(out.read_text(encoding="utf-8"))

    return run


def test_networks_are_drawn_by_their_seed_and_a_larger_draw_has_the_smaller_one() -> None:
    names = [f"net{number}" for number in range(80)]
    drawn = unseen.draw(names, 10, seed=0)
    assert len(set(drawn)) == 10
    assert drawn == unseen.draw(names[::-1], 10, seed=0) == unseen.draw(names, 20, seed=0)[:10]
    assert drawn != unseen.draw(names, 10, seed=1)
    assert drawn != names[:10]


def test_the_errors_are_those_of_a_model_that_has_not_seen_the_held_out_samples(record: Any, tmp_path: Path) -> None:
    found = record("--width-multiples", "any,8")
    assert sorted(found["draw"]["names"]) == ["broken", "narrow", "wide"]
    cells = {(cell["network"], cell["width_multiple"]): cell for cell in found["cells"]}
    assert len(cells) == 6
    assert cells["broken", "any"]["error"] == "TypeError: it needs | an option"  # and the others went on
    cell = cells["wide", "any"]
    made = Profile.load(tmp_path / cell["profile"])
    assert len(made.design_samples) == 36
    assert made.header.design.width_multiple is None
    model = fit(Profile(made.header, tuple(one for one in made.samples if one.index is None or one.index < 30)))
    held = [one for one in made.corrected() if one.index >= 30]
    errors = [abs(model.at(made.widths_by_group(one.widths)) / one.joules - 1) for one in held]
    assert (cell["samples"], cell["held_out"]["samples"]) == (30, 6)
    assert cell["held_out"]["mean"] == pytest.approx(sum(errors) / 6)
    assert cell["held_out"]["max"] == pytest.approx(max(errors))
    assert cell["cross_validated"] == pytest.approx(model.errors.mean)
    assert 0.002 < cell["cross_validated"] < 0.06  # the noise of the platform
    assert set(cell["seconds_of"]) == {"build", "trace", "profile", "fit"}
    eights = Profile.load(tmp_path / cells["wide", "8"]["profile"]).design_samples
    assert {width % 8 for one in eights for width in one.widths} == {0}


def test_a_network_of_the_zoo_is_drawn_and_modelled(tmp_path: Path) -> None:
    words = ["--networks", "zoo", "--count", "6", "--only", "network=digits", "--meter", "platform:eyeriss"]
    unseen.main(["--out", str(tmp_path / "found.json"), *words, "--samples", "24", "--held-out", "8", "--batch", "16"])
    found = json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))
    assert found["draw"] == {"library": "ecc.zoo", "of": 6, "seed": 0, "names": unseen.draw(BUNDLED_TASKS, 6, 0)}
    assert found["options"] == "the defaults of `ecc profile`, except samples, batch"
    (cell,) = found["cells"]
    assert problems(cell) == []
    assert cell["input_shape"] == [16, 1, 8, 8]
    assert cell["noise"] is None  # nothing is run
    assert 0 < max(cell["cross_validated"], cell["held_out"]["mean"]) < 0.03


def test_a_call_keeps_earlier_networks_and_resumes_or_restarts_their_profiles(record: Any, tmp_path: Path) -> None:
    first = record("--only", "network=narrow")
    assert [cell["network"] for cell in first["cells"]] == ["narrow"]
    kept = tmp_path / first["cells"][0]["profile"]
    before = kept.stat().st_mtime_ns
    made = Profile.load(kept)
    begun = tmp_path / "found.wide-any.state"
    made.save(begun)  # a profile of another network, as after an update
    second = record("--only", "network=narrow+wide")
    assert [cell["network"] for cell in second["cells"]] == ["narrow", "wide"]
    assert second["cells"][0] == first["cells"][0]
    assert kept.stat().st_mtime_ns == before
    assert second["cells"][1]["held_out"]["samples"] == 6
    assert not begun.exists()
    third = record("--only", "network=narrow", "--draw-seed", "1")  # another draw does not keep the cells of this one
    assert [cell["network"] for cell in third["cells"]] == ["narrow"]


def test_a_network_for_which_there_is_no_time_is_saved_and_continued(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = unseen.Deadline.after(1e6)
    left = iter([False] * 18)

    class Short:
        left = 1e6
        is_over = property(lambda self: next(left, True))

    monkeypatch.setattr(unseen.Deadline, "after", lambda seconds: Short())
    assert record("--only", "network=wide")["cells"] == []
    begun = Profile.load(tmp_path / "found.wide-any.state")
    assert 0 < len(begun.design_samples) < 36
    monkeypatch.setattr(unseen.Deadline, "after", lambda seconds: real)
    (cell,) = record("--only", "network=wide")["cells"]
    made = Profile.load(tmp_path / cell["profile"])
    assert len(made.design_samples) == 36
    assert made.samples[: len(begun.samples)] == begun.samples


def test_the_section_lists_every_network_and_whether_the_goal_is_met(
    record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unseen_table, "RESULTS", tmp_path / "nowhere")
    assert unseen_table.unseen_section() == ""
    assert unseen_table.unseen_goal()[2] is None
    found = record()
    good, other = (cell for cell in found["cells"] if "error" not in cell)
    good |= {"cross_validated": 0.0299, "held_out": {**good["held_out"], "mean": 0.03}, "noise": 0.004}
    other |= {"cross_validated": 0.01, "held_out": {**other["held_out"], "mean": 0.0301}, "noise": 0.005}
    text = unseen_table.section_of(found, "source")
    lines = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    assert "| 30 | 2.99% |" in lines[good["network"]]
    assert "| 3.00% ± " in lines[good["network"]]
    assert lines[good["network"]].endswith("| 0.40% | - | met |")
    assert "| 3.01% ± " in lines[other["network"]]
    assert lines[other["network"]].endswith("| 0.50% | - | **missed** |")
    assert lines["broken"].endswith("| failed: TypeError: it needs / an option |")
    assert "It is met for 1 of 3 networks; largest error 3.01%" in text
    assert text.endswith("source\n\n")
    goal, result, is_met, why = unseen_table.goal_of(found)
    assert goal.endswith("error at most 3% from 30 samples")
    assert result.startswith("1 of 3, any width")
    assert (is_met, why) == (
        False,
        "1 networks failed or were not measured; repeats of the dense network differ by at most 0.5%",
    )
    other["held_out"]["mean"] = 0.01
    assert not unseen_table.goal_of(found)[2]  # one failed
    found["draw"]["names"].remove("broken")
    assert unseen_table.goal_of(found)[2:] == (True, "")
    found["cells"].remove(good)
    assert not unseen_table.goal_of(found)[2]  # one is missing
    assert f"| {good['network']} | - | - | - | - | - | - | - | not measured |" in unseen_table.section_of(found, "")
