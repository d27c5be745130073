"""`profile`: measure many width configurations of a network, one after the other, into a file that can be resumed.

    reference | 10 samples | reference | 10 samples | ... | reference
    ^ the dense network, measured again and again to observe the drift of the device

What is measured next depends only on what the file contains. So the same call resumes after any interruption, and a
call with more samples extends a profile.
"""

from __future__ import annotations

import gc
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ecc.errors import BadFile, BadMeasurement, option_hint
from ecc.graph import ChannelGraph
from ecc.options import flat_values, settings_from
from ecc.settings import (
    CLOCK_SETTINGS,
    PROFILE_SETTINGS,
    Design,
    MeasureSettings,
    Shard,
    deployment,
    refuse_runner_of_file,
)
from ecc.task import Inputs, check_input
from ecc.torch_utils import input_shapes

from .design import sample_widths
from .drift import MAX_CV, Drift
from .early_stopping import EarlyStop, FitError, quick_error
from .meter import Analytic, Clock, EnergySource, Meter, Timed
from .profile import Profile, ProfileHeader, Sample, drift_remedy, header_conflict, merge_profiles
from .profile_writer import ProfileWriter, open_profile
from .registry import find_meter
from .remote.client import RemoteMeter, SessionRestarted
from .remote.search import choose_board_runner
from .runner_search import RunnerSearch, choose_runner
from .runners import runner_device_type
from .samplers import AnalyticProfiler, Profiler, open_profiler, reason_of
from .window import visible_device_type

