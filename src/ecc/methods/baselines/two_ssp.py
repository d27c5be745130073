"""2SSP: first prune the hidden units of the MLPs, then remove attention blocks one by one.

Sandri et al., 2SSP: A Two-Stage Framework for Structured Pruning of LLMs, TMLR 2025. Stage 1: hidden units with the
smallest mean activation norm, the same number in every MLP. Stage 2: the attention block whose removal raises the
perplexity on calibration text least, repeatedly. How many attention blocks go follows from the sparsity s as N
(|attention| / |MLP|) s^1.5, with the numbers of parameters of both. Changed for energy: s is the smallest one that
meets the targets, and the perplexity is that on held-out text.
"""

from __future__ import annotations

import math

from torch import Tensor

from ecc.errors import EccError
from ecc.methods.base import OneShotMethod, PruningContext
from ecc.methods.calibration import (
    activation_statistics,
    batch_inputs,
    branch_groups,
    calibration_batches,
    mask_,
    restored_tensors,
)

from .widths import largest_ratio

EXPONENT = 1.5
"""The paper's alpha."""


class TwoSsp(OneShotMethod):
    """Prunes MLP widths, then attention blocks."""

    name = "2ssp"
    needs_held_out = True
    removes_branches = True

    def start(self, context: PruningContext) -> None:
        """Compute the importance of hidden units.

        Raises:
            EccError: If the attention blocks of the network cannot be removed.
        """
        super().start(context)
        graph = context.graph
        self._attention = {
            name: groups for name, groups in branch_groups(context).items() if "attn" in name or "attention" in name
        }
        inside = {group for groups in self._attention.values() for group in groups}
        self._hidden = [group.name for group in graph.prunable if group.name not in inside]
        if not self._attention or not self._hidden:
            raise EccError("method '2ssp' needs attention blocks that can be removed and MLPs; this network lacks one.")
        inputs = batch_inputs(context, calibration_batches(context))
        statistics = activation_statistics(context.model, graph, inputs)
        self._importance: dict[str, Tensor] = {
            name: sum(one.square_sums.sum(1).sqrt() for one in parts)  # type: ignore[misc]  # not empty
            for name, parts in statistics.items()
        }
        self._hidden = [name for name in self._hidden if name in self._importance]
        full = graph.full_widths
        without = graph.parameters(dict.fromkeys(inside, 0)) if inside else graph.parameters()
        self._parameter_ratio = float(graph.parameters() - without) / max(1.0, self._hidden_parameters(full))

    def _hidden_parameters(self, full: dict[str, int]) -> float:
        graph = self.context.graph
        least = {group.name: group.min_width for group in graph.prunable if group.name in self._hidden}
        removable = float(graph.parameters() - graph.parameters(least))
        shares = [1 - least[name] / full[name] for name in least]
        return removable / max(1e-9, sum(shares) / len(shares))

    def step(self) -> None:
        """Find the sparsity, and prune."""
        context = self.context
        found = largest_ratio(lambda ratio: self._violation(1 - ratio, ranked=False) <= 0)
        widths = self._widths(1 - found, ranked=True)
        context.model.load_state_dict(self.dense_state)
        mask_(context, self._importance, widths)
        self.pruned_for = list(self.context.targets)
        context.log({"phase": self.name, "sparsity": 1 - found, "widths": widths})

    def _violation(self, sparsity: float, *, ranked: bool) -> float:
        return self.context.constraint_violation(list(self._widths(sparsity, ranked=ranked).values()))

    def _widths(self, sparsity: float, *, ranked: bool) -> dict[str, int]:
        context = self.context
        full = context.graph.full_widths
        blocks = len(self._attention)
        many = min(blocks - 1, round(blocks * self._parameter_ratio * sparsity**EXPONENT))
        wanted = [(1 - sparsity) * width if name in self._hidden else width for name, width in full.items()]
        widths = dict(zip(full, context.round_widths(wanted), strict=True))
        names = self._ranked(widths, many) if ranked else list(self._attention)[:many]
        for name in names:
            widths.update(dict.fromkeys(self._attention[name], 0))
        return widths

    def _ranked(self, widths: dict[str, int], many: int) -> list[str]:
        """Attention blocks in the order of removal, found one by one on the network with pruned MLPs."""
        context = self.context
        context.model.load_state_dict(self.dense_state)
        mask_(context, self._importance, widths)
        removed: list[str] = []
        while len(removed) < many:
            best, least = "", math.inf
            for name, groups in self._attention.items():
                if name in removed:
                    continue
                with restored_tensors(context.model, context.graph, groups):
                    mask_(context, {}, dict.fromkeys(groups, 0))
                    loss = -context.held_out(context.model)
                if loss < least or not best:
                    best, least = name, loss
            mask_(context, {}, dict.fromkeys(self._attention[best], 0))
            removed.append(best)
        return removed
