"""`profile`: order, resuming, drift, failures, early stop, and the two sources of samples."""

from __future__ import annotations

import gc
import json
import os
import random
import statistics
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ecc.errors import BadFile, BadMeasurement, EccError
from ecc.graph import trace_channels
from ecc.measure import (
    PROFILE_SETTINGS,
    CounterProbe,
    DeviceProfiler,
    DeviceState,
    Measured,
    MeasureSettings,
    Profile,
    Progress,
    Reading,
    close_meter,
    find_meter,
    profile,
    sample_widths,
    samplers,
)
from ecc.measure.meter import Timed
from ecc.measure.profiler import default_device, find_runner, profile_settings
from ecc.measure.samplers import AnalyticProfiler
from ecc.settings import CLOCK_SETTINGS
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import (
    EXAMPLE,
    DriftingBoard,
    FakeCosts,
    SmallNet,
    Stop,
    computed,
    header,
    measured,
    run_seconds,
    small_graph,
    stop_after,
)

TESTS = Path(__file__).parent.parent
WIDTHS = {"first": 16, "second": 12}
PLAN = header().design


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.profile"


def order_of(made: Profile) -> str:
    return "".join("R" if sample.is_reference else "." for sample in made.samples)


def test_a_meter_may_be_named(path: Path) -> None:
    made = profile(SmallNet(), small_graph(), EXAMPLE, "platform:jetson-tx2", path, samples=5)
    assert (made.header.meter.name, made.header.meter.device_id) == ("platform", "jetson-tx2")


# --- what is measured --------------------------------------------------------------------------------


def test_every_sample_of_the_design_is_measured_once_in_random_order(path: Path) -> None:
    made = computed(path, rounds=2)
    design = sample_widths(small_graph(), 25)
    for sample in made.design_samples:
        assert sample.index is not None
        assert made.widths_by_group(sample.widths) == design[sample.index]
        assert sample.joules == 1e-3 + 1e-6 * float(small_graph().macs(design[sample.index]))
    assert [sample.round for sample in made.design_samples] == [0] * 25 + [1] * 25
    first, second = [[sample.index or 0 for sample in made.design_samples if sample.round == r] for r in (0, 1)]
    other = [sample.index or 0 for sample in computed(path.with_suffix(".other"), seed=1).design_samples]
    assert sorted(first) == sorted(second) == sorted(other) == list(range(25))
    assert len({tuple(order) for order in (first, second, other, sorted(first))}) == 4
    assert len(made.corrected()) == 25
    assert made == Profile.load(path, small_graph())


def test_networks_are_measured_on_their_device(path: Path) -> None:
    board = FakeBoard()
    frozen: list[int] = []
    gc.unfreeze()
    made = measured(path, board, progress=lambda step: frozen.append(gc.get_freeze_count()))
    left = gc.get_freeze_count()
    gc.freeze()
    for sample in made.samples:
        assert sample.joules == pytest.approx(300 * run_seconds(*sample.widths), rel=0.01)
        assert sample.ticks in range(4, 6)
        assert sample.measured_at is not None
    assert made.header.counter is not None
    assert made.header.counter.tick_seconds == pytest.approx(0.1, rel=0.05)
    assert made.header.settings == replace(PROFILE_SETTINGS, runner="eager")
    assert made.header.runner_reason == "CUDA graphs need a CUDA device, and the network runs on cpu"
    assert made.label == "measured"
    assert (board.now() - 1000.0 - 4.5) / len(made.samples) < 0.9  # seconds per sample, without the probe
    assert min(frozen) > 1_000
    assert left == 0


