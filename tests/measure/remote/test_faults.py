"""Links, agents, boards and disks that fail: no sample is lost, none is taken twice, and nothing hangs."""

from __future__ import annotations

import errno
import io
import os
import random
import signal
import stat
import struct
import sys
import threading
import time
from collections import Counter
from contextlib import closing, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import BadFile, BadMeasurement, EccError
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import PROFILE_SETTINGS, Profile, merge_profiles, profile, profile_writer
from ecc.measure.doctor import diagnose_target
from ecc.measure.profiler import find_runner
from ecc.measure.remote import client
from ecc.measure.remote.client import Board, InstalledSpec, RemoteMeter, open_target
from ecc.measure.remote.link import START, Link, agent_modules, agent_sources
from ecc.measure.remote.target import Target
from ecc.measure.remote.wire import MAX_DATA_BYTES, FrameReader, FrameWriter, LinkLost
from measure.remote.boards import can_start_sshd, local_board, ssh_server

METER = """
import time
from ecc.measure.meter import DeviceState, Measured, MeterInfo
class Counter:
    def read(self):
        return 3.0 * time.perf_counter()
    def describe(self):
        return MeterInfo(name="counter", device="board", provenance=Measured(), scope="board")
class Hot(Counter):
    def state(self):
        return DeviceState(throttling=("thermal",), temperature_celsius=95.0)
class Broken(Counter):
    def read(self):
        raise MemoryError("no memory left")
"""

