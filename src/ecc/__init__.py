"""ECC: prune PyTorch networks to a measured energy budget.

    result = ecc.compress(model, train_loader, budget="50%", loss=F.cross_entropy, evaluate=accuracy)
    print(result)

`compress` does the whole job; `inspect` shows which channels can be pruned. The steps are public as well:

    model --> trace_channels --> profile --> fit --> Compression or EccSolver --> slim --> export_model
              ChannelGraph       Profile     EnergyModel

Public names are imported when they are first used, so that `import ecc` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecc.api import CompressResult, compress, inspect
    from ecc.energy import EnergyModel, counted_cost, fit
    from ecc.errors import EccError, EccWarning
    from ecc.export import export_model, load_slim, save_slim
    from ecc.graph import ChannelGraph, slim, slim_optimizer, trace_channels, with_widths
    from ecc.measure import Profile, find_meter, measure_model
    from ecc.measure.profiler import profile
    from ecc.methods import Compression, CompressSettings, EccSolver
    from ecc.task import Task

__version__ = "0.2.0"

_HOMES = {
    "api": ("CompressResult", "compress", "inspect"),
    "energy": ("EnergyModel", "counted_cost", "fit"),
    "errors": ("EccError", "EccWarning"),
    "export": ("export_model", "load_slim", "save_slim"),
    "graph": ("ChannelGraph", "slim", "slim_optimizer", "trace_channels", "with_widths"),
    "measure": ("Profile", "find_meter", "measure_model", "profile"),
    "methods": ("CompressSettings", "Compression", "EccSolver"),
    "task": ("Task",),
    "training": (),
    "zoo": (),
}
"""Modules that are attributes after `import ecc`, and the public names that each of them has."""

__all__ = [
    "ChannelGraph",
    "CompressResult",
    "CompressSettings",
    "Compression",
    "EccError",
    "EccSolver",
    "EccWarning",
    "EnergyModel",
    "Profile",
    "Task",
    "compress",
    "counted_cost",
    "export_model",
    "find_meter",
    "fit",
    "inspect",
    "load_slim",
    "measure_model",
    "profile",
    "save_slim",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "with_widths",
]


if not TYPE_CHECKING:  # or type checkers would accept any attribute

    def __getattr__(name: str) -> object:
        """Import a public name, or one of the modules above, when it is first used (PEP 562)."""
        if name in _HOMES:
            return import_module(f"ecc.{name}")
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"ecc.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
