"""Channel graphs: tracing, verification, masking and slimming of networks."""

from ecc.graph.channel_graph import ChannelGraph, ChannelGroup, ParamSlice
from ecc.graph.labels import Role
from ecc.graph.slimming import (
    kept_masks,
    live_channels,
    live_masks,
    mask_branches_,
    mask_channels_,
    removed_branches,
    slim,
    slim_optimizer,
    with_widths,
)
from ecc.graph.structure import AffineSize, Branch, Layer, StructureSpec
from ecc.graph.trace import trace_channels
from ecc.graph.verification import max_relative_diff, verify_graph

__all__ = [
    "AffineSize",
    "Branch",
    "ChannelGraph",
    "ChannelGroup",
    "Layer",
    "ParamSlice",
    "Role",
    "StructureSpec",
    "kept_masks",
    "live_channels",
    "live_masks",
    "mask_branches_",
    "mask_channels_",
    "max_relative_diff",
    "removed_branches",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "verify_graph",
    "with_widths",
]
