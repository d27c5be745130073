from __future__ import annotations

import gc
import weakref
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from ecc.measure.profilers import AnalyticProfiler, DeviceProfiler, default_device, first_line
from torch import nn

from ecc.errors import BadMeasurement
from ecc.measure import CounterProbe, DeviceState, Estimated, MeasureSettings, MeterInfo, Reading, bench
from ecc.measure.profiler import PROFILE_SETTINGS
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import EXAMPLE, Prices, SmallNet, header, run_seconds, small_graph

PLAN = header().design


def bench_on(board: FakeBoard, meter: FakeMeter | None = None, **settings: Any) -> DeviceProfiler:
    chosen = MeasureSettings(**{**vars(PROFILE_SETTINGS), **settings})
    return DeviceProfiler(SmallNet(board), small_graph(), EXAMPLE, meter or FakeMeter(board), chosen, None, board.clock)


# ---------------------------------------------------------------- the bench


def test_a_network_of_given_widths_is_measured() -> None:
    board = FakeBoard()
    place = bench_on(board, FakeMeter(board, state=DeviceState(temperature_celsius=50, clock_mhz=1980)))
    counter = place.ready(None)
    assert counter.tick_seconds == pytest.approx(0.1, rel=0.05)
    sample = place.index(7, 1, 2, {"first": 4, "second": 3})
    assert sample.joules == pytest.approx(300 * run_seconds(4, 3), rel=0.01)
    assert sample.seconds == pytest.approx(run_seconds(4, 3), rel=0.01)
    assert (sample.index, sample.round, sample.session, sample.widths) == (7, 1, 2, (4, 3))
    assert sample.ticks in range(4, 6)
    assert (sample.temperature_celsius, sample.clock_mhz, sample.power_capped) == (50, 1980, False)
    assert sample.relative_ci is None
    assert sample.edge_error is not None
    assert sample.measured_at is not None
    assert sample.measured_at.endswith("+00:00")


def test_a_network_takes_less_than_a_second_on_a_counter_of_100_ms() -> None:
    board = FakeBoard(tick_seconds=0.1)
    place = bench_on(board)
    place.ready(None)
    started = board.now()
    for _ in range(5):
        place.index(0, 0, 0, {"first": 16, "second": 12})
    assert (board.now() - started) / 5 < 0.75


def test_what_was_counted_before_the_first_tick_does_not_matter() -> None:
    board = FakeBoard(tick_seconds=0.4, idle_watts=0.0)
    place = bench_on(board)
    place.ready(None)
    board.wait(0.39)  # of a period without any load
    sample = place.index(0, 0, 0, {"first": 16, "second": 12})
    assert sample.joules == pytest.approx(300 * run_seconds(16, 12), rel=0.01)


def test_inputs_are_drawn_once_and_as_a_single_measurement_draws_them(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard()
    place = bench_on(board)
    place.ready(None)
    seen = []
    monkeypatch.setattr(
        bench, "measure_model", lambda network, inputs, *args, **kwargs: seen.append(inputs) or failing()
    )
    for _ in range(2):
        with pytest.raises(RuntimeError, match="enough"):
            place.index(0, 0, 0, {"first": 16, "second": 12})
    assert seen[0] is seen[1]
    assert seen[0].shape == EXAMPLE.shape
    assert not torch.equal(seen[0], EXAMPLE)
    own = bench_on(board, input_data="example")
    assert own._inputs is EXAMPLE


def failing() -> None:
    raise RuntimeError("enough")


def test_a_counter_that_is_known_is_not_probed_again() -> None:
    board = FakeBoard()
    place = bench_on(board)
    started = board.now()
    place.ready(CounterProbe(moves=True, tick_seconds=0.1, read_seconds=1e-4, idle_watts=80.0))
    assert board.now() == started


def test_networks_are_gone_before_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard()
    place = bench_on(board)
    place.ready(None)
    alive: list[weakref.ref[nn.Module]] = []
    left = []
    build = bench.with_widths

    def with_widths(*args: Any, **kwargs: Any) -> nn.Module:
        left.append(sum(one() is not None for one in alive))
        network = build(*args, **kwargs)
        alive.append(weakref.ref(network))
        return network

    monkeypatch.setattr(bench, "with_widths", with_widths)
    gc.disable()
    try:
        for _ in range(3):
            place.index(0, 0, 0, {"first": 16, "second": 12})
    finally:
        gc.enable()
    assert left == [0, 0, 0]


def test_memory_of_a_gpu_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    cleared = []
    board = FakeBoard()
    place = bench_on(board)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: cleared.append(True))
    place.clear()
    assert cleared == []
    place._device = torch.device("cuda", 0)
    place.clear()
    assert cleared == [True]


def test_the_header_tells_how_it_is_measured() -> None:
    made = bench_on(FakeBoard(), memory_format="channels_last").header(PLAN)
    assert made.device_type == "cpu"
    assert made.label == "measured"
    assert made.settings is not None
    assert made.settings.memory_format == "channels_last"
    assert made.environment["threads"] == str(torch.get_num_threads())
    assert made.created is not None


