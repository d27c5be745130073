from __future__ import annotations

import gc
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ecc.errors import BadFile, BadMeasurement, BadWidths
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import (
    PROFILE_SETTINGS,
    MeasureSettings,
    Profile,
    Progress,
    Reading,
    close_meter,
    design,
    find_meter,
    profile,
)
from ecc.measure.profiler import chosen_settings
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import (
    DriftingBoard,
    Prices,
    Stop,
    computed,
    measured,
    run_seconds,
    small_graph,
    stop_after,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.profile"


# ---------------------------------------------------------------- what is measured


def test_every_row_of_the_design_is_there_once(path: Path) -> None:
    made = computed(path)
    networks = design(small_graph(), 25)
    assert sorted(sample.index for sample in made.design_samples if sample.index is not None) == list(range(25))
    for sample in made.design_samples:
        assert sample.index is not None
        assert made.named(sample.widths) == networks[sample.index]
        assert sample.joules == 1e-3 + 1e-6 * float(small_graph().macs(made.named(sample.widths)))
    assert made == Profile.load(path, small_graph())


def test_the_reference_comes_first_last_and_in_between(path: Path) -> None:
    kinds = "".join("R" if sample.is_reference else "." for sample in computed(path).samples)
    assert kinds == "R..........R..........R.....R"
    kinds = "".join(
        "R" if sample.is_reference else "." for sample in computed(path.with_suffix(".2"), samples=20).samples
    )
    assert kinds == "R..........R..........R"
    assert all(sample.widths == (16, 12) for sample in Profile.load(path).references)


def test_the_order_is_shuffled_and_seeded(path: Path) -> None:
    order = [sample.index for sample in computed(path).design_samples]
    assert order != sorted(order, key=str)
    assert order == [sample.index for sample in computed(path.with_suffix(".again")).design_samples]
    assert order != [sample.index for sample in computed(path.with_suffix(".other"), seed=1).design_samples]


def test_rounds_follow_one_another_in_orders_of_their_own(path: Path) -> None:
    made = computed(path, rounds=2)
    assert [sample.round for sample in made.design_samples] == [0] * 25 + [1] * 25
    first, second = [[sample.index for sample in made.design_samples if sample.round == r] for r in (0, 1)]
    assert sorted(map(str, first)) == sorted(map(str, second))
    assert first != second
    assert len(made.corrected()) == 25


def test_arithmetic_gives_the_same_bytes_each_time(path: Path) -> None:
    computed(path)
    computed(path.with_suffix(".again"))
    assert path.read_bytes() == path.with_suffix(".again").read_bytes()


def test_networks_are_measured_on_their_device(path: Path) -> None:
    made = measured(path, FakeBoard())
    for sample in made.samples:
        assert sample.joules == pytest.approx(300 * run_seconds(*sample.widths), rel=0.01)
        assert sample.ticks in range(4, 6)
        assert sample.measured_at is not None
    assert made.header.counter is not None
    assert made.header.counter.tick_seconds == pytest.approx(0.1, rel=0.05)
    assert made.header.settings == replace(PROFILE_SETTINGS, mode="eager")
    assert made.header.mode_reason == "CUDA graphs need a CUDA device, and the network runs on cpu"
    assert made.label == "measured"


def test_a_network_takes_at_most_a_second_in_all(path: Path) -> None:
    board = FakeBoard()
    measured(path, board, samples=10)
    probing = 0.5 + 2 + 2
    assert (board.now() - 1000.0 - probing) / 14 < 0.9  # ten networks and four references


def test_garbage_is_collected_quickly_and_thawed_after(path: Path) -> None:
    frozen = []
    board = FakeBoard()
    measured(path, board, samples=3, progress=lambda step: frozen.append(gc.get_freeze_count()))
    assert min(frozen) > 1_000
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        measured(path, board, samples=4)
        assert gc.get_freeze_count() > 0  # the caller's, left alone
    finally:
        gc.unfreeze()


# ---------------------------------------------------------------- drift


def test_drift_is_seen_and_divided_out(path: Path) -> None:
    board = DriftingBoard()
    board.drift_per_second = 0.0025  # 4 % over this profile
    made = measured(path, board, samples=20)
    raw = {sample.index: sample.joules for sample in made.design_samples}
    truth = {sample.index: run_seconds(*sample.widths) for sample in made.design_samples}
    assert made.drift is not None
    assert made.drift.is_significant
    assert made.drift.span > 0.03

    def spread(joules: dict[int | None, float]) -> float:
        ratios = [joules[number] / truth[number] for number in truth]
        return statistics.stdev(ratios) / statistics.fmean(ratios)

    # A window on the host's own work scatters by some 0.3 % here.
    assert spread(raw) > 0.009
    assert spread({sample.index: sample.joules for sample in made.corrected()}) < 0.005
    assert Profile.load(path).corrected() == made.corrected()


# ---------------------------------------------------------------- failures


class Moody(Prices):
    """Fails at the given calls."""

    def __init__(self, *fails: int, error: Exception | None = None) -> None:
        super().__init__()
        self.fails = fails
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB\nmore")

    def cost(self, *args: Any) -> Reading:
        reading = super().cost(*args)
        if self.calls - 1 in self.fails:
            raise self.error
        return reading


@pytest.mark.parametrize("error", [None, BadMeasurement("the counter jumped."), MemoryError()])
def test_a_row_that_fails_once_is_tried_again(path: Path, error: Exception | None) -> None:
    messages: list[str] = []
    computed(path, Moody(3, 9, error=error), progress=lambda step: messages.append(step.message))
    computed(path.with_suffix(".smooth"))
    assert path.read_bytes() == path.with_suffix(".smooth").read_bytes()
    said = [message for message in messages if message]
    assert len(said) == 2
    assert all(message.startswith("sample ") and message.endswith("Trying once more.") for message in said)


def test_a_row_that_fails_twice_ends_the_run_and_nothing_is_lost(path: Path) -> None:
    with pytest.raises(
        BadMeasurement, match=r"^sample \d+ failed twice: CUDA out of memory\. Tried .* 20 GiB\. The 5 samples"
    ):
        computed(path, Moody(6, 7))
    assert len(Profile.load(path).design_samples) == 5
    computed(path)
    computed(path.with_suffix(".smooth"))
    assert path.read_bytes() == path.with_suffix(".smooth").read_bytes()


def test_a_reference_that_fails_at_once_leaves_no_file(path: Path) -> None:
    with pytest.raises(BadMeasurement, match="the dense reference failed twice"):
        computed(path, Moody(0, 1))
    assert not path.exists()


def test_a_fault_of_the_program_is_not_taken_for_one_of_the_device(path: Path) -> None:
    with pytest.raises(ZeroDivisionError):
        computed(path, Moody(6, error=ZeroDivisionError()))
    assert len(Profile.load(path).design_samples) == 5


def test_ctrl_c_leaves_a_file_that_goes_on(path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        computed(path, Moody(6, error=KeyboardInterrupt()))  # type: ignore[arg-type]
    computed(path)
    computed(path.with_suffix(".smooth"))
    assert path.read_bytes() == path.with_suffix(".smooth").read_bytes()


def test_two_profiles_into_one_file_are_kept_apart(path: Path) -> None:
    def second(step: Progress) -> None:
        with pytest.raises(BadFile, match="is being written by another process"):
            computed(path)
        raise Stop

    with pytest.raises(Stop):
        computed(path, progress=second)


# ---------------------------------------------------------------- early stop


def test_it_stops_early_and_says_why(path: Path) -> None:
    steps: list[Progress] = []
    made = computed(path, samples=80, target_error=0.02, progress=steps.append)
    assert len(made.design_samples) == 50
    assert made.samples[-1].is_reference
    messages = [step.message for step in steps if step.message]
    assert messages == ["stopped early: the error of the fit is 0.00%, below 2.00%, with 50 networks."]


def test_a_model_of_another_room_can_decide(path: Path) -> None:
    def error_of(graph: ChannelGraph, made: Profile) -> float:
        return 0.01 if len(made.design_samples) >= 50 else 0.5

    steps: list[Progress] = []
    made = computed(path, samples=80, target_error=0.02, error_of=error_of, progress=steps.append)
    assert len(made.design_samples) == 60
    assert steps[-1].error == 0.01
    before = path.read_bytes()
    computed(path, samples=80, target_error=0.02, error_of=error_of)
    assert path.read_bytes() == before  # asked again it stops again
    with pytest.raises(Stop):
        computed(path.with_suffix(".part"), samples=80, target_error=0.02, error_of=error_of, progress=stop_after(33))
    computed(path.with_suffix(".part"), samples=80, target_error=0.02, error_of=error_of)
    assert path.with_suffix(".part").read_bytes() == before
    assert len(computed(path, samples=80).design_samples) == 80  # and goes on without a target


# ---------------------------------------------------------------- shards, arguments, progress


def test_a_shard_measures_its_rows_and_the_reference(path: Path) -> None:
    made = computed(path, shard=(3, 8))
    assert sorted(sample.index for sample in made.design_samples if sample.index is not None) == [3, 11, 19]
    assert [sample.is_reference for sample in made.samples] == [True, False, False, False, True]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"samples": 0}, "samples=0"),
        ({"rounds": 0}, "rounds=0 is below 1"),
        ({"rounds": 10**9}, "more than 1000000 measurements"),
        ({"reference_every": 0}, "reference_every=0 is below 1"),
        ({"until": 2.0}, r"target_error=2\.0 is not a share between 0 and 1"),
        ({"shard": (9, 8)}, "shard 9/8 does not exist"),
        ({"shard": (7, 8), "samples": 3}, "shard 7/8 of a design of 3 samples holds no sample"),
        ({"design": "corners"}, "design 'corners' is unknown"),
    ],
)
def test_arguments_out_of_range_are_refused_before_anything_is_done(
    path: Path, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(BadMeasurement, match=text):
        computed(path, **options)
    assert not path.exists()


def test_a_network_with_too_few_widths_is_refused(path: Path) -> None:
    with pytest.raises(BadWidths, match="has only 192 different widths"):
        computed(path, samples=193)


def test_a_reference_that_varies_too_much_is_told_once_while_measuring(path: Path) -> None:
    board = DriftingBoard()
    board.drift_per_second = 0.02
    steps: list[Progress] = []
    made = measured(path, board, progress=steps.append)
    assert made.drift is not None
    assert not made.drift.is_steady
    told = [step for step in steps if "the dense reference varied by" in step.message]
    assert len(told) == 1
    assert told[0].done < told[0].total
    assert "--allow-drift (allow_drift=True)" in told[0].message


def test_progress_tells_rows_error_and_drift(path: Path) -> None:
    steps: list[Progress] = []
    measured(path, FakeBoard(), progress=steps.append)
    assert (steps[0].done, steps[0].total, steps[0].index) == (0, 12, None)
    assert steps[0].message == "mode eager: CUDA graphs need a CUDA device, and the network runs on cpu."
    assert (steps[-1].done, steps[-1].total) == (12, 12)
    assert steps[-1].error is not None
    assert steps[-1].drift is not None
    assert steps[-1].drift.references == 4
    assert {step.label for step in steps} == {"measured"}
    steps.clear()
    computed(path.with_suffix(".c"), progress=steps.append)
    assert steps[-1].drift is None  # arithmetic does not drift
    steps.clear()
    computed(path.with_suffix(".c"), samples=30, progress=steps.append)
    assert steps[0].message == "25 of 30 networks are there already."


def test_settings_are_chosen_one_by_one() -> None:
    meter = FakeMeter(FakeBoard())
    assert chosen_settings(meter, mode=None, device="cpu") == PROFILE_SETTINGS
    assert chosen_settings(meter, mode="compile").mode == "compile"
    long = chosen_settings(meter, window_seconds=60.0)
    assert (long.window_seconds, long.max_window_seconds) == (60.0, 60.0)
    short = chosen_settings(meter, window_seconds=0.5)
    assert (short.window_seconds, short.max_window_seconds) == (0.5, PROFILE_SETTINGS.max_window_seconds)
    with pytest.raises(BadMeasurement, match="mode='warp' is unknown"):
        chosen_settings(meter, mode="warp")
    assert chosen_settings(Prices(), mode=None) == PROFILE_SETTINGS
    with pytest.raises(BadMeasurement, match=r"precision was chosen, but coefficients runs nothing here: .* estimated"):
        chosen_settings(Prices(), precision="fp16")


# ---------------------------------------------------------------- on real hardware


def profiled_on_a_gpu(path: Path, settings: MeasureSettings, samples: int) -> Profile:
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 96, 3), nn.ReLU(), nn.Conv2d(96, 8, 1))
    example = torch.ones(64, 3, 64, 64)
    meter = find_meter("nvml")
    try:
        made = profile(
            model,
            trace_channels(model, example, verify=False),
            example,
            meter,
            path,
            samples=samples,
            rounds=2,
            reference_every=5,
            device="cuda",
            settings=settings,
        )
    finally:
        close_meter(meter)
    assert next(model.parameters()).device.type == "cpu"
    assert torch.cuda.memory_allocated() < 64e6  # networks are gone
    return made


