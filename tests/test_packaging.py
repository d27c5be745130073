"""What is shipped: the wheel and the source, and the licences of what they need."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import ecc
from report.folders import write_run

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
    build(copy, "sdist", "wheel")
    return copy / "out"


def build(source: Path, *targets: str) -> None:
    words = [word for target in targets for word in ("-t", target)]
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", *words, "-d", "out"],
        cwd=source,
        env={**os.environ, "PYTHONPATH": ""},
        check=True,
        capture_output=True,
    )


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


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as file:
        return {name: file.read(name) for name in file.namelist()}


@pytest.mark.slow
def test_the_source_alone_builds_the_same_wheel(built: Path, tmp_path: Path) -> None:
    (sdist,), (wheel,) = built.glob("*.tar.gz"), built.glob("*.whl")
    shutil.unpack_archive(sdist, tmp_path)
    (source,) = tmp_path.iterdir()
    build(source, "wheel")
    (again,) = (source / "out").glob("*.whl")
    assert contents(again) == contents(wheel)


@pytest.mark.thorough
def test_the_wheel_works_in_an_environment_of_its_own_and_brings_its_data(built: Path, tmp_path: Path) -> None:
    """Installed by pip into a fresh environment, which sees the packages of this one, but not our source."""
    (wheel,) = built.glob("*.whl")
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=os.name == "posix")
    scripts = environment / ("bin" if os.name == "posix" else "Scripts")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(scripts / "python")]
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True)
    place = sysconfig.get_path("purelib", "venv", {"base": str(environment), "platbase": str(environment)})
    shared = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (Path(place) / "shared.pth").write_text("\n".join(shared))  # their own .pth files, one of which is ours, do nothing
    write_run(tmp_path / "run")

    def run(*words: str) -> str:
        clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        done = subprocess.run([*words], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run(str(scripts / "ecc"), "--version") == f"ecc {ecc.__version__}\n"
    pytest.importorskip("vl_convert")
    code = (  # one process: torch takes long to import
        "import ecc; from ecc.cli.app import app; print(ecc.__file__)\n"
        "for words in (['inspect', 'digits', '--no-verify'], ['report', 'run', '-o', 'page.html']):\n"
        "    try:\n        app(words)\n    except SystemExit as end:\n        assert not end.code\n"
    )
    said = run(str(scripts / "python"), "-c", code)
    assert Path(said.splitlines()[0]).is_relative_to(environment)
    assert "groups are prunable" in said
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for asset in ("page.css", "page.js"):  # the package's data
        assert (ROOT / "src" / "ecc" / "report" / "templates" / asset).read_text(encoding="utf-8").strip() in page


# ---------------------------------------------------------------- what it needs


def requirements() -> list[Requirement]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, Any] = tomllib.load(file)["project"]
    texts = [*project["dependencies"], *(text for extra in project["optional-dependencies"].values() for text in extra)]
    return [Requirement(text) for text in texts]


def lower_bound(requirement: Requirement) -> str:
    """The one that `>=` names: the oldest version that there is, as `make oldest` installs it."""
    (bound,) = [one.version for one in requirement.specifier if one.operator == ">="]
    return bound


def test_the_oldest_environment_has_the_lower_bound_of_everything() -> None:
    """But for torch, whose builds are not at hand for everyone, and tomli, which only Python 3.10 has."""
    lines = (ROOT / "constraints-oldest.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    bounds = {one.name: lower_bound(one) for one in requirements() if one.name not in ("torch", "tomli")}
    assert pins == bounds
    assert list(pins) == sorted(pins)


def test_a_package_that_is_named_twice_has_one_lower_bound() -> None:
    bounds: dict[str, set[str]] = {}
    for one in requirements():
        bounds.setdefault(one.name, set()).add(lower_bound(one))
    assert {name: found for name, found in bounds.items() if len(found) > 1} == {}


def test_the_torch_that_is_installed_for_tests_is_one_that_is_allowed() -> None:
    found = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    (torch,) = [one for one in requirements() if one.name == "torch"]
    assert found is not None
    assert torch.specifier.contains(found[1])


def test_every_licence_that_is_needed_fits_ours() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "licences.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
