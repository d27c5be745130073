"""A compression while it runs: two lines that are kept up to date in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from .compress import Reachable
from .fit import si

BARS = "▁▂▃▄▅▆▇█"

LINE_SECONDS = 30.0
"""From one line to the next where the output is no terminal."""

_REFRESHES = 2  # a second: enough for a time that counts down, and too few to flicker


class CompressView:
    """Says how a run goes. It is a `History`; use it in a `with` block.

    Args:
        console: Where to; nothing is shown without one.
        now: The time.
    """

    def __init__(self, console: Console | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console, self._now = console, now
        self._ends: dict[str, int] = {}
        self._budgets: dict[str, Reachable] = {}
        self._full: dict[str, int] = {}
        self._processes = 1
        self._where = self._score = self._spent = self._bars = ""
        self._times: dict[str, float] = {}  # when the phase ends, and when all does
        self._began: tuple[str, float, int] | None = None  # this phase in this session: name, time, steps before
        self._line_at = now() + LINE_SECONDS
        self._live: Live | None = None
        if console is not None and console.is_terminal:
            self._live = Live(
                get_renderable=self._picture, console=console, refresh_per_second=_REFRESHES, transient=True
            )

    def __enter__(self) -> CompressView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def plan(
        self, ends: Mapping[str, int], budgets: Sequence[Reachable], full: Mapping[str, int], processes: int = 1
    ) -> None:
        """What is to come.

        Args:
            ends: The step with which each phase ends, from the beginning of the run, in their order.
            budgets: What is to be met.
            full: Channels, or weights, of each group in the dense network.
            processes: Each step takes a batch of each.
        """
        self._ends, self._full, self._processes = dict(ends), dict(full), processes
        self._budgets = {one.resource: one for one in budgets}

    def show(self, what: RenderableType) -> None:
        """Prints something."""
        if self._console is not None:
            self._console.print(what)

    def tell(self, sentence: str) -> None:
        """Prints a line."""
        if self._console is not None:
            self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)

    def log(self, facts: Mapping[str, Any]) -> None:
        """Takes a line of the history."""
        if self._console is None:
            return
        if facts.get("phase") == "solver":
            self._spent = self._against_budgets(facts["cost"], facts["target"])
            left = facts["widths"] or facts["nonzeros"]  # channels, or single weights
            self._bars = sparkline(left[name] / full for name, full in self._full.items() if name in left)
        elif facts.get("phase") == "score":
            self._score = f"score {facts['score']:.4f} ({facts['name']})"
        elif "loss" in facts:
            self._training(facts)

    # ------------------------------------------------------------ what is shown

    def _training(self, facts: Mapping[str, Any]) -> None:
        phase, step, done = facts["phase"], facts["step"], facts["total"] // self._processes
        if phase == "finetune":
            self._spent = self._bars = ""  # the widths are final, and weighed
        if self._began is None or self._began[0] != phase:
            self._began = phase, self._now(), done  # the first steps are not timed: they are slow
        _, since, before = self._began
        self._times = {}
        if phase in self._ends and done > before:
            pace = (self._now() - since) / (done - before)
            # CompressionRunner that are still to come count as if they were as fast as this one.
            ends = {"": self._ends[phase], " in all": max(self._ends.values())}
            self._times = {name: self._now() + pace * (end - done) for name, end in ends.items() if end > done}
        steps = f" of {self._ends[phase] - (done - step)}" if phase in self._ends else ""
        self._where = f"{phase} step {step}{steps}  loss {facts['loss']:.4f}"
        if self._live is None and self._now() >= self._line_at and self._console is not None:
            self._line_at = self._now() + LINE_SECONDS
            parts = (self._where, self._score, self._left(), self._spent)
            self.tell(", ".join(part for part in parts if part).replace("  ", ", "))

    def _against_budgets(self, spent: Mapping[str, float], target: float) -> str:
        parts = []
        for number, (resource, amount) in enumerate(spent.items()):
            budget = self._budgets.get(resource)
            unit, label = ("", "predicted") if budget is None else (budget.unit, budget.label)
            word = label if label == "counted" else "predicted"
            schedule = f", schedule {si(target, unit)}" if number == 0 else ""  # it is that of the first
            limit = "" if budget is None else f", budget {si(budget.limit, unit)}"
            parts.append(f"{resource} {si(amount, unit)} ({word}){schedule}{limit}")
        return "; ".join(parts)

    def _left(self) -> str:
        times = {name: max(0.0, at - self._now()) for name, at in self._times.items()}
        if len({round(left) for left in times.values()}) == 1:  # the last phase
            times = dict(list(times.items())[-1:])
        return ", ".join(f"{duration(left)} left{name}" for name, left in times.items())

    def _picture(self) -> Text:
        first = "  ".join(part for part in (self._where, self._score, self._left()) if part)
        second = "  ".join(part for part in (self._spent, self._bars) if part)
        # Lines that are too long are cut: were they wrapped, the picture would jump.
        return Text("\n".join(line for line in (first, second) if line), no_wrap=True, overflow="ellipsis")


def sparkline(shares: Iterable[float]) -> str:
    """Small bars, from 0 to 1."""
    return "".join(BARS[min(len(BARS) - 1, int(share * len(BARS)))] for share in shares)


def duration(seconds: float) -> str:
    """Roughly, as one would say it."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
