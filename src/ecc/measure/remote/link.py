"""One running agent: it is sent over the link and started, and answers requests until the link ends."""

from __future__ import annotations

import ast
import json
import os
import queue
import select
import subprocess
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from ecc.errors import BadMeasurement, NoMeter
from ecc.measure.meters.command import end_process

from .wire import HEARTBEAT_SECONDS, FrameReader, FrameWriter, LinkLost

START_SECONDS = 120.0
"""Longest silence of an agent that starts: a slow board needs a while to import PyTorch."""

AGENT_ROOTS = (
    "measure.remote.agent", "measure.runners.onnxruntime", "measure.runners.openvino", "measure.meters.nvml",
    "measure.meters.jetson", "measure.meters.amd", "measure.meters.apple", "measure.meters.rapl",
    "measure.meters.command", "measure.meters.cputime", "measure.meters.wall",
)  # fmt: skip
"""What a board gets, with all that these modules import at their top: nothing of it imports torch."""

_PACKAGES = ("ecc", "ecc.measure", "ecc.measure.meters", "ecc.measure.runners", "ecc.measure.remote")

START = "import sys; b = sys.stdin.buffer; exec(b.read(int(b.readline())).decode())"

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
        for work in (self._listen, self._log_errors):
            threading.Thread(target=work, daemon=True).start()
        try:
            if sources is not None:
                loader = _LOADER.encode()
                self._write(b"%d\n%s%d\n%s" % (len(loader), loader, len(sources), sources))
        except OSError as error:
            reason = self._reason(f"the link is closed ({error})")
            self.close()
            raise LinkLost(reason) from error
        threading.Thread(target=self._beat, daemon=True).start()

    @property
    def is_closed(self) -> bool:
        """Whether nothing can be sent any more."""
        return self._is_closed

    def call(self, op: str, data: bytes = b"", *, limit_seconds: float = 60.0, **fields: Any) -> dict[str, Any]:
        """Send a request and wait for its answer, at most `limit_seconds` while the agent gives signs of life.

        Raises:
            LinkLost: If the link ends, the board hangs, or the stream is damaged.
        """
        self._number += 1
        started = time.monotonic()
        self._heard = started
        try:
            self._writer.send({"op": op, "id": self._number, **fields}, data)
        except LinkLost as lost:
            raise LinkLost(self._reason(str(lost))) from lost
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
                with suppress(OSError, ValueError):  # another thread closed it
                    stream.close()
        if self._process.poll() is None:
            end_process(self._process)
        if self._process.stderr is not None:
            with suppress(OSError, ValueError):  # another thread closed it
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
        with suppress(OSError, ValueError):  # another thread closed it
            for line in self._process.stderr:
                self._errors.append(line.decode(errors="replace").strip()[:500])

    def _reason(self, text: str) -> str:
        time.sleep(0.05)  # the last words of ssh
        said = next((line for line in reversed(self._errors) if line), "")
        return f"{text}: {said.rstrip('.')}" if said else text
