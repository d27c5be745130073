"""The benchmark of profiling on fakes of its device, and the section of RESULTS.md made from it."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

import profile_speed as speed
import pytest

from ecc.measure import Profile
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import EXAMPLE, SmallNet, profile_of, reference, sample


def at(seconds: float) -> datetime:
    return datetime(2026, 1, 1, tzinfo=timezone.utc) + timedelta(seconds=seconds)


def small_profile() -> Profile:
    rows = [reference(2.0, measured_at=at(1)), sample(0, measured_at=at(1.75)), sample(1, measured_at=at(2.75))]
    return profile_of(*rows, reference(2.1, measured_at=at(3.25)))


def test_seconds_are_those_from_row_to_row() -> None:
    assert speed.seconds_of(small_profile()) == ([0.75, 1.0], [0.5])


def test_a_network_is_profiled_with_default_options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