def test_drift_is_corrected(path: Path) -> None:
    board = DriftingBoard()
    board.drift_per_second = 0.0025  # 4 % during this profile
    made = measured(path, board, samples=20)
    truth = {sample.index: run_seconds(*sample.widths) for sample in made.design_samples}
    assert made.drift is not None
    assert made.drift.is_significant
    assert made.drift.span > 0.03

    def spread(joules: dict[int | None, float]) -> float:
        ratios = [joules[index] / truth[index] for index in truth]
        return statistics.stdev(ratios) / statistics.fmean(ratios)

    assert spread({sample.index: sample.joules for sample in made.design_samples}) > 0.009
    assert spread({sample.index: sample.joules for sample in made.corrected()}) < 0.005


def test_progress_has_samples_error_drift_and_one_warning(path: Path) -> None:
    board = DriftingBoard()
    board.drift_per_second = 0.02
    steps: list[Progress] = []
    measured(path, board, progress=steps.append)
    assert (steps[0].done, steps[0].total, steps[0].sample) == (0, 12, None)
    assert steps[0].message == "runner eager, fp32: CUDA graphs need a CUDA device, and the network runs on cpu."
    assert (steps[-1].done, steps[-1].total, steps[-1].label) == (12, 12, "measured")
    assert steps[-1].error is not None
    assert steps[-1].drift is not None
    assert steps[-1].drift.references == 4
    (warning,) = [step for step in steps if "the dense reference varied by" in step.message]
    assert warning.done < warning.total
    assert "allow_drift=True" in warning.message
    steps.clear()
    computed(path.with_suffix(".c"), samples=20)
    computed(path.with_suffix(".c"), samples=30, progress=steps.append)
    assert steps[0].message == "Resuming: 20 of 30 samples are done."
    assert steps[-1].drift is None  # computed numbers do not drift


def test_a_profile_stops_early_and_stays_stopped(path: Path) -> None:
    messages: list[str] = []
    source = FakeCosts()
    made = computed(path, source, samples=150, target_error=0.02, progress=lambda step: messages.append(step.message))
    assert len(made.design_samples) == 50
    assert order_of(made).endswith("R")
    assert any(message.startswith("stopped early: the error of a quick fit is") for message in messages)
    before, calls = path.read_bytes(), source.calls
    computed(path, source, samples=150, target_error=0.02)
    assert (path.read_bytes(), source.calls) == (before, calls)


# --- resuming ----------------------------------------------------------------------------------------


KILLED = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from ecc.measure import profile
from measure.profile_cases import EXAMPLE, FakeCosts, SmallNet, small_graph

path, graph, rng, kills = sys.argv[1], small_graph(), random.Random(0), 0
while True:
    child = os.fork()
    if child == 0:
        profile(SmallNet(), graph, EXAMPLE, FakeCosts(wait_seconds=0.003), path, samples=40)
        os._exit(0)
    time.sleep(rng.uniform(0.0, 0.1))
    if kills < 6:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
    kills += 1
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_profile_killed_at_random_times_ends_as_the_same_file(path: Path) -> None:
    computed(path, samples=40)
    killed = path.with_suffix(".killed")
    command = [sys.executable, "-c", KILLED, str(killed)]
    run = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 3
    assert killed.read_bytes() == path.read_bytes()


def test_a_complete_profile_is_not_touched_and_can_be_extended(path: Path) -> None:
    computed(path, samples=10)
    source, before = FakeCosts(), path.read_bytes()
    computed(path, source, samples=10)
    computed(path, source, samples=5)
    assert (source.calls, path.read_bytes()) == (0, before)
    made = computed(path, samples=25, rounds=2)
    assert path.read_bytes().startswith(before)
    assert len(made.design_samples) == 50
    assert [s.widths for s in made.corrected()] == [tuple(n.values()) for n in sample_widths(small_graph(), 25)]
    assert made.samples[-1].is_reference


