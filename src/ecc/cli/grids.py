"""`GridSpec`: a grid of compressions in plain values, from which any process on any machine builds the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ecc.energy import EnergyModel
from ecc.measure import close_meter
from ecc.methods import CompressSettings
from ecc.methods.compare import Comparison
from ecc.zoo.find import find_task

from .choosing import source_of, usable_device


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """What `ecc compare` was asked for. Paths are as they were typed, seen from the folder it was typed in."""

    task: str
    energy: tuple[str, ...]
    """Files of energy models; the first tells how to weigh."""
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    seeds: int
    settings: CompressSettings
    meter: str = "auto"
    device: str | None = None
    """Where to train; None for a GPU, if the process sees one."""
    quick: bool = False
    """Whether methods search for a tenth of their time."""

    @contextmanager
    def opened(self) -> Iterator[Comparison]:
        """The grid, with its meter open meanwhile.

        Raises:
            EccError: If the task cannot be built, a file or the meter not be read, or the device not be used.
        """
        models = [EnergyModel.load(path) for path in self.energy]
        source = source_of(self.meter, models[0])
        try:
            yield Comparison(
                find_task(self.task),
                models,
                methods=self.methods,
                budgets=self.budgets,
                seeds=self.seeds,
                source=source,
                settings=self.settings,
                device=usable_device(self.device or ("cuda" if torch.cuda.is_available() else "cpu")),
                quick=self.quick,
            )
        finally:
            if source is not None:
                close_meter(source)
