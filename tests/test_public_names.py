"""`import ecc` is fast, and has all public names all the same."""

from __future__ import annotations

import ast
import importlib
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import ecc


def test_every_public_name_has_a_home() -> None:
    homes = {name: home for home, names in ecc._HOMES.items() for name in names}
    assert sorted(homes) == sorted(ecc.__all__)
    for name, home in homes.items():
        assert getattr(ecc, name) is getattr(importlib.import_module(f"ecc.{home}"), name)


def test_type_checkers_see_the_same_names() -> None:
    tree = ast.parse(Path(ecc.__file__).read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = [alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == sorted(ecc.__all__)


def test_all_of_them_can_be_listed_and_imported() -> None:
    assert set(ecc.__all__) <= set(dir(ecc))
    found: dict[str, object] = {}
    exec("from ecc import *", found)
    assert set(ecc.__all__) <= set(found)


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ecc' has no attribute 'trace_chanels'"):
        ecc.trace_chanels  # noqa: B018 # the access is the test
    with pytest.raises(ImportError, match="trace_chanels"):
        from ecc import trace_chanels  # noqa: F401


def test_public_classes_can_be_pickled() -> None:
    settings = ecc.CompressSettings(prune_steps=3)
    assert pickle.loads(pickle.dumps(settings)) == settings  # noqa: S301 # made on this line


def test_the_modules_are_attributes_and_torch_comes_late() -> None:
    code = (
        "import sys, ecc; assert 'torch' not in sys.modules; ecc.EccError; assert 'torch' not in sys.modules; "
        "assert ecc.graph.slim is ecc.slim; import ecc.zoo.registry; assert 'torch' in sys.modules; print('good')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "good\n", done.stderr
