"""A profile while it grows: a bar in a terminal, a line now and then elsewhere; and what it holds in the end."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from ecc.graph import ChannelGraph
from ecc.measure.early_stopping import quick_error
from ecc.measure.meter import MeterInfo
from ecc.measure.profile import DRIFT_REMEDY, Profile
from ecc.measure.profiler import Progress

LINE_EVERY = 10
"""Networks from one line to the next where the output is no terminal."""

FLOOR_SHARE = 0.7
"""A network that cannot get below this share of its energy, however thin, deserves a word."""

NARROW = 0.35
"""A network with fewer of its channels tells about what the least one would take."""


class ProfileView:
    """Shows progress; pass it to `profile` as `progress`, inside a `with` block.

    Args:
        console: Where to; nothing is shown without one.
        now: The time.
    """

    def __init__(self, console: Console | None, *, now: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._now = now
        self._first_line = ""
        self._last: Progress | None = None
        self._started: tuple[float, int] | None = None
        self._bar: RichProgress | None = None
        if console is not None and console.is_terminal:
            self._bar = RichProgress(
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.description}", markup=False),
                TimeRemainingColumn(),
                console=console,
            )
            self._bar_task = self._bar.add_task("", total=None)

    def __enter__(self) -> ProfileView:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def announce(self, meter: MeterInfo, device: str | None) -> None:
        """What to say first, once all is in order: which meter was taken, and where networks run (None: nowhere)."""
        place = "no network is run" if device is None else f"networks run on {device}"
        self._first_line = f"{meter.name}: {meter.device}, {meter.scope}, {meter.reads} ({meter.label}); {place}"

    def __call__(self, progress: Progress) -> None:
        """Shows one step."""
        self._last = progress
        if self._started is None:
            self._started = self._now(), progress.done
        if self._console is None:
            return
        for text in filter(None, (self._first_line, progress.message)):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)
        self._first_line = ""
        if self._bar is not None:
            self._bar.update(
                self._bar_task, completed=progress.done, total=progress.total, description=_facts(progress)
            )
        elif (
            progress.sample is not None
            and not progress.sample.is_reference
            and self._is_due(progress.done, progress.total)
        ):
            left = self._left(progress)
            line = f"{progress.done} of {progress.total} networks, {_facts(progress)}{left}"
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def so_far(self, path: str | Path) -> str:
        """What an interrupted profile leaves behind."""
        if self._last is None or self._last.done == 0:
            return "nothing was measured yet."
        # The file knows of a row that was written at the last moment.
        done = len(Profile.load(path).design_samples) if Path(path).exists() else self._last.done
        return f"{done} of {self._last.total} networks are in {path}; the same command goes on from there."

    def _is_due(self, done: int, total: int) -> bool:
        return done % LINE_EVERY == 0 or done == total

    def _left(self, progress: Progress) -> str:
        assert self._started is not None
        at, done = self._started
        if progress.done == progress.total or progress.done == done:
            return ""
        left = (self._now() - at) / (progress.done - done) * (progress.total - progress.done)
        return f", {left / 60:.0f} min left" if left >= 90 else f", {left:.0f} s left"


def _facts(progress: Progress) -> str:
    parts = []
    if progress.sample is not None:
        spread = "" if progress.sample.relative_ci is None else f" +- {progress.sample.relative_ci:.1%}"
        parts.append(f"{progress.sample.joules:.4g} J{spread} ({progress.label})")
    if progress.error is not None:
        parts.append(f"fit error {progress.error:.1%}")
    if progress.drift is not None and progress.drift.references > 1:
        parts.append(f"reference +-{progress.drift.cv:.1%}")
    return ", ".join(parts)


# ---------------------------------------------------------------- in the end


def profile_facts(profile: Profile, graph: ChannelGraph | None = None) -> dict[str, Any]:
    """What a profile holds, for programs."""
    header, drift = profile.header, profile.drift
    samples = profile.corrected(allow_drift=True)
    dense = sorted(row.joules for row in profile.references)
    return {
        "label": header.label,
        "meter": header.meter.name,
        "device": header.meter.device,
        "batch": header.batch,
        "mode": None if header.settings is None else header.settings.mode,
        "mode_reason": header.mode_reason,
        "networks": len(samples),
        "measurements": len(profile.design_samples),
        "references": len(profile.references),
        "dense_joules": dense[len(dense) // 2] if dense else None,
        "least_joules": min((sample.joules for sample in samples), default=None),
        "narrowest_share": min((sum(sample.widths) / sum(header.full_widths) for sample in samples), default=None),
        "most_joules": max((sample.joules for sample in samples), default=None),
        "seconds_per_sample": profile.seconds_per_sample,
        "repeat_noise": profile.repeat_noise,
        "reference_cv": None if drift is None else drift.cv,
        "drift_divided_out": drift is not None and drift.is_significant,
        "steady": drift is None or drift.is_steady,
        "quick_fit_error": None if graph is None else quick_error(graph, profile),
    }


def profile_summary(profile: Profile, path: str | Path, graph: ChannelGraph | None = None) -> str:
    """The same in a few lines for people."""
    facts = profile_facts(profile, graph)
    lines = [
        f"{path}: {facts['networks']} networks, {facts['label']}: {facts['device']}, batch {facts['batch']}",
    ]
    if facts["mode_reason"]:
        lines.append(f"mode {facts['mode']}: {facts['mode_reason']}")
    if facts["networks"]:
        dense = "" if facts["dense_joules"] is None else f"; dense {facts['dense_joules']:.4g} J"
        lines.append(f"{facts['least_joules']:.4g} to {facts['most_joules']:.4g} J an inference{dense}")
        dense_joules, narrowest = facts["dense_joules"], facts["narrowest_share"]
        if dense_joules is not None and narrowest < NARROW and facts["least_joules"] > FLOOR_SHARE * dense_joules:
            share = facts["least_joules"] / dense_joules
            lines.append(f"even the least network takes {share:.0%} of the dense one: a lower budget cannot be reached")
    if facts["seconds_per_sample"] is not None:
        lines.append(f"{facts['seconds_per_sample']:.2f} s a network in all")
    if facts["repeat_noise"] is not None:
        lines.append(f"repeats differ by {facts['repeat_noise']:.2%} (standard deviation)")
    if facts["quick_fit_error"] is not None:
        lines.append(f"a quick fit errs by {facts['quick_fit_error']:.1%} on networks it has not seen")
    if profile.drift is not None and profile.header.device_type is not None:
        lines.append(str(profile.drift))
        if not profile.drift.is_steady:
            lines.append(f"warning: the reference varied too much to trust this profile. {DRIFT_REMEDY}")
    return "\n".join(lines)
