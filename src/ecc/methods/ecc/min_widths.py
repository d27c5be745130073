"""Where a solve starts and where it must stop: the live channels and the least width of each group."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ecc.graph import ChannelGraph, ChannelGroup, kept_masks, live_masks


def floor_widths(graph: ChannelGraph, min_width_ratio: float, width_multiple: int) -> list[int]:
    """The least width of each group of a network whose channels are all alive.

    Args:
        graph: The network.
        min_width_ratio: Floors are at least this share of the full width, and at least the group's `least`.
        width_multiple: Floors are multiples of this; a group that is no wider stays.
    """
    _check(min_width_ratio, width_multiple)
    left = graph.structure.width_remainders(width_multiple)
    return [
        _floor(g, g.width, min_width_ratio, width_multiple, rest) for g, rest in zip(graph.groups, left, strict=True)
    ]


def _floor(group: ChannelGroup, live: int, min_width_ratio: float, width_multiple: int, left: int) -> int:
    """The least width on the width_remainders `left + k * width_multiple` that the share allows."""
    if _stays(group):
        return live
    return min(live, left + max(0, -((left - _least(group, min_width_ratio)) // width_multiple)) * width_multiple)


def _least(group: ChannelGroup, min_width_ratio: float) -> int:
    return min(group.width, max(group.min_width, math.ceil(min_width_ratio * group.width - 1e-9)))


def _stays(group: ChannelGroup) -> bool:
    return group.frozen is not None or not any(place.is_consumer for place in group.slices)


def _check(min_width_ratio: float, width_multiple: int) -> None:
    if not 0 <= min_width_ratio <= 1:
        raise ValueError(f"min_width_ratio={min_width_ratio} is a share of a group's channels, from 0 to 1.")
    if width_multiple < 1:
        raise ValueError(f"width_multiple={width_multiple} is below 1; 1 allows any width.")


def alive_and_floors(
    model: nn.Module, graph: ChannelGraph, min_width_ratio: float, width_multiple: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which channels count at the start, as Algorithm 1 has it (s = phi(W)), and the least width of each group.

    These are the live ones, and as many dead ones as make a multiple of `width_multiple`: they will be the first to go. A
    group of which less than the floor is read has not been trained yet, such as one before a head of zeros. It counts
    as whole. Groups that are frozen, or that no layer reads with weights of its own, keep their width.

    Args:
        model: The network that was traced.
        graph: Its channel graph.
        min_width_ratio: Floors are at least this share of the full width, and at least the group's `least`.
        width_multiple: Floors are multiples of this; a group that is no wider stays.
        device: Where the result lives.

    Returns:
        (channels,) bool and (groups,) int64.
    """
    _check(min_width_ratio, width_multiple)
    alive, floors = [], []
    left = graph.structure.width_remainders(width_multiple)
    live = live_masks(model, graph)
    for group, lives, mask, rest in zip(graph.groups, live, kept_masks(graph, live, width_multiple), left, strict=True):
        mask = torch.ones_like(mask) if _stays(group) or int(lives.sum()) < _least(group, min_width_ratio) else mask
        alive.append(mask.to(device))
        floors.append(_floor(group, int(mask.sum()), min_width_ratio, width_multiple, rest))
    return torch.cat(alive), torch.tensor(floors, dtype=torch.long, device=device)
