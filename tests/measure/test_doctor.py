from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ecc.errors import BadMeasurement, NoMeter
from ecc.graph import trace_channels
from ecc.measure import DeviceState, Meter, MeterInfo, doctor, registry
from ecc.measure.doctor import DoctorReport, MeterFinding, diagnose
from ecc.measure.runner import InferenceRunner
from ecc.records import from_builtins, to_json
from measure.fakes import FakeBoard, FakeMeter

RUN_SECONDS = 0.004


def failing(reason: str, remedy: str = "") -> Callable[[str], Meter]:
    def open_meter(argument: str) -> Meter:
        raise NoMeter(reason, remedy=remedy)

    return open_meter


@pytest.fixture(autouse=True)
def _nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in registry.AUTO:
        monkeypatch.setitem(registry.OPENERS, name, failing(f"no {name} here"))


Works = Callable[..., FakeMeter]


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Works:
    """Makes a meter of `auto` work: on a fake board, which the self-test's network runs on."""

    def make(name: str, board: FakeBoard, **info: Any) -> FakeMeter:
        meter = FakeMeter(board, **{"name": name, "covers": ("cpu",), **info})
        monkeypatch.setitem(registry.OPENERS, name, lambda argument: meter)

        @contextmanager
        def on_the_board(model: torch.nn.Module, inputs: torch.Tensor) -> Iterator[InferenceRunner]:
            yield InferenceRunner(lambda: board.work(RUN_SECONDS), torch.device("cpu"), inputs.shape[0], "eager", "")

        monkeypatch.setattr(doctor, "prepare_runner", on_the_board)
        return meter

    return make


def only(report: DoctorReport) -> MeterFinding:
    (finding,) = report.working
    return finding


# --- nothing works ----------------------------------------------------------------------------------


def test_a_machine_without_meters() -> None:
    report = diagnose(clock=FakeBoard().clock)
    assert [finding.spec for finding in report.meters] == list(registry.AUTO)
    assert [finding.reason for finding in report.meters] == [f"no {name} here" for name in registry.AUTO]
    assert not report.working
    assert not report.can_measure


def test_the_machine_is_described_without_its_name() -> None:
    machine = diagnose(clock=FakeBoard().clock).machine
    assert {"ecc", "python", "torch", "system", "processor", "cores", "cuda"} <= set(machine)
    assert machine["torch"] == torch.__version__


def test_a_remedy_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry.OPENERS, "rapl", failing("only root", remedy="sudo chmod a+r counter"))
    assert diagnose(clock=FakeBoard().clock).meters[-1].remedy == "sudo chmod a+r counter"


# --- a meter that works -----------------------------------------------------------------------------


def test_a_meter_is_observed_and_tested(works: Works) -> None:
    board = FakeBoard(tick_seconds=0.1, idle_watts=80, busy_watts=300, noise=0.005)
    state = DeviceState(temperature_celsius=34, clock_mhz=345)
    works("jetson", board, state=state, resolution_joules=1e-3)
    started = board.now()
    report = diagnose(clock=board.clock)
    assert report.can_measure
    finding = only(report)
    assert finding.spec == "jetson"
    assert finding.is_meter
    assert not finding.trouble
    assert finding.counter is not None
    assert finding.counter.tick_seconds == pytest.approx(0.1, rel=0.02)
    assert finding.counter.idle_watts == pytest.approx(80, rel=0.02)
    assert finding.counter.idle_state == state
    assert finding.self_test is not None
    result = finding.self_test.measurement
    assert finding.self_test.device == "cpu"
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.01)
    assert result.temperature_celsius == 34
    assert len(result.windows) >= 5
    assert all(window.ticks >= 10 for window in result.windows)
    assert 0.0003 < finding.self_test.repeatability < 0.005  # ten ticks of 0.5 % each
    assert board.now() - started == pytest.approx(10, abs=3)  # about as long as was asked for


@pytest.mark.parametrize("noise", [0.0, 0.1, 0.2])
def test_repeatability_follows_the_noise(works: Works, noise: float) -> None:
    board = FakeBoard(tick_seconds=0.01, noise=noise, seed=3)
    works("rapl", board)
    test = only(diagnose(seconds=20, clock=board.clock)).self_test
    assert test is not None
    assert test.repeatability == pytest.approx(noise / 50**0.5, rel=0.3, abs=0.006)  # 50 ticks a window


@pytest.mark.parametrize(("seconds", "windows"), [(1, 5), (8, 10), (120, 30)])
def test_a_longer_test_has_more_windows(works: Works, seconds: float, windows: int) -> None:
    board = FakeBoard(tick_seconds=0.01)
    works("rapl", board)
    test = only(diagnose(seconds=seconds, clock=board.clock)).self_test
    assert test is not None
    assert len(test.measurement.windows) == pytest.approx(windows, abs=2)


