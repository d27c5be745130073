"""`GridSpec`: a grid of compressions in plain values, from which any process on any machine builds the same one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ecc.energy import EnergyModel
from ecc.measure import close_meter
from ecc.methods import CompressSettings
from ecc.methods.grid import Comparison

from .options import source_of, task_of, usable_device


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """What `ecc compare` was asked for. Paths are as they were typed, seen from the folder it was typed in."""

    task: str
    energy: tuple[str, ...]
    """Files of energy models; the first tells how to weigh."""
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    seeds: int
    data: str | None = None
    weights: str | None = None
    size: str | None = None
    """As the options of the same names."""
    batch_size: int | None = None
    settings: CompressSettings = field(default_factory=CompressSettings)
    meter: str = "auto"
    device: str | None = None
    """Where to train; None for a GPU, if the process sees one."""
    freeze: tuple[str, ...] = ()
    """Modules whose outputs are kept whole."""
    quick: bool = False
    """Whether methods search for a tenth of their time."""

    @contextmanager
    def opened(self) -> Iterator[Comparison]:
        """The grid, with its meter open meanwhile.

        Raises:
            EccError: If the task cannot be built, a file or the meter not be read, or the device not be used.
        """
        models = [EnergyModel.load(path) for path in self.energy]
        device = usable_device(self.device or ("cuda" if torch.cuda.is_available() else "cpu"))
        data, weights = (None if path is None else Path(path) for path in (self.data, self.weights))
        source = source_of(self.meter, models[0])
        try:
            yield Comparison(
                task_of(self.task, data, weights, self.size, self.batch_size, device),
                models,
                methods=self.methods,
                budgets=self.budgets,
                seeds=self.seeds,
                source=source,
                settings=self.settings,
                device=device,
                freeze=self.freeze,
                quick=self.quick,
            )
        finally:
            if source is not None:
                close_meter(source)
