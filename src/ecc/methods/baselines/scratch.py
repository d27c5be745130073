"""The controls "scratch" and "dense".

Scratch: Z. Liu et al., Rethinking the Value of Network Pruning, ICLR 2019, train the widths that a pruning method found
from random weights, and find that they often do as well. `Scratch` takes such widths and reinitialises all weights;
finetuning is its whole training. For a fair comparison set

    finetune_steps  so that finetuning uses the total batches of the other method (`batches.total` in its summary.json),
                    pretraining included. `Compression` adds pruning steps that were not used to finetuning, and Scratch
                    uses none: set `prune_steps` to 1, or subtract them.
    pretrain_steps  to anything: the pretrained weights are discarded
    lr              to the rate of a training from random weights, such as `pretrain_lr`
    kd_weight       to 0, unless the dense network should teach this one too

As in the paper: same network, same widths, as many batches ("scratch-B", by batches instead of FLOPs). Changed: weights
are drawn at the size of the dense network and then pruned, so those of a narrow layer have the scale of a wide one;
normalisation layers compensate for it.

Dense: training the unpruned network for as many batches is not a method. Use `Compression` with a budget of 100 % and
any method, such as `Uniform`, and `finetune_steps` as above.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ecc.errors import BadTask, BadWidths
from ecc.graph import Branch, ChannelGraph, mask_branches_
from ecc.methods.base import PruningContext, magnitudes
from ecc.torch_utils import device_of
from ecc.training import derived_seed, fork_rng

_RESETS = ("reset_parameters", "_reset_parameters")  # the second is that of torch's attention


class Scratch:
    """Prunes to given widths and reinitialises all weights.

    Args:
        widths: Width of each group by name, as in the widths.json of another run; missing groups keep their width.
    """

    name = "scratch"
    needs_held_out = False
    removes_branches = True

    def __init__(self, widths: Mapping[str, int]) -> None:
        self._widths = {name: int(width) for name, width in widths.items()}
        self._is_pruned = False

    def config(self) -> dict[str, Any]:
        """The widths."""
        return {"widths": dict(self._widths)}

    def start(self, context: PruningContext) -> None:
        """Check the widths."""
        self._context, self._is_pruned = context, False
        groups = {group.name: group for group in context.graph.groups}
        removed = {name for branch in self._removed(context.graph) for name in branch.groups}
        for name, width in self._widths.items():
            if name not in groups:
                raise BadWidths(f"there is no group {name!r}; the widths must be of this network.")
            group = groups[name]
            least = 0 if name in removed else group.width if group.frozen is not None else 1
            if not least <= width <= group.width:
                raise BadWidths(f"group {name!r} cannot have width {width}; allowed are {least} to {group.width}.")
        _check_resets(context.model)

    def _removed(self, graph: ChannelGraph) -> list[Branch]:
        """Branches of which all groups have width 0."""
        return [branch for branch in graph.branches if all(self._widths.get(name) == 0 for name in branch.groups)]

    @property
    def is_done(self) -> bool:
        """Whether the network was pruned. The targets do not matter, since the widths are given."""
        return self._is_pruned

    def step(self) -> None:
        """Reinitialise all weights, and prune.

        The trained weights decide which channels stay: magnitudes of the new weights would favour large draws.
        """
        context = self._context
        widths = [self._widths.get(group.name, group.width) for group in context.graph.groups]
        importance = magnitudes(context)
        reinitialise_(context.model, context.settings.train.seed)
        context.keep_channels_(context.model, importance, widths)
        mask_branches_(context.model, context.graph, [branch.name for branch in self._removed(context.graph)])
        if context.widths() != widths:
            raise BadTask("the new network has zero weights, so channels count as dead.")
        self._is_pruned = True
        context.log({"phase": self.name, "widths": widths})

    def state_dict(self) -> dict[str, Any]:
        """Whether the network was pruned."""
        return {"is_pruned": self._is_pruned}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._is_pruned = bool(state["is_pruned"])


def reinitialise_(model: nn.Module, seed: int) -> None:
    """Give a network new random weights, without changing the global random state."""
    with fork_rng(derived_seed(seed, "scratch"), device_of(model)), torch.no_grad():
        for module in model.modules():
            reset = _reset_of(module)
            if reset is not None:
                reset()


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((reset for name in _RESETS if callable(reset := getattr(module, name, None))), None)


def _check_resets(model: nn.Module) -> None:
    missing = [
        ".".join(filter(None, (path, name)))
        for path, module in model.named_modules()
        if _reset_of(module) is None
        for name, _ in module.named_parameters(recurse=False)
    ]
    if missing:
        raise BadTask(
            f"{', '.join(missing[:3])} cannot be reinitialised: the module has no reset_parameters. Add this method."
        )
