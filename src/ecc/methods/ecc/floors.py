"""Where a solve starts and where it must stop: the live channels and the least width of each group."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ecc.graph import ChannelGraph, ChannelGroup, kept_masks, live_masks


def floor_widths(graph: ChannelGraph, min_share: float, round_to: int) -> list[int]:
    """The least width of each group of a network whose channels are all alive.

    Args:
        graph: The network.
        min_share: Floors are at least this share of the full width, and at least the group's `least`.
        round_to: Floors are multiples of this; a group that is no wider stays.
    """
    _check(min_share, round_to)
    left = graph.skeleton.lattice(round_to)
    return [_floor(g, g.width, min_share, round_to, rest) for g, rest in zip(graph.groups, left, strict=True)]


def _floor(group: ChannelGroup, live: int, min_share: float, round_to: int, left: int) -> int:
    """The least width on the lattice `left + k * round_to` that the share allows."""
    if _stays(group):
        return live
    return min(live, left + max(0, -((left - _least(group, min_share)) // round_to)) * round_to)


def _least(group: ChannelGroup, min_share: float) -> int:
    return min(group.width, max(group.least, math.ceil(min_share * group.width - 1e-9)))


def _stays(group: ChannelGroup) -> bool:
    return group.frozen is not None or not any(place.reads for place in group.places)


def _check(min_share: float, round_to: int) -> None:
    if not 0 <= min_share <= 1:
        raise ValueError(f"min_share={min_share} is a share of a group's channels, from 0 to 1.")
    if round_to < 1:
        raise ValueError(f"round_to={round_to} is below 1; 1 allows any width.")


def alive_and_floors(
    model: nn.Module, graph: ChannelGraph, min_share: float, round_to: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Which channels count at the start, as Algorithm 1 has it (s = phi(W)), and the least width of each group.

    These are the live ones, and as many dead ones as make a multiple of `round_to`: they will be the first to go. A
    group of which less than the floor is read has not been trained yet, such as one before a head of zeros. It counts
    as whole. Groups that are frozen, or that no layer reads with weights of its own, keep their width.

    Args:
        model: The network that was traced.
        graph: Its channel graph.
        min_share: Floors are at least this share of the full width, and at least the group's `least`.
        round_to: Floors are multiples of this; a group that is no wider stays.
        device: Where the result lives.

    Returns:
        (channels,) bool and (groups,) int64.
    """
    _check(min_share, round_to)
    alive, floors = [], []
    left = graph.skeleton.lattice(round_to)
    live = live_masks(model, graph)
    for group, lives, mask, rest in zip(graph.groups, live, kept_masks(graph, live, round_to), left, strict=True):
        mask = torch.ones_like(mask) if _stays(group) or int(lives.sum()) < _least(group, min_share) else mask
        alive.append(mask.to(device))
        floors.append(_floor(group, int(mask.sum()), min_share, round_to, rest))
    return torch.cat(alive), torch.tensor(floors, dtype=torch.long, device=device)
