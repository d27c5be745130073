from __future__ import annotations

import json
from pathlib import Path

import pytest

from ecc.energy import fit
from ecc.energy.ablation import run_ablation
from ecc.measure import Profile

H200 = Path(__file__).resolve().parent.parent.parent / "profiles" / "h200"


@pytest.mark.thorough
def test_a_study_says_what_the_fit_says() -> None:
    profile = Profile.load(H200 / "mobilenet_v1-b1.profile.gz").head(60)
    found = run_ablation(profile, iterations=200)
    assert json.loads(json.dumps(found)) == found
    quality = fit(profile).quality
    for name, family in found["families"].items():
        assert family["mean"] == quality["families"][name]["mean"]
        assert len(family["errors"]) == found["rows"] == len(found["values"]) == len(found["mean_share"])
        assert family["mean"] == pytest.approx(sum(map(abs, family["errors"])) / found["rows"], abs=1e-6)
        assert [size for size, _ in family["learning_curve"]] == [15, 20, 30, 40]
    assert list(found["paper"]) == ["0", "1", "2", "3"]
    assert [iteration for iteration, _ in found["paper"]["0"]] == [100, 200]
    assert (found["label"], found["device"], found["batch"]) == ("measured", "NVIDIA H200", 1)


def test_the_papers_figures_can_be_left_out() -> None:
    profile = Profile.load(H200 / "mobilenet_v1-b1.profile.gz").head(30)
    assert run_ablation(profile, resource="latency", iterations=0)["paper"] == {}
