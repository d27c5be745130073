"""Profiles that were interrupted, killed, extended or asked for in another way."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import BadFile
from ecc.measure import PROFILE_SETTINGS, Profile, design, profile
from measure.fakes import FakeBoard, FakeMeter
from measure.profile_cases import EXAMPLE, Prices, SmallNet, Stop, computed, measured, small_graph, stop_after

TESTS = Path(__file__).parent.parent


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.profile"


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_profile_that_was_interrupted_ends_up_the_same(path: Path, rounds: int) -> None:
    total = len(computed(path, rounds=rounds).samples)
    whole = path.read_bytes()
    for lines in (1, 2, 11, 12, 13, total // 2, total - 2, total - 1):
        part = path.with_suffix(".part")
        part.unlink(missing_ok=True)
        with pytest.raises(Stop):
            computed(part, rounds=rounds, progress=stop_after(lines))
        assert len(Profile.load(part).samples) == lines
        computed(part, rounds=rounds)
        assert part.read_bytes() == whole


KILLED = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from ecc.measure import profile
from measure.profile_cases import EXAMPLE, Prices, SmallNet, small_graph

path, samples = sys.argv[1], 120
graph = small_graph()
rng = random.Random(0)
kills = 0
while True:
    child = os.fork()
    if child == 0:
        profile(SmallNet(), graph, EXAMPLE, Prices(wait_seconds=0.003), path, samples=samples)
        os._exit(0)
    time.sleep(rng.uniform(0.0, 0.12))
    if kills < 15:
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if status == 0:
        break
    assert os.WIFSIGNALED(status), status
    kills += 1
print(kills)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_killed_at_random_moments_the_file_ends_up_the_same(path: Path) -> None:
    computed(path, samples=120)
    killed = path.with_suffix(".killed")
    run = subprocess.run(
        [sys.executable, "-c", KILLED, str(killed)],
        cwd=TESTS,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) >= 10
    assert killed.read_bytes() == path.read_bytes()


def test_a_finished_profile_asks_for_nothing(path: Path) -> None:
    computed(path)
    source = Prices()
    before = path.read_bytes()
    computed(path, source)
    computed(path, source, samples=5)
    assert source.calls == 0
    assert path.read_bytes() == before


def test_more_rows_and_rounds_extend_a_profile(path: Path) -> None:
    computed(path, samples=10)
    before = path.read_bytes()
    made = computed(path, samples=25, rounds=2)
    assert path.read_bytes().startswith(before)
    assert len(made.design_samples) == 50
    assert made.corrected() == computed(path.with_suffix(".once")).corrected() or len(made.corrected()) == 25
    assert [s.widths for s in made.corrected()] == [tuple(n.values()) for n in design(small_graph(), 25)]
    assert made.samples[-1].is_reference


def test_a_measured_profile_goes_on_with_a_new_session(path: Path) -> None:
    board = FakeBoard()
    with pytest.raises(Stop):
        measured(path, board, progress=stop_after(7))
    probes = board.now()
    made = measured(path, board)
    assert "".join(("R" if sample.is_reference else ".") + str(sample.session) for sample in made.samples) == (
        "R0.0.0.0.0R0.0" + "R1.1.1.1.1R1.1.1.1R1"
    )
    assert sorted(sample.index for sample in made.design_samples if sample.index is not None) == list(range(12))
    assert board.now() - probes < 0.9 * 10  # the counter was not probed again


def test_a_finished_measured_profile_is_not_touched(path: Path) -> None:
    board = FakeBoard()
    measured(path, board)
    at, before = board.now(), path.read_bytes()
    measured(path, board)
    assert (board.now(), path.read_bytes()) == (at, before)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"seed": 5}, "its design.seed is 0, and now it is 5"),
        ({"design": "uniform"}, "its design.kind is 'mixed', and now it is 'uniform'"),
        ({"width_multiple": 2}, "its design.width_multiple is None, and now it is 2"),
        ({"shard": (1, 2)}, r"its design.shard is None, and now it is \[1, 2\]"),
        ({"reference_every": 7}, "its design.reference_every is 4, and now it is 7"),
        (
            {"settings": replace(PROFILE_SETTINGS, memory_format="channels_last")},
            "its settings.memory_format is 'contiguous', and now it is 'channels_last'",
        ),
        ({"settings": replace(PROFILE_SETTINGS, precision="bf16")}, "its settings.precision is 'fp32'"),
        ({"settings": replace(PROFILE_SETTINGS, mode="compile")}, "its settings.mode is 'eager'"),
    ],
)
def test_another_way_of_measuring_is_not_appended(path: Path, change: dict[str, Any], text: str) -> None:
    board = FakeBoard()
    with pytest.raises(Stop):
        measured(path, board, progress=stop_after(2))
    before = path.read_bytes()
    with pytest.raises(BadFile, match=rf"a\.profile cannot be continued: {text}.* Measure as before, or give another"):
        measured(path, board, **change)
    assert path.read_bytes() == before


def test_another_device_batch_meter_or_network_is_not_appended(path: Path) -> None:
    board = FakeBoard()
    with pytest.raises(Stop):
        measured(path, board, progress=stop_after(2))
    with pytest.raises(BadFile, match=r"its meter\.device is 'fake board', and now it is 'a newer board'"):
        measured(path, board, FakeMeter(board, device="a newer board"))
    with pytest.raises(BadFile, match=r"its meter\.device_id is '', and now it is 'two'"):
        measured(path, board, FakeMeter(board, device_id="two"))
    with pytest.raises(BadFile, match="its label is 'measured', and now it is 'estimated'"):
        computed(path)
    with pytest.raises(BadFile, match=r"its input\.batch is 2, and now it is 4"):
        profile(SmallNet(board), small_graph(), torch.ones(4, 3, 6, 6), FakeMeter(board), path, samples=12)
    other = replace(small_graph(), layers=small_graph().layers[:-1])
    with pytest.raises(BadFile, match=rf"its network\.fingerprint is '{small_graph().fingerprint}', and now"):
        profile(SmallNet(board), other, EXAMPLE, FakeMeter(board), path, samples=12)


def test_rows_that_the_design_does_not_give_are_refused(path: Path) -> None:
    computed(path, samples=5)
    lines = path.read_text().splitlines(keepends=True)
    changed = json.loads(lines[2])
    changed["widths"] = [1, 2]
    path.write_text("".join([*lines[:2], json.dumps(changed) + "\n", *lines[3:]]))
    with pytest.raises(BadFile, match=r"a\.profile:3: sample \d has widths \[1, 2\], and its design gives \["):
        computed(path, samples=5)