def test_a_measured_profile_resumes_with_a_new_session(path: Path) -> None:
    board = FakeBoard()
    with pytest.raises(Stop):
        measured(path, board, progress=stop_after(7))
    at = board.now()
    made = measured(path, board)
    sessions = "".join(("R" if sample.is_reference else ".") + str(sample.session) for sample in made.samples)
    assert sessions == "R0.0.0.0.0R0.0" + "R1.1.1.1.1R1.1.1.1R1"
    assert made.missing_samples() == []
    assert board.now() - at < 0.9 * 10  # the counter was not probed again
    at, before = board.now(), path.read_bytes()
    measured(path, board)
    assert (board.now(), path.read_bytes()) == (at, before)


def test_a_profile_is_not_resumed_with_other_settings(path: Path) -> None:
    board = FakeBoard()
    with pytest.raises(Stop):
        measured(path, board, progress=stop_after(2))
    before = path.read_bytes()
    changes: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"seed": 5}, {}, "design.seed was 0 and is now 5"),
        ({"width_multiple": 2}, {}, "design.width_multiple was None and is now 2"),
        ({"shard": (1, 2)}, {}, r"design.shard was None and is now [\[\(]1, 2[\]\)]"),
        ({"reference_every": 7}, {}, "design.reference_every was 4 and is now 7"),
        ({"settings": replace(PROFILE_SETTINGS, precision="bf16")}, {}, "settings.precision was 'fp32' and is now"),
        ({"settings": replace(PROFILE_SETTINGS, runner="compile")}, {}, "settings.runner was 'eager'"),
        ({}, {"device": "a newer board"}, "meter.device was 'fake board' and is now 'a newer board'"),
        ({}, {"device_id": "two"}, "meter.device_id was '' and is now 'two'"),
    ]
    for options, info, message in changes:
        with pytest.raises(BadFile, match=rf"a\.profile cannot be resumed: {message}.* Use the same settings"):
            measured(path, board, FakeMeter(board, **info), **options)
    with pytest.raises(BadFile, match="batch was 2 and is now 4"):
        profile(SmallNet(board), small_graph(), torch.ones(4, 3, 6, 6), FakeMeter(board), path, samples=12)
    other = replace(small_graph(), layers=small_graph().layers[:-1])
    with pytest.raises(BadFile, match=f"fingerprint was '{small_graph().fingerprint}'"):
        profile(SmallNet(board), other, EXAMPLE, FakeMeter(board), path, samples=12, reference_every=4)
    assert path.read_bytes() == before


def test_an_analytic_source_needs_a_graph_of_the_same_input(path: Path) -> None:
    """It would give the energy of the batch that was traced."""
    graph = trace_channels(SmallNet(FakeBoard()), EXAMPLE, verify=False)
    with pytest.raises(BadMeasurement, match="traced with inputs of shape 2x3x6x6, and the example input has 4x3x6x6"):
        profile(SmallNet(FakeBoard()), graph, torch.ones(4, 3, 6, 6), FakeCosts(), path, samples=3)
    assert not path.exists()


def test_samples_that_the_design_does_not_give_are_refused(path: Path) -> None:
    computed(path, samples=5)
    lines = path.read_text().splitlines(keepends=True)
    lines[2] = json.dumps({**json.loads(lines[2]), "widths": [1, 2]}) + "\n"
    path.write_text("".join(lines))
    with pytest.raises(BadFile, match=r"a\.profile:3: sample \d has widths \[1, 2\], and the design gives \["):
        computed(path, samples=5)


# --- failures ----------------------------------------------------------------------------------------


class Failing(FakeCosts):
    """Fails at the given calls."""

    def __init__(self, *fails: int, error: BaseException | None = None) -> None:
        super().__init__()
        self.fails = fails
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore")

    def cost(self, *args: Any) -> Reading:
        reading = super().cost(*args)
        if self.calls - 1 in self.fails:
            raise self.error
        return reading


COUNTER_JUMPED = BadMeasurement("the counter jumped.")
TWICE = r"^sample \d+ failed twice: OutOfMemoryError: CUDA out .* GiB\. The 5 samples"


