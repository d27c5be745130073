from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure import DeviceState, MeterInfo, doctor, registry
from ecc.measure.doctor import DoctorReport, MeterFinding, diagnose
from ecc.measure.runners import PreparedRunner
from ecc.records import from_builtins, to_json
from measure.fakes import FakeBoard, FakeMeter

RUN_SECONDS = 0.004
Works = Callable[..., FakeMeter]


@pytest.fixture(autouse=True)
def _nothing_works(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in registry.AUTO:

        def fail(argument: str, name: str = name) -> Any:
            raise NoMeter(f"no {name} here", remedy="sudo chmod a+r counter" if name == "rapl" else "")

        monkeypatch.setitem(registry.OPENERS, name, fail)


@pytest.fixture
def works(monkeypatch: pytest.MonkeyPatch) -> Works:
    """Makes a meter of `auto` work: on a fake board, which the self-test's network runs on."""

    def make(name: str, board: FakeBoard, **info: Any) -> FakeMeter:
        meter = FakeMeter(board, **{"name": name, "covers": ("cpu",), **info})
        monkeypatch.setitem(registry.OPENERS, name, lambda argument: meter)

        @contextmanager
        def on_the_board(model: torch.nn.Module, inputs: torch.Tensor) -> Iterator[PreparedRunner]:
            run, batch = lambda: board.work(RUN_SECONDS), inputs.shape[0]
            yield PreparedRunner(run, torch.device("cpu"), batch, "eager", "", False, {}, None)

        monkeypatch.setattr(doctor, "prepare_runner", on_the_board)
        return meter

    return make


def only(report: DoctorReport) -> MeterFinding:
    (finding,) = report.working
    return finding


def test_a_machine_without_meters_has_reasons_remedies_and_a_description() -> None:
    report = diagnose(clock=FakeBoard().clock)
    found = [(finding.spec, finding.reason) for finding in report.meters]
    assert found == [(name, f"no {name} here") for name in registry.AUTO]
    assert report.meters[-1].remedy == "sudo chmod a+r counter"
    assert (report.working, report.can_measure) == ((), False)
    assert {"ecc", "python", "torch", "system", "processor", "cores", "cuda"} <= set(report.machine)
    assert report.machine["torch"] == torch.__version__


def test_a_meter_is_observed_and_tested(works: Works) -> None:
    board = FakeBoard(tick_seconds=0.1, idle_watts=80, busy_watts=300, noise=0.005)
    state = DeviceState(temperature_celsius=34, clock_mhz=345)
    works("jetson", board, state=state, resolution_joules=1e-3)
    started, said = board.now(), list[str]()
    report = diagnose(clock=board.clock, report=said.append)
    finding = only(report)
    assert (report.can_measure, finding.spec, finding.is_meter, finding.trouble) == (True, "jetson", True, "")
    assert finding.counter is not None
    assert finding.counter.tick_seconds == pytest.approx(0.1, rel=0.02)
    assert finding.counter.idle_watts == pytest.approx(80, rel=0.02)
    assert finding.counter.idle_state == state
    assert finding.self_test is not None
    result = finding.self_test.measurement
    assert (finding.self_test.device, result.temperature_celsius) == ("cpu", 34)
    assert result.joules == pytest.approx(300 * RUN_SECONDS, rel=0.01)
    assert len(result.windows) >= 5
    assert all(window.ticks >= 10 for window in result.windows)
    assert 0.0003 < finding.self_test.repeatability < 0.005  # ten ticks of 0.5 % each
    assert board.now() - started == pytest.approx(10, abs=3)  # about as long as was asked for
    assert said[:2] == ["looking for meters", "jetson: observing the counter, idle and busy"]
    assert said[2].startswith("jetson: measuring a small network ")


@pytest.mark.parametrize(("seconds", "windows", "noise"), [(1, 5, 0.0), (20, 28, 0.2), (120, 30, 0.0)])
def test_a_longer_test_has_more_windows_and_repeatability_follows_the_noise(
    works: Works, seconds: float, windows: int, noise: float
) -> None:
    board = FakeBoard(tick_seconds=0.01, noise=noise, seed=3)
    works("rapl", board)
    test = only(diagnose(seconds=seconds, clock=board.clock)).self_test
    assert test is not None
    assert len(test.measurement.windows) == pytest.approx(windows, abs=2)
    assert test.repeatability == pytest.approx(noise / 50**0.5, rel=0.35, abs=0.006)  # 50 ticks a window


def out_of_memory(*_: object) -> None:
    raise RuntimeError("CUDA error: out of memory\nCompile with TORCH_USE_CUDA_DSA")


@pytest.mark.parametrize(
    ("fault", "info", "run", "trouble"),
    [
        (lambda j, now: 7.0, {}, None, "its counter did not change while a network ran: it does not count work on cpu"),
        (lambda j, now: j - (1e4 if now > 1003 else 0), {}, None, "decreased"),
        (lambda j, now: j, {"state": DeviceState(other_processes=("process 42",))}, None, "process 42"),
        (lambda j, now: j, {}, out_of_memory, "RuntimeError: CUDA error: out of memory"),
        (lambda j, now: j, {"covers": ("cuda",)}, None, "no self-test: the meter sees cuda, and torch "),
    ],
    ids=["fixed", "decreasing", "shared", "failing", "no device"],
)
def test_trouble_is_reported_with_what_was_observed_before(
    works: Works, monkeypatch: pytest.MonkeyPatch, fault: Any, info: dict[str, Any], run: Any, trouble: str
) -> None:
    board = FakeBoard(fault=fault)
    works("rapl", board, **info)
    if run is not None:
        monkeypatch.setattr(doctor, "prepare_runner", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    finding = only(diagnose(clock=board.clock))
    assert trouble in finding.trouble
    assert "DSA" not in finding.trouble
    assert finding.self_test is None
    assert (finding.counter is None) == (run is not None)


def test_a_named_meter_is_tested_alone_and_an_estimate_is_not_a_measurement() -> None:
    report = diagnose("cputime:15W", quick=True, clock=FakeBoard().clock)
    (finding,) = report.meters
    assert (finding.spec, finding.reason) == ("cputime:15W", "CPU, this process, process CPU time")
    assert report.can_measure
    report = diagnose("platform:eyeriss")
    finding = only(report)
    assert (finding.is_meter, report.can_measure) == (False, False)
    assert (finding.counter, finding.self_test, finding.trouble) == (None, None, "")
    with pytest.raises(NoMeter, match="no rapl here"):
        diagnose("rapl")
    with pytest.raises(BadMeasurement, match=r"seconds is 0\.5; a self-test takes at least 1 second"):
        diagnose(seconds=0.5)


@pytest.mark.slow
@pytest.mark.gpu  # a real meter: CPU time on a loaded machine may be refused
def test_a_real_self_test_on_the_cpu() -> None:
    finding = only(diagnose("cputime:15W", seconds=1))
    assert finding.self_test is not None, finding.trouble
    assert finding.self_test.measurement.joules > 0


# --- the network and its device ----------------------------------------------------------------------


def test_every_meter_that_works_is_tested_closed_and_written_as_json(works: Works) -> None:
    board, closed = FakeBoard(), []
    for name in ("jetson", "rapl"):
        works(name, board).close = lambda name=name: closed.append(name)  # type: ignore[attr-defined]
    facts = json.loads(to_json(diagnose(clock=board.clock)))
    assert closed == ["jetson", "rapl"]
    assert facts["can_measure"] is True
    assert [meter["works"] for meter in facts["meters"]] == [False, True, False, False, True]
    failed = {"spec": "nvml", "works": False, "is_meter": False, "reason": "no nvml here", "remedy": "", "info": None}
    assert facts["meters"][0] == {**failed, "counter": None, "self_test": None, "trouble": ""}
    rapl = facts["meters"][-1]
    assert from_builtins(rapl["info"], MeterInfo, "").label == "measured"
    assert rapl["self_test"]["repeatability"] >= 0
    assert rapl["self_test"]["measurement"]["joules"] > 0
    assert list(facts["fallbacks"]) == [spec for spec, _ in registry.FALLBACKS]
