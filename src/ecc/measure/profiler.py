"""`profile`: measures a design of networks, one after the other, into a file that survives anything.

    reference | 10 networks | reference | 10 networks | ... | reference
    ^ the dense network, again and again: what changes in it is drift of the device

What comes next is decided by what the file holds and by nothing else. So running the same call again goes on
where the last one ended, however it ended, and asking for more samples extends a profile.
"""

from __future__ import annotations

import gc
import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecc.errors import BadFile, BadMeasurement
from ecc.graph import ChannelGraph
from ecc.task import Inputs, check_input

from . import design as designs
from .design import Shard
from .drift import MAX_CV, Drift
from .early_stopping import EarlyStop, ErrorOf, quick_error
from .measurement import MeasureSettings
from .meter import Analytic, Clock, EnergySource
from .profile import DRIFT_REMEDY, Profile
from .profile_header import Design, ProfileHeader, disagreement
from .profile_writer import ProfileFile, open_profile
from .profilers import AnalyticProfiler, DeviceProfiler, first_line
from .samples import Sample

PROFILE_SETTINGS = MeasureSettings(
    window_seconds=0.4, min_ticks=4, min_repeats=1, max_repeats=1, warmup_seconds=0.03, warmup_runs=3
)
"""One short window a network: below a second each on a counter of 100 ms. Repeats belong into other rounds,
where noise is another. The device comes warm from the network before, and what was counted before the first tick of a
window is not in it, so that the warm-up can be short. Autotuning the new shapes of a network takes about as long as the
window. Trying three algorithms for each instead of torch's ten takes a third of that, and was not adopted: on an H200
networks then took several percent more joules than they do as users run them."""

_ENOUGH_TO_WARN = 3  # references: two may differ by chance

_FAILURES = (BadMeasurement, RuntimeError, MemoryError)  # RuntimeError: torch is out of memory


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a profile stands; passed to `progress` after each sample, and when there is something to say."""

    done: int
    """Measurements of networks that the file holds, references not counted."""
    total: int
    """Of how many; fewer will do if the profile stops early."""
    label: str
    """Measured, estimated or declared."""
    sample: Sample | None = None
    """The sample just measured."""
    drift: Drift | None = None
    """How the reference varied; None before it was measured, and where nothing can drift."""
    error: float | None = None
    """Cross-validated relative error of the quick fit, at the last look."""
    message: str = ""


LONGEST_WINDOW = 3600.0
"""Seconds that a user may ask for."""


def chosen_settings(source: EnergySource, **choices: Any) -> MeasureSettings:
    """The settings of a profile with some of them chosen; None leaves the default.

    Args:
        source: An analytic one has no settings, so that choosing any is refused.
        **choices: Fields of `MeasureSettings`, and `device`, which is only checked here.

    Raises:
        BadMeasurement: If a choice does not exist or does not apply.
    """
    given = {name: value for name, value in choices.items() if value is not None}
    if given and isinstance(source, Analytic):
        info = source.describe()
        raise BadMeasurement(
            f"{next(iter(given))} was chosen, but {info.name} runs nothing here: its numbers are {info.label}. "
            "Leave it out, or choose a meter that reads a device."
        )
    given.pop("device", None)
    if "window_seconds" in given:  # a long window is wanted: the limit is for those that wait for ticks
        if given["window_seconds"] > LONGEST_WINDOW:
            seconds = given["window_seconds"]
            raise BadMeasurement(f"window_seconds={seconds} is above {LONGEST_WINDOW:g}, the most it may be.")
        given["max_window_seconds"] = max(PROFILE_SETTINGS.max_window_seconds, given["window_seconds"])
    return replace(PROFILE_SETTINGS, **given)


def profile(
    model: nn.Module,
    graph: ChannelGraph,
    example_input: Inputs,
    meter: EnergySource,
    path: str | Path,
    *,
    samples: int = 250,
    design: str = "mixed",
    seed: int = 0,
    width_multiple: int | None = None,
    settings: MeasureSettings = PROFILE_SETTINGS,
    device: torch.device | str | None = None,
    rounds: int = 1,
    reference_every: int = 10,
    target_error: float | None = None,
    shard: Shard | None = None,
    error_of: ErrorOf = quick_error,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measures many widths of one network. The same call again goes on where the last one ended.

    Args:
        model: The dense network; left as it is.
        graph: From `trace_channels(model, example_input)`: costs are counted for this input.
        example_input: One batch.
        meter: From `find_meter`, or your own. An `Analytic` is asked, and no network is built.
        path: The file to append to; made if it does not exist.
        samples: Networks in the design. More than before extends a profile.
        design: `mixed` or `uniform`, see `ecc.measure.design`.
        seed: Of the design and of the order of measuring.
        width_multiple: Widths in multiples of this.
        settings: How networks run and how long they are measured.
        device: Where networks run; by default where the model is.
        rounds: How often each network is measured. A second round beats a second window: it is far away in time.
        reference_every: Networks between two measurements of the dense reference.
        target_error: Stops when the error of the quick fit is below this share, or no longer falls.
        shard: (3, 8) takes the samples that are 3 modulo 8, for the third of eight equal devices; see `merge_profiles`.
        error_of: The model whose error `until` is about.
        progress: Called after each sample.
        clock: The time; the system's by default.

    Returns:
        All that the file holds.

    Raises:
        BadFile: If the file belongs to another network, device, meter or setting, or is being written to.
        BadMeasurement: If an argument is out of its range, or a network could not be measured twice in a row.
        BadWidths: If the network has too few widths for the design.
        BadTask: If the example input is not of tensors.
    """
    example_input = check_input(example_input)
    designs.check_design(samples, design, seed, width_multiple)
    for name, value in (("rounds", rounds), ("reference_every", reference_every)):
        if value < 1:
            raise BadMeasurement(f"{name}={value} is below 1, the least it may be.")
    if rounds * samples > designs.MAX_SAMPLES:
        raise BadMeasurement(f"rounds={rounds} of {samples} samples are more than {designs.MAX_SAMPLES} measurements.")
    if target_error is not None and not 0 < target_error < 1:
        raise BadMeasurement(f"target_error={target_error} is not a share between 0 and 1, such as 0.02.")
    plan = Design(
        kind=design,
        seed=seed,
        width_multiple=width_multiple,
        samples=samples,
        rounds=rounds,
        reference_every=reference_every,
        shard=shard,
    )
    if not designs.shard_indices(samples, shard):
        assert shard is not None  # a design has samples
        name = "/".join(map(str, shard))
        raise BadMeasurement(f"shard {name} of a design of {samples} samples holds no sample; ask for more samples.")
    place: DeviceProfiler | AnalyticProfiler
    if isinstance(meter, Analytic):
        place = AnalyticProfiler(graph, example_input, meter)
    else:
        place = DeviceProfiler(model, graph, example_input, meter, settings, device, clock or Clock())
    networks = designs.sample_widths(graph, samples, design, seed, width_multiple)
    early_stop = EarlyStop(graph, target_error, error_of)
    with open_profile(path) as file, _few_collections() if place.drifts else nullcontext():
        _Run(plan, networks, place, file, early_stop, progress or (lambda _: None)).finish()
        return file.profile()


