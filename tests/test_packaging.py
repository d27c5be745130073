"""What is shipped: the wheel and the source, and the licences of what they need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both, built from a copy: nothing is left in the tree."""
    pytest.importorskip("hatchling")
    copy = tmp_path_factory.mktemp("source")
    for name in ("src", "tests"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file() and not file.is_symlink() and file.name != ".git":
            shutil.copy(file, copy)
    for name in ("results", "profiles", "data"):  # what must stay behind is there to be taken
        (copy / name).mkdir()
        (copy / name / "bulk.json").write_text("{}")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel", "-d", "out"],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": ""},
        check=True,
        capture_output=True,
    )
    return copy / "out"


@pytest.mark.slow
def test_the_wheel_holds_the_package_its_types_and_its_licence_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        (facts,) = [name for name in names if name.endswith("METADATA")]
        metadata = file.read(facts).decode()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"ecc", facts.split("/")[0]}
    assert "ecc/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "License-Expression: Apache-2.0" in metadata
    sources = {f"ecc/{path.relative_to(ROOT / 'src' / 'ecc')}" for path in (ROOT / "src" / "ecc").rglob("*.py")}
    assert sources <= set(names)
    assert not [name for name in names if "test" in name or name.endswith((".json", ".profile.gz", ".pyc"))]


@pytest.mark.slow
def test_the_source_holds_what_builds_and_tests_it_and_no_results(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as file:
        names = [name.partition("/")[2] for name in file.getnames()]
    assert {"LICENSE", "README.md", "pyproject.toml", "src/ecc/py.typed", "tests/test_packaging.py"} <= set(names)
    tops = {name.split("/")[0] for name in names}
    assert not tops & {"results", "profiles", "data", "benchmarks", ".git"}
    assert not [name for name in names if name.startswith("/") or ".." in name or name.endswith(".pyc")]


def test_every_licence_that_is_needed_fits_ours() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "licences.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
