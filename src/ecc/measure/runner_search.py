"""`choose_runner`: measure the dense network in every runner, precision and memory format, and take the cheapest.

Only those count whose outputs stay within a tolerance of the fp32 outputs, and whose score does, if the task has one.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import BadMeasurement, EccError, first_line
from ecc.graph.numerics import relative_error
from ecc.settings import MeasureSettings
from ecc.task import Inputs
from ecc.torch_utils import device_of

from .counter import CounterProbe
from .meter import Clock, Meter
from .runners import (
    PreparedRunner,
    RunnerModule,
    available_runners,
    by_argument,
    draw_inputs,
    open_runner,
    prepare_runner,
)
from .window import check_device, measure, probe_under_load

OUTPUT_TOLERANCE = 0.05
"""Allowed difference of the outputs from fp32, relative to the largest output."""
SCORE_TOLERANCE = 0.005
"""Allowed loss of score, where a score is given: half a percentage point of accuracy."""

NEAR_BEST = 1.1
"""Candidates up to this multiple of the lowest cost are measured again, with more windows."""
MAX_NEAR_BEST = 4

PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "int8")


@dataclass(frozen=True, kw_only=True)
class RunnerCandidate:
    """One way to run the dense network, and what it costs."""

    runner: str
    precision: str
    channels_last: bool = False
    joules: float | None = None
    """Per inference; None if it was not measured. Seconds where the meter is a clock."""
    seconds: float | None = None
    """Per inference."""
    difference: float | None = None
    """Largest difference of an output from fp32, relative to the largest output."""
    score: float | None = None
    excluded: str = ""
    """Why it must not be used; empty if it may."""

    @property
    def name(self) -> str:
        """Runner, precision and memory format in words."""
        return f"{self.runner}, {self.precision}{', channels last' if self.channels_last else ''}"


@dataclass(frozen=True, kw_only=True)
class RunnerSearch:
    """What `choose_runner` measured, and what it chose."""

    candidates: tuple[RunnerCandidate, ...]
    """The first one is fp32 in the default runner, to which savings refer."""
    chosen: int
    """Index of the cheapest candidate that is not excluded."""
    resource: str = "energy"
    """energy or latency: what was minimized."""
    output_tolerance: float = OUTPUT_TOLERANCE
    score_tolerance: float | None = None
    """None if no score was compared."""
    label: str = "measured"

    @property
    def best(self) -> RunnerCandidate:
        """The cheapest candidate."""
        return self.candidates[self.chosen]

    def cost(self, candidate: RunnerCandidate) -> float | None:
        """Joules or seconds of a candidate, as minimized."""
        return candidate.joules if self.resource == "energy" else candidate.seconds

    def saving(self, candidate: RunnerCandidate) -> float | None:
        """Saved fraction compared with the first candidate."""
        mine, first = self.cost(candidate), self.cost(self.candidates[0])
        return None if mine is None or first is None else 1 - mine / first

    def table(self) -> str:
        """The candidates as text, the cheapest first."""
        unit = "J" if self.resource == "energy" else "s"
        rows = [("runner, precision, format", f"{unit} per inference", "change", "output difference", "score", "")]
        order = sorted(self.candidates, key=lambda one: (bool(one.excluded), self.cost(one) or float("inf")))
        for one in order:
            cost, saving = self.cost(one), self.saving(one)
            note = one.excluded or ("chosen" if one is self.best else "")
            rows.append(
                (
                    one.name,
                    "" if cost is None else f"{cost:.4g}",
                    "" if saving is None else f"{0.0 - saving:+.0%}",
                    "" if one.difference is None else f"{one.difference:.1e}",
                    "" if one.score is None else f"{one.score:.4f}",
                    note,
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        lines = [
            "  ".join(f"{cell:<{width}}" for cell, width in zip(row, (*widths, 0), strict=True)).rstrip()
            for row in rows
        ]
        score = "" if self.score_tolerance is None else f" and a score at most {self.score_tolerance:g} lower"
        lines.append(f"allowed: outputs that differ by {self.output_tolerance:.0%} of the largest output{score}")
        return "\n".join(lines)


def choose_runner(
    model: nn.Module,
    example_input: Inputs,
    meter: Meter,
    settings: MeasureSettings | None = None,
    *,
    device: torch.device | str | None = None,
    evaluate: Callable[[nn.Module], float] | None = None,
    calibration: Sequence[Inputs] = (),
    runners: Sequence[str] | None = None,
    precisions: Sequence[str] = PRECISIONS,
    resource: str | None = None,
    output_tolerance: float = OUTPUT_TOLERANCE,
    score_tolerance: float = SCORE_TOLERANCE,
    report: Callable[[str], object] = lambda _: None,
    clock: Clock | None = None,
) -> tuple[MeasureSettings, RunnerSearch]:
    """Find the cheapest way to run the dense network.

    Args:
        model: The network; it is not changed.
        example_input: One batch.
        meter: Reads the device. A clock minimizes the latency.
        settings: How to measure; runner, precision and memory format are replaced.
        device: Where it runs; by default the device of the model.
        evaluate: Score of a module; higher is better.
        calibration: Batches for the calibration of int8; the example input by default.
        runners: Specs to try; by default every runner that is installed.
        precisions: Precisions to try.
        resource: energy or latency; energy unless the meter is a clock.
        output_tolerance: Allowed difference of outputs, relative to the largest output.
        score_tolerance: Allowed loss of score.
        report: Called with a line of progress.
        clock: Time functions; those of the system by default.

    Returns:
        The settings with the cheapest runner, precision and memory format; and every candidate.
    """
    settings = replace(settings or MeasureSettings(), runner=None, precision="fp32", channels_last=False)
    place = device_of(model) if device is None else torch.device(device)
    check_device(meter.describe(), place)
    resource = resource or ("energy" if meter.describe().has_energy else "latency")
    found = available_runners(place.type) if runners is None else dict.fromkeys(runners, "")
    inputs = draw_inputs(example_input, place) if settings.input_data == "random" else example_input
    search = _Search(
        copy.deepcopy(model).to(place), inputs, example_input, meter,
        replace(settings, input_data="example", min_repeats=1, max_repeats=1), place, evaluate,
        calibration or [example_input], clock, output_tolerance, score_tolerance,
    )  # fmt: skip
    candidates = [search.candidate(RunnerCandidate(runner="", precision="fp32"))]
    first = candidates[0]
    if first.excluded:
        raise BadMeasurement(f"the dense network cannot be measured in fp32: {first.excluded}")
    report(f"{first.name}: {first.joules:.4g}")
    for spec, problem in found.items():
        if problem:
            candidates.append(RunnerCandidate(runner=spec, precision="fp32", excluded=problem))
            continue
        for precision in precisions:
            for channels_last in (False, True):
                one = RunnerCandidate(runner=spec, precision=precision, channels_last=channels_last)
                if one.name == first.name or not _applies(one, settings, place.type, example_input):
                    continue
                one = search.candidate(one)
                candidates.append(one)
                report(f"{one.name}: {one.excluded or format(one.joules, '.4g')}")
    made = RunnerSearch(
        candidates=tuple(candidates),
        chosen=0,
        resource=resource,
        output_tolerance=output_tolerance,
        score_tolerance=None if evaluate is None else score_tolerance,
        label=meter.describe().label,
    )
    ranked = sorted(
        (index for index, one in enumerate(candidates) if not one.excluded),
        key=lambda index: made.cost(candidates[index]) or float("inf"),
    )
    lowest = made.cost(candidates[ranked[0]]) or float("inf")
    near = [index for index in ranked[:MAX_NEAR_BEST] if (made.cost(candidates[index]) or 0.0) <= NEAR_BEST * lowest]
    if len(near) > 1:
        for index in near:
            one = candidates[index] = search.candidate(candidates[index], again=True)
            report(f"{one.name}, again: {one.excluded or format(one.joules, '.4g')}")
        made = replace(made, candidates=tuple(candidates))
    usable = [index for index in near if not candidates[index].excluded] or ranked
    made = replace(made, chosen=min(usable, key=lambda index: made.cost(candidates[index]) or float("inf")))
    return with_candidate(settings, made.best), made


def with_candidate(settings: MeasureSettings, one: RunnerCandidate) -> MeasureSettings:
    """Settings with the runner, precision and memory format of a candidate."""
    precision: Any = one.precision  # checked by the settings
    return replace(settings, runner=one.runner or None, precision=precision, channels_last=one.channels_last)


def _applies(one: RunnerCandidate, settings: MeasureSettings, device_type: str, example_input: Inputs) -> bool:
    """Whether the runner has this precision and format, and the format can make a difference."""
    if one.channels_last and not any(tensor.dim() == 4 for tensor in by_argument(example_input).values()):
        return False
    if one.precision == "tf32" and device_type != "cuda":
        return False
    try:
        open_runner(one.runner, with_candidate(settings, one)).close()
    except EccError:
        return False
    return True


@dataclass
class _Search:
    """Measures candidates."""

    model: nn.Module
    inputs: Inputs
    """What is run while it is measured."""
    example_input: Inputs
    """What outputs are compared on: int8 is calibrated on data and not on random numbers."""
    meter: Meter
    settings: MeasureSettings
    device: torch.device
    evaluate: Callable[[nn.Module], float] | None
    calibration: Sequence[Inputs]
    clock: Clock | None
    output_tolerance: float
    score_tolerance: float
    counter: CounterProbe | None = None
    wanted: list[Tensor] | None = None
    score: float | None = None

    def candidate(self, one: RunnerCandidate, *, again: bool = False) -> RunnerCandidate:
        """Measure a candidate in one window, or `again` in more; a failure becomes the reason of its exclusion."""
        settings = with_candidate(self.settings, one)
        if again:
            settings = replace(settings, min_repeats=2, max_repeats=4)
        try:
            with prepare_runner(self.model, self.inputs, settings, calibration=self.calibration) as ready:
                if not again:
                    one = self._compared(replace(one, runner=ready.runner), ready)
                return one if one.excluded else self._measured(one, ready, settings)
        except Exception as error:  # noqa: BLE001 - one runtime that fails in its own way must not end the search
            reason = str(error) if isinstance(error, EccError) else first_line(error)
            return replace(one, excluded=reason.splitlines()[0][:200])
        finally:
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _compared(self, one: RunnerCandidate, ready: PreparedRunner) -> RunnerCandidate:
        """The candidate with the difference of its outputs and its score; excluded if one is too large or too low."""
        if ready.infer is None:
            return one
        found = [output.float().cpu() for output in ready.infer(self.example_input)]
        if self.wanted is None:
            self.wanted = found
        difference = relative_error(self.wanted, found)
        one = replace(one, difference=difference)
        if not difference <= self.output_tolerance:
            return replace(one, excluded=f"outputs differ by {difference:.1%} ({self.output_tolerance:.0%} allowed)")
        if self.evaluate is not None:
            score = float(self.evaluate(RunnerModule(ready, self.model, self.inputs)))
            one, self.score = replace(one, score=score), score if self.score is None else self.score
            if score < self.score - self.score_tolerance:
                return replace(one, excluded=f"the score is {self.score - score:.4f} lower")
        return one

    def _measured(self, one: RunnerCandidate, ready: PreparedRunner, settings: MeasureSettings) -> RunnerCandidate:
        """The candidate with joules and seconds of one inference."""
        about: dict[str, Any] = {"device": ready.device, "is_asynchronous": ready.is_asynchronous, "clock": self.clock}
        if self.counter is None:  # a property of the meter, so once is enough
            self.counter = probe_under_load(ready.run, self.meter, settings, **about)
        result = measure(ready.run, self.meter, settings, batch=ready.batch, counter=self.counter, **about)
        return replace(one, joules=result.joules, seconds=result.seconds)
