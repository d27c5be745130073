"""ECC: make a neural network fit an energy budget.

    model --> ChannelGraph --> Profile --> EnergyModel --> Method --> slim model --> report, export
              graph/           measure/    energy/         methods/   graph/surgery

`trace_channels` finds which channels live and die together, `resized` builds the network at any widths, and
`slim` removes dead channels so that the outputs stay the same. `find_meter` opens what counts joules here,
`measure_model` reads them off one network, and `profile` off many widths of it. `fit` learns from a profile what any
widths cost, `EccSolver` takes an optimizer's place and prunes to a budget, and `Compression` does all of it.
`load_slim` brings the result back, and `export_run` writes it for other programs.
"""

from ecc.energy import Cost, EnergyModel, counted, fit, nonzero_cost, parse_budgets
from ecc.errors import (
    BadBudget,
    BadFile,
    BadMeasurement,
    BadTask,
    BadWidths,
    CannotExport,
    EccError,
    InfeasibleBudget,
    NoMeter,
    UntraceableModel,
)
from ecc.export import export_model, export_run, load_slim, save_slim
from ecc.graph import (
    ChannelGraph,
    ChannelGroup,
    live_channels,
    prove,
    resized,
    slim,
    slim_optimizer,
    trace_channels,
    zero_channels_,
)
from ecc.measure import Measurement, MeasureSettings, Profile, find_meter, measure_model, profile
from ecc.methods import Compressed, Compression, CompressSettings, EccSolver, WeightCompression, WeightSolver
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
    "Compressed",
    "Compression",
    "Cost",
    "EccError",
    "EccSolver",
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
    "counted",
    "export_model",
    "export_run",
    "find_meter",
    "fit",
    "live_channels",
    "load_slim",
    "measure_model",
    "nonzero_cost",
    "parse_budgets",
    "profile",
    "prove",
    "resized",
    "save_slim",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "zero_channels_",
]
