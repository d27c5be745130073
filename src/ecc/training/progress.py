"""Who is told how training goes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol


class History(Protocol):
    """Takes one line of facts after another. `RunDir` is one."""

    def log(self, facts: Mapping[str, Any]) -> None:
        """Notes plain values by name; `step` and `phase` say when."""


class Histories:
    """Tells several."""

    def __init__(self, *histories: History) -> None:
        self._histories = histories

    def log(self, facts: Mapping[str, Any]) -> None:
        """See `History`."""
        for history in self._histories:
            history.log(facts)
