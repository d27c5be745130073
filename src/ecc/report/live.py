"""Progress of long commands: a live display in a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

from ecc.formatting import duration, percent, score_text, si
from ecc.measure.meter import MeterInfo
from ecc.measure.profile import Profile
from ecc.measure.profiler import Progress
from ecc.records import to_builtins
from ecc.run_records import Feasibility

View = TypeVar("View", bound="_View")

BARS = "▁▂▃▄▅▆▇█"

LINE_SECONDS = 30.0
"""Seconds between two lines of a compression where the output is not a terminal."""

LINE_SAMPLES = 10
"""Samples between two lines of a profile where the output is not a terminal."""

_REFRESHES = 2  # per second


class _View:
    """Lines on a console, if there is one, and in a terminal a live display inside a `with` block."""

    def __init__(self, console: Console | None, now: Callable[[], float]) -> None:
        self._console, self._now = console, now
        self._display: Live | RichProgress | None = None
        if console is not None and console.is_terminal:
            self._display = self._make_display(console)

    def _make_display(self, console: Console) -> Live | RichProgress:
        raise NotImplementedError

    def __enter__(self: View) -> View:
        if self._display is not None:
            self._display.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._display is not None:
            self._display.stop()

    def say(self, sentence: str) -> None:
        """Print a line."""
        if self._console is not None:
            self._console.print(sentence, markup=False, highlight=False, soft_wrap=True)


class CompressProgress(_View):
    """Shows the progress of a compression. Pass it as `history`, inside a `with` block."""

    def __init__(self, console: Console | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._ends: dict[str, int] = {}
        self._budgets: dict[str, Feasibility] = {}
        self._full: dict[str, int] = {}
        self._processes, self._metric = 1, "score"
        self._where = self._score = self._cost = self._bars = ""
        self._end_times: dict[str, float] = {}  # of the phase, and of the run
        self._phase_start: tuple[str, float, int] | None = None  # name, time, and steps before, in this session
        self._next_line = now() + LINE_SECONDS
        super().__init__(console, now)  # a display draws at once

    def _make_display(self, console: Console) -> Live:
        return Live(get_renderable=self._picture, console=console, refresh_per_second=_REFRESHES, transient=True)

    def plan(
        self,
        ends: Mapping[str, int],
        budgets: Sequence[Feasibility],
        full: Mapping[str, int],
        processes: int = 1,
        metric: str = "score",
    ) -> None:
        """Set what the run will do.

        Args:
            ends: Last step of each phase, counted from the start of the run, in order.
            budgets: The budgets.
            full: Channels, or weights, of each group in the dense network.
            processes: Number of processes; each step takes one batch per process.
            metric: What the scores are, as in `Task`.
        """
        self._ends, self._full, self._processes, self._metric = dict(ends), dict(full), processes, metric
        self._budgets = {one.resource: one for one in budgets}

    def show(self, what: RenderableType) -> None:
        """Print a table."""
        if self._console is not None:
            self._console.print(what)

    def log(self, record: Any) -> None:
        """Show a line of the history: a record of `ecc.run_records`, or the same as a mapping."""
        if self._console is None:
            return
        line: Mapping[str, Any] = to_builtins(record)
        phase = line.get("phase")
        if phase == "solver":
            self._cost = self._against_budgets(line["cost"], line.get("target"))
            kept = line.get("widths") or line.get("nonzeros") or {}
            self._bars = sparkline(kept[name] / full for name, full in self._full.items() if name in kept)
        elif phase == "score":
            self._score = f"{self._metric} {score_text(line['score'], self._metric)} ({line['name']})"
        elif "loss" in line:
            self._training(line)

    def _training(self, line: Mapping[str, Any]) -> None:
        phase, step, done = line["phase"], line["step"], line["total"] // self._processes
        if phase == "finetune":
            self._cost = self._bars = ""  # the widths are final
        if self._phase_start is None or self._phase_start[0] != phase:
            self._phase_start = phase, self._now(), done  # the first steps are slow and not timed
        _, since, before = self._phase_start
        self._end_times = {}
        if phase in self._ends and done > before:
            seconds_per_step = (self._now() - since) / (done - before)  # later phases are assumed to be as fast
            ends = {"": self._ends[phase], " in total": max(self._ends.values())}
            self._end_times = {
                name: self._now() + seconds_per_step * (end - done) for name, end in ends.items() if end > done
            }
        steps = f" of {self._ends[phase] - (done - step)}" if phase in self._ends else ""
        loss = "not finite" if line["loss"] is None else f"{line['loss']:.4f}"
        self._where = f"{phase} step {step}{steps}  loss {loss}"
        if self._display is None and self._now() >= self._next_line:
            self._next_line = self._now() + LINE_SECONDS
            parts = (self._where, self._score, self._time_left(), self._cost)
            self.say(", ".join(part for part in parts if part).replace("  ", ", "))

    def _against_budgets(self, cost: Mapping[str, float], target: float | None) -> str:
        parts = []
        for number, (resource, amount) in enumerate(cost.items()):
            budget = self._budgets.get(resource)
            if budget is None:
                parts.append(f"{resource} {si(amount, '')} (predicted)")
                continue
            label = budget.label if budget.label == "counted" else "predicted"
            is_first = number == 0 and target is not None  # the schedule is that of the first resource
            schedule = f", schedule {budget.text(target)}" if is_first and target else ""
            limit = f", budget {budget.text(budget.limit)}"
            parts.append(f"{resource} {budget.text(amount)}{budget.per} ({label}){schedule}{limit}")
        return "; ".join(parts)

    def _time_left(self) -> str:
        times = {name: max(0.0, at - self._now()) for name, at in self._end_times.items()}
        if len({round(left) for left in times.values()}) == 1:  # the last phase
            times = dict(list(times.items())[-1:])
        return ", ".join(f"{duration(left)} left{name}" for name, left in times.items())

    def _picture(self) -> Text:
        first = "  ".join(part for part in (self._where, self._score, self._time_left()) if part)
        second = "  ".join(part for part in (self._cost, self._bars) if part)
        # Long lines are truncated: wrapped lines would make the display jump.
        return Text("\n".join(line for line in (first, second) if line), no_wrap=True, overflow="ellipsis")


def sparkline(ratios: Iterable[float]) -> str:
    """Small bars for ratios from 0 to 1."""
    return "".join(BARS[min(len(BARS) - 1, int(ratio * len(BARS)))] for ratio in ratios)


class ProfileProgress(_View):
    """Shows the progress of a profile. Pass it as `progress`, inside a `with` block."""

    def __init__(self, console: Console | None, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(console, now)
        self._first_line = ""
        self._unit = "J"
        self._last: Progress | None = None
        self._start: tuple[float, int] | None = None

    def _make_display(self, console: Console) -> RichProgress:
        text = TextColumn("{task.description}", markup=False)
        bar = RichProgress(BarColumn(bar_width=24), MofNCompleteColumn(), text, TimeRemainingColumn(), console=console)
        self._bar_task = bar.add_task("", total=None)
        return bar

    def announce(self, meter: MeterInfo, device: str | None) -> None:
        """Set the first line: the meter, and the device that networks run on (None: they are not run)."""
        self._unit = "J" if meter.has_energy else "s"
        place = "networks are not run" if device is None else f"networks run on {device}"
        self._first_line = f"{meter.name}: {meter.device}, {meter.scope}, {meter.reads} ({meter.label}); {place}"

    def __call__(self, progress: Progress) -> None:
        """Show one step."""
        self._last = progress
        if self._start is None:
            self._start = self._now(), progress.done
        for text in filter(None, (self._first_line, progress.message)):
            self.say(text)
        self._first_line = ""
        sample, done, total = progress.sample, progress.done, progress.total
        if isinstance(self._display, RichProgress):
            self._display.update(self._bar_task, completed=done, total=total, description=self._describe(progress))
        elif sample is not None and not sample.is_reference and (done % LINE_SAMPLES == 0 or done == total):
            self.say(f"{done} of {total} samples, {self._describe(progress)}{self._time_left(progress)}")

    def so_far(self, path: str | Path) -> str:
        """What an interrupted profile leaves behind."""
        if self._last is None or self._last.done == 0:
            return "nothing was measured yet."
        # The file may hold a sample that was written at the last moment.
        done = len(Profile.load(path).design_samples) if Path(path).exists() else self._last.done
        return f"{done} of {self._last.total} samples are in {path}. Run the same command again to resume."

    def _time_left(self, progress: Progress) -> str:
        assert self._start is not None
        at, done = self._start
        if progress.done in (progress.total, done):
            return ""
        left = (self._now() - at) / (progress.done - done) * (progress.total - progress.done)
        return f", {duration(left)} left"

    def _describe(self, progress: Progress) -> str:
        parts = []
        if progress.sample is not None:
            interval = progress.sample.relative_ci
            ci = "" if interval is None else f" ±{percent(interval)}"
            parts.append(f"{si(progress.sample.joules, self._unit)}{ci} ({progress.label})")
        if progress.error is not None:
            parts.append(f"error of a quick fit {percent(progress.error)}")
        if progress.drift is not None and progress.drift.references > 1:
            parts.append(f"reference ±{percent(progress.drift.cv)}")
        return ", ".join(parts)
