"""Tables for the terminal: inspect, doctor, profile, fit, compress, compare and export.

Names and notes come from files and from other people's code, so they are shown as plain text: no markup, and no control
characters that a terminal would obey.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from rich import box
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy import Budget, EnergyModel, FitErrors, FitQuality
from ecc.energy.quality import describe_learning_curve, describe_outlier_widths
from ecc.formatting import percent, si
from ecc.graph import ChannelGraph, ChannelGroup, Role
from ecc.measure.doctor import DoctorReport, MeterFinding, SelfTest
from ecc.measure.early_stopping import quick_error
from ecc.measure.meter import Declared, DeviceState, Estimated, Timed
from ecc.measure.profile import Profile, drift_remedy
from ecc.measure.registry import FALLBACKS
from ecc.run_records import RunSummary
from ecc.settings import deployment

from .load import GridRow, MeanStd

if TYPE_CHECKING:
    from ecc.export.run_export import ExportedRun

MAX_ITEMS = 12
"""Groups or tensors in a line of the terminal; the files have all of them."""


def plain(text: object) -> Text:
    """Text without markup; characters that are not printable become `?`."""
    return Text("".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in str(text)))


def _table(*columns: str, left: int = 1, title: str | None = None) -> Table:
    table = Table(title=None if title is None else plain(title), title_justify="left", box=None, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < left else "right")
    return table


def _optional(value: float | None, digits: int = 2, *, sign: bool = False) -> str:
    return "-" if value is None else percent(value, digits, sign=sign)


def _first(parts: Sequence[str], count: int = MAX_ITEMS) -> str:
    return ", ".join(parts[:count]) + (f" and {len(parts) - count} more" if len(parts) > count else "")


# ---------------------------------------------------------------- ecc inspect


@dataclass(frozen=True, kw_only=True)
class GroupSummary:
    """A channel group, for `ecc inspect --json`."""

    name: str
    width: int
    producers: list[str]
    per_channel: list[str]
    consumers: list[str]
    share_of_macs: float
    frozen: str | None
    """Why the group is not prunable; None if it is."""


@dataclass(frozen=True, kw_only=True)
class GraphSummary:
    """A channel graph, for `ecc inspect --json`."""

    fingerprint: str
    macs: int
    parameters: int
    weight_bytes: int
    activation_bytes: int
    prunable_share_of_parameters: float
    max_relative_diff: float | None
    notes: list[str]
    groups: list[GroupSummary]


def graph_summary(graph: ChannelGraph) -> GraphSummary:
    """A channel graph as a record."""
    return GraphSummary(
        fingerprint=graph.fingerprint,
        macs=int(graph.macs()),
        parameters=int(graph.parameters()),
        weight_bytes=int(graph.weight_bytes()),
        activation_bytes=int(graph.activation_bytes()),
        prunable_share_of_parameters=prunable_share(graph),
        max_relative_diff=graph.max_relative_diff,
        notes=list(graph.notes),
        groups=[
            GroupSummary(
                name=group.name,
                width=group.width,
                producers=list(group.layers(Role.PRODUCER)),
                per_channel=list(group.layers(Role.PER_CHANNEL)),
                consumers=list(group.layers(Role.CONSUMER)),
                share_of_macs=graph.share_of_macs(group),
                frozen=group.frozen,
            )
            for group in graph.groups
        ],
    )


def prunable_share(graph: ChannelGraph) -> float:
    """Fraction of the parameters that is removed when every group has its minimum width."""
    smallest = graph.parameters({group.name: group.min_width for group in graph.prunable})
    return float(1 - smallest / graph.parameters().clamp(min=1))


def graph_table(graph: ChannelGraph, title: str) -> RenderableType:
    """The channel groups of a network, named after their first producer, with a summary and notes."""
    table = Table(title=plain(title), title_justify="left", header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("group", "width", "other producers", "consumers", "MACs", "prunable"):
        table.add_column(name, justify="right" if name in ("width", "MACs") else "left", overflow="fold")
    for group in graph.groups:
        channels = _output_channels(group)
        others = [path for path in group.layers(Role.PRODUCER) if path != group.name.partition("#")[0]]
        table.add_row(
            plain(group.name),
            str(group.width) if channels == group.width else f"{group.width} ({channels} ch.)",
            plain(_first(others, 2)),
            plain(_first(list(group.layers(Role.CONSUMER)), 2)),
            percent(graph.share_of_macs(group)),
            plain("yes" if group.frozen is None else f"no: {group.frozen}"),
            style=None if group.frozen is None else "dim",
        )
    verified = "not verified"
    if graph.max_relative_diff is not None:
        verified = f"verified: max relative difference {graph.max_relative_diff:.0e}"
    summary = (
        f"{len(graph.prunable)} of {len(graph.groups)} groups are prunable; {si(float(graph.macs()), '')} MACs, "
        f"{si(float(graph.parameters()), '')} parameters, {prunable_share(graph):.0%} of them prunable; {verified}."
    )
    return Group(table, Text(summary), *(plain(f"note: {note}") for note in graph.notes))


def _output_channels(group: ChannelGroup) -> int:
    """Output channels of the group's first producer: more than the width where channels are tied."""
    return group.slices[0].index.numel()


