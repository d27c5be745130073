"""`ecc report`, run as a user runs it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner

from ecc.cli.app import app
from report.folders import write_grid, write_run


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["report", *words])
    return result.exit_code, result.output


@pytest.mark.slow
def test_a_page_and_figures_from_a_folder(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    code, text = run(str(write_run(tmp_path / "run")), "-o", str(page), "--figures", str(tmp_path / "figures"))
    assert code == 0
    assert text.splitlines()[0] == str(page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert str(tmp_path / "figures" / "widths.svg") in text
    code, _ = run(str(write_grid(tmp_path / "runs")), "-o", str(page))
    assert code == 0
    assert "3 methods at 2 budgets" in page.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-o", "a.html"], "holds neither a run nor a grid"),
        ([], "nothing to do: say where the page goes"),
        (["--port", "80", "-o", "a.html"], "--port 80 is where --live serves the page"),
        (["--live", "-o", "a.html"], "--live serves the page and writes nothing"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path: Path, words: list[str], said: str) -> None:
    code, text = run(str(tmp_path), *words)
    assert code == 2
    assert said in text
    assert len(text.strip().splitlines()) == 1
    assert not (tmp_path / "a.html").exists()


def test_a_folder_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ecc.report.html._library", lambda: "0")
    code, text = run(str(write_run(tmp_path / "run")), "-o", str(tmp_path / "no" / "report.html"))
    assert (code, "cannot write" in text) == (2, True)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no SIGINT for one process")
def test_live_prints_where_to_look_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False)
    words = [sys.executable, "-m", "ecc", "report", "--live", str(folder), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            url = process.stdout.readline().split()[0]
            with urlopen(url, timeout=30) as answer:
                assert b"not finished" in answer.read()
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=30)
        finally:
            process.kill()  # or it would be waited for without end
    assert (process.returncode, errors) == (0, "")
