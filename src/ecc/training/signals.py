"""Being asked to stop: noted at once, obeyed when the state is whole."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from ecc.errors import EccError

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupted(EccError):
    """Raised when training was asked to stop and has saved its state.

    Args:
        message: Where it stopped, and how to go on.
        signum: The signal; a command line exits with 128 more than it.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum


class StopRequests:
    """A block in which SIGTERM and Ctrl-C are noted. The second one acts as it always did.

    Python delivers signals to the main thread only; in any other thread the block notes nothing. Neither does a block
    within another: the outer one knows better when the state is whole, as between short trainings of a search.
    """

    def __init__(self) -> None:
        self.signum = 0
        """The signal that came; 0 for none."""
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopRequests:
        if threading.current_thread() is threading.main_thread() and not self._is_within_another():
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._put_back()

    @staticmethod
    def _is_within_another() -> bool:
        return any(isinstance(getattr(signal.getsignal(one), "__self__", None), StopRequests) for one in SIGNALS)

    def _note(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - as Python calls it
        self.signum = number
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not set by Python
        self._before.clear()