# ---------------------------------------------------------------- ecc doctor

GOOD, FAIR = 0.01, 0.03
"""Relative standard deviations of one window up to which a meter is called good, or fair."""

_DIFFERENCE = 1.96 * math.sqrt(2)  # 95 % of pairs of windows of one network differ by less than this many std

_NO_METER = (
    "No energy meter works on this machine, so ECC cannot measure the energy of a network. That is common in virtual "
    "machines, containers and laptops. ECC does not invent joules: choose a source, and pass it as --meter:"
)
_FALLBACK_HELP = {
    "platform:jetson-tx2": "Estimates joules from published constants of a device (also jetson-orin-nano, h100). Needs "
    "no hardware and takes seconds; every number is labelled as estimated. The best way to try ECC.",
    "cputime:15W": "Multiplies the CPU time of your network by the power of one busy core, which you declare. Ranks "
    "networks for a CPU.",
    "command:PROGRAM": "Runs any program that prints joules or watts: a smart plug, a bench meter, a phone over adb, a "
    "board over ssh.",
    "replay:FILE": "Uses the numbers of a profile that was measured on another machine.",
    "file.py:MyMeter": "Your own Python class with two methods, read() and describe().",
}


def doctor_table(report: DoctorReport) -> RenderableType:
    """The machine, its meters, the findings on each that works, and what to do next."""
    parts: list[RenderableType] = [plain(line) for line in _machine_lines(report.machine)]
    parts.append(_meter_table(report) if len(report.meters) > 1 else Text())
    for finding in report.working:
        parts += [_meter_details(finding), Text()]
    if report.working:
        parts.append(plain(f"Next: ecc profile digits --meter {shlex.quote(report.working[0].spec)} -o digits.profile"))
    else:
        parts += _fallbacks(report)
    return Group(*parts)


def _machine_lines(machine: Mapping[str, str]) -> Iterator[str]:
    cuda = machine["cuda"]
    if "gpus" in machine:
        cuda += f" (driver {machine['driver']}, cuDNN {machine['cudnn']})"
    yield f"ecc {machine['ecc']}, Python {machine['python']}, torch {machine['torch']}, CUDA: {cuda}"
    cores = "1 core" if machine["cores"] == "1" else f"{machine['cores']} cores"
    gpus = f"; {machine['gpus']}" if "gpus" in machine else ""
    yield f"{machine['system']}, {machine['processor']}, {cores}{gpus}"


