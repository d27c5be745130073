"""Single operators under the tracer, on tensors with given labels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ecc.graph.calls import OpRecord
from ecc.graph.grouping import ChannelPartition
from ecc.graph.labels import FROZEN, ChannelLabels, PrunedLabels, Role
from ecc.graph.tracer import Tracer


class OpTrace:
    """A trace in which a test creates the tensors and calls the operators."""

    def __init__(self) -> None:
        self.channel_labels = ChannelLabels()
        self.tracer = Tracer(self.channel_labels, recording=True)

    # --- tensors --------------------------------------------------------------------------------

    def activation(self, labels: Tensor | None) -> Tensor:
        """A meta tensor with these labels; None for a value that belongs to no channel."""
        shape = torch.Size([]) if labels is None else labels.shape
        tensor = torch.empty(shape, device="meta")
        tensor._ecc_state = labels  # type: ignore[attr-defined]
        return tensor

    def channels(self, *shape: int, axis: int = 1, name: str = "x") -> Tensor:
        """An activation whose labels change along one axis, like the output of a layer."""
        vector = self.channel_labels.axis(name, 0, shape[axis], Role.PRODUCER)
        return self.activation(vector.view([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape))

    def distinct(self, *shape: int, name: str = "x") -> Tensor:
        """An activation with a different label at every position."""
        count = torch.Size(shape).numel()
        return self.activation(self.channel_labels.axis(name, 0, count, Role.PRODUCER).view(shape))

    def input(self, *shape: int) -> Tensor:
        """An input of the network."""
        return self.activation(torch.tensor(FROZEN).expand(shape))

    def parameter(self, name: str, *shape: int) -> Tensor:
        tensor = torch.empty(shape, device="meta")
        self.tracer.name(tensor, name)
        return tensor

    # --- operators and their effects --------------------------------------------------------------

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with torch.inference_mode(), self.tracer:
            return function(*args, **kwargs)

    def labels(self, tensor: Tensor) -> Tensor | None:
        """The labels of every element."""
        found = self.tracer.labels(tensor)
        return None if found is None else found.expand(tensor.shape)

    def along(self, tensor: Tensor, axis: int = 1) -> list[int]:
        """The labels along one axis, which must not change along the others."""
        labels = self.labels(tensor)
        assert labels is not None
        lines = labels.movedim(axis, 0).reshape(labels.shape[axis], -1)
        assert torch.equal(lines, lines[:, :1].expand_as(lines))
        return lines[:, 0].tolist()

    def axis(self, name: str, axis: int) -> list[int]:
        """The labels of an axis of a parameter."""
        return self.channel_labels.vector(name, axis).tolist()

    def roles(self, name: str) -> dict[int, set[Role]]:
        return {axis: roles for (tensor, axis), roles in self.channel_labels.roles.items() if tensor == name}

    def tied(self) -> list[list[int]]:
        """Sets of two or more labels that are pruned together."""
        together = defaultdict(list)
        for label, unit in enumerate(ChannelPartition(self.channel_labels).unit.tolist()):
            together[unit].append(label)
        return sorted(labels for labels in together.values() if len(labels) > 1)

    def frozen(self) -> dict[int, str]:
        """The first reason why each label is frozen, before unions spread it."""
        reasons: dict[int, str] = {}
        for labels, why in self.channel_labels.freezes():
            for label in labels.tolist():
                reasons.setdefault(label, why)
        return reasons

    @property
    def record(self) -> OpRecord:
        (only,) = self.tracer.records
        return only


def pruned_labels(dense: ChannelLabels, *kept: Tensor) -> PrunedLabels:
    """The labels of a pruned network that keeps these labels of a dense one."""
    partition = ChannelPartition(dense)
    alive = torch.zeros(dense.size, dtype=torch.bool)
    for labels in kept:
        alive[labels] = True
    return PrunedLabels(dense, alive, torch.from_numpy(partition.unit), partition.frozen_mask(), partition.repeated())


def merged(*parts: list[int]) -> list[list[int]]:
    """[[a, c], [b, d]] from [a, b] and [c, d]."""
    return sorted(sorted(set(labels)) for labels in zip(*parts, strict=True))
