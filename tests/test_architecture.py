"""Rules for the whole source tree: packages import in one direction, and nothing reads pickle."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "src" / "ecc"

ORDER = (
    "constants", "errors", "budget", "formatting", "io", "records", "options", "run_records", "settings",
    "torch_utils", "task", "graph",
    "measure", "energy", "training", "methods", "zoo", "export", "integrations", "report", "profiling", "api", "cli",
)  # fmt: skip
"""A module or package imports only itself and what stands before it."""
FORBIDDEN = {"report": {"methods", "training"}}
"""A report is made from files, also where nothing can be trained."""
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "marshal", "joblib"}
TORCH_LOADS = {"torch.load", "torch.serialization.load"}


def imports(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of every import, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            stem = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{stem}.{alias.name}") for alias in node.names)


def upward_imports(package: Path) -> list[str]:
    found = []
    for file in sorted(package.rglob("*.py")):
        here = file.relative_to(package).parts[0].removesuffix(".py")
        if here in ("__init__", "__main__"):
            continue
        parts = ("ecc", *file.relative_to(package).parts[:-1])
        for line, name in imports(ast.parse(file.read_text(encoding="utf-8")), parts):
            top, *rest = name.split(".")
            if top != "ecc" or rest == ["__version__"]:
                continue
            there = rest[0] if rest and rest[0] in ORDER else "__init__"  # `import ecc` reaches everything
            is_allowed = there == here or (there in ORDER and ORDER.index(there) < ORDER.index(here))
            if there == "__init__":
                is_allowed = here == ORDER[-1]
            if not is_allowed or there in FORBIDDEN.get(here, ()):
                found.append(f"{file}:{line}: {here} must not import {name}")
    return found


def dotted_name(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted_name(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def pickles(package: Path) -> list[str]:
    """Imports of pickle and its relatives, and `torch.load` without `weights_only=True`."""
    found = []
    for file in sorted(package.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        names = [(line, name) for line, name in imports(tree, ("ecc",)) if name.split(".")[0] in PICKLES]
        names += [(line, name) for line, name in imports(tree, ("ecc",)) if name in TORCH_LOADS]
        safe = {
            call.func
            for call in ast.walk(tree)
            if isinstance(call, ast.Call)
            and any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in call.keywords)
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and dotted_name(node) in TORCH_LOADS and node not in safe:
                names.append((node.lineno, "torch.load"))
            if isinstance(node, ast.Call) and any(word.arg == "allow_pickle" for word in node.keywords):
                names.append((node.lineno, "allow_pickle"))
        found += [f"{file}:{line}: {name}" for line, name in names]
    return found


def test_every_module_has_a_place_in_the_import_order() -> None:
    names = {path.name.removesuffix(".py") for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert names - {"__init__", "__main__", "py.typed", "__pycache__"} == set(ORDER)


def test_imports_go_one_way() -> None:
    assert upward_imports(PACKAGE) == []


def test_nothing_reads_pickle() -> None:
    assert pickles(PACKAGE) == []


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (upward_imports, "from ecc.report import page"),
        (upward_imports, "from ..report.page import draw"),
        (upward_imports, "from .. import report"),
        (upward_imports, "def late():\n    import ecc.cli.app"),
        (upward_imports, "import ecc"),
        (pickles, "from pickle import loads"),
        (pickles, "import torch\ntorch.load('x')"),
        (pickles, "import torch, functools\nfunctools.partial(torch.load)"),
        (pickles, "from torch import load"),
        (pickles, "import numpy\nnumpy.load('x', allow_pickle=True)"),
    ],
)
def test_the_rules_find_what_they_forbid(rule: object, text: str, tmp_path: Path) -> None:
    (tmp_path / "graph").mkdir()
    (tmp_path / "graph" / "planted.py").write_text(text)
    assert len(rule(tmp_path)) == 1  # type: ignore[operator]
    (tmp_path / "graph" / "planted.py").write_text(
        "import torch\ntorch.load('x', weights_only=True)\nimport ecc.errors"
    )
    assert rule(tmp_path) == []  # type: ignore[operator]