def test_the_mode_is_decided_by_the_dense_network(monkeypatch: pytest.MonkeyPatch) -> None:
    place = bench_on(FakeBoard())
    assert place.header(PLAN).settings == replace(PROFILE_SETTINGS, mode="eager")  # on a CPU it is known at once
    place._run_in("auto", "")  # as on CUDA
    real = bench.runner_for

    def as_graph(settings: MeasureSettings, *args: Any) -> Any:
        assert settings.mode == "auto"
        ready = real(replace(settings, mode="eager"), *args)
        monkeypatch.undo()
        return captured(ready)

    monkeypatch.setattr(bench, "runner_for", as_graph)
    place.ready(None)
    made = place.header(PLAN)
    assert made.settings == replace(PROFILE_SETTINGS, mode="graph")
    assert made.mode_reason == "it can be captured"


@contextmanager
def captured(ready: Any) -> Any:
    with ready as found:
        yield replace(found, mode="graph", mode_reason="it can be captured")


@pytest.mark.parametrize(("asked", "taken"), [("auto", "graph"), ("compile", "compile")])
def test_a_profile_is_continued_in_its_mode_unless_another_is_asked_for(asked: Any, taken: str) -> None:
    place = bench_on(FakeBoard())
    place._run_in(asked, "")
    place.continue_as(header(settings=replace(PROFILE_SETTINGS, mode="graph"), mode_reason="it can be captured"))
    assert place.header(PLAN).settings == replace(PROFILE_SETTINGS, mode=taken)


def test_a_meter_that_does_not_see_the_device_is_refused_at_once() -> None:
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match="only sees cuda"):
        bench_on(board, FakeMeter(board, covers=("cuda",)))


@pytest.mark.parametrize("device", ["warp", "cuda:77", "xpu"])
def test_a_device_that_is_not_there_is_refused(device: str) -> None:
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match=rf"device '{device}' cannot be used here: "):
        DeviceProfiler(SmallNet(), small_graph(), EXAMPLE, FakeMeter(board), PROFILE_SETTINGS, device, board.clock)


def test_networks_are_built_on_the_device_that_is_named() -> None:
    board = FakeBoard()
    model = SmallNet(board).to("meta")
    place = DeviceProfiler(model, small_graph(), EXAMPLE, FakeMeter(board), PROFILE_SETTINGS, "meta", board.clock)
    assert place._source is model
    place = DeviceProfiler(SmallNet(), small_graph(), EXAMPLE, FakeMeter(board), PROFILE_SETTINGS, "meta", board.clock)
    assert {parameter.device.type for parameter in place._source.parameters()} == {"meta"}


def test_a_network_that_cannot_run_is_told_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: SmallNet, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory\nand many more lines")

    place = bench_on(FakeBoard())
    monkeypatch.setattr(SmallNet, "forward", forward)
    with pytest.raises(BadMeasurement, match=r"cannot be run on cpu in mode 'eager': out of memory\.$"):
        place.ready(None)


# ---------------------------------------------------------------- the desk


def test_an_analytic_source_is_asked_and_nothing_volatile_is_kept() -> None:
    desk = AnalyticProfiler(small_graph(), EXAMPLE, Prices())
    desk.ready(None)
    desk.clear()
    sample = desk.index(3, 0, 0, {"first": 4, "second": 3})
    assert sample.joules == 1e-3 + 1e-6 * float(small_graph().macs({"first": 4, "second": 3}))
    assert set(sample.to_dict()) == {"sample", "reference", "round", "session", "widths", "joules", "seconds"}
    made = desk.header(PLAN)
    assert (made.created, made.settings, made.device_type, made.label) == (None, None, None, "estimated")


@pytest.mark.parametrize("joules", [0.0, -1.0, float("nan"), float("inf")])
def test_a_source_must_give_positive_numbers(joules: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prices, "cost", lambda *_: Reading(joules, 1.0))
    with pytest.raises(BadMeasurement, match=f"coefficients gave {joules} joules"):
        AnalyticProfiler(small_graph(), EXAMPLE, Prices()).index(0, 0, 0, {"first": 4, "second": 3})


# ---------------------------------------------------------------- small things


def test_the_default_device_is_one_that_the_meter_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    class EnergySource(Prices):
        covers: tuple[str, ...] = ()

        def describe(self) -> MeterInfo:
            return MeterInfo(name="a", device="b", provenance=Estimated("c"), scope="d", covers=self.covers)

    source = EnergySource()
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device(source) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device(source) == "cuda"
    source.covers = ("cpu",)
    assert default_device(source) == "cpu"
    source.covers = ("cuda",)
    assert default_device(source) == "cuda"


def test_an_error_becomes_a_sentence() -> None:
    assert first_line(RuntimeError("too big\nstack")) == "too big."
    assert first_line(RuntimeError("Done.")) == "Done."
    assert first_line(MemoryError()) == "MemoryError."