@pytest.mark.gpu
def test_a_real_gpu_is_profiled_with_default_options(path: Path) -> None:
    """What we promise of a network that can be captured: a second for each sample, repeats within a percent."""
    made = profiled_on_a_gpu(path, PROFILE_SETTINGS, 15)
    assert made.header.settings is not None
    assert made.header.settings.mode == "graph"
    assert made.header.mode_reason is not None
    assert "can be captured" in made.header.mode_reason
    assert len(made.corrected()) == 15
    assert made.repeat_noise is not None
    assert made.repeat_noise < 0.01, made.drift
    assert made.seconds_per_sample is not None
    assert made.seconds_per_sample < 1.0
    assert made.drift is not None
    assert made.drift.is_steady


@pytest.mark.gpu
def test_a_real_gpu_is_profiled_in_eager_mode_without_a_promise_of_repeats(path: Path) -> None:
    """The host launches its kernels one by one, and its pace shows in the joules; the profile says by how much."""
    made = profiled_on_a_gpu(path, replace(PROFILE_SETTINGS, mode="eager"), 5)
    assert made.header.settings is not None
    assert (made.header.settings.mode, made.header.mode_reason) == ("eager", "as asked for")
    assert len(made.corrected(allow_drift=True)) == 5
    assert made.repeat_noise is not None
    assert made.drift is not None
    assert made.drift.references >= 3
