"""The agent: runs on the board, holds meter and runner, and measures what the client sends.

It ends when the link ends, or when the client gives no sign of life. It stores nothing. Except for tasks that are
installed on the board, it needs only the standard library, NumPy and the runtime of the runner.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from ecc.errors import EccError, first_line
from ecc.measure.counter import CounterProbe, probe_counter
from ecc.measure.meter import Meter, close_meter
from ecc.measure.registry import attempt_of, find_meter, probe_meters
from ecc.measure.runners.runtime import SESSIONS, import_runtime, open_session
from ecc.measure.window import measure, probe_under_load
from ecc.settings import MeasureSettings

from .wire import HEARTBEAT_SECONDS, FrameReader, FrameWriter, LinkLost

PROTOCOL = 1
SILENCE_SECONDS = 60.0
"""The agent ends if the client gives no sign of life for this long."""

BuildTask = Callable[[Mapping[str, Any]], Any]
"""Builds the profiler of a task that is installed here: an object with header, prepare and sample."""


def serve(source: BinaryIO, sink: BinaryIO, build_task: BuildTask | None = None) -> None:
    """Answer requests until the link ends. `build_task` builds the profiler of a task, where ECC is installed."""

    def write(data: bytes) -> None:
        sink.write(data)
        sink.flush()

    writer, requests = FrameWriter(write), queue.Queue[tuple[dict[str, Any], bytes]]()
    heard = [time.monotonic()]

    def listen() -> None:
        reader = FrameReader(source.read)
        try:
            while True:
                message, data = reader.receive()
                heard[0] = time.monotonic()
                if message.get("op") != "alive":
                    requests.put((message, data))
        except LinkLost:
            os._exit(0)  # also in the middle of a measurement

    def beat() -> None:
        while time.monotonic() - heard[0] < SILENCE_SECONDS:
            try:
                writer.send({"kind": "alive"})
            except LinkLost:
                os._exit(0)
            time.sleep(HEARTBEAT_SECONDS)
        os._exit(0)

    for work in (listen, beat):
        threading.Thread(target=work, daemon=True).start()
    board = _Board(build_task)
    while True:
        try:
            writer.send(board.reply(*requests.get()))
        except LinkLost:  # noqa: PERF203 - short beside a request
            os._exit(0)


class _Board:
    """State of the agent: the meter, and a task if there is one."""

    def __init__(self, build_task: BuildTask | None) -> None:
        self._build_task = build_task
        self._profiler: Any = None
        self._meter: Any = None

    def reply(self, message: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        """Answer one request; every failure becomes an answer, too."""
        answer = {"to": message.get("id")}
        try:
            return {**answer, "kind": "answer", **self._answer(message, data)}
        except Exception as error:  # noqa: BLE001 - reported to the client
            reason = str(error) if isinstance(error, EccError) else first_line(error)
            return {**answer, "kind": "error", "type": type(error).__name__, "message": reason[:2000]}

    def _answer(self, message: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        match message.get("op"):
            case "hello":
                return {"protocol": PROTOCOL, "pid": os.getpid(), "machine": machine()}
            case "runners":
                return {"runners": _runners()}
            case "open":
                return self._open(message)
            case "doctor":
                return {"findings": _findings(message.get("meter", "auto")), "machine": machine()}
            case "read":
                return {"joules": self._meter.read()}
            case "prepare":
                return self._prepare(message, data)
            case "sample":
                return self._sample(message, data)
            case "cost":  # of an analytic platform, which has a task
                found: dict[str, Any] = plain(self._profiler.cost(message["widths"], message.get("repeat", 0)))
                return found
        raise EccError(f"the agent does not know the request {message.get('op')!r}.")

    def _open(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Open the meter, and build the task if the request names one."""
        if self._meter is not None:
            close_meter(self._meter)
        self._meter = find_meter(message["meter"], device_type=message.get("device_type"))
        found: dict[str, Any] = {"meter": plain(self._meter.describe()), "is_meter": isinstance(self._meter, Meter)}
        task = message.get("task")
        if task is not None:
            if self._build_task is None:
                raise EccError("this agent cannot build tasks: ECC is not installed on the board.")
            self._profiler = self._build_task({**task, "meter": self._meter, "settings": _settings(message)})
            found |= {"header": plain(self._profiler.summary())}
        return found

    def _prepare(self, message: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        """Observe the counter under the dense network."""
        if self._profiler is not None:
            return {"counter": plain(self._profiler.prepare(None)), "header": plain(self._profiler.summary())}
        session = self._session(message, data)
        counter = probe_under_load(
            session.run, self._meter, _settings(message), device=session.device_type, is_asynchronous=False
        )
        counter = dataclasses.replace(counter, idle_state=None)
        return {"counter": plain(counter), "device_type": session.device_type, "versions": session.versions()}

    def _sample(self, message: Mapping[str, Any], data: bytes) -> dict[str, Any]:
        """Measure one network; with the first numbers of each output, if they are requested to compare precisions."""
        counter = CounterProbe(**message["counter"])
        if self._profiler is not None:
            return {"sample": plain(self._profiler.measure(message["widths"], counter))}
        session = self._session(message, data)
        result = measure(
            session.run, self._meter, _settings(message), device=session.device_type, is_asynchronous=False,
            counter=counter,
        )  # fmt: skip
        count = message.get("outputs", 0)
        outputs = [array.reshape(-1)[:count].tolist() for array in session.outputs()] if count else []
        return {"sample": measured_fields(result), "outputs": outputs}

    def _session(self, message: Mapping[str, Any], data: bytes) -> Any:
        """Load the network of a request: an ONNX file, followed by the inputs that are not random numbers."""
        import_runtime(message["runner"].partition(":")[0])  # its message says what to install
        np = import_runtime("numpy")
        generator, inputs, end = np.random.default_rng(20190613), {}, message["onnx_bytes"]
        for name, (dtype, shape, size) in message["inputs"].items():
            if size == 0:
                inputs[name] = generator.standard_normal(shape, dtype=np.float32).astype(dtype)
            else:
                inputs[name] = np.frombuffer(data[end : end + size], dtype=dtype).reshape(shape)
                end += size
        return open_session(
            message["runner"],
            data[: message["onnx_bytes"]],
            inputs,
            precision=message["precision"],
            threads=message.get("threads"),
        )


def _runners() -> dict[str, str]:
    """The runners of ONNX files, with the reason why one cannot be used, or an empty string."""
    found: dict[str, str] = {}
    for name in SESSIONS:
        try:
            specs = importlib.import_module(f"ecc.measure.runners.{name}").available_arguments()
            found |= {f"{name}:{argument}": "" for argument in specs}
        except EccError as error:  # noqa: PERF203 - two runtimes
            found[name] = str(error)
    return found


def _findings(spec: str) -> list[dict[str, Any]]:
    """The meters as `ecc doctor` shows them: each is tried, and the counters of those that work are observed."""
    findings = []
    for attempt in probe_meters() if spec == "auto" else [attempt_of(spec, find_meter(spec))]:
        meter = attempt.meter
        found: dict[str, Any] = {"spec": attempt.name, "works": meter is not None, "reason": attempt.reason}
        found["remedy"] = attempt.remedy
        findings.append(found)
        if meter is None:
            continue
        try:
            info = meter.describe()
            found |= {
                "info": plain(info),
                "is_meter": isinstance(meter, Meter),
                "reason": f"{info.device}, {info.scope}",
            }
            if isinstance(meter, Meter):
                found["counter"] = plain(dataclasses.replace(probe_counter(meter, None, 1.0), idle_state=None))
        except EccError as error:
            found["trouble"] = str(error)
        finally:
            close_meter(meter)
    return findings


def _settings(message: Mapping[str, Any]) -> MeasureSettings:
    return MeasureSettings(**message["settings"])


def measured_fields(result: Any) -> dict[str, Any]:
    """The fields of a sample that a measurement gives."""
    return {
        "joules": result.joules,
        "seconds": result.seconds,
        "relative_ci": _rounded(result.relative_ci),
        "edge_error": _rounded(result.edge_error),
        "ticks": result.ticks,
        "temperature_celsius": result.temperature_celsius,
        "clock_mhz": result.clock_mhz,
        "power_capped": result.power_capped,
        "throttled": result.throttled or None,
        "host_bound_share": _rounded(result.host_bound_share),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.4g}")


def machine() -> dict[str, str]:
    """Versions and processor of this machine, without host and user names."""
    found = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": str(os.cpu_count() or 1),
    }
    model = Path("/proc/device-tree/model")
    if model.is_file():
        found["board"] = model.read_text(encoding="utf-8", errors="replace").strip("\0 \n")
    for name in ("torch", "onnxruntime", "openvino", "numpy"):
        if importlib.util.find_spec(name) is not None:
            from importlib import metadata

            try:
                found[name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                found[name] = "installed"
    return found


def plain(value: Any) -> Any:
    """Records as JSON can represent them. A tagged struct gets its tag as `kind`."""
    if hasattr(value, "__struct_fields__"):
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return {"kind": value.__struct_config__.tag, **fields}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value


def main(build_task: BuildTask | None = None) -> None:
    """Serve on stdin and stdout. What libraries print goes to stderr, where it cannot damage the stream."""
    sink = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    serve(sys.stdin.buffer, sink, build_task)
