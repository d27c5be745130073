from __future__ import annotations

from typing import Any

from ecc.training.progress import Histories


class Kept:
    def __init__(self) -> None:
        self.lines: list[Any] = []

    def log(self, facts: Any) -> None:
        self.lines.append(facts)


def test_several_histories_hear_the_same() -> None:
    one, other = Kept(), Kept()
    Histories(one, other).log({"step": 1})
    assert one.lines == other.lines == [{"step": 1}]
