from __future__ import annotations

import gc
import statistics
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from ecc.errors import BadMeasurement
from ecc.measure import (
    CounterProbe,
    Declared,
    DeviceState,
    Measurement,
    MeasureSettings,
    close_meter,
    find_meter,
    measure,
    measure_model,
    probe,
)
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.runner import Mode
from measure.fakes import FakeBoard, FakeMeter

RUN_SECONDS = 0.001037


def measured(board: FakeBoard, meter: FakeMeter | None = None, **settings: object) -> Measurement:
    return measure(
        lambda: board.work(RUN_SECONDS),
        meter or FakeMeter(board),
        MeasureSettings(**settings),  # type: ignore[arg-type]
        clock=board.clock,
    )


# ---------------------------------------------------------------- a function


def test_a_function_is_measured_gross_and_net() -> None:
    result = measured(FakeBoard(idle_watts=80, busy_watts=300))
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.005)
    assert result.seconds == pytest.approx(RUN_SECONDS, rel=0.005)
    assert result.watts == pytest.approx(300, rel=0.005)
    assert result.idle_watts == pytest.approx(80, rel=0.02)
    assert result.net_joules == pytest.approx(220 * RUN_SECONDS, rel=0.01)
    assert result.converged
    assert result.combined_by == "median"
    assert result.tick_seconds == pytest.approx(0.1, rel=0.05)
    assert len(result.windows) == 3


def test_a_single_window_has_no_interval() -> None:
    result = measured(FakeBoard(), min_repeats=1, max_repeats=1)
    assert result.relative_ci is None
    assert not result.converged


def test_a_probe_that_is_given_is_not_made_again() -> None:
    board = FakeBoard()
    meter = FakeMeter(board)
    counter = probe(meter, lambda: board.work(0.004), clock=board.clock)
    settings = MeasureSettings(min_repeats=1, max_repeats=1)
    started = board.now()
    measure(lambda: board.work(RUN_SECONDS), meter, settings, counter=counter, clock=board.clock)
    assert board.now() - started < 0.3 + 0.1 + 1.0 + 0.1  # warm-up, wait for a tick, window, the rest


def test_a_run_may_hold_several_inferences() -> None:
    board = FakeBoard()
    result = measure(lambda: board.work(8 * RUN_SECONDS), FakeMeter(board), inferences_per_run=8, clock=board.clock)
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.005)
    assert result.windows[0].joules == pytest.approx(result.joules, rel=0.01)
    assert result.windows[0].watts == pytest.approx(300, rel=0.01)


def test_a_slow_reader_gets_longer_chunks() -> None:
    board = FakeBoard(tick_seconds=0.2, read_seconds=0.05)
    result = measured(board)
    # Reading takes the host's time, and the device idles meanwhile: the share is told.
    assert 0.05 < result.polling_share < 0.25
    assert result.windows[0].window_seconds > 2.0


def test_without_an_idle_reading_there_is_no_net() -> None:
    board = FakeBoard()
    counter = CounterProbe(moves=True, tick_seconds=0.1, read_seconds=1e-5, idle_watts=None)
    result = measure(lambda: board.work(RUN_SECONDS), FakeMeter(board), counter=counter, clock=board.clock)
    assert result.net_joules is None


def test_declared_watts_are_combined_otherwise_and_labelled() -> None:
    board = FakeBoard(tick_seconds=1e-4, resolution_joules=1e-6, idle_watts=0)
    result = measured(board, FakeMeter(board, provenance=Declared(15)))
    assert result.combined_by == "lower quartile"
    assert result.label == "CPU time x declared 15 W"
    assert result.net_joules == result.joules


def test_garbage_collection_rests_during_the_windows() -> None:
    board = FakeBoard()
    enabled = []
    meter = FakeMeter(board)
    counter = probe(meter, clock=board.clock)

    def run() -> None:
        enabled.append(gc.isenabled())
        board.work(RUN_SECONDS)

    measure(run, meter, counter=counter, clock=board.clock)
    assert not any(enabled)
    assert gc.isenabled()


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> FakeBoard:
    """A board behind the parts of torch.cuda that measuring uses."""
    board = FakeBoard(read_seconds=5e-4)

    class Event:
        def record(self) -> None:
            self.mark = board.mark()

        def query(self) -> bool:
            return self.mark.query()

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", board.synchronize)
    return board


def test_a_gpu_is_measured_through_its_queue(fake_cuda: FakeBoard) -> None:
    board = fake_cuda
    run = lambda: board.queue(RUN_SECONDS, launch_seconds=1e-4)  # noqa: E731 - it is what a launch is
    result = measure(run, FakeMeter(board), device="cuda", clock=board.clock)
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.005)
    assert result.seconds == pytest.approx(RUN_SECONDS, rel=0.005)
    assert result.host_bound_share == 0
    assert board.mark().query()  # nothing is left in the queue


def test_a_gpu_that_waits_for_launches_is_measured_with_its_waits(fake_cuda: FakeBoard) -> None:
    board = fake_cuda
    result = measure(lambda: board.queue(1e-4, launch_seconds=1e-3), FakeMeter(board), device="cuda", clock=board.clock)
    # Reading the counter holds the host up, too; looking away between ticks keeps that to a few percent.
    assert result.joules == pytest.approx(1e-4 * 300 + 9e-4 * 80, rel=0.05)
    assert result.host_bound_share > 0.9
    assert result.polling_share < 0.05


# ---------------------------------------------------------------- what is refused


def test_a_counter_that_stands_still_is_refused() -> None:
    with pytest.raises(BadMeasurement, match="fake stood still while it was probed"):
        measured(FakeBoard(fault=lambda joules, now: 5.0))


