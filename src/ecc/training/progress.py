"""Who is told how training goes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from ecc.errors import EccError


class History(Protocol):
    """Takes one line of facts after another. `RunDir` is one."""

    def log(self, facts: Mapping[str, Any]) -> None:
        """Notes plain values by name; `step` and `phase` say when."""


class Histories:
    """Tells several."""

    def __init__(self, *histories: History) -> None:
        self._histories = histories

    def log(self, facts: Mapping[str, Any]) -> None:
        """See `History`."""
        for history in self._histories:
            history.log(facts)


class TensorBoard:
    """Writes every number to a folder that TensorBoard shows, as `phase/name`.

    A resumed run repeats the steps since its last checkpoint; TensorBoard shows the later value.

    Raises:
        EccError: If TensorBoard is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise EccError(
                f"curves for TensorBoard need its package, which cannot be imported ({error}); pip install tensorboard."
            ) from None
        self._writer: Any = SummaryWriter(str(folder))

    def log(self, facts: Mapping[str, Any]) -> None:
        """See `History`."""
        phase, step = facts.get("phase", "train"), facts.get("step")
        for name, value in facts.items():
            if name != "step" and isinstance(value, int | float) and not isinstance(value, bool):
                self._writer.add_scalar(f"{phase}/{name}", value, step)

    def close(self) -> None:
        """Writes what is still in memory."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