@pytest.mark.parametrize(
    ("source", "error", "message"),
    [
        (Failing(3, 9), None, None),
        (Failing(3, 9, error=COUNTER_JUMPED), None, None),
        (Failing(3, 9, error=MemoryError()), None, None),
        (Failing(6, 7, 8, 9), BadMeasurement, TWICE),
        (Failing(6, error=ZeroDivisionError()), ZeroDivisionError, None),
        (Failing(6, error=KeyboardInterrupt()), KeyboardInterrupt, None),
    ],
)
def test_a_sample_that_fails_is_repeated_once_and_a_failed_profile_resumes(
    path: Path, source: Failing, error: type[BaseException] | None, message: str | None
) -> None:
    messages: list[str] = []
    with nullcontext() if error is None else pytest.raises(error, match=message):
        computed(path, source, progress=lambda step: messages.append(step.message))
    if error is None:
        failed = [message for message in messages if message]
        assert len(failed) == 2
        assert all(message.startswith("sample ") and message.endswith("Trying once more.") for message in failed)
    else:
        assert len(Profile.load(path).design_samples) == 5
        computed(path)
    computed(path.with_suffix(".smooth"))
    assert path.read_bytes() == path.with_suffix(".smooth").read_bytes()


@pytest.mark.parametrize("is_fixed", [True, False])
def test_a_sample_that_fails_twice_is_measured_again_at_the_end(path: Path, is_fixed: bool) -> None:
    computed(path.with_suffix(".smooth"))
    expected = {sample.index: sample.widths for sample in Profile.load(path.with_suffix(".smooth")).design_samples}
    messages: list[str] = []
    broken = () if is_fixed else range(len(expected) + 1, 2 * len(expected) + 9)  # nothing works from some time on
    source = Failing(6, 7, *broken)
    with nullcontext() if is_fixed else pytest.raises(BadMeasurement, match=r"^sample \d+ failed twice: "):
        computed(path, source, progress=lambda step: messages.append(step.message))
    postponed = [message for message in messages if message.endswith("failed twice; it is measured again at the end.")]
    found = {sample.index: sample.widths for sample in Profile.load(path).design_samples}
    assert len(postponed) == (1 if is_fixed else 2)
    assert found == expected if is_fixed else found.items() < expected.items()


def test_a_reference_that_fails_at_once_leaves_no_file(path: Path) -> None:
    with pytest.raises(BadMeasurement, match="the dense reference failed twice"):
        computed(path, Failing(0, 1))
    assert not path.exists()


# --- sources of samples ------------------------------------------------------------------------------


def device_profiler(board: FakeBoard, meter: FakeMeter | None = None, **settings: Any) -> DeviceProfiler:
    chosen = replace(PROFILE_SETTINGS, **settings)
    meter = meter or FakeMeter(board)
    return DeviceProfiler(SmallNet(board), small_graph(), EXAMPLE, meter, chosen, None, board.clock)


def test_a_sample_has_the_state_of_its_device() -> None:
    board = FakeBoard(tick_seconds=0.4, idle_watts=0.0)
    source = device_profiler(board, FakeMeter(board, state=DeviceState(temperature_celsius=50, clock_mhz=1980)))
    assert source.prepare().tick_seconds == pytest.approx(0.4, rel=0.05)
    board.wait(0.39)  # idle energy before the first tick is not counted
    sample = source.sample(7, 1, 2, {"first": 4, "second": 3})
    seconds = run_seconds(4, 3)
    assert (sample.joules, sample.seconds) == pytest.approx((300 * seconds, seconds), rel=0.01)
    assert (sample.index, sample.round, sample.session, sample.widths) == (7, 1, 2, (4, 3))
    assert (sample.temperature_celsius, sample.clock_mhz, sample.power_capped) == (50, 1980, False)
    assert sample.relative_ci is None
    assert sample.measured_at is not None
    assert sample.measured_at.tzinfo is not None
    at = board.now()
    source.prepare(CounterProbe(moves=True, tick_seconds=0.1, read_seconds=1e-4, idle_watts=80.0))
    assert board.now() == at  # a known counter is not probed


