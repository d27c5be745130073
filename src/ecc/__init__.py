"""ECC: make a neural network fit an energy budget.

    model --> ChannelGraph --> Profile --> EnergyModel --> Method --> slim model --> report, export
              graph/           measure/    energy/         methods/   graph/surgery

`trace_channels` finds which channels live and die together, `resized` builds the network at any widths, and
`slim` removes dead channels so that the outputs stay the same. `find_meter` opens what counts joules here,
`measure_model` reads them off one network, and `profile` off many widths of it.
"""

from ecc.errors import BadFile, BadMeasurement, BadTask, BadWidths, EccError, NoMeter, UntraceableModel
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
from ecc.task import Task

__version__ = "0.1.0"

__all__ = [
    "BadFile",
    "BadMeasurement",
    "BadTask",
    "BadWidths",
    "ChannelGraph",
    "ChannelGroup",
    "EccError",
    "MeasureSettings",
    "Measurement",
    "NoMeter",
    "Profile",
    "Task",
    "UntraceableModel",
    "find_meter",
    "live_channels",
    "measure_model",
    "profile",
    "prove",
    "resized",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "zero_channels_",
]
