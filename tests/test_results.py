from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_pages_of_results_are_what_the_files_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "write_results.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["PAGE", "LONG"])
def test_a_page_that_is_not_what_the_files_say_is_caught(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("write_results")
    page = tmp_path / "page.md"
    page.write_text("of other days", encoding="utf-8")
    monkeypatch.setattr(script, name, page)
    assert script.wrong() == ["page.md"]


def test_the_goals_for_a_step_are_judged_by_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("write_results")
    ratios = {"a": 1.029, "b": 1.031, "c": 1.03, "d": 2.0}
    networks = {name: {"ratio_to_adam": {"ecc": ratio}} for name, ratio in ratios.items()}
    monkeypatch.setattr(script, "load", lambda name: {"device": "NVIDIA H200", "networks": networks})
    assert script.steps_verdict("step_time.json") == "1.03 on the GPU, missed by two of four networks"