@pytest.mark.parametrize("in_turns", [True, False])
def test_in_turns_with_the_dense_network_the_speed_of_the_machine_cancels_out(in_turns: bool) -> None:
    board = DriftingBoard(tick_seconds=0.01)
    board.drift_per_second = 0.02
    source = device_profiler(board, in_turns=in_turns, window_seconds=0.1, min_repeats=4, max_repeats=4)
    source.prepare()
    dense = source.sample(None, 0, 0, WIDTHS)
    found = [source.sample(0, round_, 0, {"first": 4, "second": 3}) for round_ in range(6)]
    ratios = [sample.joules / dense.joules for sample in found]
    assert all(sample.relative_ci is not None for sample in found)
    truth = run_seconds(4, 3) / run_seconds(16, 12)
    errors = [abs(ratio / truth - 1) for ratio in ratios]
    assert (max(errors) < 0.03) is in_turns
    assert found[0].seconds / dense.seconds == pytest.approx(truth, rel=0.03)
    source.refer_to(10.0, 20.0)  # as in an earlier session
    again = source.sample(0, 0, 0, WIDTHS)
    assert (abs(again.joules - 10.0) < 0.5, abs(again.seconds - 20.0) < 0.5) == (in_turns, in_turns)


def turn(*seconds: float) -> Any:
    return SimpleNamespace(windows=[SimpleNamespace(seconds=one) for one in seconds])


def test_other_programs_that_slow_single_windows_hardly_change_a_ratio_in_turns() -> None:
    generator = random.Random(0)

    def turns(seconds: float, count: int) -> list[Any]:
        slowed = [1.0 if generator.random() < 0.5 else generator.uniform(1.0, 1.6) for _ in range(2 * count)]
        return [turn(seconds * one, seconds * two) for one, two in zip(slowed[::2], slowed[1::2], strict=True)]

    errors, covered = [], 0
    for _ in range(30):
        results, references = turns(0.3, 12), turns(1.0, 13)
        ratio, interval = samplers.ratio_in_turns(results, references, "seconds", Timed("CPU time"))
        single = statistics.median(
            one.windows[0].seconds / two.windows[0].seconds for one, two in zip(results, references[1:], strict=True)
        )
        errors.append((abs(ratio / 0.3 - 1), abs(single / 0.3 - 1)))
        covered += interval is not None and errors[-1][0] <= interval < 0.3
    in_turns, of_single_turns = (statistics.fmean(column) for column in zip(*errors, strict=True))
    assert in_turns < 0.02 < 0.04 < of_single_turns
    assert covered >= 27


def test_the_interval_of_a_ratio_in_turns_comes_from_the_turns() -> None:
    steady = samplers.ratio_in_turns([turn(1.0, 1.0)] * 4, [turn(2.0, 2.0)] * 5, "seconds", Timed("CPU time"))
    assert steady == (0.5, 0.0)
    one_turn = samplers.ratio_in_turns([turn(1.0, 3.0)], [turn(2.0, 2.0)] * 2, "seconds", Timed("CPU time"))
    assert one_turn == (0.5, None)  # the fastest windows
    median = samplers.ratio_in_turns([turn(1.0, 3.0)], [turn(2.0, 2.0)] * 2, "seconds", Measured())
    assert median == (1.0, None)
    rising = [turn(1.0 + 0.1 * n, 1.0 + 0.1 * n) for n in range(9)]
    between = [turn(0.525 + 0.05 * n, 0.525 + 0.05 * n) for n in range(8)]
    ratio, _ = samplers.ratio_in_turns(between, rising, "seconds", Measured())
    assert ratio == pytest.approx(0.5)  # of a machine that becomes slower


