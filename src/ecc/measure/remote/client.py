"""The client: starts the agent on a board over ssh, and measures there.

`RemoteMeter` takes the place of a meter in `profile` and `compress`; `RemotePlatform` that of an analytic platform. If
the link is lost, the client connects again and measures the sample in progress again; a sample is written only when its
answer has arrived, so none is lost and none is taken twice.
"""

from __future__ import annotations

import ast
import json
import os
import queue
import select
import shlex
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote, urlsplit

from ecc.errors import BadMeasurement, EccError, NoMeter
from ecc.measure.counter import CounterProbe
from ecc.measure.meter import MeterInfo, Reading
from ecc.measure.profile import ProfileHeader, Sample
from ecc.measure.runners.runtime import SESSIONS
from ecc.records import from_builtins, to_builtins
from ecc.settings import Design, MeasureSettings

from .agent import PROTOCOL
from .wire import HEARTBEAT_SECONDS, FrameReader, FrameWriter, LinkLost

if TYPE_CHECKING:
    from torch import nn

    from ecc.graph import ChannelGraph
    from ecc.task import Inputs

SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
"""No questions, and a dead connection is noticed within 15 seconds."""

START_SECONDS = 120.0
"""Longest silence of an agent that starts: a slow board needs a while to import PyTorch."""

ANALYTIC = ("platform:", "replay:")

AGENT_ROOTS = (
    "measure.remote.agent", "measure.runners.onnxruntime", "measure.runners.openvino", "measure.meters.nvml",
    "measure.meters.jetson", "measure.meters.amd", "measure.meters.apple", "measure.meters.rapl",
    "measure.meters.command", "measure.meters.cputime", "measure.meters.wall",
)  # fmt: skip
"""What a board gets, with all that these modules import at their top: nothing of it imports torch."""

_PACKAGES = ("ecc", "ecc.measure", "ecc.measure.meters", "ecc.measure.runners", "ecc.measure.remote")

_START = "import sys; b = sys.stdin.buffer; exec(b.read(int(b.readline())).decode())"

_LOADER = """
import importlib.util, json, sys, zlib
from importlib.machinery import ModuleSpec
stream = sys.stdin.buffer
SOURCES = json.loads(zlib.decompress(stream.read(int(stream.readline()))))
if importlib.util.find_spec("msgspec") is not None:
    del SOURCES["msgspec"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=SOURCES[name][0]) if name in SOURCES else None
    def create_module(self, spec):
        return None
    def exec_module(self, module):
        exec(compile(SOURCES[module.__name__][1], "<ecc agent> " + module.__name__, "exec"), module.__dict__)
sys.meta_path.insert(0, Finder())
from ecc.measure.remote.agent import main
main()
"""
"""Imports the agent's modules from memory, so that nothing is stored on the board."""

_MSGSPEC = """
import dataclasses, types
class Struct:
    def __init_subclass__(cls, frozen=False, tag_field=None, tag=None, **_):
        dataclasses.dataclass(frozen=frozen)(cls)
        cls.__struct_fields__ = tuple(cls.__dataclass_fields__)
        cls.__struct_config__ = types.SimpleNamespace(tag=tag)
"""
"""Takes the place of msgspec on boards that do not have it; the agent only creates records and reads none."""


class SessionRestarted(Exception):
    """The link was lost and made again: the sample in progress has to be measured again, in a new session."""