QUICK = replace(
    PROFILE_SETTINGS, runner="onnxruntime:CPUExecutionProvider", window_seconds=0.002, probe_seconds=0.02,
    warmup_seconds=0.0, warmup_runs=1, min_ticks=1,
)  # fmt: skip


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 24), nn.Linear(24, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.c(self.b(self.a(x).relu()).relu())
        return y


@pytest.fixture(scope="module")
def network() -> tuple[nn.Module, ChannelGraph, Tensor]:
    torch.manual_seed(0)
    model, example = Net(), torch.randn(4, 6)
    return model, trace_channels(model, example, verify=False), example


@pytest.fixture
def meter_file(tmp_path: Path) -> Path:
    path = tmp_path / "meter.py"
    path.write_text(METER)
    return path


# --- frames ------------------------------------------------------------------------------------------


def frames(*messages: tuple[dict[str, Any], bytes]) -> bytes:
    stream = io.BytesIO()
    writer = FrameWriter(stream.write)
    for message, data in messages:
        writer.send(message, data)
    return stream.getvalue()


def test_frames_return_what_was_sent() -> None:
    sent: list[tuple[dict[str, Any], bytes]] = [({"op": "a", "x": 1.5}, b""), ({}, bytes(range(256)) * 9)]
    reader = FrameReader(io.BytesIO(frames(*sent)).read)
    assert [reader.receive(), reader.receive()] == sent
    with pytest.raises(LinkLost, match="ended"):
        reader.receive()


def received_until_lost(stream: bytes) -> list[tuple[dict[str, Any], bytes]]:
    """What arrives before the link is lost; it always is."""
    reader, found = FrameReader(io.BytesIO(stream).read), []
    with suppress(LinkLost):
        while True:
            found.append(reader.receive())
    return found


def test_every_damaged_byte_is_noticed() -> None:
    sent: list[tuple[dict[str, Any], bytes]] = [
        ({"op": "sample", "widths": {"a": 3}}, b"network"),
        ({"op": "next"}, b""),
    ]
    good = frames(*sent)
    assert received_until_lost(good) == sent
    for position in range(len(good)):
        for bit in (0x01, 0x80):
            bad = bytearray(good)
            bad[position] ^= bit
            assert received_until_lost(bytes(bad)) in ([], sent[:1])


def test_cut_repeated_and_huge_frames_are_refused() -> None:
    one, two = frames(({"n": 1}, b"x")), frames(({"n": 1}, b"x"), ({"n": 2}, b""))
    for end in range(1, len(two)):
        assert len(received_until_lost(two[:end])) < 2
    reader = FrameReader(io.BytesIO(one + one).read)
    reader.receive()
    with pytest.raises(LinkLost, match="message 0 arrived in place of 1"):
        reader.receive()
    huge = struct.pack(">4sIIQI", b"ECC1", 2, MAX_DATA_BYTES + 1, 0, 0)
    with pytest.raises(LinkLost, match="damaged"):
        FrameReader(io.BytesIO(huge + b"{}").read).receive()
    with pytest.raises(ValueError, match=r"too large|larger than"):
        FrameWriter(lambda _: None).send({"x": "y" * (5 << 20)})


# --- the agent ---------------------------------------------------------------------------------------


def test_the_agent_needs_neither_torch_nor_other_packages() -> None:
    """It answers in an interpreter without site-packages."""
    link = Link([sys.executable, "-I", "-S", "-c", START], 20.0, agent_sources())
    try:
        assert link.call("hello")["machine"]["python"]
        info = link.call("open", meter="cputime:15W", settings={})["meter"]
        assert info["provenance"] == {"kind": "declared", "watts": 15.0}
        assert link.call("read")["joules"] > 0
        findings = link.call("doctor", meter="wall")["findings"]
        assert findings[0]["counter"]["moves"] is True
        with pytest.raises(BadMeasurement, match="does not know the request 'exec'"):
            link.call("exec", code="1")
        with pytest.raises(EccError, match=r"on the board: .*platform"):
            link.call("open", meter="platform:jetson-tx2", settings={})
    finally:
        link.close()


def test_the_modules_of_the_agent_do_not_import_torch() -> None:
    found = agent_modules()
    assert {"measure.window", "measure.remote.wire", "settings", "errors"} <= set(found)
    for name, text in found.items():
        head = text.partition("if TYPE_CHECKING")[0]
        assert "\nimport torch" not in head, name


def test_the_agent_ends_with_the_link() -> None:
    for end in ("stdin", "kill"):
        link = Link([sys.executable, "-I", "-c", START], 20.0, agent_sources())
        pid = link.call("hello")["pid"]
        if end == "stdin":
            assert link._process.stdin is not None
            link._process.stdin.close()
        else:
            link.close()
        until = time.monotonic() + 10
        while Path(f"/proc/{pid}/stat").exists() and link._process.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert link._process.poll() is not None
        link.close()


# --- faults ------------------------------------------------------------------------------------------

FAULTS = ("link", "agent", "frozen", "corrupt request", "corrupt answer", "client", "full disk", "clock")


class FaultyBoard(Board):
    """Injects faults while samples are measured."""

    plan: list[str | None]
    injected: list[str]

    def call(self, op: str, data: bytes = b"", **fields: Any) -> dict[str, Any]:
        fault = self.plan.pop(0) if op == "sample" and self.plan else None
        link = self._link
        if fault is not None and link is not None:
            self.injected.append(fault)
            agent = link.call("hello")["pid"]
            later = random.Random(len(self.injected)).choice([0.0, 0.002, 0.01])
            if fault == "link":
                _later(later, lambda: end_link(link, agent))
            elif fault == "agent":
                _later(later, lambda: os.kill(agent, signal.SIGKILL))
            elif fault == "frozen":
                os.kill(agent, signal.SIGSTOP)
            elif fault == "corrupt request":
                real = link._writer._write
                link._writer._write = lambda data: real(bytes([data[0] ^ 0x40]) + data[1:])
            elif fault == "corrupt answer":
                link._answers.put(LinkLost("message 7 is damaged (checksum)"))
        return super().call(op, data, **fields)


def end_link(link: Link, agent: int) -> None:
    """Kill the ssh client; without ssh, close the pipe."""
    if link.pid != agent:
        os.kill(link.pid, signal.SIGKILL)
    elif link._process.stdin is not None:
        link._process.stdin.close()


def _later(seconds: float, act: Any) -> None:
    def run() -> None:
        time.sleep(seconds)
        with suppress(OSError):  # it has ended
            act()

    threading.Thread(target=run, daemon=True).start()


class Killed(Exception):
    """The client ends."""


def inject(
    faults: list[str],
    network: tuple[nn.Module, ChannelGraph, Tensor],
    meter: Path,
    path: Path,
    seed: int,
    target: Target | None = None,
) -> Profile:
    """Profile under a list of faults, resuming whenever the client ends; check that nothing was lost or doubled."""
    model, graph, example = network
    random.Random(seed).shuffle(faults)
    on_board = [fault for fault in faults if fault in FAULTS[:5]]
    here = [fault for fault in faults if fault not in FAULTS[:5]]
    board = FaultyBoard(target or local_board(hang_seconds=1.0), f"{meter}:Counter", None, QUICK)
    board.plan, board.injected = [one for fault in on_board for one in (None, None, fault)], []
    samples, done_here, started = len(faults) + 6, [], time.monotonic()
    jump = [timedelta()]

    class Jumping(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + jump[0]

    real_write = os.write

    def full_disk(descriptor: int, data: bytes) -> int:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return real_write(descriptor, data)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def progress(step: Any) -> None:
        if step.sample is None or step.sample.is_reference or not here:
            return
        fault = here.pop()
        done_here.append(fault)
        if fault == "client":
            raise Killed
        if fault == "clock":
            jump[0] += timedelta(days=random.Random(len(here)).choice([-2, 3]))
        if fault == "full disk":
            patch.setattr(profile_writer.os, "write", full_disk)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "datetime", Jumping)
        for _ in range(len(faults) + 1):
            try:
                profile(
                    model, graph, example, RemoteMeter(board), path, samples=samples, settings=QUICK, progress=progress
                )
                break
            except Killed:
                board.close()
                board.reconnect("killed")
            except BadFile:  # no space left
                patch.setattr(profile_writer.os, "write", real_write)
    board.close()
    made = Profile.load(path)
    assert Counter(sample.index for sample in made.design_samples) == Counter(range(samples))
    assert made.missing_samples() == []
    assert sorted([*board.injected, *done_here]) == sorted(faults)
    assert made.samples[-1].is_reference
    sessions = [sample.session for sample in made.samples]
    assert sessions == sorted(sessions)
    first = [next(s for s in made.samples if s.session == number) for number in sorted(set(sessions))]
    assert all(sample.is_reference for sample in first)  # each session starts with the reference
    assert time.monotonic() - started < 12 * len(faults)
    return made


def test_every_kind_of_fault_loses_and_doubles_nothing(
    network: tuple[nn.Module, ChannelGraph, Tensor], meter_file: Path, tmp_path: Path
) -> None:
    inject(list(FAULTS), network, meter_file, tmp_path / "net.profile", 0)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("link", ["pipe", "ssh"])
def test_a_hundred_faults_lose_and_double_nothing(
    link: str, seed: int, network: tuple[nn.Module, ChannelGraph, Tensor], meter_file: Path, tmp_path: Path
) -> None:
    """34 faults each, 102 over ssh and 102 over pipes."""
    if link == "ssh" and not can_start_sshd():
        pytest.skip("no OpenSSH server, or not root")
    counts = {"link": 6, "agent": 6, "frozen": 1, "corrupt request": 3, "corrupt answer": 6, "client": 4}
    faults = [name for name, count in counts.items() for _ in range(count)] + ["full disk", "clock"] * 4
    assert len(faults) == 34
    path = tmp_path / "net.profile"
    if link == "pipe":
        inject(faults, network, meter_file, path, seed)
        return
    folder = tmp_path / "ssh"
    folder.mkdir()
    with ssh_server(folder) as (url, command), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ECC_SSH", command)
        inject(faults, network, meter_file, path, seed, Target.parse(f"{url}&hang_seconds=3&retry_seconds=20"))


def test_a_board_that_hangs_is_noticed_in_bounded_time(meter_file: Path) -> None:
    board = Board(local_board(hang_seconds=1.0, retry_seconds=1.0), f"{meter_file}:Counter", None, QUICK)
    assert board._link is not None
    pid = board._link.pid
    os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(LinkLost, match=r"silent|took nothing"):
        board.call("read")
    assert time.monotonic() - started < 5
    board.close()
    assert not Path(f"/proc/{pid}").exists() or Path(f"/proc/{pid}/stat").read_text().split()[2] == "Z"


def test_a_board_that_does_not_come_back_is_one_message_and_the_samples_are_kept(
    network: tuple[nn.Module, ChannelGraph, Tensor], meter_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, graph, example = network
    board = Board(local_board(retry_seconds=0.3), f"{meter_file}:Counter", None, QUICK)

    def end(step: Any) -> None:
        if step.done == 4 and board._link is not None:
            monkeypatch.setattr(Target, "command", lambda *_: ["false"])
            monkeypatch.setattr(type(board.target), "command", lambda *_: ["false"])
            os.kill(board._link.pid, signal.SIGKILL)

    with pytest.raises(EccError, match="could not be made again"):
        profile(model, graph, example, RemoteMeter(board), tmp_path / "p", samples=8, settings=QUICK, progress=end)
    assert len(Profile.load(tmp_path / "p").design_samples) == 4


def test_failures_on_the_board_are_reported(
    network: tuple[nn.Module, ChannelGraph, Tensor], meter_file: Path, tmp_path: Path
) -> None:
    model, graph, example = network
    with pytest.raises(EccError, match=r"on the board: .*no memory left"):
        open_target(local_board(), f"{meter_file}:Broken", settings=QUICK)
    hot = open_target(local_board(), f"{meter_file}:Hot", settings=QUICK)
    assert isinstance(hot, RemoteMeter)
    try:
        with pytest.raises(BadMeasurement, match=r"throttles at 95 C \(thermal\)"):
            profile(model, graph, example, hot, tmp_path / "p", samples=2, settings=QUICK)
        allowed = replace(QUICK, allow_throttling=True)
        made = profile(model, graph, example, hot, tmp_path / "q", samples=2, settings=allowed)
        assert all(sample.throttled for sample in made.samples)
    finally:
        hot.close()
    with pytest.raises(EccError, match="needs the task and ECC on the board"):
        open_target(local_board(), "platform:jetson-tx2")
    with pytest.raises(EccError, match="in_turns has no effect on a board"):
        open_target(local_board(), "wall", settings=replace(QUICK, in_turns=True))
    with pytest.raises(EccError, match="device has no effect on a board"):
        open_target(local_board(), "wall", settings=QUICK, task=InstalledSpec(task="digits", device="cuda"))
    with pytest.raises(EccError, match="does not support precision 'bf16'"):
        open_target(local_board(), "wall", settings=replace(QUICK, precision="bf16"))
    with pytest.raises(EccError, match="channels_last has no effect"):
        open_target(local_board(), "wall", settings=replace(QUICK, channels_last=True))
    with pytest.raises(EccError, match=r"platform:h100 is computed from a formula and needs no board"):
        diagnose_target("ssh://board", "platform:h100")
    with pytest.raises(EccError, match="runner 'auto' needs a meter; platform:jetson-tx2 runs nothing"):
        open_target(local_board(), "platform:jetson-tx2", settings=replace(QUICK, runner="auto"))


def test_a_board_without_the_runtime_says_what_to_install() -> None:
    link = Link([sys.executable, "-I", "-S", "-c", START], 20.0, agent_sources())
    try:
        link.call("open", meter="wall", settings={})
        with pytest.raises(
            EccError, match=r"on the board: onnxruntime cannot be imported .*; run: pip install onnxrun"
        ):
            link.call("prepare", runner="onnxruntime:CPUExecutionProvider", onnx_bytes=0, inputs={}, precision="fp32")
    finally:
        link.close()


def test_the_last_words_of_ssh_are_part_of_the_message() -> None:
    for script in ("echo refused. >&2", "sleep 0.3; echo refused. >&2"):  # before and while the agent is sent
        with (
            pytest.raises(LinkLost, match=r": refused$"),
            closing(Link(["sh", "-c", script], 20.0, agent_sources())) as link,
        ):
            link.call("hello")


def test_several_boards_refuse_a_finished_profile_that_is_another_one(
    network: tuple[nn.Module, ChannelGraph, Tensor], meter_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(merge_profiles.__globals__, "MAX_DEVICE_DIFFERENCE", 100.0)  # both run on this busy machine
    model, graph, example = network
    path = tmp_path / "net.profile"
    boards = [open_target(local_board(), f"{meter_file}:Counter", settings=QUICK) for _ in range(2)]
    boards[0].others = tuple(boards[1:])
    try:
        made = profile(model, graph, example, boards[0], path, samples=4, settings=QUICK)
        assert len(made.header.merged_from) == 2
        again = profile(model, graph, example, boards[0], path, samples=4, settings=QUICK)
        assert again.samples == made.samples
        with pytest.raises(BadFile, match=r"settings.precision was 'fp32' and is now 'fp16'"):
            profile(model, graph, example, boards[0], path, samples=4, settings=replace(QUICK, precision="fp16"))
        with pytest.raises(BadFile, match=r"was merged with 4 samples\. To measure more, delete it"):
            profile(model, graph, example, boards[0], path, samples=6, settings=QUICK)
        path.unlink()
        assert len(profile(model, graph, example, boards[0], path, samples=6, settings=QUICK).design_samples) == 6
        one = tmp_path / "one.profile"
        profile(model, graph, example, boards[1], one, samples=2, settings=QUICK)
        with pytest.raises(BadFile, match="was measured on one device"):
            profile(model, graph, example, boards[0], one, samples=2, settings=QUICK)
    finally:
        boards[0].close()


def test_auto_takes_the_cheapest_runner_of_the_board_and_keeps_it(
    network: tuple[nn.Module, ChannelGraph, Tensor], tmp_path: Path
) -> None:
    model, graph, example = network
    settings, path, lines = replace(QUICK, runner="auto"), tmp_path / "net.profile", []
    meter = open_target(local_board(), "cputime", settings=settings)
    assert isinstance(meter, RemoteMeter)
    try:
        chosen, search = find_runner(path, model, example, meter, settings, report=lines.append)
        assert search is not None
        assert {one.runner for one in search.candidates} >= {"onnxruntime:CPUExecutionProvider"}
        assert {"fp32", "fp16", "int8"} <= {one.precision for one in search.candidates}
        assert len(lines) == len([one for one in search.candidates if ":" in one.runner])
        costs = [one.seconds for one in search.candidates if not one.excluded and one.seconds is not None]
        assert search.best.seconds == min(costs)
        assert (search.resource, search.best.excluded, search.candidates[0].difference) == ("latency", "", 0.0)
        assert (chosen.runner, chosen.precision) == (search.best.runner, search.best.precision)
        made = profile(
            model, graph, example, meter, path, samples=2, settings=chosen, runner_search=search, depth=False
        )
        assert made.header.runner_search == search
        assert made.header.settings is not None
        assert (made.header.settings.runner, made.header.settings.precision) == (chosen.runner, chosen.precision)
        assert find_runner(path, model, example, meter, settings) == (chosen, search)  # resumed: not measured again
    finally:
        meter.close()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("http://board", "give ssh://user@host"),
        ("ssh://me:secret@board", "without a password"),
        ("ssh://-oProxyCommand=x", "must not start with a dash"),
        ("ssh://board?shell=sh", "option 'shell' is unknown"),
        ("ssh://board?hang_seconds=soon", "give a number"),
        ("ssh://board?hang_seconds=nan", "hang_seconds is nan; give a number of seconds above 0"),
        ("ssh://board?retry_seconds=-1", "retry_seconds is -1"),
        ("ssh://board:port", "is not valid"),
        ("ssh://board/etc", "is not valid"),
    ],
)
def test_wrong_targets_are_refused(text: str, message: str) -> None:
    with pytest.raises(EccError, match=message):
        Target.parse(text)


def test_a_target_becomes_an_ssh_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECC_SSH", "ssh -F 'my config'")
    target = Target.parse("ssh://me@board:2222?python=/opt/my%20python/python3&dir=work&hang_seconds=9")
    assert (str(target), target.hang_seconds) == ("ssh://me@board:2222", 9.0)
    assert target.version_command == "ssh -p 2222 me@board '/opt/my python/python3' --version"
    command = target.command(["-c", "print('x')"])
    assert command[:3] == ["ssh", "-F", "my config"]
    assert "BatchMode=yes" in command
    assert command[-3:-1] == ["--", "board"]
    assert command[-1] == "cd work && exec '/opt/my python/python3' -c 'print('\"'\"'x'\"'\"')'"
