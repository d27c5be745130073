"""House rules no reader can check by eye: one-way imports, mirrored tests, no pickle, short files."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# A room may import itself and what stands before it. Rooms that are not built yet are simply absent.
ORDER = (
    "constants",
    "errors",
    "formatting",
    "io",
    "records",
    "options",
    "run_records",
    "torch_utils",
    "task",
    "graph",
    "measure",
    "energy",
    "training",
    "methods",
    "zoo",
    "export",
    "integrations",
    "report",
    "cli",
)
BARRED = {"report": {"methods", "training"}}  # it draws from files, so it must run where nothing can train
FACADE = "__init__"  # `import ecc` reaches every room, so inside the package only the last room may do it
UNMIRRORED = {"__init__.py", "__main__.py"}
MAX_LINES = 400
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
TORCH_LOADS = {"torch.load", "torch.serialization.load"}


# ---------------------------------------------------------------- reading a source tree


def sources(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def room_of(file: Path, package: Path) -> str:
    return file.relative_to(package).parts[0].removesuffix(".py")


def imported_names(tree: ast.AST, package_parts: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """Yields (line, absolute dotted name) for every import, also inside functions and TYPE_CHECKING blocks.

    Args:
        tree: The parsed file.
        package_parts: The package the file lies in, e.g. ("ecc", "graph"); relative imports start there.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = package_parts[: len(package_parts) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, f"{stem}.{alias.name}"
        elif isinstance(node, ast.Call) and (name := imported_by_call(node)):
            yield node.lineno, name


def imported_by_call(call: ast.Call) -> str | None:
    """The literal name in importlib.import_module("name") or __import__("name")."""
    function = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    first = call.args[0] if call.args else None
    if function not in {"import_module", "__import__"} or not isinstance(first, ast.Constant):
        return None
    return str(first.value)


def parsed(package: Path) -> Iterator[tuple[Path, ast.AST, list[tuple[int, str]]]]:
    for file in sources(package):
        tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
        parts = (package.name, *file.relative_to(package).parts[:-1])
        yield file, tree, list(imported_names(tree, parts))


# ---------------------------------------------------------------- the rules: each returns its complaints


def upward_imports(package: Path) -> list[str]:
    complaints = []
    for file, _, imports in parsed(package):
        here = room_of(file, package)
        if here in {FACADE, "__main__"}:
            continue
        if here not in ORDER:
            complaints.append(f"{file}: room {here!r} has no place in the import order")
            continue
        for line, name in imports:
            there = target_room(name, package)
            if there is None or there == here:
                continue
            if there == FACADE:
                upward = here != ORDER[-1]
            else:
                upward = there not in ORDER or ORDER.index(there) > ORDER.index(here)
            if upward or there in BARRED.get(here, ()):
                complaints.append(f"{file}:{line}: {here} must not import {name}")
    return complaints


def target_room(name: str, package: Path) -> str | None:
    """The room a dotted name lies in; FACADE for names of the package itself; None for other packages."""
    top, *rest = name.split(".")
    if top != package.name or rest == ["__version__"]:
        return None
    is_room = rest and ((package / rest[0]).is_dir() or (package / f"{rest[0]}.py").is_file())
    return rest[0] if is_room or (rest and rest[0] in ORDER) else FACADE


def untested_sources(package: Path, tests: Path) -> list[str]:
    complaints = []
    for file in sources(package):
        if file.name in UNMIRRORED:
            continue
        mirror = tests / file.relative_to(package).parent / f"test_{file.name.lstrip('_')}"
        if not mirror.is_file():
            complaints.append(f"{file}: its test {mirror} does not exist")
    return complaints


def pickles(package: Path) -> list[str]:
    """Files that could run code hidden in data: pickle and its kin, or torch.load beyond weights."""
    complaints = []
    for file, tree, imports in parsed(package):
        complaints += [
            f"{file}:{line}: imports {name}"
            for line, name in imports
            if name.split(".")[0] in PICKLES or name in TORCH_LOADS  # only `torch.load` is seen below
        ]
        aliases = import_aliases(tree)
        safe = {
            node.func
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and has_keyword(node, "weights_only", value=True)
        }
        for node in ast.walk(tree):
            # Any mention but a safe call is refused: partial(torch.load) loads as well as torch.load() does.
            if isinstance(node, ast.Name | ast.Attribute) and node not in safe:
                if dotted_name(node, aliases) in TORCH_LOADS:
                    complaints.append(f"{file}:{node.lineno}: torch.load without weights_only=True")
            elif isinstance(node, ast.Call) and has_keyword(node, "allow_pickle", value=True):
                complaints.append(f"{file}:{node.lineno}: allow_pickle=True")
    return complaints


def has_keyword(call: ast.Call, name: str, *, value: object) -> bool:
    return any(
        word.arg == name and isinstance(word.value, ast.Constant) and word.value.value is value
        for word in call.keywords
    )


def import_aliases(tree: ast.AST) -> dict[str, str]:
    """Maps a name in the file to what it was imported as: `import torch as t` gives {"t": "torch"}."""
    return {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }


def dotted_name(node: ast.expr, aliases: dict[str, str]) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value, aliases)}.{node.attr}"
    return aliases.get(node.id, node.id) if isinstance(node, ast.Name) else "?"