# --- target ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where to measure: `ssh://user@host:port?python=/path/python3&dir=/path`."""

    host: str
    user: str | None = None
    port: int | None = None
    python: str = "python3"
    """Python on the board."""
    dir: str | None = None
    """Working directory on the board, for tasks in files."""
    hang_seconds: float = 20.0
    """A board that is silent for this long is given up."""
    retry_seconds: float = 180.0
    """How long to try to connect again after the link was lost; a reboot takes a minute or two."""

    @classmethod
    def parse(cls, text: str) -> Target:
        """Parse a URL.

        Raises:
            EccError: If it is not valid.
        """
        hint = "give ssh://user@host[:port]"
        try:
            url = urlsplit(text)
            port = url.port
        except ValueError as error:
            raise EccError(f"target {text!r} is not valid ({error}); {hint}.") from None
        if url.scheme != "ssh" or not url.hostname or url.path not in ("", "/") or url.password is not None:
            raise EccError(f"target {text!r} is not valid; {hint}, without a password: ssh uses your keys.")
        if url.hostname.startswith("-") or (url.username or "").startswith("-"):
            raise EccError(f"target {text!r} is not valid: a name must not start with a dash.")
        given = dict(parse_qsl(url.query, keep_blank_values=True))
        options: dict[str, Any] = {}
        for name, value in given.items():
            if name in ("python", "dir"):
                options[name] = value
            elif name in ("hang_seconds", "retry_seconds"):
                try:
                    options[name] = float(value)
                except ValueError:
                    raise EccError(f"target {text!r}: {name} is {value!r}; give a number.") from None
            else:
                known = "python, dir, hang_seconds and retry_seconds"
                raise EccError(f"target {text!r}: option {name!r} is unknown; options are {known}.")
        user = None if url.username is None else unquote(url.username)
        return cls(host=url.hostname, user=user, port=port, **options)

    def __str__(self) -> str:
        user = "" if self.user is None else f"{self.user}@"
        return f"ssh://{user}{self.host}{'' if self.port is None else f':{self.port}'}"

    def command(self, arguments: Sequence[str]) -> list[str]:
        """The ssh command that runs Python with these arguments on the board.

        The environment variable ECC_SSH replaces `ssh`, for example `ssh -F my_config`.
        """
        remote = " ".join(["exec", *map(shlex.quote, [self.python, *arguments])])
        if self.dir is not None:
            remote = f"cd {shlex.quote(self.dir)} && {remote}"
        command = shlex.split(os.environ.get("ECC_SSH", "ssh"))
        for one in SSH_OPTIONS:
            command += ["-o", one]
        if self.port is not None:
            command += ["-p", str(self.port)]
        if self.user is not None:
            command += ["-l", self.user]
        return [*command, "-T", "--", self.host, remote]


def agent_modules() -> dict[str, str]:
    """Sources of the agent's modules by their name below `ecc`."""
    root = Path(__file__).resolve().parents[2]
    found: dict[str, str] = {}
    waiting = list(AGENT_ROOTS)
    while waiting:
        name = waiting.pop()
        path = root.joinpath(*name.split(".")).with_suffix(".py")
        if name in found or not path.is_file():  # packages are empty on the board
            continue
        found[name] = path.read_text(encoding="utf-8")
        for node in ast.parse(found[name]).body:
            if isinstance(node, ast.ImportFrom):
                base = ["ecc", *name.split(".")][: -node.level] if node.level else []
                words = [*base, *(node.module.split(".") if node.module else [])]
                if words[:1] == ["ecc"]:
                    waiting += [".".join(words[1:]), *(".".join([*words[1:], alias.name]) for alias in node.names)]
    return found


def agent_sources() -> bytes:
    """The agent as it is sent to a board: module sources, compressed."""
    from ecc import __version__

    sources: dict[str, tuple[bool, str]] = dict.fromkeys(_PACKAGES, (True, ""))
    sources["ecc"] = (True, f"__version__ = {__version__!r}\n")
    sources["msgspec"] = (False, _MSGSPEC)
    sources |= {f"ecc.{name}": (False, text) for name, text in agent_modules().items()}
    return zlib.compress(json.dumps(sources).encode())


# --- link --------------------------------------------------------------------------------------------


