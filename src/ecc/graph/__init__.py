"""Room 1: a network becomes a channel graph."""

from ecc.graph.channels import ChannelGraph, ChannelGroup, Place
from ecc.graph.costs import Extent, Layer
from ecc.graph.labels import Role
from ecc.graph.skeleton import Skeleton
from ecc.graph.surgery import kept_masks, live_channels, live_masks, resized, slim, slim_optimizer, zero_channels_
from ecc.graph.trace import trace_channels
from ecc.graph.verification import max_relative_diff, verify

__all__ = [
    "ChannelGraph",
    "ChannelGroup",
    "Extent",
    "Layer",
    "Place",
    "Role",
    "Skeleton",
    "kept_masks",
    "live_channels",
    "live_masks",
    "max_relative_diff",
    "resized",
    "slim",
    "slim_optimizer",
    "trace_channels",
    "verify",
    "zero_channels_",
]