_MIN_REFERENCES_TO_WARN = 3  # two may differ by chance
_FAILURES = (BadMeasurement, RuntimeError, MemoryError)  # torch raises RuntimeError if memory is exhausted


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Progress of a profile, passed to the callback after each sample and with each message."""

    done: int
    """Design samples in the file, without references."""
    total: int
    """Planned design samples; fewer suffice if the profile stops early."""
    label: str
    """Label of the provenance."""
    sample: Sample | None = None
    """The sample that was just measured."""
    drift: Drift | None = None
    """Variation of the reference; None before it was measured, and for computed profiles."""
    error: float | None = None
    """Cross-validated relative error of the quick fit, at its last check."""
    message: str = ""


def profile_settings(source: EnergySource, *, device: str | None = None, **choices: Any) -> MeasureSettings:
    """Settings of a profile with some values chosen by the user; None keeps the default.

    Defaults are `PROFILE_SETTINGS`, and `CLOCK_SETTINGS` for a clock of this machine. Choices have the names that the
    command line uses. An analytic source runs nothing, so any choice is refused, as is a device.
    """
    given = {name: value for name, value in {"device": device, **choices}.items() if value is not None}
    if given and isinstance(source, Analytic):
        info = source.describe()
        raise BadMeasurement(
            f"{option_hint(next(iter(given)))} has no effect: {info.name} runs nothing here, its numbers are "
            f"{info.label}. Leave it out, or choose a meter that reads a device."
        )
    given.pop("device", None)
    is_clock = isinstance(source.describe().provenance, Timed) and not isinstance(source, RemoteMeter)
    defaults = CLOCK_SETTINGS if is_clock else PROFILE_SETTINGS
    limit = max(defaults.max_window_seconds, given.get("window", 0.0))
    values = {**flat_values(defaults), "max_window_seconds": limit, **given}
    return settings_from(MeasureSettings, values)


def find_runner(
    path: str | Path,
    model: nn.Module,
    example_input: Inputs,
    meter: EnergySource,
    settings: MeasureSettings,
    *,
    device: torch.device | str | None = None,
    **options: Any,
) -> tuple[MeasureSettings, RunnerSearch | None]:
    """Resolve `runner="auto"` by measuring, here or on a board; a profile that is resumed keeps its choice.

    Other settings are returned unchanged. The options are those of `choose_runner`; boards use `resource` and `report`
    only.
    """
    if settings.runner != "auto":
        return settings, None
    if not isinstance(meter, Meter):
        raise BadMeasurement(f"runner 'auto' needs a meter; {meter.describe().name} runs nothing here. Leave it out.")
    path, search = Path(path), None
    for begun in (path, *sorted(path.parent.glob(f"{path.name}.shard-*-of-*"))):
        header = Profile.load(begun).header if begun.exists() else None
        if header is None or header.settings is None:
            continue
        refuse_runner_of_file(header.settings.runner, settings.runner, str(begun))
        if header.runner_search is not None:
            kept = {name: getattr(header.settings, name) for name in ("runner", "precision", "channels_last")}
            settings, search = replace(settings, **kept), header.runner_search
            break
    if isinstance(meter, RemoteMeter):
        if search is None:
            wanted = {name: value for name, value in options.items() if name in ("resource", "report")}
            settings, search = choose_board_runner(model, example_input, meter, settings, **wanted)
        meter.use_runner(settings)
    elif search is None:
        settings, search = choose_runner(model, example_input, meter, settings, device=device, **options)
    return settings, search


def _shapes_text(shapes: Mapping[str, Sequence[int]] | None) -> str:
    """Such as 1x3x224x224."""
    return ", ".join("x".join(map(str, shape)) for shape in (shapes or {}).values())


def default_device(source: EnergySource, runner: str | None = None) -> str:
    """The device to run on by default: that of the runner, else an accelerator that the meter sees, else the CPU."""
    kind = runner_device_type(runner)
    if kind is not None:
        return kind
    return visible_device_type(source.describe(), ("cuda", "mps")) or "cpu"


def profile(
    model: nn.Module,
    graph: ChannelGraph,
    example_input: Inputs,
    meter: EnergySource | str,
    path: str | Path,
    *,
    samples: int = 250,
    design: str = "mixed",
    seed: int = 0,
    width_multiple: int | None = None,
    depth: bool = True,
    settings: MeasureSettings = PROFILE_SETTINGS,
    device: torch.device | str | None = None,
    rounds: int = 1,
    reference_every: int = 10,
    target_error: float | None = None,
    shard: Shard | None = None,
    runner_search: RunnerSearch | None = None,
    fit_error: FitError = quick_error,
    progress: Callable[[Progress], None] | None = None,
    clock: Clock | None = None,
) -> Profile:
    """Measure many width configurations of a network. Call it again with the same arguments to resume.

    Args:
        model: The dense network; it is not changed.
        graph: Result of `trace_channels(model, example_input)`.
        example_input: One batch.
        meter: A meter from `find_meter`, its name, or your own. For an `Analytic`, no network is built or run. Meters
            of several boards from `open_targets` share the samples.
        path: The file to append to; created if it does not exist.
        samples: Number of width configurations. More than before extends a profile.
        design: `mixed` or `uniform`, see `ecc.measure.design`.
        seed: Random seed of the design and of the order of measurements.
        width_multiple: Widths are multiples of this.
        depth: Include networks with removed branches, so that the energy without them can be predicted.
        settings: How networks are run and measured.
        device: Where networks run; by default the device of the model.
        rounds: How often each configuration is measured. Two rounds are better than two windows: they are far apart
            in time.
        reference_every: Samples between two measurements of the dense reference.
        target_error: Stop when the relative error of a quick fit is below this, or no longer improves.
        shard: (3, 8) measures the samples whose index is 3 modulo 8, for the third of eight equal devices; see
            `merge_profiles`.
        runner_search: What `choose_runner` measured, to be recorded in the profile.
        fit_error: Error that `target_error` refers to.
        progress: Called after each sample.
        clock: Time functions; those of the system by default.

    Returns:
        Everything that the file contains.

    Raises:
        BadFile: If the file belongs to another network, device, meter or setting, or is being written.
        BadMeasurement: If two samples in a row failed, each twice, or one of them failed at the end again.
        BadWidths: If the network has too few widths for the design.
        EccError: If an argument is out of its range.
    """
    example_input = check_input(example_input)
    meter = find_meter(meter) if isinstance(meter, str) else meter
    shapes = input_shapes(example_input)
    if isinstance(meter, Analytic) and graph.input_shapes not in (None, shapes):
        raise BadMeasurement(
            f"the channel graph was traced with inputs of shape {_shapes_text(graph.input_shapes)}, and the example "
            f"input has {_shapes_text(shapes)}. Trace it with this input: trace_channels(model, example_input)."
        )
    if target_error is not None and not 0 < target_error < 1:
        raise BadMeasurement(f"target error {target_error} is not between 0 and 1; give a fraction such as 0.02.")
    plan = Design(
        kind=design,
        samples=samples,
        seed=seed,
        width_multiple=width_multiple,
        depth=depth,
        rounds=rounds,
        reference_every=reference_every,
        shard=shard,
    )
    graph = graph if plan.removes_branches else graph.without_branches()
    widths = sample_widths(graph, samples, design, seed, width_multiple)
    lock = threading.Lock()

    def report(step: Progress) -> None:
        with lock:  # several boards may report at once
            (progress or (lambda _: None))(step)

    def profiler_of(source: EnergySource) -> Profiler:
        if isinstance(source, Analytic):
            return AnalyticProfiler(graph, example_input, source)
        return open_profiler(
            model, graph, example_input, source, settings, device=device, clock=clock, runner_search=runner_search
        )

    def measure(source: EnergySource, file: str | Path, plan: Design) -> Profile:
        profiler = profiler_of(source)
        with open_profile(file) as writer:
            run = _ProfileRun(plan, widths, profiler, writer, EarlyStop(graph, target_error, fit_error), report)
            with _fewer_collections() if profiler.drifts else nullcontext():
                run.finish()
            return writer.profile()

    others: tuple[EnergySource, ...] = getattr(meter, "others", ()) if shard is None else ()
    if not others:
        return measure(meter, path, plan)
    if Path(path).exists():
        return _load_merged(Path(path), profiler_of(meter).header(plan))
    return _profile_shards((meter, *others), Path(path), plan, measure)


def _profile_shards(
    meters: Sequence[EnergySource], path: Path, plan: Design, measure: Callable[[EnergySource, Path, Design], Profile]
) -> Profile:
    """Measure shards of one profile on several equal boards at once, and merge them.

    The shards are in files beside the profile, so that the same call resumes each of them.
    """
    numbers, count = range(1, len(meters) + 1), len(meters)
    paths = [path.with_name(f"{path.name}.shard-{number}-of-{count}") for number in numbers]
    with ThreadPoolExecutor(count) as pool:  # waits for every board, also after a failure
        list(pool.map(measure, meters, paths, [replace(plan, shard=(number, count)) for number in numbers]))
    return merge_profiles(paths, path)


def _load_merged(path: Path, header: ProfileHeader) -> Profile:
    """A profile that several boards have finished, after checking that it is the one that is asked for."""
    merged = Profile.load(path)
    if not merged.header.merged_from:
        raise BadFile(f"{path} was measured on one device. Give another file for several targets.")
    _check_conflict(path, merged.header, header, ignore=frozenset({"design.shard", "meter.device_id", "merged_from"}))
    found, wanted = merged.header.design, header.design
    if (found.samples, found.rounds) < (wanted.samples, wanted.rounds):
        raise BadFile(
            f"{path} was merged with {found.samples} samples. To measure more, delete it and run the same command "
            "again: the files of the boards beside it are kept and extended."
        )
    return merged


# --- one call of profile() ---------------------------------------------------------------------------


class _ProfileRun:
    """Measures what the file does not contain yet."""

    def __init__(
        self,
        plan: Design,
        widths: Sequence[dict[str, int]],
        profiler: Profiler,
        writer: ProfileWriter,
        early_stop: EarlyStop,
        report: Callable[[Progress], None],
    ) -> None:
        self._plan, self._widths, self._profiler = plan, widths, profiler
        self._writer, self._early_stop, self._report_progress = writer, early_stop, report
        if writer.header is not None:
            profiler.adopt_runner(writer.header)
        self._header = profiler.header(plan)
        if writer.header is not None:
            _check_header(writer, writer.header, self._header)
            _check_widths(writer, widths)
        self._pending = self._missing()
        self._done = sum(not sample.is_reference for sample in writer.samples)
        self._total = self._done + len(self._pending)
        self._drift: Drift | None = None
        self._has_warned = False
        self._has_failed = False
        """Whether the last sample failed."""
        last = max((sample.session for sample in writer.samples), default=-1)
        self._session = last + 1 if profiler.drifts else 0
        self._check_early_stop()
        self._since_reference = self._count_since_reference()

    def finish(self) -> None:
        """Measure the missing samples, and the reference before, between and after them."""
        if not self._pending and self._since_reference == 0:
            return
        if self._writer.header is None:
            counter = self._profiler.prepare(None)
            self._header = replace(self._profiler.header(self._plan), counter=counter)
            self._writer.start(self._header)
        else:
            self._profiler.prepare(self._writer.header.counter)
        messages = []
        if self._header.settings is not None:
            reason = f": {self._header.runner_reason}" if self._header.runner_reason else ""
            messages.append(f"runner {deployment(self._header.settings)}{reason}.")
        if self._done:
            messages.append(f"Resuming: {self._done} of {self._total} samples are done.")
        self._report(message=" ".join(messages))
        while self._pending or self._since_reference:
            try:
                self._measure_next()
            except SessionRestarted as restarted:  # noqa: PERF203 - short beside a measurement
                self._session += 1  # a board came back: a new session starts with the reference
                self._since_reference = self._plan.reference_every
                self._report(message=f"the link was lost and made again ({restarted}).")

    def _measure_next(self) -> None:
        """Measure the next sample, or the reference if it is due."""
        if self._since_reference >= self._plan.reference_every or not self._pending:
            round_ = self._pending[0][0] if self._pending else self._writer.samples[-1].round
            sample = self._measure(None, round_)
            self._writer.append(sample)
            self._since_reference = 0
            self._drift = self._writer.profile().drift if self._profiler.drifts else None
            self._warn_about_drift()
        else:
            round_, index = self._pending[0]
            try:
                sample = self._measure(index, round_)
            except BadMeasurement as error:
                self._postpone(error)
                return
            self._has_failed = False
            self._writer.append(sample)
            self._pending.popleft()
            self._done += 1
            self._since_reference += 1
        stop = "" if sample.is_reference else self._check_early_stop()
        self._report(sample=sample)
        if stop:
            self._report(message=stop)

    def _postpone(self, error: BadMeasurement) -> None:
        """Measure a sample that failed after all others, so that one of them does not stop a long profile.

        Raises:
            BadMeasurement: If the sample before it failed as well, or it is the last one.
        """
        if self._has_failed or len(self._pending) == 1:
            raise error
        self._has_failed = True
        self._report(message=f"sample {self._pending[0][1]} failed twice; it is measured again at the end.")
        self._pending.rotate(-1)

    def _missing(self) -> deque[tuple[int, int]]:
        """(round, index) of missing samples in the order of measurement: shuffled within each round."""
        known = {(sample.round, sample.index) for sample in self._writer.samples}
        planned = ((round_, index) for round_ in range(self._plan.rounds) for index in self._plan.indices())
        missing = [key for key in planned if key not in known]
        return deque(sorted(missing, key=lambda key: (key[0], _shuffle_key(self._plan.seed, *key))))

    def _count_since_reference(self) -> int:
        """Samples since the last reference. A new session or file starts with the reference."""
        samples = self._writer.samples
        if not samples or (self._profiler.drifts and self._pending):
            return self._plan.reference_every
        return next((count for count, sample in enumerate(reversed(samples)) if sample.is_reference), len(samples))

    def _check_early_stop(self) -> str:
        """Drop the samples that are not needed; a message if there are any."""
        reason = self._early_stop.reason(self._writer.profile()) if self._early_stop.is_due(self._done) else None
        if reason is None or not self._pending:
            return ""
        self._pending.clear()
        return f"stopped early: {reason}."

    def _warn_about_drift(self) -> None:
        """Warn once, early enough to stop, that a fit would refuse this profile."""
        drift = self._drift
        if drift is None or drift.is_steady or drift.references < _MIN_REFERENCES_TO_WARN or self._has_warned:
            return
        self._has_warned = True
        self._report(
            message=f"warning: the dense reference varied by {drift.cv:.1%} over {drift.references} measurements; a "
            f"fit accepts at most {MAX_CV:.0%}. {drift_remedy()}"
        )

    def _measure(self, index: int | None, round_: int) -> Sample:
        widths = dict(zip(self._header.groups, self._header.full_widths, strict=True))
        if index is not None:
            widths = self._widths[index]
        what = "the dense reference" if index is None else f"sample {index}"
        for is_last in (False, True):
            try:
                return self._profiler.sample(index, round_, self._session, widths)
            except _FAILURES as error:
                reason = reason_of(error)
                if is_last:
                    raise BadMeasurement(
                        f"{what} failed twice: {reason} The {self._done} samples measured so far are in "
                        f"{self._writer.path}. Run the same command again to resume."
                    ) from error
            gc.collect()  # the traceback may hold the failed network
            self._profiler.clear()
            self._report(message=f"{what} failed: {reason} Trying once more.")
        raise AssertionError("the loop returns or raises")

    def _report(self, *, sample: Sample | None = None, message: str = "") -> None:
        self._report_progress(
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


def _check_header(writer: ProfileWriter, old: ProfileHeader, new: ProfileHeader) -> None:
    """Refuse to append samples with another meaning."""
    if old.merged_from:
        raise BadFile(f"{writer.path} was merged from {len(old.merged_from)} files; extend those, and merge again.")
    _check_conflict(writer.path, old, new)


def _check_conflict(
    path: Path, old: ProfileHeader, new: ProfileHeader, *, ignore: frozenset[str] = frozenset()
) -> None:
    conflict = header_conflict(old, new, ignore=ignore)
    if conflict is not None:
        name, before, now = conflict
        raise BadFile(
            f"{path} cannot be resumed: {name} was {before!r} and is now {now!r}. "
            "Use the same settings, or give another file."
        )


def _check_widths(writer: ProfileWriter, widths: Sequence[dict[str, int]]) -> None:
    """Refuse samples that the design does not give, as in a file that was edited."""
    for line, sample in enumerate(writer.samples, start=2):
        if sample.index is None or sample.index >= len(widths):
            continue
        expected = tuple(widths[sample.index].values())
        if sample.widths != expected:
            raise BadFile(
                f"{writer.path}:{line}: sample {sample.index} has widths {list(sample.widths)}, and the design gives "
                f"{list(expected)}. Give another file."
            )


def _shuffle_key(seed: int, round_: int, index: int) -> bytes:
    """A random sort key that does not change when a design grows."""
    return hashlib.sha256(f"{seed}/{round_}/{index}".encode()).digest()


@contextmanager
def _fewer_collections() -> Iterator[None]:
    """Freeze existing objects, so that garbage collection before each window is fast."""
    if gc.get_freeze_count():
        yield  # the caller froze objects; unfreezing would affect those
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
