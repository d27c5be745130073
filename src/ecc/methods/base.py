"""`Method`: what a rival of ECC has to be. One file each; an instance is passed to `Compression`.

A method is given its work, takes steps of its natural size (a round, an episode, a layer), and says when it is done:
when its predictions are within the targets. Between two steps its state can be saved. What it leaves is the dense network
with channels silenced, so that all methods are cut, weighed and tuned alike.

The targets may change after it was done: the scales found that the energy model errs there. A method that is asked again
goes on from where it is, or begins anew where that is cheap. One that cuts the dense network anew in each step says so
(`prunes_from_dense = True`), and is also asked for more where its network lies far below the budget.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ecc.energy import Cost
from ecc.errors import BadTask
from ecc.graph import ChannelGraph, live_masks, mask_channels_
from ecc.task import Task
from ecc.training import BatchStream, Teacher

from .ecc.constraints import group_min_widths
from .ecc.importance import ConsumerSlices
from .settings import CompressSettings


@dataclass
class PruningContext:
    """A network, what it may cost, and what there is to work with."""

    model: nn.Module
    """The dense network, trained; a method silences channels of it in place."""
    graph: ChannelGraph
    costs: tuple[Cost, ...]
    targets: list[float]
    """What each cost may be at most, as the cost itself predicts it."""
    settings: CompressSettings
    width_multiple: int
    stream: BatchStream
    """Of training batches; candidates that are given up are trained on forks of it."""
    teacher: Teacher | None
    held_out: Callable[[nn.Module], float]
    """Score on data that no choice of a method may go beyond; higher is better."""
    train: Callable[[nn.Module, int, float, BatchStream], None]
    """`train(model, steps, lr, stream)`: trains in place, and silent channels stay silent."""
    log: Callable[[Mapping[str, Any]], None]
    """A line for the history."""

    def widths(self, model: nn.Module | None = None) -> list[int]:
        """What `slim` would keep of each group, in the order of the graph: live channels, and dead ones to round up."""
        masks = live_masks(self.model if model is None else model, self.graph)
        device = next((mask.device for mask in masks if mask.device.type != "cpu"), torch.device("cpu"))
        counts = torch.stack([mask.sum().to(device) for mask in masks]).tolist()  # waits for the device once
        return self.graph.structure.padded(counts, self.width_multiple)

    def constraint_violation(self, widths: Sequence[float]) -> float:
        """The largest of cost / aim - 1 at some widths: not above 0 where all targets are met."""
        vector = torch.tensor(widths, dtype=torch.float64)
        spent = (float(cost.to("cpu").value(vector)) for cost in self.costs)
        return max(cost / aim - 1 for cost, aim in zip(spent, self.targets, strict=True))

    def min_widths(self) -> list[int]:
        """The least width of each group."""
        return group_min_widths(self.graph, self.settings.min_width_ratio, self.width_multiple)

    def round_widths(self, widths: Sequence[float]) -> list[int]:
        """Widths on the width_remainders that the hardware likes, none larger than given and none below its floor."""
        left = self.graph.structure.width_remainders(self.width_multiple)
        found = []
        for group, width, floor, rest in zip(self.graph.groups, widths, self.min_widths(), left, strict=True):
            on_lattice = rest + int((width - rest + 1e-9) // self.width_multiple) * self.width_multiple
            found.append(group.width if width >= group.width else max(floor, on_lattice))
        return found

    def keep_channels_(self, model: nn.Module, scores: Mapping[str, Tensor], widths: Sequence[int]) -> None:
        """Silences all but the channels of highest score.

        Args:
            model: Changed in place.
            scores: One for each channel of each group that can be cut.
            widths: How many stay, in the order of the graph.
        """
        dead = {}
        cut = [group.name for group, width in zip(self.graph.groups, widths, strict=True) if width < group.width]
        known = _on_cpu({name: scores[name] for name in cut if name in scores})
        for group, width in zip(self.graph.groups, widths, strict=True):
            if group.frozen is None and width < group.width:
                order = known[group.name].argsort(descending=True, stable=True)
                mask = torch.zeros(group.width, dtype=torch.bool)
                mask[order[width:]] = True
                dead[group.name] = mask
        mask_channels_(model, self.graph, dead)


class Method(Protocol):
    """A way to bring a network down to its targets."""

    @property
    def name(self) -> str:
        """Short, for tables."""

    @property
    def needs_held_out(self) -> bool:
        """Whether it judges by `PruningContext.held_out`; a task without held-out data is then refused before any training."""

    def config(self) -> dict[str, Any]:
        """Its settings as plain values; a run with other settings is another run."""

    def start(self, work: PruningContext) -> None:
        """Takes on a work. Called once, before anything else, and with the dense weights in any case."""

    def step(self) -> None:
        """One step of its natural size; must bring it nearer to being done."""

    @property
    def is_done(self) -> bool:
        """Whether the network in the work is within the targets."""

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later, beside the weights of the network and those that `start` was given."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse, after `start`."""


def check_needs_held_out(method: Method | None, task: Task) -> None:
    """Refuses a task without held-out data where the method needs them.

    Raises:
        BadTask: With the way out.
    """
    if method is not None and method.needs_held_out and task.evaluate_held_out is None:
        raise BadTask(
            f"{method.name} chooses between candidates, and task {task.name!r} has no evaluate_held_out to judge them "
            "by. Give it one, or take a method that needs none, such as ecc."
        )


class OneShotMethod:
    """Base of methods without settings that prune the dense network in one step, and again when the targets change."""

    needs_held_out = False
    prunes_from_dense = True

    def config(self) -> dict[str, Any]:
        """No settings."""
        return {}

    def start(self, context: PruningContext) -> None:
        """Keep the context and the dense weights."""
        self._context = context
        self._dense = copy.deepcopy(context.model.state_dict())

    @property
    def is_done(self) -> bool:
        """Whether the targets are met."""
        return self._context.constraint_violation(self._context.widths()) <= 0

    def state_dict(self) -> dict[str, Any]:
        """Empty: the method starts from the dense weights again."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing to restore."""


def _on_cpu(scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """In one transfer, for each waits for the device."""
    if not scores:
        return {}
    flat = torch.cat(list(scores.values())).cpu()
    return dict(zip(scores, flat.split([len(one) for one in scores.values()]), strict=True))


def magnitudes(work: PruningContext, model: nn.Module | None = None) -> dict[str, Tensor]:
    """For each channel that can be cut, the sum of squares of the weights that read it."""
    model = work.model if model is None else model
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    flat = ConsumerSlices(model, work.graph, device).norms()
    found = {}
    for group in work.graph.prunable:
        first, stop = work.graph.channel_ids(group.name)
        found[group.name] = flat[first - 1 : stop - 1]
    return found
