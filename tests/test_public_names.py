"""`import ecc` is fast, and has about twenty public names."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import ecc


def test_every_public_name_is_importable_and_type_checkers_see_the_same_names() -> None:
    homes = {name: home for home, names in ecc._HOMES.items() for name in names}
    assert sorted(homes) == sorted(ecc.__all__)
    assert len(ecc.__all__) <= 25
    for name, home in homes.items():
        assert getattr(ecc, name) is getattr(importlib.import_module(f"ecc.{home}"), name)
    assert set(ecc.__all__) <= set(dir(ecc))
    tree = ast.parse(Path(ecc.__file__).read_text(encoding="utf-8"))
    (guarded,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    seen = [alias.name for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert sorted(seen) == sorted(ecc.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ecc' has no attribute 'trace_chanels'"):
        ecc.trace_chanels  # noqa: B018 # the access is the test


def test_torch_is_imported_when_it_is_needed_and_large_libraries_are_not() -> None:
    large = ("accelerate", "altair", "matplotlib", "onnx", "pandas", "ray", "scipy.stats", "sklearn", "vl_convert")
    code = (
        "import sys, ecc; assert 'torch' not in sys.modules; ecc.EccError; assert 'torch' not in sys.modules; "
        "assert ecc.graph.slim is ecc.slim; import ecc.api, ecc.export, ecc.zoo; assert 'torch' in sys.modules; "
        "from ecc.training.distributed import find_distributed; assert find_distributed('cpu').size == 1; "
        f"print([name for name in {large} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
