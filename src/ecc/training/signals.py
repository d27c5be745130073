"""SIGTERM and Ctrl-C: noted at once, and obeyed when the state can be saved."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from ecc.errors import EccError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(EccError):
    """Raised when training was stopped by a signal, after its state was saved."""

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class StopRequests:
    """A block in which the first SIGTERM or Ctrl-C is noted in `signum`. A second one acts as usual.

    Python delivers signals to the main thread only, so in other threads nothing is noted. A block inside another one
    notes nothing either: the outer block knows when the state can be saved.
    """

    def __init__(self) -> None:
        self.signum = 0
        """The signal that came; 0 if none did."""
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread() and not self._is_nested():
            self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, *error: object) -> None:
        self._restore_handlers()

    @staticmethod
    def _is_nested() -> bool:
        return any(isinstance(getattr(signal.getsignal(one), "__self__", None), StopRequests) for one in SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.signum = number
        self._restore_handlers()

    def _restore_handlers(self) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._handlers.clear()
