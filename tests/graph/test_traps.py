"""Networks that are easy to prune wrongly are never pruned wrongly, and similar ordinary ones stay prunable."""

from __future__ import annotations

import pytest

import graph.traps  # noqa: F401 - fills the catalogue
from graph.traps.base import ORDINARY, TRAPS
from graph.traps.checking import assert_never_wrong, traced
from graph.traps.unreached import UNREACHED


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * trap.is_similar) for name, trap in TRAPS.items()]
)
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


@pytest.mark.parametrize("name", UNREACHED)
def test_inputs_of_a_layer_that_does_not_run_are_not_pruned(name: str) -> None:
    trap = UNREACHED[name]
    assert_never_wrong(trap.net(), trap.example(), trap.second())
    graph = traced(trap.net(), trap.example())
    assert graph is not None
    assert any("late" in note for note in graph.notes), graph.notes