class Link:
    """One running agent.

    Args:
        command: Starts the agent.
        hang_seconds: Longest silence, and longest time in which nothing can be sent.
        sources: The agent's modules, if they are sent.
    """

    def __init__(self, command: Sequence[str], hang_seconds: float, sources: bytes | None) -> None:
        self._hang_seconds = hang_seconds
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0,
                start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise LinkLost(f"{command[0]} cannot be started ({error})") from error
        assert self._process.stdin is not None and self._process.stdout is not None  # noqa: PT018 - pipes
        os.set_blocking(self._process.stdin.fileno(), False)
        self._writer = FrameWriter(self._write)
        self._answers: queue.Queue[dict[str, Any] | LinkLost] = queue.Queue()
        self._heard, self._has_heard, self._number, self._is_closed = time.monotonic(), False, 0, False
        self._errors: deque[str] = deque(maxlen=20)
        try:
            if sources is not None:
                loader = _LOADER.encode()
                self._write(b"%d\n%s%d\n%s" % (len(loader), loader, len(sources), sources))
        except OSError as error:
            self.close()
            raise LinkLost(self._reason(f"the link is closed ({error})")) from error
        for work in (self._listen, self._log_errors, self._beat):
            threading.Thread(target=work, daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._is_closed

    def call(self, op: str, data: bytes = b"", *, limit_seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer.

        Args:
            op: The request.
            data: Binary data.
            limit_seconds: Longest time to wait for the answer of an agent that gives signs of life.
            **fields: Of the request.

        Raises:
            LinkLost: If the link ends, the board hangs, or the stream is damaged.
            EccError: If the agent reports a failure.
        """
        self._number += 1
        started = time.monotonic()
        self._heard = started
        self._writer.send({"op": op, "id": self._number, **fields}, data)
        while True:
            try:
                answer = self._answers.get(timeout=min(1.0, self._hang_seconds / 4))
            except queue.Empty:
                now = time.monotonic()
                if now - self._heard > (self._hang_seconds if self._has_heard else START_SECONDS):
                    raise LinkLost(self._reason(f"the board was silent for {now - self._heard:.0f} s")) from None
                if now - started > limit_seconds:
                    raise LinkLost(self._reason(f"no answer to {op!r} in {now - started:.0f} s")) from None
                continue
            if isinstance(answer, LinkLost):
                raise LinkLost(self._reason(str(answer)))
            if answer.get("to") != self._number:
                continue  # the answer to a request that was given up
            if answer.get("kind") == "error":
                kind = NoMeter if answer.get("type") == "NoMeter" else BadMeasurement
                raise kind(f"on the board: {answer.get('message')}")
            return answer

    def close(self) -> None:
        """End the agent; it also ends by itself when its input ends."""
        self._is_closed = True
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with _suppressed():
                    stream.close()
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout=2.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stderr is not None:
            with _suppressed():
                self._process.stderr.close()

    @property
    def pid(self) -> int:
        """Process of the ssh client."""
        return self._process.pid

    def _write(self, data: bytes) -> None:
        """Write everything, or fail if nothing can be written for `hang_seconds`."""
        assert self._process.stdin is not None
        view = memoryview(data)
        while view:
            descriptor = self._process.stdin.fileno()
            _, ready, _ = select.select([], [descriptor], [], self._hang_seconds)
            if not ready:
                raise OSError(f"the board took nothing for {self._hang_seconds:g} s")
            try:
                view = view[os.write(descriptor, view[: 1 << 20]) :]
            except BlockingIOError:
                continue

    def _listen(self) -> None:
        assert self._process.stdout is not None
        stream = self._process.stdout

        def read(size: int) -> bytes:
            parts, left = [], size
            while left:
                part = stream.read(min(left, 1 << 20))
                if not part:
                    break
                self._heard, self._has_heard = time.monotonic(), True
                parts.append(part)
                left -= len(part)
            return b"".join(parts)

        reader = FrameReader(read)
        try:
            while True:
                message, _ = reader.receive()
                if message.get("kind") != "alive":
                    self._answers.put(message)
        except LinkLost as lost:
            self._answers.put(lost)

    def _beat(self) -> None:
        while not self._is_closed:
            try:
                self._writer.send({"op": "alive"})
            except (LinkLost, OSError, ValueError):
                return
            time.sleep(HEARTBEAT_SECONDS)

    def _log_errors(self) -> None:
        assert self._process.stderr is not None
        with _suppressed():
            for line in self._process.stderr:
                self._errors.append(line.decode(errors="replace").strip()[:500])

    def _reason(self, text: str) -> str:
        time.sleep(0.05)  # the last words of ssh
        said = next((line for line in reversed(self._errors) if line), "")
        return f"{text}: {said}" if said else text


class _suppressed:  # noqa: N801 - used like a function
    """Ignores errors of files that another thread closed."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        return kind is not None and issubclass(kind, (OSError, ValueError))


# --- board -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class InstalledSpec:
    """A task that is installed on the board."""

    task: str
    """As on the command line: a bundled network, or file.py:function."""
    batch: int | None = None
    freeze: tuple[str, ...] = ()
    device: str | None = None
    image_size: str | None = None


class Board:
    """A connection to a board that is made again when it is lost.

    Args:
        target: Where.
        meter: Spec of the meter on the board.
        task: A task that is installed on the board; None if networks are sent as ONNX files.
        settings: How networks are run and measured.

    Raises:
        EccError: If the board cannot be reached, or the meter cannot be opened there.
    """

    def __init__(
        self, target: Target, meter: str, task: InstalledSpec | None = None, settings: MeasureSettings | None = None
    ) -> None:
        self.target, self.meter_spec, self.task = target, meter, task
        self.settings = settings or MeasureSettings()
        self.restarts = 0
        """How often the link was made again."""
        self.machine: dict[str, str] = {}
        self.opened: dict[str, Any] = {}
        """Answer of the agent to `open`."""
        self._link: Link | None = None
        self._lock = threading.RLock()
        self.connect()

    def connect(self) -> None:
        """Start the agent, and open the meter.

        Raises:
            EccError: If that is not possible.
        """
        with self._lock:
            try:
                self._connect()
            except LinkLost as lost:
                self.close()
                raise EccError(
                    f"{self.target} cannot be used: {lost}. Check that `ssh {self.target.host} {self.target.python} "
                    "--version` works without a password and is Python 3.10 or newer."
                ) from None

    def _connect(self) -> None:
        if self._link is not None:
            self._link.close()
        arguments = ["-c", _START] if self.task is None else ["-m", "ecc", "agent"]
        sources = agent_sources() if self.task is None else None
        self._link = Link(self.target.command(arguments), self.target.hang_seconds, sources)
        hello = self._link.call("hello", limit_seconds=START_SECONDS)
        if hello.get("protocol") != PROTOCOL:
            raise EccError(
                f"{self.target}: the agent speaks protocol {hello.get('protocol')}, and this is {PROTOCOL}; install "
                "the same version of ECC on both machines."
            )
        self.machine = {str(name): str(value) for name, value in hello["machine"].items()}
        if self.meter_spec:
            self.opened = self._link.call(
                "open",
                meter=self.meter_spec,
                settings=to_builtins(self.settings),
                task=None if self.task is None else to_builtins(self.task),
                limit_seconds=300.0,
            )

    def call(self, op: str, data: bytes = b"", **fields: Any) -> dict[str, Any]:
        """Send a request to the agent.

        Raises:
            LinkLost: If the link is lost.
            EccError: If the agent reports a failure.
        """
        with self._lock:
            if self._link is None or self._link.is_closed:
                raise LinkLost("the link is closed")
            return self._link.call(op, data, **fields)

    def reconnect(self, reason: str) -> None:
        """Connect again, for `retry_seconds`.

        Raises:
            EccError: If the board does not come back.
        """
        started, pause, last = time.monotonic(), 0.2, reason
        while True:
            self.restarts += 1
            try:
                with self._lock:
                    self._connect()
                return
            except (LinkLost, EccError) as error:
                last = str(error)
            if time.monotonic() - started + pause > self.target.retry_seconds:
                self.close()
                raise EccError(
                    f"the link to {self.target} was lost ({reason}) and could not be made again in "
                    f"{time.monotonic() - started:.0f} s: {last}. What was measured is kept; run the same command "
                    "again to resume."
                )
            time.sleep(pause)
            pause = min(10.0, 2 * pause)

    def call_again(self, op: str, **fields: Any) -> dict[str, Any]:
        """As `call`, but connect and ask again after a lost link; for answers that do not depend on time."""
        for _ in range(20):
            try:
                return self.call(op, **fields)
            except LinkLost as lost:  # noqa: PERF203 - short beside the link
                self.reconnect(str(lost))
        raise BadMeasurement(f"the link to {self.target} was lost 20 times in a row; nothing is lost, run it again.")

    def close(self) -> None:
        """End the agent."""
        if self._link is not None:
            self._link.close()
            self._link = None


def open_target(
    target: str | Target, meter: str, *, task: InstalledSpec | None = None, settings: MeasureSettings | None = None
) -> RemoteMeter | RemotePlatform:
    """Open a meter on a board.

    Args:
        target: `ssh://user@host[:port]`.
        meter: Spec of the meter on the board.
        task: The task, if it is installed on the board; needed for runners of PyTorch and for analytic platforms.
        settings: How networks are run. Without a runner, they are sent as ONNX files and run by onnxruntime.

    Raises:
        EccError: If the board cannot be reached, or has no such meter.
    """
    where = Target.parse(target) if isinstance(target, str) else target
    settings = settings or MeasureSettings()
    is_analytic = meter.startswith(ANALYTIC)
    name = (settings.runner or "onnxruntime").partition(":")[0]
    if settings.runner == "auto":
        raise EccError("runner 'auto' measures on this machine; with --target give a runner, such as onnxruntime.")
    if name in SESSIONS and not is_analytic:
        settings = settings if settings.runner and ":" in settings.runner else replace(settings, runner=_default(name))
        return RemoteMeter(Board(where, meter, None, settings))
    if task is None:
        raise EccError(
            f"{meter if is_analytic else settings.runner} on {where} needs the task and ECC on the board; use runner "
            "onnxruntime, which gets the network as a file."
        )
    board = Board(where, meter, task, settings)
    return RemotePlatform(board) if is_analytic else RemoteMeter(board)


def open_targets(
    targets: Sequence[str], meter: str, *, task: InstalledSpec | None = None, settings: MeasureSettings | None = None
) -> RemoteMeter | RemotePlatform:
    """Open a meter on each of several equal boards, which share the samples of a profile; see `open_target`.

    Returns:
        The meter of the first board, with the `others`.
    """
    opened: list[RemoteMeter | RemotePlatform] = []
    try:
        for target in targets:
            opened.append(open_target(target, meter, task=task, settings=settings))  # noqa: PERF401 - closed below
    except BaseException:
        for one in opened:
            one.close()
        raise
    opened[0].others = tuple(opened[1:])
    return opened[0]


def _default(name: str) -> str:
    return "openvino:CPU" if name == "openvino" else "onnxruntime:CPUExecutionProvider"


class RemotePlatform:
    """An analytic platform on the board: an `Analytic`."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.others: tuple[RemoteMeter | RemotePlatform, ...] = ()
        self.noise = 0.0 if "noise=" not in board.meter_spec else 1.0  # rounds differ

    def describe(self) -> MeterInfo:
        """Description of the platform."""
        return from_builtins(self.board.opened["meter"], MeterInfo, f"the meter of {self.board.target}")

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int], *, repeat: int = 0) -> Reading:
        """Joules and seconds of one inference.

        Raises:
            BadMeasurement: If the board has another network under the same name, or does not come back.
        """
        check_fingerprint(self.board, graph)
        kept = {name: int(width) for name, width in widths.items()}
        found = self.board.call_again("cost", widths=kept, repeat=repeat)
        return Reading(joules=float(found["joules"]), seconds=float(found["seconds"]))

    def close(self) -> None:
        """End the agent, and those of the other boards."""
        for one in (self, *self.others):
            one.board.close()


def check_fingerprint(board: Board, graph: ChannelGraph) -> None:
    """Refuse a board that has another network.

    Raises:
        BadMeasurement: If the fingerprints differ.
    """
    found = board.opened.get("header", {}).get("fingerprint")
    if found is not None and found != graph.fingerprint:
        raise BadMeasurement(
            f"{board.target} has network {found} under this name, and this network is {graph.fingerprint}. Install the "
            "same code on both machines."
        )


class RemoteMeter:
    """A meter on the board. `profile` and `compress` measure with its `open_profiler`."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.others: tuple[RemoteMeter | RemotePlatform, ...] = ()

    def describe(self) -> MeterInfo:
        """Description of the meter on the board."""
        return from_builtins(self.board.opened["meter"], MeterInfo, f"the meter of {self.board.target}")

    def read(self) -> float:
        """One reading of the counter on the board."""
        return float(self.board.call_again("read")["joules"])

    def close(self) -> None:
        """End the agent, and those of the other boards."""
        for one in (self, *self.others):
            one.board.close()

    def open_profiler(
        self, model: nn.Module, graph: ChannelGraph, example_input: Inputs, settings: MeasureSettings
    ) -> RemoteProfiler:
        """A profiler whose networks run on the board."""
        return RemoteProfiler(self, model, graph, example_input, settings)


_export_lock = threading.Lock()  # torch's exporter changes global state, and several boards may measure at once
MAX_RESTARTS = 3
"""Lost links in a row at the same sample before it is given up; a network that exhausts the memory ends the agent."""


@dataclass
class RemoteProfiler:
    """Builds networks of given widths here and measures them on the board. See `ecc.measure.profiler`."""

    meter: RemoteMeter
    model: nn.Module
    graph: ChannelGraph
    example_input: Inputs
    settings: MeasureSettings
    drifts: bool = True
    _counter: CounterProbe | None = None
    _header: dict[str, Any] = field(default_factory=dict)
    _failures: int = 0
    _dense_request: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        board = self.meter.board
        if board.task is not None:
            check_fingerprint(board, self.graph)
            self._header = dict(board.opened["header"])
        runner = self._header.get("runner") or board.settings.runner
        self.settings = replace(self.settings, runner=runner)

    def header(self, design: Design) -> ProfileHeader:
        """Header of the samples from here, without the counter."""
        from ecc import __version__

        board = self.meter.board
        runner = (self.settings.runner or "").partition(":")
        environment = {"ecc": __version__, **board.machine, "threads": str(self._threads or "runtime")}
        device_type = self._header.get("device_type")
        if board.task is None:
            import importlib

            device_type = importlib.import_module(f"ecc.measure.runners.{runner[0]}").device_type_of(runner[2])
        return ProfileHeader.of(
            self.graph,
            self.example_input,
            meter=self.meter.describe(),
            device_type=device_type,
            settings=self.settings,
            runner_reason=self._header.get("runner_reason") or "chosen for the board",
            design=design,
            environment={**environment, **self._header.get("environment", {})},
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        )

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the software on the board."""
        return self.header(Design()).environment

    def adopt_runner(self, header: ProfileHeader) -> None:
        """Use the runner of a profile that is resumed, if the user chose none."""
        if self.settings.runner is None and header.settings is not None:
            self.settings = replace(self.settings, runner=header.settings.runner)

    def prepare(self, counter: CounterProbe | None = None) -> CounterProbe:
        """Use known properties of the counter, or observe it under the dense network."""
        for attempt in range(MAX_RESTARTS + 1):
            if counter is not None:
                break
            full = {group.name: group.width for group in self.graph.variable}
            try:
                found = self.meter.board.call("prepare", limit_seconds=self._limit, **self._request(full))
            except LinkLost as lost:
                if attempt == MAX_RESTARTS:
                    raise BadMeasurement(f"the dense network cannot be measured on the board: {lost}") from None
                self.meter.board.reconnect(str(lost))
                continue
            counter = from_builtins(found["counter"], CounterProbe, "the counter on the board")
            self._header |= found.get("header", {})
            if self._header.get("runner"):
                self.settings = replace(self.settings, runner=self._header["runner"])
        assert counter is not None
        self._counter = counter
        return counter

    def sample(self, index: int | None, round_: int, session: int, widths: Mapping[str, int]) -> Sample:
        """Measure one width configuration on the board.

        Raises:
            SessionRestarted: If the link was lost and made again.
            BadMeasurement: If the measurement cannot be trusted, or the board does not come back.
        """
        board = self.meter.board
        try:
            found = board.call(
                "sample", counter=to_builtins(self._counter), limit_seconds=self._limit, **self._request(widths)
            )
        except LinkLost as lost:
            self._failures += 1
            if self._failures > MAX_RESTARTS:
                self._failures = 0
                raise BadMeasurement(
                    f"the agent on {board.target} ended {MAX_RESTARTS + 1} times in a row at these widths, last: "
                    f"{lost}. The board may be out of memory."
                ) from None
            board.reconnect(str(lost))
            raise SessionRestarted(str(lost)) from None
        self._failures = 0
        kept = tuple(int(widths[group.name]) for group in self.graph.variable)
        fields = {name: value for name, value in found["sample"].items() if value is not None}
        fields |= {"index": index, "round": round_, "session": session, "widths": kept}
        fields["measured_at"] = datetime.now(timezone.utc).isoformat()
        return from_builtins(fields, Sample, f"a sample of {board.target}")

    @property
    def _threads(self) -> int | None:
        """One thread where CPU time is the latency; else the choice of the runtime."""
        return 1 if self.meter.describe().name == "cputime" else None

    def clear(self) -> None:
        """Do nothing: the board frees its memory."""

    @property
    def _limit(self) -> float:
        """Longest time of one measurement."""
        s = self.settings
        return 120.0 + s.probe_seconds * 4 + s.warmup_seconds + s.max_repeats * 3 * s.max_window_seconds

    def _request(self, widths: Mapping[str, int]) -> dict[str, Any]:
        """The network of these widths: as widths, or as an ONNX file with its inputs."""
        settings = to_builtins(self.settings)
        if self.meter.board.task is not None:
            return {"widths": {name: int(width) for name, width in widths.items()}, "settings": settings}
        is_dense = all(widths[group.name] == group.width for group in self.graph.variable)
        if is_dense and self._dense_request is not None:
            return {**self._dense_request, "settings": settings}  # the reference is measured again and again
        from ecc.graph import with_widths
        from ecc.measure.runners.onnx_network import OnnxNetwork

        with _export_lock:
            network = OnnxNetwork.of(
                with_widths(self.model, self.graph, widths, device="cpu"), self.example_input, self.settings.precision
            )
        data, inputs = [network.data], {}
        for name, array in network.inputs.items():
            is_random = self.settings.input_data == "random" and array.dtype.kind == "f"
            inputs[name] = (str(array.dtype), list(array.shape), 0 if is_random else array.nbytes)
            if not is_random:
                data.append(array.tobytes())
        request = {
            "data": b"".join(data),
            "onnx_bytes": len(network.data),
            "inputs": inputs,
            "runner": self.settings.runner,
            "precision": self.settings.precision,
            "threads": self._threads,
        }
        if is_dense:
            self._dense_request = request
        return {**request, "settings": settings}