def long_files(package: Path) -> list[str]:
    counts = {file: len(file.read_text(encoding="utf-8").splitlines()) for file in sources(package)}
    return [
        f"{file}: {count} lines, at most {MAX_LINES}: look for the second idea inside"
        for file, count in counts.items()
        if count > MAX_LINES
    ]


# ---------------------------------------------------------------- the house itself

PACKAGE = ROOT / "src" / "ecc"


def test_the_package_is_where_this_test_looks() -> None:
    assert (PACKAGE / "__init__.py").is_file()


def test_imports_go_one_way() -> None:
    assert upward_imports(PACKAGE) == []


def test_every_source_file_has_its_test() -> None:
    assert untested_sources(PACKAGE, ROOT / "tests") == []


def test_nothing_unpickles() -> None:
    assert pickles(PACKAGE) == []


def test_files_stay_short() -> None:
    assert long_files(PACKAGE) == []


def test_the_tests_stay_short() -> None:
    assert long_files(ROOT / "tests") == []


# ---------------------------------------------------------------- the rules catch what is planted

Plant = Callable[[str, str], Path]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A small house that keeps every rule."""
    files = {
        "__init__.py": "from ecc.graph.trace import trace\nfrom ecc.cli import main\n__version__ = '0'\n",
        "__main__.py": "from ecc.cli import main\n",
        "errors.py": "class EccError(Exception): ...\n",
        "graph/__init__.py": "from .trace import trace\n",
        "graph/trace.py": "import torch\nfrom ecc.errors import EccError\nfrom ._labels import labels\n",
        "graph/_labels.py": "from .. import errors\n",
        "report/page.py": "import ecc.graph.trace\n",
        "cli.py": "import ecc\nfrom ecc import __version__\nfrom . import graph\n",
    }
    for name, text in files.items():
        plant_in(tmp_path / "ecc", name, text)
    return tmp_path / "ecc"


@pytest.fixture
def plant(package: Path) -> Plant:
    return lambda name, text: plant_in(package, name, text)


def plant_in(package: Path, name: str, text: str) -> Path:
    file = package / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_a_good_house_has_no_complaints(package: Path) -> None:
    assert upward_imports(package) == []
    assert pickles(package) == []
    assert long_files(package) == []


@pytest.mark.parametrize(
    "text",
    [
        "from ecc.report import page",
        "import ecc.report.page",
        "import ecc.report.page as page",
        "from ..report.page import draw",
        "from ..report import page",
        "from .. import report",
        "from ecc import report",
        "import importlib\nimportlib.import_module('ecc.report')",
        "def late():\n    from ecc.report import page",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ecc.report import page",
        "from ecc import zoo",  # a room that is not there yet
        "import ecc",
        "from ecc import trace_channels",
        "from .. import trace_channels",
    ],
)
def test_an_upward_import_is_caught(package: Path, plant: Plant, text: str) -> None:
    file = plant("graph/planted.py", text)
    (complaint,) = upward_imports(package)
    assert complaint.startswith(f"{file}:{len(text.splitlines())}: graph must not import ecc")


def test_relative_imports_count_from_the_folder_they_stand_in(package: Path, plant: Plant) -> None:
    plant("measure/meters/nvml.py", "from ..meter import Meter\nfrom ...graph import trace\n")
    plant("measure/meters/__init__.py", "from .nvml import Nvml\n")
    assert upward_imports(package) == []
    plant("measure/meters/nvml.py", "from ...cli import main\n")
    assert len(upward_imports(package)) == 1


def test_the_report_room_may_not_import_what_trains(package: Path, plant: Plant) -> None:
    plant("report/tables.py", "from ecc.methods import compress\n")
    assert len(upward_imports(package)) == 1


def test_a_room_outside_the_order_is_caught(package: Path, plant: Plant) -> None:
    plant("utils.py", "")
    (complaint,) = upward_imports(package)
    assert "'utils' has no place" in complaint


def test_a_source_without_its_test_is_caught(package: Path, tmp_path: Path) -> None:
    tests = tmp_path / "tests"
    for name in ("test_errors.py", "graph/test_trace.py", "graph/test_labels.py", "report/test_page.py"):
        plant_in(tests, name, "")
    (complaint,) = untested_sources(package, tests)
    assert complaint.endswith(f"{tests / 'test_cli.py'} does not exist")
    plant_in(tests, "test_cli.py", "")
    assert untested_sources(package, tests) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "def late():\n    import dill",
        "import torch\ntorch.load('x')",
        "import torch as t\nt.load('x')",
        "import torch\ntorch.load('x', weights_only=False)",
        "import torch\ntorch.load('x', **options)",
        "import torch\ntorch.serialization.load('x')",
        "import torch, functools\nfunctools.partial(torch.load)",
        "from torch import load",
        "import numpy\nnumpy.load('x', allow_pickle=True)",
    ],
)
def test_unpickling_is_caught(package: Path, plant: Plant, text: str) -> None:
    plant("graph/planted.py", text)
    assert len(pickles(package)) == 1


def test_a_safe_load_passes(package: Path, plant: Plant) -> None:
    plant("graph/planted.py", "import json, torch\ntorch.load('x', weights_only=True)\njson.load(f)\n")
    assert pickles(package) == []


def test_a_long_file_is_caught(package: Path, plant: Plant) -> None:
    plant("graph/planted.py", "x = 1\n" * MAX_LINES)
    assert long_files(package) == []
    plant("graph/planted.py", "x = 1\n" * (MAX_LINES + 1))
    assert len(long_files(package)) == 1
