from __future__ import annotations

from pathlib import Path

import pytest
import write_results as script


def test_the_pages_of_results_are_what_the_files_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = script.page(), script.long_page()
    monkeypatch.setattr(script, "page", lambda: texts[0])  # rendered once
    monkeypatch.setattr(script, "long_page", lambda: texts[1])
    assert script.wrong() == []
    page = tmp_path / "page.md"
    page.write_text("of other days", encoding="utf-8")
    for name in ("PAGE", "LONG"):
        with monkeypatch.context() as patch:
            patch.setattr(script, name, page)
            assert script.wrong() == ["page.md"]


def test_the_goals_for_a_step_are_judged_by_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    ratios = {"a": 1.029, "b": 1.031, "c": 1.03, "d": 2.0}
    networks = {name: {"ratio_to_adam": {"ecc": ratio}} for name, ratio in ratios.items()}
    monkeypatch.setattr(script, "load", lambda name: {"device": "NVIDIA H200", "networks": networks})
    assert script.steps_verdict("step_time.json") == "1.03 on the GPU, missed by two of four networks"
