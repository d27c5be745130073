"""Whatever is typed wrongly, one line says so: exit code 2, no traceback, and nothing is changed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from ecc.cli.app import app
from faults.folder import filled
from faults.invocations import TABLE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled(tmp_path_factory.mktemp("invocations"))


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"}


def test_there_are_many() -> None:
    assert len(TABLE) >= 150


@pytest.mark.parametrize("name", TABLE)
def test_a_wrong_invocation_is_one_line_and_exit_code_2(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    words, part = TABLE[name]
    before = contents(folder)
    result = CliRunner().invoke(app, shlex.split(words.replace("-o new", f"-o {tmp_path}/new")))
    lines = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert len(lines) == 1, result.output
    assert result.stderr.splitlines()[-1] == lines[0]
    assert part in lines[0], lines[0]
    assert contents(folder) == before
