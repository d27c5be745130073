"""Tables for the terminal."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console, RenderableType
from torch import nn

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy import parse_budget
from ecc.export.onnx_tools import Latency
from ecc.export.run_export import Exported, ExportedRun
from ecc.formatting import percent, si
from ecc.graph import trace_channels
from ecc.measure import (
    CounterProbe,
    Declared,
    DeviceState,
    Estimated,
    Measured,
    Measurement,
    MeasureSettings,
    MeterInfo,
    Profile,
    Timed,
    Window,
)
from ecc.measure.doctor import DoctorReport, MeterFinding, SelfTest
from ecc.measure.registry import FALLBACKS
from ecc.records import to_json
from ecc.report import doctor as doctor_module
from ecc.report import terminal
from ecc.report.doctor import doctor_table
from ecc.report.load import load_grid
from ecc.run_records import BudgetResult
from graph.cases import conv, named, traced
from measure.profile_cases import profile_of, reference, sample, small_graph
from report.folders import Budgeted, energy_model, make_summary, write_grid


def shown(what: RenderableType, width: int = 200) -> str:
    file = io.StringIO()
    Console(width=width, file=file, highlight=False).print(what)
    return file.getvalue()


def words(what: RenderableType) -> str:
    """Without line breaks and columns."""
    return " ".join(shown(what, width=1000).split())


def cells(text: str, name: str) -> list[str]:
    """The cells of the row that starts with a name."""
    (line,) = [line for line in text.splitlines() if re.split(r"\s{2,}", line.strip())[0] == name]
    return re.split(r"\s{2,}", line.strip())


# ---------------------------------------------------------------- ecc inspect


@pytest.mark.parametrize("name", ["chain", "unet", "option A", "transformer block", "value-dependent code"])
def test_the_graph_table_has_every_group_and_reason(name: str) -> None:
    _, _, graph = traced(name)
    text = shown(terminal.graph_table(graph, "Channel groups"), width=400)
    removable = {group for branch in graph.branches for group in branch.groups}
    lines = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    for group in graph.groups:
        (row,) = [line for line in lines if line[0] == group.name and len(line) > 3]  # others are second producers
        assert row[1].split()[0] == str(group.width)
        prunable = "yes" if group.frozen is None else f"no: {group.frozen}"
        assert row[-1] == ("yes, or removed" if group.name in removable else prunable)
        assert percent(graph.share_of_macs(group)) in row
    for note in graph.notes:
        assert f"note: {note}" in text
    summary = terminal.graph_summary(graph)
    assert (summary["macs"], summary["parameters"]) == (int(graph.macs()), int(graph.parameters()))
    assert {one["name"]: (one["width"], one["frozen"]) for one in summary["groups"]} == {
        group.name: (group.width, group.frozen) for group in graph.groups
    }
    json.loads(to_json(summary))
    assert f"{len(graph.prunable)} of {len(graph.groups)} groups are prunable" in text
    assert "not verified." in text
    verified = terminal.graph_table(replace(graph, max_relative_diff=2.9e-7), "x")
    assert "verified: max relative difference 3e-07." in words(verified)


def test_the_graph_table_does_not_divide_names_in_a_narrow_terminal() -> None:
    layers = {f"backbone_stage{i}_conv": conv(3 if i == 0 else 8, 8) for i in range(3)}
    graph = trace_channels(named(**layers), torch.randn(1, 3, 8, 8))
    text = shown(terminal.graph_table(graph, "x"), width=80)
    assert [sum(name in line for line in text.splitlines()) for name in layers] == [1, 2, 2]


@pytest.mark.parametrize("width", [60, 80, 100])
def test_the_graph_table_shows_reasons_in_a_narrow_terminal(width: int) -> None:
    layers = {f"model_layers_{i}_self_attention_projection": conv(3 if i == 0 else 8, 8) for i in range(2)}
    graph = trace_channels(named(**layers), torch.randn(1, 3, 8, 8))
    text = shown(terminal.graph_table(graph, "x"), width=width)
    table = [line for line in text.splitlines() if len(line) == width]
    start = next(line.index("prunable") for line in table if "prunable" in line)
    reasons = " ".join(" ".join(line[start:] for line in table).split())
    assert "yes" in reasons
    assert "no: it is an output of the network" in reasons


def test_the_prunable_share_is_what_minimum_widths_remove() -> None:
    net = named(fc1=nn.Linear(5, 8, bias=False), fc2=nn.Linear(8, 4, bias=False))
    graph = trace_channels(net, torch.randn(1, 5))
    assert terminal.prunable_share(graph) == pytest.approx(1 - (5 * 1 + 1 * 4) / (5 * 8 + 8 * 4))
    assert terminal.prunable_share(trace_channels(net, torch.randn(1, 5), freeze=["*"])) == 0


def test_markup_and_control_characters_are_shown_as_text() -> None:
    _, _, graph = traced("chain")
    groups = (replace(graph.groups[0], name="[red]x"), replace(graph.groups[1], frozen="\x1b[2J why"), graph.groups[2])
    text = shown(terminal.graph_table(replace(graph, groups=groups, notes=("[link]note[/link]",)), "of [red]x"))
    assert cells(text, "[red]x")[1] == "8"
    assert all(part in text for part in ("of [red]x", "no: ?[2J why", "note: [link]note[/link]"))
    summary = make_summary(task="net[b]\x1b[2J", note="see [red]this", widths={"a[i]": 3}, full_widths={"a[i]": 4})
    text = shown(terminal.compress_table(summary, "run[bold]"))
    assert all(part in text for part in ("net[b]?[2J by ecc on", "see [red]this", "a[i] 3/4", "run[bold]:"))


# ---------------------------------------------------------------- ecc doctor

MACHINE = {"ecc": "0.2", "python": "3.11", "torch": "2.6", "system": "Linux", "processor": "CPU", "cores": "2"}
MACHINE |= {"cuda": "none"}
INFO = MeterInfo(
    name="nvml", device="NVIDIA H200", provenance=Measured(), scope="board", resolution_joules=1e-3, notes=("a note",)
)
COUNTER = CounterProbe(
    moves=True,
    tick_seconds=0.1,
    read_seconds=0.0012,
    idle_watts=76.31,
    idle_state=DeviceState(temperature_celsius=34, clock_mhz=345, other_processes=("process 42",)),
)
REFUSED = MeterFinding(spec="rapl", reason="only [root] may read it", remedy="sudo chmod a+r /sys/counter")
NO_METER = DoctorReport(
    can_measure=False,
    machine=MACHINE,
    meters=(MeterFinding(spec="nvml", reason="no NVIDIA driver"), REFUSED),
    fallbacks=dict(FALLBACKS),
)


def self_test(spread: float, **window: Any) -> SelfTest:
    """Windows of 1 J, plus and minus the spread."""
    common = {"seconds": 0.004, "window_seconds": 1.0, "inferences": 250, "ticks": 10, "edge_error": 0.001}
    common |= {"polling_share": 0.01, "host_bound_share": 0.0, **window}
    windows = tuple(Window(joules=joules, **common) for joules in (1 - spread, 1.0, 1 + spread))
    result = Measurement(
        joules=1.0,
        seconds=0.004,
        net_joules=0.7,
        idle_watts=76.31,
        relative_ci=0.01,
        batch=256,
        device_type="cuda",
        combined_by="median",
        tick_seconds=0.1,
        windows=windows,
        meter=INFO,
        settings=MeasureSettings(),
    )
    return SelfTest(device="cuda:0", measurement=result, repeatability=spread)


def doctor(**changes: Any) -> DoctorReport:
    finding = MeterFinding(spec="nvml", works=True, reason="works", info=INFO, is_meter=True, counter=COUNTER)
    return replace(NO_METER, can_measure=True, meters=(replace(finding, **changes), REFUSED))


def test_without_a_meter_doctor_lists_every_alternative(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_module, "FALLBACKS", (*FALLBACKS, ("oracle:NOW", "ask an oracle")))
    text = words(doctor_table(NO_METER))
    assert text.startswith("ecc 0.2, Python 3.11, torch 2.6, CUDA: none Linux, CPU, 2 cores")
    for part in ("nvml no no NVIDIA driver", "rapl no only [root] may read it", "oracle:NOW Ask an oracle."):
        assert part in text
    assert all(spec in text for spec, _ in FALLBACKS)
    assert "which lasts until the next boot: sudo chmod a+r /sys/counter" in text
    assert text.endswith(
        "To start: ecc compress digits --budget 50% --meter platform:jetson-tx2 -o run --pretrain-steps 300"
    )


def test_doctor_describes_a_meter_that_works() -> None:
    state = DeviceState(temperature_celsius=61, clock_mhz=1980, power_capped=True)
    text = words(doctor_table(doctor(self_test=self_test(0.003, state=state))))
    for part in (
        "nvml NVIDIA H200, board: measured",
        "counter energy counter, updated every 100 ms, resolution 1.00 mJ, a reading takes 1.20 ms",
        "idle 76.3 W, 34 °C, 345 MHz, shared with process 42",
        "load 250 W, 61 °C, 1980 MHz, at its power limit",
        "self-test 1.00 J and 4.00 ms for 256 images of a small network on cuda:0, 3 windows of 1.00 s",
        "std of one window 0.30 %: good; one window distinguishes networks that differ by 0.8 %",
        "note a note",
    ):
        assert part in text
    assert text.endswith("Next: ecc profile digits --meter nvml -o digits.profile")
    assert "No energy meter works" not in text


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"self_test": self_test(0.02)}, ": fair; one window"),
        ({"self_test": self_test(0.1)}, ": poor; another program uses this device"),
        ({"trouble": "the device is shared."}, "problem the device is shared."),
        ({"info": replace(INFO, provenance=Declared(15))}, "CPU time x declared 15 W"),
        ({"info": replace(INFO, provenance=Estimated("a table")), "counter": None}, "computed from constants: a table"),
        ({"info": replace(INFO, reads="replay of a.profile"), "counter": None}, "joules replay of a.profile"),
        ({"spec": "command:read --port 3"}, "--meter 'command:read --port 3' -o"),
        (
            {"counter": replace(COUNTER, idle_state=DeviceState(throttling=("too hot",)))},
            "idle 76.3 W, throttled: too hot",
        ),
    ],
)
def test_doctor_reports_the_state_of_a_meter(changes: dict[str, Any], part: str) -> None:
    assert part in words(doctor_table(doctor(**changes)))


def test_doctor_describes_a_board_without_torch() -> None:
    machine = {
        "target": "ssh://me@pi?python=/opt/python",
        "python": "3.11",
        "onnxruntime": "1.20",
        "openvino": "2025.1",
    }
    machine |= {"board": "Raspberry Pi 5", "system": "Linux aarch64", "cores": "4"}
    text = words(doctor_table(replace(doctor(), machine=machine)))
    start = (
        "Python 3.11, onnxruntime 1.20, OpenVINO 2025.1 ssh://me@pi?python=/opt/python, Raspberry Pi 5, Linux aarch64,"
    )
    assert text.startswith(f"{start} 4 cores")
    assert "Next: ecc profile digits --target 'ssh://me@pi?python=/opt/python' --meter nvml" in text
    assert "No energy meter works on the board" in words(doctor_table(replace(NO_METER, machine=machine)))


def test_doctor_shows_no_energy_of_a_clock() -> None:
    test, clock = self_test(0.003), replace(INFO, provenance=Timed("CPU time"))
    measured = replace(test, measurement=replace(test.measurement, meter=clock))
    text = words(doctor_table(doctor(info=clock, self_test=measured)))
    assert "self-test 4.00 ms for 256 images" in text
    assert "load" not in text


# ---------------------------------------------------------------- ecc profile


START = datetime(2026, 1, 1, tzinfo=timezone.utc)


def some_profile(**changes: Any) -> Profile:
    samples = [sample(i, 0.5 + 0.01 * i, (4 + i, 3)) for i in range(12)]
    return profile_of(reference(2.0), *samples, reference(2.02), **changes)


def test_the_summary_of_a_profile() -> None:
    found = terminal.profile_summary(some_profile(), small_graph())
    assert (found.label, found.samples, found.references, found.batch) == ("estimated", 12, 2, 2)
    assert (found.min_joules, found.max_joules, found.dense_joules, found.steady) == (0.5, 0.61, 2.02, True)
    assert found.quick_fit_error is not None
    lines = terminal.profile_text(some_profile(), "a.profile", small_graph()).splitlines()
    assert lines[0] == "a.profile: 12 samples, estimated: paper, batch 2"
    assert lines[1] == "500 mJ to 610 mJ per inference; dense 2.02 J"
    assert lines[2].startswith("cross-validated error of a quick fit: ")
    assert len(lines) == 3  # an analytic platform does not drift
    assert terminal.profile_text(profile_of(), "a") == "a: 0 samples, estimated: paper, batch 2"


def test_the_summary_of_a_measured_profile_has_noise_and_drift() -> None:
    profile = profile_of(
        reference(2.0, measured_at=START),
        sample(0, measured_at=START + timedelta(seconds=0.75)),
        sample(0, 1.01, round=1),
        reference(2.3),
        device_type="cpu",
        settings=MeasureSettings(runner="cuda-graph"),
        runner_reason="it can be captured",
    )
    lines = terminal.profile_text(profile, "a").splitlines()
    assert {
        "0.75 s per sample",
        "std of repeated measurements: 0.70 %",
        "runner cuda-graph, fp32: it can be captured",
    } <= set(lines)
    assert lines[-1].startswith("warning: the reference drifted too much")


# ---------------------------------------------------------------- ecc fit


def test_the_fit_table_has_the_numbers_of_the_model() -> None:
    model = energy_model()
    text = shown(terminal.fit_table(model, "digits: energy"))
    columns = ["mean", "p90", "max", "bias", "dense", "held out", "smallest", "near dense", "uniform"]
    assert cells(text, "model")[1:] == columns
    errors = model.quality.families["physical"]
    row = [percent(errors.mean, 2), percent(errors.p90, 2), percent(errors.max, 2), percent(errors.bias, 2, sign=True)]
    assert cells(text, "physical (selected)")[1:5] == row
    assert f"leave out {errors.ends} networks" in text
    assert f"the largest error there is {percent(errors.max_at_ends or 0, 2)}" in " ".join(text.split())
    assert "Most expensive layers of the dense network, predicted:" in text
    assert cells(text, "(constant)")[1] == si(model.fitted.base, "J")
    assert json.loads(to_json(terminal.fit_summary(model)))["dense"] == model.dense
    smallest = terminal.min_cost(model)
    assert f"with --no-depth {smallest / model.dense_profiled:.0%} to 100%." in " ".join(text.split())
    step = model.origin.width_multiple or 1
    floors = {
        name: full if least == full else min(full, max(least, step * -(-MIN_WIDTH_RATIO * full // step)))
        for name, full, least in zip(model.groups, model.full_widths, model.min_widths, strict=True)
    }
    assert smallest == pytest.approx(model.at(floors))


@pytest.mark.parametrize(
    ("budget", "is_reachable", "part"),
    [
        (
            "1%",
            False,
            "is not reachable: with 10% of the channels in every group and without residual branches it still",
        ),
        ("1 nJ", False, "Give a budget of at least"),
        ("100%", False, "is already met by the dense network"),
        ("50%", True, "is reachable: 50% of dense."),
    ],
)
def test_budgets_are_checked_against_a_model(budget: str, is_reachable: bool, part: str) -> None:
    found, sentence = terminal.check_budget(energy_model(), parse_budget(budget))
    assert found == is_reachable
    assert part in sentence


# ---------------------------------------------------------------- ecc compress


def test_the_feasibility_table_has_the_numbers() -> None:
    latency = Budgeted("latency", "s", "measured", 0.0036, 0.0027, 0.0018, None)
    prefill = Budgeted(resource="prefill", tokens=1000)
    text = shown(terminal.feasibility_table([Budgeted(), latency, prefill]))
    assert cells(text, "energy (estimated)")[1:] == ["19.0 mJ", "2.90 mJ", "9.49 mJ", "50%", "61%"]
    assert cells(text, "latency (measured)")[1:] == ["3.60 ms", "2.70 ms", "1.80 ms", "50%", "not reachable"]
    assert cells(text, "prefill per token (estimated)")[1:] == ["19.0 µJ", "2.90 µJ", "9.49 µJ", "50%", "61%"]


def test_the_result_table_has_the_numbers_of_the_summary() -> None:
    summary = make_summary(widths={"stem": 12, "head": 10}, full_widths={"stem": 16, "head": 10})
    text = shown(terminal.compress_table(summary, "runs/a"))
    assert text.splitlines()[0].strip() == "digits by ecc on NVIDIA Jetson TX2"
    assert cells(text, "energy (estimated)")[1:] == ["19.0 mJ", "9.40 mJ", "9.49 mJ", "99.0 %", "met"]
    assert cells(text, "MACs (counted)")[1:] == ["200 M", "50.0 M"]
    assert cells(text, "parameters (counted)")[1:] == ["40.0 k", "6.00 k"]
    assert cells(text, "score")[1:] == ["0.9800", "0.9500"]
    for line in (
        "Widths: stem 12/16.",
        "Verified: masked and slim outputs differ by at most 2e-09 (relative).",
        "runs/a: slim.safetensors, widths.json, summary.json, history.jsonl",
    ):
        assert line in text.splitlines()


def test_the_result_table_of_other_runs() -> None:
    missed = make_summary(result=0.525 * energy_model().dense, note="the budget is exceeded", max_relative_diff=None)
    text = shown(terminal.compress_table(missed, "run"))
    assert "105.0 %  NOT MET" in text
    assert "Note: the budget is exceeded" in text
    assert "Verified" not in text
    params = BudgetResult(budget="", limit=7e3, unit="", dense=4e4, result=6e3, label="counted", met=True)
    text = shown(terminal.compress_table(make_summary(budgets={"params": params}), "run"))
    assert text.count("6.00 k") == text.count("MACs (counted)") == 1
    for scores, row in (({"dense": 0.5}, ["0.5000"]), ({"dense": 0.5, "pruned": 0.25}, ["0.5000", "0.2500"])):
        assert cells(shown(terminal.compress_table(make_summary(scores=scores), "run")), "score")[1:] == row
    assert "No score: no evaluate= given." in words(terminal.compress_table(make_summary(scores={}), "run"))
    full = {f"layer{number}": 8 for number in range(15)}
    many = make_summary(widths=dict.fromkeys(full, 4), full_widths=full)
    assert "layer11 4/8 and 3 more." in words(terminal.compress_table(many, "run"))
    assert "Widths: unchanged." in words(terminal.compress_table(make_summary(widths=full, full_widths=full), "run"))


# ---------------------------------------------------------------- ecc compare and export


def test_the_grid_table_fits_80_columns_and_lists_failures(tmp_path: Path) -> None:
    text = shown(terminal.grid_table(load_grid(write_grid(tmp_path / "runs"))), width=80)
    rows = [line.split() for line in text.splitlines()]
    assert "budget method finetuned pruned of dense batches seconds peak MB p".split() in rows
    assert ["65%", "ecc", "0.960±0.014", "0.860±0.014", "64.4", "%", "70/70", "2", "1"] in rows
    assert "failed: amc 65% seed 1: no <luck>" in text
    assert "cost estimated" in text


def test_the_export_table_has_errors_and_latencies() -> None:
    latency = Latency(0.02, 0.01, 2.0, (1.9, 2.1), 64, 1, "processor time")
    common: dict[str, Any] = {"bytes": 1234, "error": 2.2e-7, "batches": (1, 4), "tolerance": 1e-4}
    files = (
        Exported(format="pt2", file="slim.pt2", **common),
        Exported(format="onnx", file="slim.onnx", beside_bytes=5678, latency=latency, **common),
        Exported(format="onnx", file="slim.int8.onnx", score=0.85, **(common | {"tolerance": None})),
    )
    summary: Any = SimpleNamespace(score=0.9)
    text = shown(terminal.export_table(ExportedRun(Path("run/export"), files, summary, ("[a note]",))), width=120)
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert ["slim.pt2", "1,234", "2.2e-07", "0.0001"] in rows
    assert ["slim.onnx", "20.0 ms", "10.0 ms", "2.00 (1.90 to 2.10)"] in rows
    flat = " ".join(text.split())
    assert "by onnxruntime, batch 64, 1 thread, processor time." in flat
    assert "in floating point: score 0.8500, in floating point 0.9000." in flat
    assert "at batch sizes 1, 4" in flat
    assert "[a note]" in flat
    only = terminal.export_table(ExportedRun(Path("run/export"), files[:1], summary))
    assert "onnxruntime" not in shown(only)
