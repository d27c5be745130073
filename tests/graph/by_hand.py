"""A channel graph that is written down and not traced."""

from __future__ import annotations

from typing import Any

import torch

from ecc.graph import AffineSize, ChannelGraph, ChannelGroup, Layer, ParamSlice, Role
from ecc.graph.structure import TensorShape

IRREGULAR = torch.tensor([[3], [0], [2]])  # no offset and step gives these


def by_hand(index: torch.Tensor = IRREGULAR, **changes: Any) -> ChannelGraph:
    """Two layers with a group of 3 units between them and 2 outputs."""
    middle = ChannelGroup(
        "first",
        3,
        (
            ParamSlice("first.weight", 0, (Role.PRODUCER,), torch.arange(3)[:, None]),
            ParamSlice("last.weight", 1, (Role.CONSUMER,), index),
        ),
    )
    outputs = ChannelGroup(
        "last",
        2,
        (ParamSlice("last.weight", 0, (Role.PRODUCER,), torch.arange(2)[:, None]),),
        "it is an output of the network",
    )
    s, t = AffineSize(0, ((0, 1),)), AffineSize(0, ((1, 1),))
    each = index.shape[1]
    columns = AffineSize(each % 2, ((0, each),))  # with one for each unit, another column belongs to no group
    layers = (
        Layer("first", "linear", 1, AffineSize(5), s, AffineSize(5), s, 4, ("first.weight",)),
        Layer("last", "linear", 1, s, t, s, t, 4, ("last.weight",)),
    )
    tensors = (
        TensorShape("first.weight", (s, AffineSize(5)), 4, True),
        TensorShape("last.weight", (t, columns), 4, True),
    )
    fields: dict[str, Any] = {"groups": (middle, outputs), "layers": layers, "tensors": tensors, **changes}
    return ChannelGraph(**fields)
