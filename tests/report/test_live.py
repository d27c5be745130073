"""Progress of compressions and profiles."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from ecc.measure import Progress
from ecc.measure.drift import Drift
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.records import to_builtins
from ecc.report.live import LINE_SECONDS, CompressProgress, ProfileProgress
from ecc.run_records import ScoreLine, SolverLine, TrainLine
from measure.profile_cases import reference, sample
from report.folders import Budgeted


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


ENDS = {"pretrain": 300, "prune": 2300, "finetune": 3300}
FULL = {"a": 8, "b": 16}
SOLVER = SolverLine(step=50, cost={"energy": 0.0125}, target=0.013, energy_dual=1.0, widths={"a": 8, "b": 4})


def train(phase: str, step: int, total: int, loss: float | None = 1.25) -> dict[str, Any]:
    found: dict[str, Any] = to_builtins(TrainLine(phase=phase, step=step, loss=loss, lr=0.1, total=total))
    return found


def planned(console: Console | None, clock: Clock, processes: int = 1) -> CompressProgress:
    view = CompressProgress(console, now=clock)
    view.plan(ENDS, [Budgeted(dense=0.02, limit=0.0095)], FULL, processes)
    return view


def terminal(width: int = 120) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)


def test_a_terminal_shows_progress_cost_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    console, clock = terminal(), Clock()
    with planned(console, clock) as view:
        view.log(to_builtins(ScoreLine(name="dense", score=0.9812)))
        view.log(to_builtins(SOLVER))
        view.log(train("prune", 50, 350))
        assert "left" not in view._picture().plain  # one line is not enough to know the speed
        clock.seconds += 10
        view.log(train("prune", 150, 450))
        picture = view._picture().plain
    assert picture.splitlines() == [
        "prune step 150 of 2000  loss 1.2500  score 0.9812 (dense)  3 min left, 5 min left in total",
        "energy 12.5 mJ (predicted), schedule 13.0 mJ, budget 9.50 mJ  █▃",
    ]
    assert "prune step 150 of 2000" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_score_of_a_language_model_is_its_perplexity() -> None:
    view = CompressProgress(terminal(), now=Clock())
    view.plan(ENDS, [], FULL, metric="perplexity")
    view.log(ScoreLine(name="dense", score=-3.0445))
    assert view._picture().plain == "perplexity 21.0 (dense)"


def test_the_speed_is_that_of_the_phase_in_this_session() -> None:
    clock = Clock()
    view = planned(terminal(), clock)
    view.log(train("pretrain", 100, 100))
    clock.seconds += 1000
    view.log(train("pretrain", 200, 200))  # 10 s per step
    view.log(train("prune", 700, 1000))  # a resumed session
    assert view._time_left() == ""
    clock.seconds += 50
    view.log(train("prune", 800, 1100))  # 0.5 s per step
    assert view._time_left() == "10 min left, 18 min left in total"
    view.log(train("finetune", 100, 1900))
    clock.seconds += 10
    view.log(train("finetune", 200, 2000))
    assert view._picture().plain == "finetune step 200 of 1500  loss 1.2500  2 min left in total"


def test_other_outputs_get_a_line_now_and_then() -> None:
    file, clock = io.StringIO(), Clock()
    with planned(Console(file=file, width=40), clock) as view:
        view.say("pruning to [the] budget, 2000 steps")
        view.log(to_builtins(SOLVER))
        view.log(train("prune", 50, 350))
        clock.seconds += LINE_SECONDS
        view.log(train("prune", 150, 450))
        clock.seconds += LINE_SECONDS / 2
        view.log(train("prune", 200, 500))
        view.show("a table")
    assert file.getvalue().splitlines() == [
        "pruning to [the] budget, 2000 steps",
        "prune step 150 of 2000, loss 1.2500, 9 min left, 14 min left in total, "
        "energy 12.5 mJ (predicted), schedule 13.0 mJ, budget 9.50 mJ",
        "a table",
    ]


# ---------------------------------------------------------------- profiles


class Screen:
    """A console that remembers, and a clock that is set by hand."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.text = io.StringIO()
        self.seconds = 0.0
        console = Console(file=self.text, force_terminal=is_terminal, width=100, color_system=None)
        self.view = ProfileProgress(console, now=lambda: self.seconds)

    def show(self, done: int, total: int = 50, **values: Any) -> None:
        self.view(Progress(done=done, total=total, label="measured", **values))


def test_a_line_of_a_profile_comes_every_ten_samples() -> None:
    screen, drift = (
        Screen(is_terminal=False),
        Drift(references=3, cv=0.004, span=0.01, noise=0.002, is_significant=True),
    )
    with screen.view:
        screen.show(0)
        for done in range(1, 51):
            screen.seconds = 4.0 * done
            screen.show(done, sample=sample(done, 0.02471, relative_ci=0.004), error=0.023, drift=drift)
            screen.show(done, sample=reference(0.03))
    lines = screen.text.getvalue().splitlines()
    assert len(lines) == 5
    assert (
        lines[0]
        == "10 of 50 samples, 24.7 mJ ±0.4 % (measured), error of a quick fit 2.3 %, reference ±0.4 %, 3 min left"
    )
    assert lines[3].endswith("40 s left")
    assert lines[4].endswith("reference ±0.4 %")


def test_a_profile_of_a_clock_shows_seconds() -> None:
    screen = Screen(is_terminal=False)
    screen.view.announce(CpuTimeMeter().describe(), "cpu")
    with screen.view:
        screen.show(10, sample=sample(10, 0.02471))
    assert "10 of 50 samples, 24.7 ms (measured)" in screen.text.getvalue()
