"""ECC: make a neural network fit an energy budget.

    model --> ChannelGraph --> Profile --> EnergyModel --> Method --> slim model --> report, export
              graph/           measure/    energy/         methods/   graph/surgery

`trace_channels` finds which channels live and die together, `resized` builds the network at any widths, and
`slim` removes dead channels so that the outputs stay the same.
"""

from ecc.errors import BadFile, BadTask, BadWidths, EccError, UntraceableModel
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
from ecc.task import Task

__version__ = "0.1.0"

__all__ = [
    "BadFile",
    "BadTask",
    "BadWidths",
    "ChannelGraph",
    "ChannelGroup",
    "EccError",
    "Task",
    "UntraceableModel",
    "live_channels",
    "prove",
    "resized",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "zero_channels_",
]
