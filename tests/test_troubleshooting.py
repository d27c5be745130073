"""docs/troubleshooting.md has an entry for every reason why channels are frozen, and for every class of errors."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from pathlib import Path

import ecc.errors

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CALLS = {"freeze", "_freeze", "Misaligned"}
NAMES = {"why"}


def literal(node: ast.AST) -> str:
    """The longest constant part of a message."""
    parts = [node] if isinstance(node, ast.Constant) else getattr(node, "values", [])
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return max(texts, key=len, default="").strip(" .:`{}")


def reasons() -> Iterator[str]:
    """What `ecc inspect` may show as the reason, from the source."""
    for file in sorted((ROOT / "src" / "ecc" / "graph").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            found: list[ast.AST] = []
            if isinstance(node, ast.Call) and len(node.args) > 1:
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                found = [node.args[1]] if name in CALLS else []
            elif isinstance(node, ast.Assign):
                found = [node.value] if getattr(node.targets[0], "id", "") in NAMES else []
            for one in found:
                texts = [one.body, one.orelse] if isinstance(one, ast.IfExp) else [one]
                yield from filter(None, map(literal, texts))


def test_reasons_are_found() -> None:
    found = set(reasons())
    assert {"it is an output of the network", "no layer consumes it", "pools along the channel axis"} <= found
    assert len(found) > 30


def test_every_reason_has_an_entry() -> None:
    text = " ".join(PAGE.split())
    assert [reason for reason in dict.fromkeys(reasons()) if " ".join(reason.split()) not in text] == []


def test_every_error_has_an_entry() -> None:
    names = [
        name
        for name, kind in inspect.getmembers(ecc.errors, inspect.isclass)
        if issubclass(kind, (ecc.errors.EccError, ecc.errors.EccWarning))
    ]
    assert len(names) > 8
    assert [name for name in names if f"`{name}`" not in PAGE] == []
