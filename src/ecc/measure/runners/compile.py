"""`compile`: torch.compile, with its mode as the argument."""

from __future__ import annotations

import torch
from torch import nn

from ecc.errors import BadMeasurement
from ecc.settings import COMPILE_MODES, MeasureSettings

from .eager import EagerRunner


class CompileRunner(EagerRunner):
    """Compiles every network anew, for the shapes of its example input.

    Raises:
        BadMeasurement: If torch.compile has no such mode.
    """

    def __init__(self, argument: str, settings: MeasureSettings) -> None:
        super().__init__(argument, settings)
        if argument and argument not in COMPILE_MODES:
            raise BadMeasurement(f"torch.compile has no mode {argument!r}; choose one of {', '.join(COMPILE_MODES)}.")

    def _load(self, model: nn.Module) -> None:
        torch.compiler.reset()  # after eight networks of one class, torch would silently fall back to eager
        options = {"mode": self._argument} if self._argument else {}
        self._call = torch.compile(model, dynamic=False, **options)  # type: ignore[call-overload]  # mode is a string


open_runner = CompileRunner
