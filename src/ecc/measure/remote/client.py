"""The client: measures on a board, through an agent that it starts there.

`RemoteMeter` takes the place of a meter in `profile` and `compress`; `RemotePlatform` that of an analytic platform. If
the link is lost, the client connects again and measures the sample in progress again; a sample is written only when its
answer has arrived, so none is lost and none is taken twice.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from typing import Any

from torch import nn

from ecc.errors import BadMeasurement, EccError, option_hint
from ecc.graph import ChannelGraph, with_widths
from ecc.measure.counter import CounterProbe
from ecc.measure.meter import MeterInfo, Reading
from ecc.measure.profile import ProfileHeader, Sample
from ecc.measure.runner_search import RunnerSearch
from ecc.measure.runners import open_runner
from ecc.measure.runners.onnx_network import OnnxNetwork
from ecc.measure.runners.runtime import SESSIONS
from ecc.records import from_builtins, to_builtins
from ecc.settings import Design, MeasureSettings, refuse_runner_of_file
from ecc.task import Inputs

from .agent import PROTOCOL
from .link import START, START_SECONDS, Link, agent_sources
from .target import Target
from .wire import LinkLost

ANALYTIC = ("platform:", "replay:")


class SessionRestarted(Exception):
    """The link was lost and made again: the sample in progress has to be measured again, in a new session."""


@dataclass(frozen=True, kw_only=True)
class InstalledSpec:
    """A task that is installed on the board."""

    task: str
    """As on the command line: a bundled network, or file.py:function."""
    batch: int | None = None
    freeze: tuple[str, ...] = ()
    attention: str = "heads"
    device: str | None = None
    image_size: str | None = None


class Board:
    """A connection to a board that is made again when it is lost.

    With a task, networks are built on the board, where ECC is installed; otherwise they are sent as ONNX files.
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
        try:
            self._connect()
        except LinkLost as lost:
            self.close()
            hint = f"Check that `{self.target.version_command}` works without a password and is Python 3.10 or newer."
            if self.task is not None and "No module named" in str(lost):
                hint = "Install PyTorch and ECC there, or use runner onnxruntime, which gets the network as a file."
            raise EccError(f"{self.target} cannot be used: {lost}. {hint}") from None

    def _connect(self) -> None:
        """Start the agent, and open the meter."""
        if self._link is not None:
            self._link.close()
        arguments = ["-c", START] if self.task is None else ["-m", "ecc", "agent"]
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
        """
        with self._lock:
            if self._link is None or self._link.is_closed:
                raise LinkLost("the link is closed")
            return self._link.call(op, data, **fields)

    def reconnect(self, reason: str) -> None:
        """Connect again, for `retry_seconds`."""
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
    if not is_analytic and (name in SESSIONS or settings.runner == "auto"):
        ignored = {"in_turns": settings.in_turns, "device": task is not None and task.device is not None}
        for option in (option for option, is_given in ignored.items() if is_given):
            raise EccError(f"{option_hint(option)} has no effect on a board that gets networks as files. Leave it out.")
    if settings.runner == "auto":
        if is_analytic:
            raise EccError(f"runner 'auto' needs a meter; {meter} runs nothing. Leave it out.")
        return RemoteMeter(Board(where, meter, None, settings))
    if name in SESSIONS and not is_analytic:
        if ":" not in (settings.runner or ""):
            place = "openvino:CPU" if name == "openvino" else "onnxruntime:CPUExecutionProvider"
            settings = replace(settings, runner=place)
        open_runner(str(settings.runner), settings).close()  # refuses a precision or format that it does not have
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

    The result is the meter of the first board, with the `others`.
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


class _OnBoard:
    """A meter or a platform of a board."""

    def __init__(self, board: Board) -> None:
        self.board = board
        self.others: tuple[RemoteMeter | RemotePlatform, ...] = ()

    def describe(self) -> MeterInfo:
        """Description of the meter on the board."""
        return from_builtins(self.board.opened["meter"], MeterInfo, f"the meter of {self.board.target}")

    def close(self) -> None:
        """End the agent, and those of the other boards."""
        for one in (self, *self.others):
            one.board.close()


class RemotePlatform(_OnBoard):
    """An analytic platform on the board: an `Analytic`."""

    @property
    def noise(self) -> float:
        """Not 0 if the rounds of a profile differ."""
        return float("noise=" in self.board.meter_spec)

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int], *, repeat: int = 0) -> Reading:
        """Joules and seconds of one inference."""
        check_fingerprint(self.board, graph)
        kept = {name: int(width) for name, width in widths.items()}
        found = self.board.call_again("cost", widths=kept, repeat=repeat)
        return Reading(joules=float(found["joules"]), seconds=float(found["seconds"]))


def check_fingerprint(board: Board, graph: ChannelGraph) -> None:
    """Refuse a board that has another network."""
    found = board.opened.get("header", {}).get("fingerprint")
    if found is not None and found != graph.fingerprint:
        raise BadMeasurement(
            f"{board.target} has network {found} under this name, and this network is {graph.fingerprint}. Install the "
            "same code on both machines."
        )


class RemoteMeter(_OnBoard):
    """A meter on the board. `profile` and `compress` measure with its `open_profiler`."""

    def read(self) -> float:
        """One reading of the counter on the board."""
        return float(self.board.call_again("read")["joules"])

    def use_runner(self, settings: MeasureSettings) -> None:
        """Run networks as these settings say, on all boards."""
        for one in (self, *self.others):
            one.board.settings = replace(one.board.settings, runner=settings.runner, precision=settings.precision)

    @property
    def threads(self) -> int | None:
        """Threads of a network on the CPU: one where CPU time is the latency, else the choice of the runtime."""
        return 1 if self.describe().name == "cputime" else None

    def open_profiler(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        example_input: Inputs,
        settings: MeasureSettings,
        runner_search: RunnerSearch | None = None,
    ) -> RemoteProfiler:
        """A profiler whose networks run on the board."""
        return RemoteProfiler(self, model, graph, example_input, settings, runner_search)


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
    runner_search: RunnerSearch | None = None
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
        runner, _, argument = (self.settings.runner or "").partition(":")
        environment = {"ecc": __version__, **board.machine, "threads": str(self.meter.threads or "runtime")}
        device_type = self._header.get("device_type")
        if board.task is None:
            device_type = importlib.import_module(f"ecc.measure.runners.{runner}").device_type_of(argument)
        return ProfileHeader.of(
            self.graph,
            self.example_input,
            meter=self.meter.describe(),
            device_type=device_type,
            settings=self.settings,
            runner_reason=self._header.get("runner_reason") or "chosen for the board",
            runner_search=self.runner_search,
            design=design,
            environment={**environment, **self._header.get("environment", {})},
            created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        )

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the software on the board."""
        return self.header(Design()).environment

    def adopt_runner(self, header: ProfileHeader) -> None:
        """Use the runner of a profile that is resumed, if the user chose none; refuse one in a Python file."""
        if header.settings is None:
            return
        refuse_runner_of_file(header.settings.runner, self.settings.runner, "the profile")
        if self.settings.runner is None:
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

    def clear(self) -> None:
        """Do nothing: the board frees its memory."""

    @property
    def _limit(self) -> float:
        return limit_seconds(self.settings)

    def _request(self, widths: Mapping[str, int]) -> dict[str, Any]:
        """The network of these widths: as widths, or as an ONNX file with its inputs."""
        settings = to_builtins(self.settings)
        if self.meter.board.task is not None:
            return {"widths": {name: int(width) for name, width in widths.items()}, "settings": settings}
        is_dense = all(widths[group.name] == group.width for group in self.graph.variable)
        if is_dense and self._dense_request is not None:
            return {**self._dense_request, "settings": settings}  # the reference is measured again and again
        with _export_lock:
            network = OnnxNetwork.of(
                with_widths(self.model, self.graph, widths, device="cpu"), self.example_input, self.settings.precision
            )
        request = onnx_request(network, self.settings, self.meter.threads)
        if is_dense:
            self._dense_request = request
        return {**request, "settings": settings}


def limit_seconds(settings: MeasureSettings) -> float:
    """Longest time of one measurement on a board."""
    windows = settings.max_repeats * 3 * settings.max_window_seconds
    return 120.0 + settings.probe_seconds * 4 + settings.warmup_seconds + windows


def onnx_request(network: OnnxNetwork, settings: MeasureSettings, threads: int | None) -> dict[str, Any]:
    """A network as it is sent to a board: an ONNX file, and those inputs that the board does not draw itself."""
    data, inputs = [network.data], {}
    for name, array in network.inputs.items():
        is_random = settings.input_data == "random" and array.dtype.kind == "f"
        inputs[name] = (str(array.dtype), list(array.shape), 0 if is_random else array.nbytes)
        if not is_random:
            data.append(array.tobytes())
    return {
        "data": b"".join(data),
        "onnx_bytes": len(network.data),
        "inputs": inputs,
        "runner": settings.runner,
        "precision": settings.precision,
        "threads": threads,
    }
