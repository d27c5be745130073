"""Messages between client and agent: frames of JSON and binary data, numbered and checked.

    magic (4) | length of the JSON | length of the data | number | CRC-32 of both | JSON | data

Lengths are limited, so a damaged length cannot exhaust the memory. A frame that is damaged, out of order or repeated
ends the link: the client connects again, and asks again. Messages contain no code and nothing is unpickled. This module
needs only the standard library.
"""

from __future__ import annotations

import json
import struct
import threading
import zlib
from collections.abc import Callable
from typing import Any

MAGIC = b"ECC1"
_HEAD = struct.Struct(">4sIIQI")
MAX_JSON_BYTES = 4 << 20
MAX_DATA_BYTES = 1 << 30
"""Largest network that can be sent."""

HEARTBEAT_SECONDS = 1.0
"""Time between two signs of life, in both directions."""


class LinkLost(Exception):
    """The link ended, or cannot be trusted any more."""


class FrameWriter:
    """Writes frames by a function that writes all bytes or raises OSError; several threads may use it."""

    def __init__(self, write: Callable[[bytes], object]) -> None:
        self._write, self._number, self._lock = write, 0, threading.Lock()

    def send(self, message: dict[str, Any], data: bytes = b"") -> None:
        """Write one frame.

        Raises:
            LinkLost: If it cannot be written.
            ValueError: If it is too large.
        """
        text = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > MAX_JSON_BYTES or len(data) > MAX_DATA_BYTES:
            raise ValueError(
                f"a message of {len(text)} + {len(data)} bytes is too large; at most {MAX_DATA_BYTES} bytes"
            )
        checksum = zlib.crc32(data, zlib.crc32(text))
        with self._lock:
            head = _HEAD.pack(MAGIC, len(text), len(data), self._number, checksum)
            self._number += 1
            try:
                self._write(head + text)
                if data:
                    self._write(data)
            except (OSError, ValueError) as error:  # ValueError: the file was closed
                raise LinkLost(f"the link is closed ({error})") from error


class FrameReader:
    """Reads frames by a function that returns exactly that many bytes, or fewer at the end of the stream."""

    def __init__(self, read: Callable[[int], bytes]) -> None:
        self._read, self._number = read, 0

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """The next message and its data.

        Raises:
            LinkLost: At the end of the stream, or if the frame is damaged.
        """
        head = self._exactly(_HEAD.size)
        magic, text_size, data_size, number, checksum = _HEAD.unpack(head)
        if magic != MAGIC:
            raise LinkLost(f"the stream is damaged: {head[:16]!r} is not the start of a message")
        if text_size > MAX_JSON_BYTES or data_size > MAX_DATA_BYTES:
            raise LinkLost(f"the stream is damaged: a message of {text_size} + {data_size} bytes")
        if number != self._number:
            raise LinkLost(f"message {number} arrived in place of {self._number}")
        self._number += 1
        text, data = self._exactly(text_size), self._exactly(data_size)
        if zlib.crc32(data, zlib.crc32(text)) != checksum:
            raise LinkLost(f"message {number} is damaged (checksum)")
        try:
            message = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise LinkLost(f"message {number} is not JSON ({error})") from error
        if not isinstance(message, dict):
            raise LinkLost(f"message {number} is not an object")
        return message, data

    def _exactly(self, size: int) -> bytes:
        try:
            data = self._read(size) if size else b""
        except (OSError, ValueError) as error:
            raise LinkLost(f"the link is closed ({error})") from error
        if len(data) < size:
            raise LinkLost("the link ended")
        return data
