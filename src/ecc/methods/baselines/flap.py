"""FLAP: prune what fluctuates least, with one threshold for all layers, and compensate what is removed.

An et al., Fluctuation-based Adaptive Structured Pruning for Large Language Models, AAAI 2024. A channel has the
variance of its activation times the squared norm of the weights that consume it. Scores are standardised within each
layer and compared over all layers, so that layers lose different numbers of channels. The paper adds the mean of what
is removed to the bias of the next layer. Changed here: layers without a bias cannot have one added, so the consumer
is refit by least squares to its dense outputs, which includes that correction, if that lowers the held-out loss.
Changed for energy: the threshold is the smallest one whose widths meet the targets. The authors' code standardises the
channels of attention and then averages over heads, so that heads hardly differ and hidden units go first; here heads
are standardised as heads, because where attention costs most of the energy, hidden units save nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from ecc.methods.base import OneShotMethod, PruningContext
from ecc.methods.calibration import activation_statistics, batch_inputs, calibration_batches, mask_
from ecc.methods.reconstruction import REFITS, DenseOutputs, Refit, linear_consumers, reconstruct_best_, record_outputs

from .widths import largest_ratio


class Flap(OneShotMethod):
    """Prunes by the fluctuation of activations, globally."""

    name = "flap"
    needs_held_out = True

    def start(self, context: PruningContext) -> None:
        """Compute scores, and record the outputs of the dense layers."""
        super().start(context)
        self._inputs = batch_inputs(context, calibration_batches(context))
        statistics = activation_statistics(context.model, context.graph, self._inputs)
        self._scores: dict[str, Tensor] = {}
        for name, parts in statistics.items():
            raw = torch.stack([(one.variances * one.weight_norms).mean(1) for one in parts]).sum(0)
            self._scores[name] = (raw - raw.mean()) / raw.std().clamp(min=1e-12) if len(raw) > 1 else raw * 0
        consumed = [
            one.tensor
            for group in context.graph.prunable
            if group.name in self._scores
            for one in group.slices
            if one.is_consumer
        ]
        self._paths = linear_consumers(context.model, consumed)
        self._dense: DenseOutputs = record_outputs(context.model, self._paths, self._inputs)
        self._dense.residuals = {}  # each layer compensates for itself
        self.refit: Refit | None = None
        """How layers were refit last."""

    def step(self) -> None:
        """Find the threshold, and prune."""
        context = self.context
        ordered = torch.cat([score.flatten() for score in self._scores.values()]).sort().values.cpu()

        def widths(ratio: float) -> dict[str, int]:
            threshold = float(ordered[min(len(ordered) - 1, int((1 - ratio) * len(ordered)))])
            kept = dict(context.graph.full_widths)
            counts = {name: int((score >= threshold).sum()) for name, score in self._scores.items()}
            rounded = context.round_widths([counts.get(group.name, group.width) for group in context.graph.groups])
            kept.update({group.name: width for group, width in zip(context.graph.groups, rounded, strict=True)})
            return kept

        ratio = largest_ratio(lambda ratio: context.constraint_violation(list(widths(ratio).values())) <= 0)
        context.model.load_state_dict(self.dense_state)
        mask_(context, self._scores, widths(ratio))
        choices = REFITS if self.pruned_for is None else (self.refit,)  # a corrected target changes little
        self.refit = reconstruct_best_(context.model, self._dense, self._paths, self._inputs, context.held_out, choices)
        self.pruned_for = list(self.context.targets)
        context.log({"phase": self.name, "ratio": ratio, "widths": widths(ratio)})

    def state_dict(self) -> dict[str, Any]:
        """How layers were refit, besides that of the base class."""
        return {**super().state_dict(), "refit": None if self.refit is None else asdict(self.refit)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self.refit = None if state["refit"] is None else Refit(**state["refit"])
