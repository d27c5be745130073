"""Energy-aware pruning: prune the layers that use most energy first, and refit the kept weights to the dense outputs.

T.-J. Yang, Y.-H. Chen, V. Sze, "Designing Energy-Efficient Convolutional Neural Networks using Energy-Aware Pruning",
CVPR 2017. No code was published; this follows the description.

As in the paper: layers are pruned in the order of their energy, the most expensive first. In each layer the smallest
weights are removed, a few too many; those that lower the error of the layer's output most are restored; the kept ones
are refit by least squares on the output. There are several passes over all layers, with training after each. At equal
numbers of batches, the pruning steps are divided among the trainings between passes.

Changed for channels: the paper removes single weights, from which an ordinary device gains nothing. Here a step prunes
one channel group. Its magnitude is that of all slices that consume it, its error is summed over its consumers, and
those are refit one after the other in the order of the forward pass. Layers that cannot be refit (see `refit.py`) are
pruned by magnitude alone.

Changed for energy: the order comes from the fitted energy model of the device at the widths of each pass, not from a
model of one chip; for costs without layers, from the derivative times the width. The paper stops when the accuracy
falls too far; here a budget has to be met. So a pass stops where the targets are met, and the last group is pruned no
further than needed.

If a measurement lowers the targets, pruning continues from the present network, as further passes would.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ecc.energy import EnergyModel
from ecc.errors import InfeasibleBudget, option_hint
from ecc.graph import ChannelGroup, Role, live_masks, mask_channels_
from ecc.methods.base import PruningContext, magnitudes
from ecc.options import check_options, option

from .calibration_loss import CalibrationBatches
from .refit import ConsumerView, Samples, collect_samples, columns_of, refit_, refittable_modules, restore_best
from .widths import largest_ratio


@dataclass(frozen=True, kw_only=True)
class EapSettings:
    """Settings of energy-aware pruning."""

    prune_ratio: float | None = option(
        0.25,
        "Fraction of its live channels that each group loses in a pass. None finds, for each pass, the one ratio at "
        "which all groups together meet the targets, so that one pass is usually enough.",
        range=(1e-6, 1 - 1e-6),
    )
    extra: float = option(
        0.1, "Channels removed beyond the need and restored again, as a fraction of those removed.", range=(0, None)
    )
    batches: int = option(4, "Number of calibration batches.", range=(1, None))
    rows: int = option(4096, "Output positions of each layer in the least squares problem.", range=(1, None))
    ridge: float = option(1e-3, "Regularisation of the refit towards the present weights.", range=(1e-12, None))
    refit: bool = option(True, "Refit the kept weights.")
    finetune_steps: int | None = option(
        None,
        "Training steps after each pass that did not meet the targets. None divides the pruning steps among the passes "
        "that are expected.",
        range=(0, None),
    )

    def __post_init__(self) -> None:
        check_options(self)


class Eap:
    """Prunes one group after the other, those with the most expensive consumers first."""

    name = "eap"
    needs_held_out = False

    def __init__(self, settings: EapSettings | None = None) -> None:
        self.settings = settings or EapSettings()

    def config(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self.settings)

    def start(self, context: PruningContext) -> None:
        """Keep the dense network, whose outputs are the targets of the refits."""
        self._context = context
        self._dense = copy.deepcopy(context.model).requires_grad_(False)
        self._batches = CalibrationBatches(context, self.settings.batches)
        self._first_total = context.stream.total
        self._passes = 0
        self._keep_ratio = 1.0  # fraction of its channels that a group keeps in this pass
        self._queue: list[str] = []

    @property
    def is_done(self) -> bool:
        """Whether the targets are met."""
        return self._context.constraint_violation(self._context.widths()) <= 0

    def step(self) -> None:
        """Prune one group. The first step of a pass orders the groups."""
        context = self._context
        live = context.named_widths()
        least = dict(zip(live, context.min_widths(), strict=True))
        self._queue = [name for name in self._queue if live[name] > least[name]]
        if not self._queue:
            self._start_pass(live, least)
        name = self._queue.pop(0)
        width = self._target_width(list(live.values()), list(live).index(name))
        line = {"phase": self.name, "pass": self._passes, "group": name, "width": width}
        context.log(line | self._prune(context.graph[name], width))

    # ------------------------------------------------------------ which group, and how far

    def _start_pass(self, live: Mapping[str, int], least: Mapping[str, int]) -> None:
        context, settings = self._context, self.settings
        prunable = [name for name, width in live.items() if width > least[name]]
        if not prunable:
            raise InfeasibleBudget(
                "every group is at its minimum width, and the targets are not met. Raise the budget, or lower "
                f"{option_hint('min_width_ratio')}."
            )
        widths = list(live.values())
        if self._passes and (steps := self._finetune_steps(widths)):
            context.train(context.model, steps, context.settings.lr, context.stream)
        self._passes += 1
        self._keep_ratio = self._uniform_ratio(widths) if settings.prune_ratio is None else 1 - settings.prune_ratio
        self._queue = [name for name in self.order() if name in prunable]
        context.log({"phase": self.name, "pass": self._passes, "keep_ratio": self._keep_ratio, "order": self._queue})

    def _finetune_steps(self, widths: list[int]) -> int:
        """Training steps before the next pass."""
        settings, context = self.settings, self._context
        if settings.finetune_steps is not None:
            return settings.finetune_steps
        left = context.settings.prune_steps - (context.stream.total - self._first_total)
        if settings.prune_ratio is None:
            return 0
        ratio = max(self._uniform_ratio(widths), 1e-3)
        passes = math.ceil(math.log(ratio) / math.log(1 - settings.prune_ratio))
        return max(0, left // max(1, passes))

    def order(self) -> list[str]:
        """Prunable groups by the energy of their consumers, the most expensive first.

        Of several costs, the one that is furthest above its target counts.
        """
        context = self._context
        widths = context.named_widths()
        vector = context.graph.widths(widths)
        pairs = zip(context.costs, context.targets, strict=True)
        cost = max(pairs, key=lambda pair: float(pair[0].to("cpu").value(vector)) / pair[1])[0].to("cpu")
        if isinstance(cost, EnergyModel):
            layers = cost.per_layer(widths)
            groups = context.graph.prunable
            energy = {g.name: sum(layers.get(path, 0.0) for path in g.layers(Role.CONSUMER)) for g in groups}
        else:
            energy = dict(zip(widths, (cost.gradient(vector) * vector).tolist(), strict=True))
        return sorted((group.name for group in context.graph.prunable), key=lambda name: -energy[name])

    def _uniform_ratio(self, widths: list[int]) -> float:
        """Largest ratio of all live widths that meets the targets; 0 if none does."""
        context = self._context

        def fits(ratio: float) -> bool:
            rounded = context.round_widths([ratio * width for width in widths])
            return context.constraint_violation([min(pair) for pair in zip(widths, rounded, strict=True)]) <= 0

        return largest_ratio(fits)

    def _target_width(self, widths: list[int], number: int) -> int:
        """Width of a group after its step: by the ratio, at least one step narrower, and no narrower than needed."""
        context = self._context

        def with_width(width: float) -> list[float]:
            return [*widths[:number], width, *widths[number + 1 :]]

        def rounded(width: float) -> int:
            return context.round_widths(with_width(width))[number]

        def is_enough(width: int) -> bool:
            return context.constraint_violation(with_width(width)) <= 0

        width = rounded(widths[number] - 1)
        last = min(width, rounded(self._keep_ratio * widths[number]))
        if not is_enough(last):
            return last
        while not is_enough(width):
            width = max(last, rounded(width - 1))
        return width

    # ------------------------------------------------------------ pruning a group

    def _prune(self, group: ChannelGroup, width: int) -> dict[str, Any]:
        """Remove, restore and refit; returns the numbers for the history."""
        context, settings = self._context, self.settings
        consumers = self._consumers(group)
        dense = self._samples(self._dense, list(consumers)) if consumers else {}
        consumers = {path: index for path, index in consumers.items() if path in dense}  # layers that were called
        names = list(context.graph.full_widths)
        live = live_masks(context.model, context.graph)[names.index(group.name)].cpu()
        importance = magnitudes(context)[group.name].cpu().masked_fill(~live, -1)
        alive = importance.argsort(descending=True, stable=True)[: int(live.sum())].tolist()
        extra = min(math.ceil(settings.extra * (len(alive) - width)), width) if consumers else 0
        removed = alive[width - extra :]
        restored = restore_best(self._views(consumers, dense), removed, extra) if extra else []
        dead = [unit for unit in removed if unit not in restored]
        mask_channels_(context.model, context.graph, {group.name: torch.tensor(dead, dtype=torch.long)})
        if settings.refit:
            modules = refittable_modules(context.model)
            for path in consumers:  # in order: the inputs of a layer may depend on the refit of those before it
                inputs = self._samples(context.model, [path])[path].inputs
                refit_(modules[path], inputs, dense[path].outputs, settings.ridge)
        return {"removed": len(dead), "restored": len(restored), "refit": list(consumers) if settings.refit else []}

    def _consumers(self, group: ChannelGroup) -> dict[str, Tensor]:
        """Consumers of a group that can be refit, in the order of the forward pass, and the indices of its channels."""
        modules = refittable_modules(self._context.model)
        found: dict[str, Tensor] = {}
        for one in group.slices:
            path, _, tensor = one.tensor.rpartition(".")
            if one.is_consumer and path in modules and tensor == "weight" and one.axis == 1:
                found[path] = torch.cat([found[path], one.index], 1) if path in found else one.index
        return found

    def _views(self, consumers: Mapping[str, Tensor], dense: Mapping[str, Samples]) -> list[ConsumerView]:
        modules = refittable_modules(self._context.model)
        now = self._samples(self._context.model, list(consumers))
        return [
            ConsumerView(
                Samples(now[path].inputs, dense[path].outputs), modules[path], columns_of(modules[path], index.cpu())
            )
            for path, index in consumers.items()
        ]

    def _samples(self, model: torch.nn.Module, paths: list[str]) -> dict[str, Samples]:
        seed = self._context.settings.train.seed
        return collect_samples(model, paths, self._batches.inputs(), self.settings.rows, seed)

    # ------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Position within the pass."""
        return {
            "first_batch": self._batches.state(),
            "first_total": self._first_total,
            "passes": self._passes,
            "keep_ratio": self._keep_ratio,
            "queue": list(self._queue),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self._batches.restore(state["first_batch"])
        self._first_total = int(state["first_total"])
        self._passes, self._keep_ratio = int(state["passes"]), float(state["keep_ratio"])
        self._queue = [str(name) for name in state["queue"]]
