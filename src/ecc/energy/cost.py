"""`Cost`: what a network costs at any widths, in joules, seconds, bytes or whatever else has a budget."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch
from torch import Tensor


@runtime_checkable
class Cost(Protocol):
    """A nonnegative function of the widths of all channel groups that never falls when a width grows.

    Widths are real numbers, one for each group in the order of `ChannelGraph.groups`, frozen groups among them.
    """

    @property
    def resource(self) -> str:
        """What is spent: energy, latency, macs, parameters, weight_bytes, activation_bytes, ..."""

    @property
    def unit(self) -> str:
        """J, s, B, or nothing for counts; of one inference of the whole example batch."""

    @property
    def label(self) -> str:
        """Where the numbers come from: measured, estimated, declared or counted. Belongs beside every number."""

    @property
    def groups(self) -> tuple[str, ...]:
        """Names of all groups, in the order of the graph."""

    @property
    def full_widths(self) -> tuple[int, ...]:
        """Of the dense network."""

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths, or at each row of a matrix; autograd goes through it."""

    def gradient(self, widths: Tensor) -> Tensor:
        """Derivative at one vector of widths, one number a group: closed form, no tape, no host synchronisation."""

    def to(self, device: torch.device | str) -> Cost:
        """The same cost, computing on a device."""
