"""A folder as a user has it: a file with tasks, profiles, energy models, and some files that are none."""

from __future__ import annotations

import gzip
import shutil
from pathlib import Path

from typer.testing import CliRunner

from ecc.cli import app
from faults.tasks import NET
from methods.jobs import digits_model, digits_profile


def filled(folder: Path) -> Path:
    """The folder with everything that `invocations.TABLE` names."""
    net = folder / "net.py"
    net.write_text(NET)
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "binary.py").write_bytes(b"\xff\xfe\x00def")
    (folder / "folder.py").mkdir()
    (folder / "empty").write_text("")
    for name, words in {"net": "--shard 1/2", "net2": "--shard 2/2"}.items():
        run(
            "profile",
            f"{net}:task",
            "--batch",
            "256",
            "--meter",
            "platform:jetson-tx2",
            *words.split(),
            "--rows",
            "40",
            "-o",
            f"{folder / name}.profile",
        )
    run("fit", f"{folder / 'net.profile'}", "-o", f"{folder / 'net.json'}")
    digits_profile().save(folder / "digits.profile")
    digits_model().save(folder / "digits.json")
    digits_model().save(folder / "energy.json")
    text = (folder / "digits.profile").read_text()
    (folder / "header.profile").write_text(text.splitlines(keepends=True)[0])
    (folder / "torn.profile.gz").write_bytes(gzip.compress(text.encode())[:-20])
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return folder


def run(*words: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
