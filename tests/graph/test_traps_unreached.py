"""What the example input does not run stays usable: whatever may feed it is not pruned, and it is named."""

from __future__ import annotations

import pytest

from graph.traps.checking import assert_never_wrong, traced
from graph.traps.unreached import UNREACHED


@pytest.mark.parametrize("name", UNREACHED)
def test_what_feeds_an_unreached_layer_is_not_pruned(name: str) -> None:
    trap = UNREACHED[name]
    assert_never_wrong(trap.net(), trap.example(), trap.second())


@pytest.mark.parametrize("name", UNREACHED)
def test_an_unreached_layer_is_named(name: str) -> None:
    trap = UNREACHED[name]
    graph = traced(trap.net(), trap.example())
    assert graph is not None
    assert any("late" in note for note in graph.notes), graph.notes
