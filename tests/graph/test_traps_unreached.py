"""What the example input does not run stays usable: whatever may feed it is not pruned, and it is named."""

from __future__ import annotations

from typing import Any

import pytest

from graph.traps.checking import assert_never_wrong, traced
from graph.traps.unreached import UNREACHED

KNOWN_WRONG = frozenset(
    {
        "OfTwoConcatenated",
        "OfAPart",
        "OfShuffledPixels",
        "BatchNormWithoutParameters",
        "ScaleInABuffer",
        "BesideAReachedLayerOfTheSameSize",
    }
)
"""Pruned wrongly. Remove a name once its test passes."""
NOT_NAMED = frozenset({"BatchNormWithoutParameters", "ScaleInABuffer"})
"""Not named in the notes of the graph."""


def each(known: frozenset[str]) -> Any:
    """One test for each network; those that are known to fail must fail."""
    fails = pytest.mark.xfail(strict=True, raises=AssertionError, reason="see the list above")
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[fails] if n in known else []) for n in UNREACHED])


@each(KNOWN_WRONG)
def test_what_feeds_an_unreached_layer_is_not_pruned(name: str) -> None:
    trap = UNREACHED[name]
    assert_never_wrong(trap.net(), trap.example(), trap.second())


@each(NOT_NAMED)
def test_an_unreached_layer_is_named(name: str) -> None:
    trap = UNREACHED[name]
    graph = traced(trap.net(), trap.example())
    assert graph is not None
    assert any("late" in note for note in graph.notes), graph.notes
