"""The whole path over a real OpenSSH server: doctor, profile, shards and compress."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ecc.cli.app import app
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import PROFILE_SETTINGS, Profile, Progress, find_meter, profile
from ecc.measure.remote.client import InstalledSpec, RemotePlatform, open_target
from ecc.task import Task
from ecc.zoo.registry import find_task
from measure.remote.boards import can_start_sshd, ssh_server

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_start_sshd(), reason="needs root and OpenSSH: apt-get install openssh-server"),
]


@pytest.fixture(scope="module")
def board(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A target; ECC_SSH is set."""
    with ssh_server(tmp_path_factory.mktemp("ssh")) as (target, command), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECC_SSH", command)
        yield target


def ecc(*words: object) -> Result:
    """Run the command line."""
    return CliRunner().invoke(app, list(map(str, words)))


def test_doctor_shows_the_meters_of_the_board(board: str) -> None:
    done = ecc("doctor", "--target", board, "--meter", "cputime:15W", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["machine"]["python"].startswith("3.")
    assert [meter["spec"] for meter in found["meters"]] == ["cputime:15W"]
    assert found["meters"][0]["counter"]["moves"] in (True, False)
    done = ecc("doctor", "--target", board, "--meter", "wall")
    assert done.exit_code == 0, done.output
    assert f"Python {found['machine']['python']}" in done.stdout
    assert "measured (wall clock)" in done.stdout


def test_two_boards_share_a_profile(board: str, tmp_path: Path) -> None:
    out = tmp_path / "merged.profile"
    words = ("profile", "digits", "--meter", "platform:jetson-tx2", "--samples", 8, "-q", "-o", out)
    done = ecc(*words, "--target", board, "--target", board)
    assert done.exit_code == 0, done.stderr
    merged = Profile.load(out)
    assert len(merged.design_samples) == 8
    assert merged.missing_samples() == []
    assert [part.shard for part in merged.header.merged_from] == [(1, 2), (2, 2)]


def test_onnxruntime_on_the_board_is_profiled_fitted_and_meets_a_latency_budget(
    board: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = replace(PROFILE_SETTINGS, window_seconds=0.03, probe_seconds=0.2)
    monkeypatch.setattr("ecc.measure.profiler.PROFILE_SETTINGS", short)
    run = tmp_path / "run"
    done = ecc(
        "compress", "digits", "--target", board, "--meter", "cputime", "--budget", "latency=70%", "-o", run,
        "--runner", "onnxruntime", "--samples", 12, "--batch", 8, "--pretrain-steps", 5, "--prune-steps", 12,
        "--finetune-steps", 2, "--lr", "1e-3", "--no-depth", "--json",
    )  # fmt: skip
    assert done.exit_code in (0, 2), done.stderr  # 2: the budget was missed on a noisy machine
    summary = json.loads((run / "summary.json").read_text())
    assert summary["runner"] == "onnxruntime:CPUExecutionProvider, fp32"
    assert "onnxruntime" in summary["versions"]
    latency = summary["budgets"]["latency"]
    assert latency["label"] == "measured (CPU time)"
    assert latency["result"] < 0.9 * latency["dense"]
    profile = Profile.load(run / "network.profile")
    assert len(profile.design_samples) == 12
    assert profile.header.meter.provenance.label == "measured (CPU time)"


def test_a_link_that_is_killed_gives_the_same_profile(board: str, tmp_path: Path) -> None:
    spec, graph, task = "platform:jetson-tx2,noise=0.03,seed=1", *digits()
    local = profile(task.model, graph, task.example_input, find_meter(spec), tmp_path / "local.profile", samples=12)
    remote = open_target(board, spec, task=InstalledSpec(task="digits"))
    assert isinstance(remote, RemotePlatform)
    killed: list[int] = []

    def kill(step: Progress) -> None:
        if step.done == 5 and not killed:
            killed.append(step.done)
            link = remote.board._link
            assert link is not None
            os.kill(link.pid, signal.SIGKILL)  # the ssh client; the agent must end by itself

    try:
        far = profile(
            task.model, graph, task.example_input, remote, tmp_path / "far.profile", samples=12, progress=kill
        )
    finally:
        remote.close()
    assert killed == [5]
    assert remote.board.restarts == 1
    assert far.samples == local.samples
    assert (tmp_path / "far.profile").read_bytes() == (tmp_path / "local.profile").read_bytes()
    until = time.monotonic() + 15
    while agents() and time.monotonic() < until:
        time.sleep(0.1)
    assert agents() == []


def digits() -> tuple[ChannelGraph, Task]:
    task = find_task("digits")
    return trace_channels(task.model, task.example_input, verify=False), task


def agents() -> list[str]:
    """Agents of installed tasks that still run on this machine under this tree."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().split(b"\0")
        except OSError:
            continue
        if words[1:4] == [b"-m", b"ecc", b"agent"]:
            found.append(entry.parent.name)
    return found


def test_a_board_that_cannot_be_reached_is_one_message(board: str) -> None:
    done = ecc("doctor", "--target", "ssh://127.0.0.1:1")
    assert done.exit_code == 2
    assert "cannot be used" in done.stderr
    assert "Traceback" not in done.output
