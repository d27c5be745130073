from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ecc.energy.ablation import run_ablation
from ecc.errors import BadFile
from ecc.measure import Profile
from ecc.report.fit_figures import draw_fit, draw_paper

H200 = Path(__file__).resolve().parent.parent.parent / "profiles" / "h200"


@cache
def found() -> dict[str, Any]:
    return run_ablation(Profile.load(H200 / "mobilenet_v1-b1.profile.gz").head(60), iterations=200)


def test_figures_are_drawn_with_their_labels(tmp_path: Path) -> None:
    drawn = draw_fit(found(), "MobileNet v1", tmp_path / "figures", "mobile")
    assert [path.name for path in drawn] == ["mobile-prediction.svg", "mobile-paper.svg"]
    for path in drawn:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("<?xml")
        assert len(text) > 10_000
    again = draw_fit(found(), "MobileNet v1", tmp_path / "again", "mobile")
    assert [path.read_bytes() for path in again] == [path.read_bytes() for path in drawn]


def test_without_the_papers_fit_its_figure_is_left_out(tmp_path: Path) -> None:
    drawn = draw_fit({**found(), "paper": {}}, "MobileNet v1", tmp_path, "mobile")
    assert [path.name for path in drawn] == ["mobile-prediction.svg"]


def test_several_profiles_share_the_papers_figure(tmp_path: Path) -> None:
    path = draw_paper([("one", found()), ("two", found())], tmp_path / "paper.svg")
    assert path.stat().st_size > 10_000


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadFile, match="cannot write to"):
        draw_fit(found(), "x", tmp_path / "file" / "inside", "x")


def test_without_matplotlib_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data, real = found(), importlib.import_module

    def missing(name: str, *rest: Any) -> Any:
        if name == "matplotlib":
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(BadFile, match=r"pip install matplotlib"):
        draw_fit(data, "x", tmp_path, "x")
