from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import pytest
from rich.console import Console

from ecc.report.live_compress import BARS, LINE_SECONDS, CompressView, duration, sparkline
from report.test_compress import Feasibility


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


ENDS = {"dense": 300, "solve": 2300, "tune": 3300}
FULL = {"a": 8, "b": 16}
SOLVER = {"phase": "solver", "step": 50, "spent": {"energy": 0.0125}, "target": 0.013, "widths": {"a": 8, "b": 4}}


def loss(phase: str, step: int, total: int) -> dict[str, Any]:
    return {"phase": phase, "step": step, "loss": 1.25, "lr": 0.1, "total": total}


def planned(console: Console | None, clock: Clock, processes: int = 1) -> CompressView:
    view = CompressView(console, now=clock)
    view.plan(ENDS, [Feasibility(limit=0.0095)], FULL, processes)
    return view


def terminal(file: io.StringIO, width: int = 120) -> Console:
    return Console(file=file, width=width, force_terminal=True, color_system=None)


@pytest.mark.parametrize(
    ("shares", "bars"),
    [
        ([], ""),
        ([0, 0], BARS[0] * 2),
        ([number / 8 for number in range(8)], BARS),
        ([1, 0.5, 1 / 16], "█▅▁"),
        (iter([1.0]), "█"),
    ],
)
def test_a_sparkline_is_as_high_as_its_shares(shares: Iterable[float], bars: str) -> None:
    assert sparkline(shares) == bars


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "0 s"), (89, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (86400, "24.0 h")],
)
def test_times_are_said_roughly(seconds: float, text: str) -> None:
    assert duration(seconds) == text


# ---------------------------------------------------------------- in a terminal


def test_two_lines_say_where_it_is_and_what_it_spends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file, clock = io.StringIO(), Clock()
    with planned(terminal(file), clock) as view:
        view.log({"phase": "score", "dense": 0.9812, "total": 300})
        view.log(SOLVER)
        view.log(loss("solve", 50, 350))
        assert "left" not in view._picture().plain  # one line tells no speed
        clock.seconds += 10
        view.log(loss("solve", 150, 450))
        picture = view._picture().plain
        clock.seconds += 5
        later = view._picture().plain
    assert picture.splitlines() == [
        "solve step 150 of 2000  loss 1.2500  score 0.9812 (dense)  3 min left, 5 min left in all",  # 0.1 s a step
        "energy 12.5 mJ (predicted), schedule 13 mJ, budget 9.5 mJ  █▃",
    ]
    assert view._times == {"": 110 + 0.1 * 1850, " in all": 110 + 0.1 * 2850}
    assert later.splitlines()[1] == picture.splitlines()[1]
    assert "solve step 150 of 2000" in file.getvalue()  # the last picture is drawn before it is wiped away


def test_speed_is_that_of_this_phase_in_this_session() -> None:
    clock = Clock()
    view = planned(terminal(io.StringIO()), clock)
    view.log(loss("dense", 100, 100))
    clock.seconds += 1000
    view.log(loss("dense", 200, 200))  # 10 s a step
    view.log(loss("solve", 700, 1000))  # taken up at 650 by another session
    assert view._times == {}
    clock.seconds += 50
    view.log(loss("solve", 800, 1100))
    assert view._times == {"": 1150 + 0.5 * 1200, " in all": 1150 + 0.5 * 2200}


def test_the_last_phase_has_one_end_and_no_more_widths() -> None:
    clock = Clock()
    view = planned(terminal(io.StringIO()), clock)
    view.log(SOLVER)
    view.log(loss("tune", 100, 1900))  # the solve left 500 steps over
    clock.seconds += 10
    view.log(loss("tune", 200, 2000))
    assert view._picture().plain == "tune step 200 of 1500  loss 1.2500  2 min left in all"


def test_batches_of_several_processes_are_one_step() -> None:
    clock = Clock()
    view = planned(terminal(io.StringIO()), clock, processes=4)
    view.log(loss("dense", 100, 400))
    clock.seconds += 10
    view.log(loss("dense", 200, 800))
    assert view._picture().plain == "dense step 200 of 300  loss 1.2500  10 s left, 5 min left in all"


def test_lines_that_are_too_long_are_cut_and_not_wrapped() -> None:
    console = terminal(io.StringIO(), width=30)
    view = planned(console, Clock())
    view.log(SOLVER)
    view.log(loss("solve", 50, 350))
    first, second = ("".join(part.text for part in line) for line in console.render_lines(view._picture()))
    assert first.startswith("solve step 50 of 2000  loss")
    assert second == "energy 12.5 mJ (predicted), s…"
    assert len(first) <= 30


def test_single_weights_and_several_budgets() -> None:
    view = planned(terminal(io.StringIO()), Clock())
    view.plan(ENDS, [Feasibility(limit=0.0095), Feasibility("params", "", "counted", limit=30_000)], FULL)
    spent = {"energy": 0.0125, "params": 31_000.0}
    view.log({"phase": "solver", "spent": spent, "target": 0.013, "nonzeros": {"a": 2, "b": 16}})
    assert view._picture().plain == (
        "energy 12.5 mJ (predicted), schedule 13 mJ, budget 9.5 mJ; params 31 k (counted), budget 30 k  ▃█"
    )


# ---------------------------------------------------------------- elsewhere


def test_outside_a_terminal_there_is_a_plain_line_now_and_then() -> None:
    file, clock = io.StringIO(), Clock()
    with planned(Console(file=file, width=40), clock) as view:
        view.tell("solving for [the] budget, 2000 steps")
        view.log(SOLVER)
        view.log(loss("solve", 50, 350))
        clock.seconds += LINE_SECONDS
        view.log(loss("solve", 150, 450))
        clock.seconds += LINE_SECONDS / 2
        view.log(loss("solve", 200, 500))
        view.show("a table")
    assert file.getvalue().splitlines() == [
        "solving for [the] budget, 2000 steps",
        "solve step 150 of 2000, loss 1.2500, 9 min left, 14 min left in all, "
        "energy 12.5 mJ (predicted), schedule 13 mJ, budget 9.5 mJ",
        "a table",
    ]


def test_without_a_console_nothing_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with planned(None, Clock()) as view:
        view.tell("a line")
        view.show("a table")
        view.log(SOLVER)
        view.log(loss("solve", 50, 350))
    assert capsys.readouterr() == ("", "")
