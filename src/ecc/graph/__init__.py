"""Channel graphs: tracing, verification, masking and slimming of networks."""

from ecc.graph.channel_graph import ChannelGraph, ChannelGroup, ParamSlice
from ecc.graph.labels import Role
from ecc.graph.slimming import kept_masks, live_channels, live_masks, mask_channels_, slim, slim_optimizer, with_widths
from ecc.graph.structure import AffineSize, Layer, StructureSpec
from ecc.graph.trace import trace_channels
from ecc.graph.verification import max_relative_diff, verify_graph

__all__ = [
    "AffineSize",
    "ChannelGraph",
    "ChannelGroup",
    "Layer",
    "ParamSlice",
    "Role",
    "StructureSpec",
    "kept_masks",
    "live_channels",
    "live_masks",
    "mask_channels_",
    "max_relative_diff",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "verify_graph",
    "with_widths",
]