def _meter_table(report: DoctorReport) -> Table:
    table = Table(header_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("meter", no_wrap=True)
    table.add_column("works")
    table.add_column("what it reads, or why it does not work", overflow="fold")
    for finding in report.meters:
        works = Text("yes", style="green") if finding.works else Text("no")
        is_dim = report.working and not finding.works  # where nothing works, the reasons matter most
        table.add_row(plain(finding.spec), works, plain(finding.reason), style="dim" if is_dim else None)
    return table


def _meter_details(finding: MeterFinding) -> RenderableType:
    info = finding.info
    assert info is not None
    title = Text.assemble((finding.spec, "bold"), f"  {info.device}, {info.scope}: ", (info.label, "bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    for name, value in _meter_lines(finding):
        grid.add_row(name, plain(value))
    return Group(title, Padding(grid, (0, 0, 0, 2)))


def _meter_lines(finding: MeterFinding) -> Iterator[tuple[str, str]]:
    info, counter, test = finding.info, finding.counter, finding.self_test
    assert info is not None
    if isinstance(info.provenance, Estimated):
        yield "joules", f"computed from constants: {info.provenance.source}"
    elif counter is None and not finding.trouble:
        yield "joules", info.reads
    if counter is not None:
        parts = [info.reads]
        if counter.tick_seconds is not None:
            parts.append(f"updated every {si(counter.tick_seconds, 's')}")
        if info.resolution_joules is not None:
            parts.append(f"resolution {si(info.resolution_joules, 'J')}")
        parts.append(f"a reading takes {si(counter.read_seconds, 's')}")
        yield "counter", ", ".join(parts)
        if counter.idle_watts is not None and not isinstance(info.provenance, Declared | Timed):
            yield "idle", ", ".join([si(counter.idle_watts, "W"), *_state(counter.idle_state)])
    if test is not None:
        result = test.measurement
        state = DeviceState(temperature_celsius=result.temperature_celsius, clock_mhz=result.clock_mhz)
        capped = ["at its power limit"] if result.power_capped else []
        yield "load", ", ".join([si(result.watts, "W"), *_state(state), *capped])
        yield "self-test", _self_test(test)
        yield "repeatability", f"std of one window {percent(test.repeatability, 2)}: {_verdict(test.repeatability)}"
    if finding.trouble:
        yield "problem", finding.trouble
    for note in info.notes:
        yield "note", note


def _self_test(test: SelfTest) -> str:
    result = test.measurement
    seconds = sum(window.window_seconds for window in result.windows) / len(result.windows)
    images = "1 image" if result.batch == 1 else f"{result.batch} images"
    return (
        f"{si(result.joules, 'J')} and {si(result.seconds, 's')} for {images} of a small network on {test.device}, "
        f"{len(result.windows)} windows of {si(seconds, 's')}"
    )


def _verdict(repeatability: float) -> str:
    differ = f"one window distinguishes networks that differ by {percent(_DIFFERENCE * repeatability)}"
    if repeatability <= GOOD:
        return f"good; {differ}"
    if repeatability <= FAIR:
        return f"fair; {differ}; repeat measurements for smaller differences"
    return (
        "poor; another program uses this device, or its clock changes. Close other programs, let the device warm up, "
        "and run `ecc doctor` again"
    )


def _state(state: DeviceState | None) -> Iterator[str]:
    if state is None:
        return
    if state.temperature_celsius is not None:
        yield f"{state.temperature_celsius:.0f} °C"
    if state.clock_mhz is not None:
        yield f"{state.clock_mhz:.0f} MHz"
    yield from (f"throttled: {reason}" for reason in state.throttling)
    yield from (f"shared with {process}" for process in state.other_processes)


def _fallbacks(report: DoctorReport) -> Iterator[RenderableType]:
    yield Text(_NO_METER)
    yield Text()
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="bold")
    grid.add_column(overflow="fold")
    known = {spec: what for spec, what in FALLBACKS if spec}
    for spec in dict.fromkeys((*_FALLBACK_HELP, *known)):
        grid.add_row(spec, Text(_FALLBACK_HELP.get(spec) or f"{known[spec].capitalize()}."))
    yield Padding(grid, (0, 0, 0, 2))
    yield Text()
    for finding in report.meters:
        if finding.remedy:
            yield plain(f"Or give read permission for {finding.spec}, which lasts until the next boot:")
            yield Padding(Text(finding.remedy, style="bold", overflow="fold"), (0, 0, 1, 2))
    yield Text("To start: ecc compress digits --budget 50% --meter platform:jetson-tx2 -o run --pretrain-steps 300")


# ---------------------------------------------------------------- ecc profile

FLOOR_SHARE = 0.7
"""If the narrowest sample uses more than this share of the dense energy, the summary says so."""

NARROW = 0.35
"""Share of the channels up to which a sample is narrow enough for that statement."""


@dataclass(frozen=True, kw_only=True)
class ProfileSummary:
    """A profile, for `ecc profile --json`."""

    label: str
    meter: str
    device: str
    batch: int
    runner: str | None
    runner_reason: str | None
    samples: int
    measurements: int
    references: int
    dense_joules: float | None
    min_joules: float | None
    max_joules: float | None
    narrowest_share: float | None
    seconds_per_sample: float | None
    repeat_noise: float | None
    reference_cv: float | None
    drift_corrected: bool
    steady: bool
    quick_fit_error: float | None


def profile_summary(profile: Profile, graph: ChannelGraph | None = None) -> ProfileSummary:
    """A profile as a record; with the graph of its network, also the error of a quick fit."""
    header, drift = profile.header, profile.drift
    samples = profile.corrected(allow_drift=True)
    dense = sorted(sample.joules for sample in profile.references)
    joules = [sample.joules for sample in samples]
    return ProfileSummary(
        label=header.label,
        meter=header.meter.name,
        device=header.meter.device,
        batch=header.batch,
        runner=None if header.settings is None else deployment(header.settings),
        runner_reason=header.runner_reason,
        samples=len(samples),
        measurements=len(profile.design_samples),
        references=len(profile.references),
        dense_joules=dense[len(dense) // 2] if dense else None,
        min_joules=min(joules, default=None),
        max_joules=max(joules, default=None),
        narrowest_share=min((sum(one.widths) / sum(header.full_widths) for one in samples), default=None),
        seconds_per_sample=profile.seconds_per_sample,
        repeat_noise=profile.repeat_noise,
        reference_cv=None if drift is None else drift.cv,
        drift_corrected=drift is not None and drift.is_significant,
        steady=drift is None or drift.is_steady,
        quick_fit_error=None if graph is None else quick_error(graph, profile),
    )


def profile_text(profile: Profile, path: str | Path, graph: ChannelGraph | None = None) -> str:
    """A profile in a few lines."""
    found = profile_summary(profile, graph)
    lines = [f"{path}: {found.samples} samples, {found.label}: {found.device}, batch {found.batch}"]
    if found.runner_reason:
        lines.append(f"runner {found.runner}: {found.runner_reason}")
    unit = "J" if profile.header.meter.has_energy else "s"
    if found.min_joules is not None and found.max_joules is not None and found.narrowest_share is not None:
        dense = "" if found.dense_joules is None else f"; dense {si(found.dense_joules, unit)}"
        lines.append(f"{si(found.min_joules, unit)} to {si(found.max_joules, unit)} per inference{dense}")
        share = found.min_joules / found.dense_joules if found.dense_joules else 0.0
        if found.narrowest_share < NARROW and share > FLOOR_SHARE:
            lines.append(
                f"the narrowest network still uses {share:.0%} of the dense {'energy' if unit == 'J' else 'latency'}: "
                "lower budgets are not reachable"
            )
    if found.seconds_per_sample is not None:
        lines.append(f"{found.seconds_per_sample:.2f} s per sample")
    if found.repeat_noise is not None:
        lines.append(f"std of repeated measurements: {percent(found.repeat_noise, 2)}")
    if found.quick_fit_error is not None:
        lines.append(f"cross-validated error of a quick fit: {percent(found.quick_fit_error)}")
    if profile.drift is not None and profile.header.device_type is not None:
        lines.append(str(profile.drift))
        if not profile.drift.is_steady:
            lines.append(f"warning: the reference drifted too much for a reliable profile. {drift_remedy()}")
    return "\n".join(lines)


# ---------------------------------------------------------------- ecc fit

MAX_FIT_LAYERS = 8


@dataclass(frozen=True, kw_only=True)
class FitSummary:
    """An energy model, for `ecc fit --json`."""

    resource: str
    label: str
    device: str
    batch: int
    kind: str
    samples: int
    dense: float
    min_cost: float
    errors: FitErrors | None
    quality: FitQuality
    per_layer: dict[str, float]


def fit_summary(model: EnergyModel) -> FitSummary:
    """An energy model as a record."""
    return FitSummary(
        resource=model.resource,
        label=model.label,
        device=model.origin.meter.device,
        batch=model.origin.batch,
        kind=model.kind,
        samples=model.origin.samples,
        dense=model.dense,
        min_cost=model.min_cost,
        errors=model.errors,
        quality=model.quality,
        per_layer=model.per_layer(),
    )


def fit_table(model: EnergyModel, title: str) -> RenderableType:
    """How well an energy model predicts, what the layers cost, and which budgets can be met."""
    quality = model.quality
    columns = ("model", "mean", "p90", "max", "bias", "dense", "held out", "near dense", "uniform")
    table = _table(*columns, title=title)
    for name, found in quality.families.items():
        selected = " (selected)" if name == model.kind and len(quality.families) > 1 else ""
        numbers = [_optional(getattr(found, key)) for key in ("mean", "p90", "max")]
        numbers += [_optional(getattr(found, key), sign=True) for key in ("bias", "dense_fitted", "dense")]
        numbers += [_optional(getattr(found, key)) for key in ("near_dense", "uniform")]
        table.add_row(name + selected, *numbers)
    noise = quality.noise
    about = "Relative errors on held-out samples (10-fold cross-validation); `dense`: in the final fit. "
    about += "The noise was not measured." if noise is None else f"Std of one measurement: {percent(noise, 2)}."
    sentences = [text for text in (describe_learning_curve(quality), describe_outlier_widths(quality)) if text]
    layers: list[RenderableType] = ["Most expensive layers of the dense network, predicted:", _layer_table(model)]
    return Group(table, about, *map(plain, sentences), *layers, plain(reachable_budgets(model)))


def _layer_table(model: EnergyModel) -> Table:
    costs = model.per_layer()
    total = sum(costs.values())
    outside = costs.pop("") - model.fitted.base  # operators that the network calls between its layers
    costs |= {"(constant)": model.fitted.base} | ({"(outside any layer)": outside} if outside > 0 else {})
    ranked = sorted(costs.items(), key=lambda item: -item[1])
    table = _table("layer", model.unit, "share")
    for path, cost in ranked[:MAX_FIT_LAYERS]:
        table.add_row(plain(path), si(cost, model.unit), f"{cost / total:.0%}")
    rest = sum(cost for _, cost in ranked[MAX_FIT_LAYERS:])
    if rest > 0:
        table.add_row(f"{len(ranked) - MAX_FIT_LAYERS} others", si(rest, model.unit), f"{rest / total:.0%}")
    return table


def reachable_budgets(model: EnergyModel) -> str:
    """Which budgets can be met."""
    dense, smallest, batch = model.dense_profiled, min_cost(model), model.origin.batch
    label = model.label if model.dense_sample is not None else "predicted"
    each = f" ({si(dense / batch, model.unit)} per item)" if batch > 1 else ""
    return (
        f"Dense: {si(dense, model.unit)}{each}, {label}; {model.origin.meter.device}, batch {batch}. With "
        f"{MIN_WIDTH_RATIO:.0%} of the channels in every group (default --min-width-ratio): "
        f"{si(smallest, model.unit)}, predicted. Reachable budgets: {smallest / dense:.0%} to 100%."
    )


def min_cost(model: EnergyModel) -> float:
    """Predicted cost with the default minimum width in every group, in the multiples that were profiled."""
    step = model.origin.width_multiple or 1
    widths = [
        full if least == full else min(full, max(least, step * math.ceil(MIN_WIDTH_RATIO * full / step)))
        for full, least in zip(model.full_widths, model.min_widths, strict=True)
    ]
    return float(model.value(torch.tensor(widths, dtype=torch.float64)))


def check_budget(model: EnergyModel, budget: Budget) -> tuple[bool, str]:
    """Whether a budget is useful and reachable, and a sentence that says so."""
    limit, smallest, dense = budget.limit(model, model.origin.batch), min_cost(model), model.dense_profiled
    shown = f"budget {si(limit, model.unit)}"
    if limit < smallest:
        return False, (
            f"{shown} is not reachable: with {MIN_WIDTH_RATIO:.0%} of the channels in every group this network still "
            f"uses {si(smallest, model.unit)} ({smallest / dense:.0%} of dense). Give a budget of at least "
            f"{math.ceil(100 * smallest / dense)}%, or lower --min-width-ratio."
        )
    if limit >= dense:
        return False, f"{shown} is already met by the dense network, which uses {si(dense, model.unit)}."
    return True, f"{shown} is reachable: {limit / dense:.0%} of dense."


# ---------------------------------------------------------------- ecc compress


class Feasibility(Protocol):
    """One budget and what is reachable; `ecc.methods.check_feasibility` makes it."""

    @property
    def resource(self) -> str: ...  # noqa: D102
    @property
    def unit(self) -> str: ...  # noqa: D102
    @property
    def label(self) -> str: ...  # noqa: D102
    @property
    def dense(self) -> float: ...  # noqa: D102
    @property
    def min_cost(self) -> float: ...  # noqa: D102
    @property
    def limit(self) -> float: ...  # noqa: D102
    @property
    def uniform_ratio(self) -> float | None: ...  # noqa: D102


def feasibility_table(found: Sequence[Feasibility]) -> Table:
    """Which costs are reachable, before training."""
    columns = ("", "dense", "minimum", "budget", "of dense", "uniform widths")
    table = _table(*columns, title="Feasibility")
    for one in found:
        ratio = "not reachable" if one.uniform_ratio is None else f"{one.uniform_ratio:.0%}"
        costs = [si(cost, one.unit) for cost in (one.dense, one.min_cost, one.limit)]
        table.add_row(f"{one.resource} ({one.label})", *costs, f"{one.limit / one.dense:.0%}", ratio)
    return table


def compress_table(summary: RunSummary, folder: str | Path) -> RenderableType:
    """The result of a compression."""
    sparse = summary.sparse
    what = " (unstructured)" if sparse is not None else ""
    title = f"{summary.task} by {summary.method}{what}" + (f" on {summary.device}" if summary.device else "")
    table = _table("", "dense", "result", "budget", "of budget", "", title=title)
    for resource, row in summary.budgets.items():
        costs = [si(cost, row.unit) for cost in (row.dense, row.result, row.limit)]
        verdict = "met" if row.met else "NOT MET"
        table.add_row(plain(f"{resource} ({row.label})"), *costs, percent(row.result / row.limit), verdict)
    for name, shown, counts in (("macs", "MACs", summary.macs), ("params", "parameters", summary.parameters)):
        if name not in summary.budgets and counts is not None:
            table.add_row(f"{shown} (counted)", si(counts.dense, ""), si(counts.result, ""), "", "", "")
    if sparse is not None:
        totals = [si(sum(counts.values()), "") for counts in (sparse.weights, sparse.nonzeros)]
        table.add_row("prunable weights (counted)", *totals, "", "", "")
    scores = summary.scores
    if scores:
        final = scores.get("finetuned", scores.get("pruned"))
        shown_scores = ["" if score is None else f"{score:.4f}" for score in (scores.get("dense"), final)]
        table.add_row("score", *shown_scores, "", "", "")
    full, kept = (summary.full_widths, summary.widths) if sparse is None else (sparse.weights, sparse.nonzeros)
    parts = [f"{name} {count}/{full[name]}" for name, count in kept.items() if count != full.get(name, count)]
    lines = [f"{'Widths' if sparse is None else 'Nonzero weights'}: {_first(parts) or 'unchanged'}."]
    files = "slim.safetensors, widths.json"
    if sparse is not None:
        zeros = 1 - sum(sparse.nonzeros.values()) / max(1, sum(sparse.weights.values()))
        lines += [f"{percent(zeros)} of the weights are zero.", f"The estimate assumes: {sparse.assumes}."]
        files = "sparse.safetensors, nonzeros.json"
    if summary.max_relative_diff is not None:
        lines.append(f"Verified: masked and slim outputs differ by at most {summary.max_relative_diff:.1g} (relative).")
    if summary.note:
        lines.append(f"Note: {summary.note}")
    lines.append(f"{folder}: {files}, summary.json, history.jsonl")
    return Group(table, *map(plain, lines))


# ---------------------------------------------------------------- ecc compare


def grid_table(rows: Sequence[GridRow]) -> RenderableType:
    """Scores and costs of all methods and budgets, and the runs that failed."""
    labels = ", ".join(sorted({label for row in rows for label in row.labels}))
    columns = ("budget", "method", "finetuned", "pruned", "of dense", "batches", "seconds", "peak MB", "p")
    table = Table(box=None, pad_edge=False, collapse_padding=True)
    for number, name in enumerate(columns):
        table.add_column(name, justify="left" if number < 2 else "right", no_wrap=True)
    failed: list[str] = []
    for row in sorted(rows, key=lambda row: row.budget, reverse=True):
        table.add_row(
            plain(row.budget),
            plain(row.method + (" (over budget)" if row.met is False else "")),
            _mean_std(row.finetuned),
            _mean_std(row.pruned),
            "-" if row.cost_ratio is None else percent(row.cost_ratio.mean),
            "-" if row.batches_total is None else f"{row.batches_lineage:.0f}/{row.batches_total:.0f}",
            "-" if row.seconds is None else f"{row.seconds:.0f}",
            "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e6:.0f}",
            "" if row.p_value is None else f"{row.p_value:.3f}",
        )
        failed += [f"failed: {row.method} {row.budget} {reason}" for reason in row.failures]
    title = f"Score after and before finetuning, mean ± std over seeds; cost {labels}"
    legend = "batches: of the result / all that were drawn; p: paired t-test of the scores against ecc"
    return Group(plain(title), table, legend, *map(plain, failed))


def _mean_std(found: MeanStd | None) -> str:
    if found is None:
        return "-"
    return f"{found.mean:.3f}" + (f"±{found.std:.3f}" if found.std else "")


# ---------------------------------------------------------------- ecc export


def export_table(result: ExportedRun) -> RenderableType:
    """The files of an export, how they were verified, and their latency in onnxruntime."""
    score = result.summary.scores.get("finetuned", result.summary.scores.get("pruned"))
    files = _table("file", "bytes", "dense bytes", "max relative error", "tolerance")
    times = _table("onnxruntime", "before", "after", "speedup")
    notes: dict[str, None] = {}  # each once, in order
    for file in result.files:
        tolerance = "none" if file.tolerance is None else f"{file.tolerance:g}"
        before = "" if file.beside_bytes is None else f"{file.beside_bytes:,}"
        files.add_row(plain(file.file), f"{file.bytes:,}", before, f"{file.error:.2g}", tolerance)
        latency = file.latency
        if latency is not None:
            low, high = latency.ratio_range
            seconds = [si(latency.dense_seconds, "s"), si(latency.slim_seconds, "s")]
            times.add_row(plain(file.file), *seconds, f"{latency.ratio:.2f} ({low:.2f} to {high:.2f})")
            threads = f"{latency.threads} thread" + ("s" if latency.threads > 1 else "")
            notes[f"Latency is {latency.label}, batch {latency.batch}, {threads}, {latency.clock}."] = None
    for file in result.files:
        if file.tolerance is None:
            scores = "the task has no score" if file.score is None else f"score {file.score:.4f}"
            scores += "" if score is None else f", in floating point {score:.4f}"
            notes[f"{file.file} is compared with the same network in floating point: {scores}."] = None
    batches = ", ".join(map(str, result.files[0].batches)) if result.files else ""
    error = (
        "Error: largest difference from the outputs of the slim network, relative to the largest output. Each file was "
        f"run by its own runtime at batch sizes {batches}."
    )
    names = ", ".join([*(file.file for file in result.files), "model_card.md"])
    shown = [times] if times.row_count else []
    return Group(files, Text(error), *shown, *map(plain, (*notes, *result.notes, f"{result.folder}: {names}")))
