"""Wrong input: one message, exit code 2, no traceback, and no file is changed."""

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


@pytest.mark.parametrize("name", TABLE)
def test_wrong_input_is_one_message_and_exit_code_2(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(folder)
    words, part = TABLE[name]
    before = contents(folder)
    result = CliRunner().invoke(app, shlex.split(words.replace("-o new", f"-o {tmp_path}/new")), prog_name="ecc")
    assert result.exception is None or isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2, result.output
    message = result.stderr[result.stderr.index("error: ") :]
    assert part in message
    assert message.count("error: ") == 1
    assert len(message) < 1000
    assert "Traceback" not in result.output
    assert contents(folder) == before