def test_inputs_are_drawn_once_and_networks_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    board, inputs, networks = FakeBoard(), [], []
    source = device_profiler(board)
    source.prepare()
    real = samplers.measure_model

    def measure_model(network: nn.Module, example: torch.Tensor, *args: Any, **options: Any) -> Any:
        assert [one() for one in networks] == [None] * len(networks)
        inputs.append(example)
        networks.append(weakref.ref(network))
        return real(network, example, *args, **options)

    monkeypatch.setattr(samplers, "measure_model", measure_model)
    gc.disable()
    try:
        for _ in range(3):
            source.sample(0, 0, 0, WIDTHS)
    finally:
        gc.enable()
    assert inputs[0] is inputs[1] is inputs[2]
    assert not torch.equal(inputs[0], EXAMPLE)
    assert device_profiler(board, input_data="example")._inputs is EXAMPLE


def test_the_runner_is_decided_by_the_dense_network_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    source = device_profiler(FakeBoard())
    assert source.header(PLAN).settings == replace(PROFILE_SETTINGS, runner="eager")  # known at once on a CPU
    source._set_runner(None, "")  # as on CUDA
    real = samplers.prepare_runner

    @contextmanager
    def as_graph(model: nn.Module, inputs: Any, settings: MeasureSettings) -> Iterator[Any]:
        assert settings.runner is None
        with real(model, inputs, replace(settings, runner="eager")) as ready:
            yield replace(ready, runner="cuda-graph", reason="it can be captured")

    with monkeypatch.context() as patch:
        patch.setattr(samplers, "prepare_runner", as_graph)
        source.prepare()
    made = source.header(PLAN)
    assert (made.settings, made.runner_reason) == (replace(PROFILE_SETTINGS, runner="cuda-graph"), "it can be captured")
    for chosen, expected in ((None, "cuda-graph"), ("compile", "compile")):
        resumed = device_profiler(FakeBoard())
        resumed._set_runner(chosen, "")
        resumed.adopt_runner(header(settings=made.settings, runner_reason="it can be captured"))
        assert resumed.header(PLAN).settings == replace(PROFILE_SETTINGS, runner=expected)


def test_a_profile_does_not_choose_code_to_execute(path: Path) -> None:
    board, message = FakeBoard(), r"measured with the runner 'own\.py:Runner', which would be executed"
    own = header(settings=replace(PROFILE_SETTINGS, runner="own.py:Runner"))
    for chosen in (None, "eager"):  # None as on CUDA
        resumed = device_profiler(board)
        resumed._set_runner(chosen, "")
        with pytest.raises(EccError, match=message):
            resumed.adopt_runner(own)
    measured(path, board)
    text = path.read_text()
    path.write_text(text.replace('"runner":"eager"', '"runner":"own.py:Runner"'))
    assert path.read_text() != text
    with pytest.raises(EccError, match=message):
        measured(path, board)
    settings = replace(PROFILE_SETTINGS, runner="auto")
    with pytest.raises(EccError, match=message):
        find_runner(path, SmallNet(board), EXAMPLE, FakeMeter(board), settings)
    path.rename(f"{path}.shard-1-of-2")
    with pytest.raises(EccError, match=message):
        find_runner(path, SmallNet(board), EXAMPLE, FakeMeter(board), settings)