def test_quick_observes_the_counter_and_runs_nothing(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard()
    works("rapl", board)
    monkeypatch.setattr(doctor, "prepare_runner", lambda *_: pytest.fail("it ran"))
    started = board.now()
    finding = only(diagnose(quick=True, clock=board.clock))
    assert finding.counter is not None
    assert finding.counter.idle_watts == pytest.approx(80, rel=0.02)
    assert finding.self_test is None
    assert not finding.trouble
    assert board.now() - started < 3


def test_every_meter_that_works_is_tested_and_closed(works: Works) -> None:
    board, closed = FakeBoard(), []
    for name in ("jetson", "rapl"):
        works(name, board).close = lambda name=name: closed.append(name)  # type: ignore[attr-defined]
    report = diagnose(clock=board.clock)
    assert [finding.spec for finding in report.working] == ["jetson", "rapl"]
    assert all(finding.self_test is not None for finding in report.working)
    assert closed == ["jetson", "rapl"]


def test_progress_is_reported(works: Works) -> None:
    board = FakeBoard()
    works("rapl", board)
    said: list[str] = []
    diagnose(report=said.append, clock=board.clock)
    assert said[0] == "looking for meters"
    assert said[1] == "rapl: observing the counter, idle and busy"
    assert said[2].startswith("rapl: measuring a small network ")


# --- trouble --------------------------------------------------------------------------------------


def test_a_counter_that_does_not_change_is_reported(works: Works) -> None:
    board = FakeBoard(fault=lambda joules, now: 7.0)
    works("rapl", board)
    finding = only(diagnose(clock=board.clock))
    assert finding.trouble == "its counter did not change while a network ran: it does not count work on cpu."
    assert finding.self_test is None


def test_a_counter_that_decreases_is_reported(works: Works) -> None:
    board = FakeBoard(fault=lambda joules, now: joules - (1e4 if now > 1003 else 0))
    works("rapl", board)
    assert "decreased" in only(diagnose(clock=board.clock)).trouble


def test_a_shared_device_is_reported(works: Works) -> None:
    board = FakeBoard()
    works("rapl", board, state=DeviceState(other_processes=("process 42",)))
    finding = only(diagnose(clock=board.clock))
    assert "process 42" in finding.trouble
    assert finding.counter is not None  # what was seen before is kept


def test_a_failing_device_is_reported(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard()
    works("rapl", board)

    def broken(*_: object) -> object:
        raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(doctor, "prepare_runner", broken)
    assert only(diagnose(clock=board.clock)).trouble == "RuntimeError: CUDA error: out of memory"


def test_a_meter_for_a_device_that_torch_cannot_use(works: Works, monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard()
    works("nvml", board, covers=("cuda",))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = only(diagnose(clock=board.clock))
    assert finding.trouble.startswith("no self-test: the meter sees cuda, and torch ")
    assert finding.counter is not None  # at rest, it was watched all the same


# --- one meter by name ------------------------------------------------------------------------------


def test_a_named_meter_is_tested_alone() -> None:
    report = diagnose("cputime:15W", quick=True)
    (finding,) = report.meters
    assert finding.spec == "cputime:15W"
    assert finding.reason == "CPU, this process, process CPU time"
    assert report.can_measure


def test_a_named_meter_that_does_not_work_is_an_error() -> None:
    with pytest.raises(NoMeter, match="no rapl here"):
        diagnose("rapl")


def test_an_estimate_is_not_a_measurement() -> None:
    report = diagnose("platform:eyeriss")
    finding = only(report)
    assert not finding.is_meter
    assert not report.can_measure
    assert (finding.counter, finding.self_test, finding.trouble) == (None, None, "")


def test_a_self_test_below_a_second_is_refused() -> None:
    with pytest.raises(BadMeasurement, match=r"seconds is 0\.5; a self-test takes at least 1 second"):
        diagnose(seconds=0.5)


@pytest.mark.slow
@pytest.mark.gpu  # a real meter: CPU time on a loaded machine may be refused
def test_a_real_self_test_on_the_cpu() -> None:
    finding = only(diagnose("cputime:15W", seconds=1))
    assert finding.self_test is not None, finding.trouble
    assert finding.self_test.measurement.joules > 0


# --- the network and its device ---------------------------------------------------------------------


def test_the_network_is_small_and_leaves_random_numbers_alone() -> None:
    state = torch.get_rng_state()
    model, images = doctor._small_network(torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)
    assert int(trace_channels(model, images, verify=False).macs()) == 29_196_288
    assert images.shape[0] == 1
    _, images = doctor._small_network(torch.device("meta"))
    assert images.shape[0] == 256


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda k: SimpleNamespace(uuid=f"uuid-{k}"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda k: f"GPU {k}")


@pytest.mark.parametrize(
    ("covers", "device_id", "device"),
    [
        (("cuda",), "GPU-uuid-1", "cuda:1"),
        (("cuda",), "", "cuda"),
        ((), "", "cuda"),
        (("cpu",), "", "cpu"),
        (("cpu", "mps"), "", "cpu"),
        (("xpu",), "", None),
    ],
)
def test_the_network_runs_on_the_device_of_the_meter(
    two_gpus: None, covers: tuple[str, ...], device_id: str, device: str | None
) -> None:
    info = FakeMeter(FakeBoard(), covers=covers, device_id=device_id).describe()
    found = doctor._device_for(info)
    assert found == (None if device is None else torch.device(device))


def test_gpus_are_listed(two_gpus: None) -> None:
    machine = doctor._machine()
    assert machine["gpus"] == "GPU 0, GPU 1"
    assert {"cudnn", "driver"} <= set(machine)


# --- for programs -----------------------------------------------------------------------------------


def test_the_report_is_json(works: Works) -> None:
    board = FakeBoard()
    works("rapl", board)
    facts = json.loads(to_json(diagnose(clock=board.clock)))
    assert facts["can_measure"] is True
    *failed, rapl = facts["meters"]
    assert [meter["works"] for meter in failed] == [False] * 4
    assert failed[0] == {
        "spec": "nvml",
        "works": False,
        "is_meter": False,
        "reason": "no nvml here",
        "remedy": "",
        "info": None,
        "counter": None,
        "self_test": None,
        "trouble": "",
    }
    assert from_builtins(rapl["info"], MeterInfo, "").label == "measured"
    assert rapl["self_test"]["repeatability"] >= 0
    assert rapl["self_test"]["measurement"]["joules"] > 0
    assert list(facts["fallbacks"]) == [spec for spec, _ in registry.FALLBACKS]