class _Run:
    """One call of `profile`."""

    def __init__(
        self,
        plan: Design,
        networks: Sequence[dict[str, int]],
        place: DeviceProfiler | AnalyticProfiler,
        file: ProfileFile,
        early_stop: EarlyStop,
        tell: Callable[[Progress], None],
    ) -> None:
        self._plan, self._networks, self._place = plan, networks, place
        self._file, self._early_stop, self._tell = file, early_stop, tell
        if file.header is not None:
            place.continue_as(file.header)
        self._header = place.header(plan)
        if file.header is not None:
            _check_same(file, file.header, self._header)
            _check_design(file, networks)
        self._pending = self._missing()
        self._done = sum(not sample.is_reference for sample in file.samples)
        self._total = self._done + len(self._pending)
        self._drift: Drift | None = None
        self._has_warned = False
        last = max((sample.session for sample in file.samples), default=-1)
        self._session = last + 1 if place.drifts else 0  # arithmetic has no breaks
        self._look()
        self._since_reference = self._count_since_reference()

    def finish(self) -> None:
        """Measures what the file lacks: networks, and the reference before, between and after them."""
        if not self._pending and self._since_reference == 0:
            return
        if self._file.header is None:
            counter = self._place.ready(None)
            self._header = replace(self._place.header(self._plan), counter=counter)
            self._file.start(self._header)
        else:
            self._place.ready(self._file.header.counter)
        there = f"{self._done} of {self._total} networks are there already." if self._done else ""
        self._say(message=" ".join(filter(None, (_mode(self._header), there))))
        while self._pending or self._since_reference:
            if self._since_reference >= self._plan.reference_every or not self._pending:
                sample = self._measured(None, self._pending[0][0] if self._pending else self._file.samples[-1].round)
                self._file.append(sample)
                self._since_reference = 0
                self._drift = self._file.profile().drift if self._place.drifts else None
                self._warn_if_unsteady()
            else:
                round_, number = self._pending[0]
                sample = self._measured(number, round_)
                self._file.append(sample)
                self._pending.popleft()
                self._done += 1
                self._since_reference += 1
                self._look()
            self._say(sample=sample)

    # ------------------------------------------------------------ what is left

    def _missing(self) -> deque[tuple[int, int]]:
        """(round, sample), in the order in which they are measured: shuffled, and one round after the other."""
        there = {(sample.round, sample.index) for sample in self._file.samples}
        wanted = (
            (round_, number)
            for round_ in range(self._plan.rounds)
            for number in designs.shard_indices(self._plan.samples, self._plan.shard)
        )
        missing = [key for key in wanted if key not in there]
        return deque(sorted(missing, key=lambda key: (key[0], _shuffled(self._plan.seed, *key))))

    def _count_since_reference(self) -> int:
        """Networks since the last reference; in a new session, and in a new file, the reference is due at once."""
        samples = self._file.samples
        if not samples or (self._place.drifts and self._pending):
            return self._plan.reference_every
        return next((count for count, sample in enumerate(reversed(samples)) if sample.is_reference), len(samples))

    def _look(self) -> None:
        """Leaves out what is pending when more samples no longer help."""
        if not self._early_stop.is_due(self._done):
            return
        reason = self._early_stop.reason(self._file.profile())
        if reason is not None and self._pending:
            self._pending.clear()
            self._say(message=f"stopped early: {reason}.")

    def _warn_if_unsteady(self) -> None:
        """Tells once, early enough to stop, that a fit would refuse what is being measured."""
        drift = self._drift
        if drift is None or drift.is_steady or drift.references < _ENOUGH_TO_WARN or self._has_warned:
            return
        self._has_warned = True
        self._say(
            message=f"warning: the dense reference varied by {drift.cv:.1%} over {drift.references} measurements; "
            f"ecc fit refuses more than {MAX_CV:.0%}. {DRIFT_REMEDY}"
        )

    # ------------------------------------------------------------ one sample

    def _measured(self, number: int | None, round_: int) -> Sample:
        widths = dict(zip(self._header.groups, self._header.full_widths, strict=True))
        if number is not None:
            widths = self._networks[number]
        what = "the dense reference" if number is None else f"sample {number}"
        for is_last in (False, True):
            try:
                return self._place.sample(number, round_, self._session, widths)
            except _FAILURES as error:
                reason = first_line(error)
                if is_last:
                    raise BadMeasurement(
                        f"{what} failed twice: {reason} The {self._done} samples measured so far are in "
                        f"{self._file.path}; the same command goes on from there."
                    ) from error
            gc.collect()  # the failed network may hang in the traceback
            self._place.clear()
            self._say(message=f"{what} failed: {reason} Trying once more.")
        raise AssertionError("the loop returns or raises")

    def _say(self, *, sample: Sample | None = None, message: str = "") -> None:
        self._tell(
            Progress(
                done=self._done,
                total=self._total,
                label=self._header.label,
                sample=sample,
                drift=self._drift,
                error=self._early_stop.error,
                message=message,
            )
        )