def test_devices_that_cannot_be_used_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    board = FakeBoard()
    with pytest.raises(BadMeasurement, match="only sees cuda"):
        device_profiler(board, FakeMeter(board, covers=("cuda",)))
    for device in ("warp", "cuda:77", "xpu"):
        with pytest.raises(BadMeasurement, match=rf"device '{device}' cannot be used here: "):
            DeviceProfiler(SmallNet(), small_graph(), EXAMPLE, FakeMeter(board), PROFILE_SETTINGS, device)
    moved = DeviceProfiler(SmallNet(), small_graph(), EXAMPLE, FakeMeter(board), PROFILE_SETTINGS, "meta")
    assert {parameter.device.type for parameter in moved._dense.parameters()} == {"meta"}

    def forward(self: SmallNet, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("out of memory\nand many more lines")

    source = device_profiler(board)
    monkeypatch.setattr(SmallNet, "forward", forward)
    with pytest.raises(BadMeasurement, match=r"cannot be run on cpu \(eager, fp32\): RuntimeError: out of memory\.$"):
        source.prepare()


@pytest.mark.parametrize("joules", [0.0, -1.0, float("nan"), float("inf")])
def test_an_analytic_source_must_return_positive_numbers(joules: float, monkeypatch: pytest.MonkeyPatch) -> None:
    source = AnalyticProfiler(small_graph(), EXAMPLE, FakeCosts())
    made = source.header(PLAN)
    assert (made.created, made.settings, made.device_type, made.label) == (None, None, None, "estimated")
    monkeypatch.setattr(FakeCosts, "cost", lambda *_: Reading(joules, 1.0))
    with pytest.raises(BadMeasurement, match=f"returned {joules} J and"):
        source.sample(0, 0, 0, WIDTHS)


def test_the_default_device_is_one_that_the_meter_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for covers, device in [((), "cuda"), (("cuda",), "cuda"), (("cpu",), "cpu"), (("xpu",), "cpu")]:
        assert default_device(FakeMeter(FakeBoard(), covers=covers)) == device


def test_settings_are_chosen_one_by_one() -> None:
    meter = FakeMeter(FakeBoard())
    assert profile_settings(meter, runner=None, device="cpu") == PROFILE_SETTINGS
    assert profile_settings(meter, runner="compile").runner == "compile"
    for window, limit in ((60.0, 60.0), (0.5, PROFILE_SETTINGS.max_window_seconds)):
        chosen = profile_settings(meter, window=window)
        assert (chosen.window_seconds, chosen.max_window_seconds) == (window, limit)
    assert all(profile_settings(find_meter(clock)) == CLOCK_SETTINGS for clock in ("cputime", "wall"))
    assert not profile_settings(find_meter("wall"), in_turns=False).in_turns
    with pytest.raises(EccError, match="runner is 'warp'"):
        profile_settings(meter, runner="warp")
    with pytest.raises(EccError, match="window is -1"):
        profile_settings(meter, window=-1)
    with pytest.raises(BadMeasurement, match="precision has no effect: coefficients runs nothing here"):
        profile_settings(FakeCosts(), precision="fp16")


# --- real hardware -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(("runner", "samples"), [(None, 15), ("eager", 5)])
def test_a_real_gpu_is_profiled(path: Path, runner: Any, samples: int) -> None:
    """With default options, below a second per sample, and repeats within a percent."""
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.ReLU(), nn.Conv2d(96, 8, 1))
    example = torch.ones(64, 3, 64, 64)
    graph = trace_channels(model, example, verify=False)
    meter, before = find_meter("nvml"), torch.cuda.memory_allocated()  # other tests leave workspaces of cuBLAS
    settings = replace(PROFILE_SETTINGS, runner=runner)
    options: dict[str, Any] = {"samples": samples, "rounds": 2, "reference_every": 5, "device": "cuda"}
    try:
        made = profile(model, graph, example, meter, path, settings=settings, **options)
    finally:
        close_meter(meter)
    assert next(model.parameters()).device.type == "cpu"
    assert torch.cuda.memory_allocated() - before < 64e6
    assert made.header.settings is not None
    assert made.drift is not None
    assert made.drift.references >= 3
    assert len(made.corrected(allow_drift=runner == "eager")) == samples
    if runner == "eager":
        assert (made.header.settings.runner, made.header.runner_reason) == ("eager", "chosen by the user")
        return
    assert made.header.settings.runner == "cuda-graph"
    assert "can be captured" in (made.header.runner_reason or "")
    assert made.repeat_noise is not None
    assert made.repeat_noise < 0.01, made.drift
    assert made.seconds_per_sample is not None
    assert made.seconds_per_sample < 1.0
