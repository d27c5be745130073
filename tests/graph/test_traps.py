"""Networks that invite wrong pruning are never pruned wrongly, and ordinary ones beside them stay prunable."""

from __future__ import annotations

import pytest

import graph.traps  # noqa: F401 - fills the catalogue
from graph.traps.base import ORDINARY, TRAPS
from graph.traps.checking import assert_never_wrong, traced


@pytest.mark.parametrize("name", TRAPS)
def test_a_trap_is_never_pruned_wrongly(name: str) -> None:
    trap = TRAPS[name]
    assert_never_wrong(trap.net(), trap.example(), trap.second())


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_network_stays_prunable(name: str) -> None:
    trap = ORDINARY[name]
    assert_never_wrong(trap.net(), trap.example(), trap.second(), min_prunable=trap.min_prunable)


@pytest.mark.parametrize("name", [name for name, trap in TRAPS.items() if trap.idle])
def test_a_module_that_the_example_input_does_not_run_is_named(name: str) -> None:
    trap = TRAPS[name]
    graph = traced(trap.net(), trap.example())
    for module in trap.idle if graph is not None else ():
        assert any(module in note for note in graph.notes), graph.notes