# ---------------------------------------------------------------- what is refused


def _check_same(file: ProfileFile, old: ProfileHeader, new: ProfileHeader) -> None:
    """Refuses to append under a header that means something else."""
    if old.merged_from:
        raise BadFile(f"{file.path} was merged from {len(old.merged_from)} files; extend those, and merge again.")
    found = disagreement(old, new)
    if found is not None:
        field, before, now = found
        raise BadFile(
            f"{file.path} cannot be continued: its {field} is {before!r}, and now it is {now!r}. "
            "Measure as before, or give another file."
        )


def _check_design(file: ProfileFile, networks: Sequence[dict[str, int]]) -> None:
    """Refuses samples that the design of the header does not give: it was made by another version, or changed."""
    for line, sample in enumerate(file.samples, start=2):
        if sample.index is None or sample.index >= len(networks):
            continue
        expected = tuple(networks[sample.index].values())
        if sample.widths != expected:
            raise BadFile(
                f"{file.path}:{line}: sample {sample.index} has widths {list(sample.widths)}, and its design gives "
                f"{list(expected)}. Give another file."
            )


def _mode(header: ProfileHeader) -> str:
    """How networks run, and why so; nothing where none is run."""
    if header.settings is None:
        return ""
    return f"mode {header.settings.mode}" + (f": {header.mode_reason}." if header.mode_reason else ".")


def _shuffled(seed: int, round_: int, number: int) -> bytes:
    """A sort key that looks random, and that does not change when a design grows."""
    return hashlib.sha256(f"{seed}/{round_}/{number}".encode()).digest()


@contextmanager
def _few_collections() -> Iterator[None]:
    """Sets aside the objects that are there, so that collecting garbage before each window is quick."""
    if gc.get_freeze_count():
        yield  # the caller froze some already, and thawing would thaw those
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
