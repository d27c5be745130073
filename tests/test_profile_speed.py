"""The benchmark of profiling on fakes of its device, and the section of RESULTS.md made from it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType

import pytest
import torch

from ecc.measure import Profile
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import EXAMPLE, SmallNet, profile_of, reference, sample

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def speed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import profile_speed

    return profile_speed


def at(seconds: float) -> datetime:
    return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=seconds)


def small_profile() -> Profile:
    rows = [reference(2.0, measured_at=at(1)), sample(0, measured_at=at(1.75)), sample(1, measured_at=at(2.75))]
    return profile_of(*rows, reference(2.1, measured_at=at(3.25)))


def test_seconds_are_those_from_row_to_row(speed: ModuleType) -> None:
    assert speed.seconds_of(small_profile()) == ([0.75, 1.0], [0.5])


def test_the_small_u_net_keeps_the_size_of_its_input(speed: ModuleType) -> None:
    with torch.no_grad():
        assert speed.UNet((4, 8, 8, 8)).eval()(torch.randn(1, 3, 16, 16)).shape == (1, 8, 16, 16)


def test_a_network_is_profiled_with_default_options(
    speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    board = FakeBoard()
    real = speed.profile

    def on_the_board(*args: object, **options: object) -> Profile:
        made: Profile = real(*args, **options, clock=board.clock)
        rows = [replace(one, measured_at=at(k)) for k, one in enumerate(made.samples)]
        Path(str(args[4])).unlink()
        Profile(made.header, tuple(rows)).save(str(args[4]))
        return made

    measure_model = speed.measure_model
    monkeypatch.setattr(speed, "profile", on_the_board)
    monkeypatch.setattr(speed, "measure_model", lambda *a, **k: measure_model(*a, **k, clock=board.clock))
    monkeypatch.setitem(speed.NETWORKS, "small", lambda: (SmallNet(board), EXAMPLE))
    found = speed.one("small", tmp_path / "a.profile", FakeMeter(board), "cpu", 6, float("inf"))
    assert (found["runner"], found["samples"], found["references"]) == ("eager", 6, 7)
    assert found["seconds_per_sample"] == pytest.approx(1.0)
    assert found["repeat_noise"] < 0.01
    assert abs(found["bias"]) < 0.01


def test_the_section_tells_what_missed_its_goal(speed: ModuleType) -> None:
    import profile_table

    one = {
        "input_shape": [32, 3, 224, 224],
        "runner": "cuda-graph",
        "runner_reason": "it can be captured",
        "samples": 10,
        "seconds_per_sample": 0.714,
        "slowest_sample_seconds": 0.9,
        "references": 6,
        "repeat_noise": 0.0123,
        "bias": -0.002,
    }
    found = {"device": "NVIDIA H200", "networks": {"A": one, "B": {**one, "repeat_noise": 0.004}}}
    text = profile_table.section_of(found, "the origin")
    assert "1 s per sample (met by all networks)" in text
    assert "1% repeat noise (missed by A)" in text
    assert "| A, 32x3x224x224 | graph | 0.71 | 0.90 | 10 | 1.23% | 6 | -0.20% |" in text
    assert text.count("`graph`: it can be captured") == 1
    assert text.endswith("the origin\n\n")


def test_no_file_gives_no_section(speed: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import profile_table

    monkeypatch.setattr(profile_table, "RESULTS", tmp_path)
    assert profile_table.profile_section() == ""
