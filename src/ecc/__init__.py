"""ECC: make a neural network fit an energy budget.

    model --> ChannelGraph --> Profile --> EnergyModel --> Method --> slim model --> report, export
              graph/           measure/    energy/         methods/   graph/surgery

`trace_channels` finds which channels live and die together, `with_widths` builds the network at any widths, and
`slim` removes dead channels so that the outputs stay the same. `find_meter` opens what counts joules here,
`measure_model` reads them off one network, and `profile` off many widths of it. `fit` learns from a profile what any
widths cost, `EccSolver` takes an optimizer's place and prunes to a budget, and `Compression` does all of it.
`load_slim` brings the result back, and `export_run` writes it for other programs.

Public names are imported when they are first used, so `import ecc` alone does not import torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ecc.energy import Cost, EnergyModel, fit, nonzero_cost, parse_budgets
    from ecc.energy.counted import counted_cost
    from ecc.errors import (
        BadBudget,
        BadFile,
        BadMeasurement,
        BadTask,
        BadWidths,
        CannotExport,
        EccError,
        EccWarning,
        InfeasibleBudget,
        NoMeter,
        UntraceableModel,
    )
    from ecc.export import export_model, export_run, load_slim, save_slim
    from ecc.graph import (
        ChannelGraph,
        ChannelGroup,
        live_channels,
        mask_channels_,
        slim,
        slim_optimizer,
        trace_channels,
        verify_graph,
        with_widths,
    )
    from ecc.measure import Measurement, MeasureSettings, Profile, find_meter, measure_model
    from ecc.measure.profiler import profile
    from ecc.methods import CompressedModel, Compression, CompressSettings, EccSolver, WeightCompression, WeightSolver
    from ecc.task import Task

__version__ = "0.1.0"

__all__ = [
    "BadBudget",
    "BadFile",
    "BadMeasurement",
    "BadTask",
    "BadWidths",
    "CannotExport",
    "ChannelGraph",
    "ChannelGroup",
    "CompressSettings",
    "CompressedModel",
    "Compression",
    "Cost",
    "EccError",
    "EccSolver",
    "EccWarning",
    "EnergyModel",
    "InfeasibleBudget",
    "MeasureSettings",
    "Measurement",
    "NoMeter",
    "Profile",
    "Task",
    "UntraceableModel",
    "WeightCompression",
    "WeightSolver",
    "counted_cost",
    "export_model",
    "export_run",
    "find_meter",
    "fit",
    "live_channels",
    "load_slim",
    "mask_channels_",
    "measure_model",
    "nonzero_cost",
    "parse_budgets",
    "profile",
    "save_slim",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "verify_graph",
    "with_widths",
]

_HOMES = {
    "energy": ("Cost", "EnergyModel", "counted_cost", "fit", "nonzero_cost", "parse_budgets"),
    "errors": (
        "BadBudget",
        "BadFile",
        "BadMeasurement",
        "BadTask",
        "BadWidths",
        "CannotExport",
        "EccError",
        "EccWarning",
        "InfeasibleBudget",
        "NoMeter",
        "UntraceableModel",
    ),
    "export": ("export_model", "export_run", "load_slim", "save_slim"),
    "io": (),
    "graph": (
        "ChannelGraph",
        "ChannelGroup",
        "live_channels",
        "verify_graph",
        "with_widths",
        "slim",
        "slim_optimizer",
        "trace_channels",
        "mask_channels_",
    ),
    "measure": ("MeasureSettings", "Measurement", "Profile", "find_meter", "measure_model", "profile"),
    "methods": ("CompressSettings", "CompressedModel", "Compression", "EccSolver", "WeightCompression", "WeightSolver"),
    "task": ("Task",),
    "training": (),
    "zoo": (),
}
"""The modules that are attributes after `import ecc`, and the public names that each of them has."""


if not TYPE_CHECKING:  # or type checkers would accept any attribute

    def __getattr__(name: str) -> object:
        """Imports a public name, or one of the modules above, when it is first used (PEP 562)."""
        if name in _HOMES:
            return import_module(f"ecc.{name}")
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(f"ecc.{home}"), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_HOMES})
