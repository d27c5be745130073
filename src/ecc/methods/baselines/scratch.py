"""The controls "scratch" and "dense": what the widths alone are worth, and what all of it costs.

Scratch: Z. Liu et al., Rethinking the Value of Network Pruning, ICLR 2019, train the widths that a pruning found from
random weights, and find that they often do as well. `Scratch` takes such widths and draws all weights anew; tuning is
its whole training. For a fair match:

    finetune_steps   such that tuning takes the total batches of the method it is compared with (`batches.total` in its
                 summary.json), those that trained the dense network included. `Compression` adds the `steps` of a
                 solve that were not used to tuning, and this solve uses none: take 1 for `steps`, or subtract them.
    pretrain_steps  does not count: what it trains is forgotten
    lr           that of a training from random weights, such as `pretrain_lr`: tuning starts with it
    distill      0, unless the dense network is to teach this one too

As there: same network, same widths, as many batches ("scratch-B" in their words, by batches and not FLOPs). Changed:
weights are drawn at the size of the dense network and then cut, so that those of a narrow layer come from the spread of
a wide one; normalisation makes up for it where there is any.

Dense: the network as it is, trained for as many batches as the others, is no method. It removes nothing, so it meets
no budget below 100 %. It is a `Compression` with a budget of 100 %, by any method that is done where the targets are met,
such as `Uniform`, with `finetune_steps` as above: only tuning is left to do. Say 101 %, lest the last bit of a division, or
scales that scatter, cost it a channel.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ecc.errors import BadTask, BadWidths
from ecc.methods.base import PruningContext, magnitudes
from ecc.training import derived_seed, fork_rng

_RESETS = ("reset_parameters", "_reset_parameters")  # the second is that of torch's attention


class Scratch:
    """Cuts to widths that are given, and forgets all weights.

    Args:
        widths: Of each group by its name, as in the widths.json of another run; a group without one stays whole.
        build: Makes the network anew, with random weights of its own taste. By default each module resets itself, as
            torch's modules can.
    """

    name = "scratch"
    needs_held_out = False

    def __init__(self, widths: Mapping[str, int], build: Callable[[], nn.Module] | None = None) -> None:
        self._asked = {name: int(width) for name, width in widths.items()}
        self._build = build
        self._is_cut = False

    def config(self) -> dict[str, Any]:
        """The widths, and whether the network is built anew."""
        return {"widths": dict(self._asked), "builds": self._build is not None}

    def start(self, work: PruningContext) -> None:
        """Checks the widths.

        Raises:
            BadWidths: If a group does not exist, or cannot have its width.
            BadTask: If there are weights that nobody can draw anew.
        """
        self._work, self._is_cut = work, False
        groups = {group.name: group for group in work.graph.groups}
        for name, width in self._asked.items():
            if name not in groups:
                raise BadWidths(f"no group is called {name!r}; the widths must be of this network.")
            group = groups[name]
            least = group.width if group.frozen is not None else 1
            if not least <= width <= group.width:
                raise BadWidths(f"group {name!r} cannot have width {width}; it can have {least} to {group.width}.")
        if self._build is None:
            _refuse_orphans(work.model)

    @property
    def is_done(self) -> bool:
        """Whether it was cut. There is nothing more to be done, even if the targets say so: the widths are given."""
        return self._is_cut

    def step(self) -> None:
        """Draws all weights, and cuts.

        Which channels stay was decided by the trained weights: by the new ones it would favour large draws.

        Raises:
            BadTask: If a new network has zeros where channels are read: these would be cut off as dead.
        """
        work = self._work
        widths = [self._asked.get(group.name, group.width) for group in work.graph.groups]
        scores = magnitudes(work)
        redraw_(work.model, work.settings.train.seed, self._build)
        work.keep_channels_(work.model, scores, widths)
        if work.widths() != widths:
            raise BadTask(
                "the new network reads channels with zeros, so that they count as dead; give a `build` that does not."
            )
        self._is_cut = True
        work.log({"phase": "scratch", "widths": widths})

    def state_dict(self) -> dict[str, Any]:
        """Whether it was cut."""
        return {"is_cut": self._is_cut}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts it back."""
        self._is_cut = bool(state["is_cut"])


def redraw_(model: nn.Module, seed: int, build: Callable[[], nn.Module] | None = None) -> None:
    """Gives a network new random weights, and leaves the random generators as they were.

    Args:
        model: Changed in place, statistics of normalisation included.
        seed: The same one gives the same weights.
        build: Makes such a network; by default each module resets itself.
    """
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    with fork_rng(derived_seed(seed, "scratch"), device), torch.no_grad():
        if build is not None:
            model.load_state_dict(build().state_dict())
            return
        for module in model.modules():
            reset = _reset_of(module)
            if reset is not None:
                reset()


def _reset_of(module: nn.Module) -> Callable[[], Any] | None:
    return next((reset for name in _RESETS if callable(reset := getattr(module, name, None))), None)


def _refuse_orphans(model: nn.Module) -> None:
    orphans = [
        ".".join(filter(None, (place, name)))
        for place, module in model.named_modules()
        if _reset_of(module) is None
        for name, _ in module.named_parameters(recurse=False)
    ]
    if orphans:
        raise BadTask(
            f"{', '.join(orphans[:3])} would keep trained values, for the module that holds it has no "
            "reset_parameters. Give the module one, or tell Scratch how to `build` the network."
        )
