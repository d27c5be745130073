"""Networks that invite wrong pruning are never pruned wrongly, and ordinary ones beside them stay prunable."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

import graph.traps  # noqa: F401 - fills the catalogue
from graph.traps.base import ORDINARY, TRAPS
from graph.traps.checking import assert_never_wrong, traced
from graph.traps.known_wrong import KNOWN_WRONG, NOT_NAMED


def each(names: Iterable[str], known: Collection[str]) -> Any:
    """One test for each name; those that are known to fail must fail."""
    reason = pytest.mark.xfail(strict=True, raises=AssertionError, reason="see known_wrong.py")
    return pytest.mark.parametrize("name", [pytest.param(n, marks=[reason] if n in known else []) for n in names])


@each(TRAPS, KNOWN_WRONG)
def test_a_trap_is_never_pruned_wrongly(name: str) -> None:
    trap = TRAPS[name]
    assert_never_wrong(trap.net(), trap.example(), trap.second())


@each(ORDINARY, KNOWN_WRONG)
def test_an_ordinary_network_stays_prunable(name: str) -> None:
    trap = ORDINARY[name]
    assert_never_wrong(trap.net(), trap.example(), trap.second(), min_prunable=trap.min_prunable)


@each((name for name, trap in TRAPS.items() if trap.idle), NOT_NAMED)
def test_a_module_that_the_example_input_does_not_run_is_named(name: str) -> None:
    trap = TRAPS[name]
    graph = traced(trap.net(), trap.example())
    for module in trap.idle if graph is not None else ():
        assert any(module in note for note in graph.notes), graph.notes


def test_the_lists_of_known_failures_hold_no_other_names() -> None:
    assert {*TRAPS, *ORDINARY} >= KNOWN_WRONG
    assert {name for name, trap in TRAPS.items() if trap.idle} >= NOT_NAMED