def test_a_neighbour_is_refused_before_any_long_work() -> None:
    board = FakeBoard()
    meter = FakeMeter(board, state=DeviceState(other_processes=("process 42",)))
    with pytest.raises(BadMeasurement, match="shared with process 42"):
        measured(board, meter)
    assert board.now() < 1000.1
    assert measured(board, meter, allow_shared=True).joules > 0


@pytest.mark.parametrize("sensor_watts", [150.0, 600.0])
def test_a_counter_that_disagrees_with_power_is_refused(sensor_watts: float) -> None:
    board = FakeBoard()
    meter = FakeMeter(board, state=DeviceState(power_watts=sensor_watts))
    with pytest.raises(BadMeasurement, match=rf"says (299|30\d)\.\d W and the power reading .* {sensor_watts}"):
        measured(board, meter)


def test_a_counter_that_agrees_with_power_passes() -> None:
    board = FakeBoard()
    result = measured(board, FakeMeter(board, state=DeviceState(power_watts=330.0)))
    assert result.sensor_watts == 330.0


def test_small_powers_may_differ() -> None:
    board = FakeBoard(idle_watts=0.5, busy_watts=2.0)
    assert measured(board, FakeMeter(board, state=DeviceState(power_watts=5.0))).sensor_watts == 5.0


def test_a_meter_that_does_not_see_the_device_is_refused() -> None:
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match=r"runs on cpu, but meter fake \(fake board\) only sees cuda"):
        measured(board, FakeMeter(board, covers=("cuda",)))
    with pytest.raises(BadMeasurement, match=r"runs on cuda:0, but .* only sees cpu"):
        measure(lambda: None, FakeMeter(board, covers=("cpu",)), device="cuda:0")


def test_the_meter_of_another_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="8f3a"))
    meter = FakeMeter(FakeBoard(), name="nvml", device_id="GPU-77b1", covers=("cuda",))
    with pytest.raises(BadMeasurement, match=r"is GPU-8f3a, but the meter reads GPU-77b1. Choose nvml:GPU-8f3a"):
        measure(lambda: None, meter, device="cuda:0")


# ---------------------------------------------------------------- a model


class Ticking(nn.Module):
    """A network whose inference takes a known time on a fake board."""

    def __init__(self, board: FakeBoard) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.board = [board]  # in a list: no part of the module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.board[0].work(RUN_SECONDS)
        return self.layer(x)


def test_a_model_is_measured_as_deployed() -> None:
    board = FakeBoard()
    settings = MeasureSettings(mode="eager", precision="fp32")
    result = measure_model(Ticking(board), torch.ones(16, 3), FakeMeter(board), settings, clock=board.clock)
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.005)
    assert result.joules_per_item == pytest.approx(300 * RUN_SECONDS / 16, rel=0.005)
    assert (result.batch, result.device_type, result.settings) == (16, "cpu", settings)


def test_a_model_fed_with_zeros_is_refused() -> None:
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match="all zeros"):
        measure_model(Ticking(board), torch.zeros(1, 3), FakeMeter(board), clock=board.clock)


@pytest.mark.gpu  # a real meter: CPU time on a loaded machine may be refused
def test_a_real_model_on_this_machine_by_cpu_time() -> None:
    """No clock is injected: the whole path runs for real, and only what cannot vary is asserted."""
    settings = MeasureSettings(
        window_seconds=0.05, warmup_seconds=0.05, probe_seconds=0.05, max_repeats=3, target_relative_ci=1.0
    )
    result = measure_model(nn.Linear(64, 64), torch.ones(8, 64), CpuTimeMeter(15.0), settings)
    assert result.joules > 0
    assert result.net_joules == result.joules
    assert result.label == "CPU time x declared 15 W"
    assert result.batch == 8


# ---------------------------------------------------------------- on real hardware


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")  # torch.compile warns of many things that are not ours
@pytest.mark.parametrize("mode", ["eager", "graph", "compile"])
def test_a_real_gpu(mode: Mode) -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()).cuda()
    meter = find_meter("nvml")
    try:
        result = measure_model(model, torch.ones(32, 3, 64, 64), meter, MeasureSettings(mode=mode))
    finally:
        close_meter(meter)
    assert result.converged, result
    assert result.ticks >= 10
    assert result.idle_watts is not None
    assert result.idle_watts < result.watts < (result.meter.max_watts or 1e9)
    assert result.edge_error < 0.005
    assert result.polling_share < 0.2  # a reading of NVML takes some milliseconds, and a tick is watched for closely
    assert result.temperature_celsius is not None
    assert result.clock_mhz is not None


@pytest.mark.gpu
def test_a_real_gpu_repeats_within_a_percent() -> None:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()).cuda()
    meter = find_meter("nvml")
    settings = MeasureSettings(min_ticks=5, min_repeats=1, max_repeats=1)
    try:
        counter = probe(meter, clock=None)
        joules = [
            measure_model(model, torch.ones(32, 3, 64, 64), meter, settings, counter=counter).joules for _ in range(10)
        ]
    finally:
        close_meter(meter)
    assert statistics.stdev(joules[1:]) / statistics.fmean(joules[1:]) < 0.01, joules


# ---------------------------------------------------------------- what is no meter


def test_an_analytic_source_is_refused_before_anything_runs() -> None:
    platform = find_meter("platform:jetson-tx2")
    said = r"platform \(NVIDIA Jetson TX2\) tells joules without running anything.*cost\(graph, widths\)"
    with pytest.raises(BadMeasurement, match=said):
        measure(lambda: pytest.fail("it ran"), platform)  # type: ignore[arg-type]
    with pytest.raises(BadMeasurement, match=said):
        measure_model(nn.Linear(2, 2), torch.zeros(1, 2), platform)  # type: ignore[arg-type]
