"""2SSP: first prune the hidden units of the MLPs, then remove attention blocks one by one.

Sandri et al., 2SSP: A Two-Stage Framework for Structured Pruning of LLMs, TMLR 2025. Stage 1: hidden units with the
smallest norm of their activations over a sequence, averaged over sequences; the same number in every MLP. Stage 2: the
attention block whose removal from the network with pruned MLPs raises the perplexity least, repeatedly.

Changed for energy: the paper computes the number of attention blocks from the share of parameters to remove, with a
constant found by experiments. An attention block may cost much more energy than its parameters suggest, because it
reads a KV cache. So every number is tried, with the widest MLPs that meet the targets, and the one with the smallest
held-out loss is taken. To choose it, blocks are ranked in the network with dense MLPs, once for all numbers. The
perplexity is that on held-out text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
        statistics = activation_statistics(context.model, graph, batch_inputs(context, calibration_batches(context)))
        self._importance: dict[str, Tensor] = {
            name: sum(one.mean_norms.sum(1) for one in parts)  # type: ignore[misc]  # not empty
            for name, parts in statistics.items()
            if name not in inside and graph[name].frozen is None
        }
        if not self._attention or not self._importance:
            raise EccError("method '2ssp' needs attention blocks that can be removed and MLPs; this network lacks one.")
        self._order: list[str] = []
        """Attention blocks in the order of their removal from the network with dense MLPs, as far as it is known."""

    def step(self) -> None:
        """Choose the number of attention blocks, and prune."""
        context = self.context
        number = self._choose_number()
        with_attention = {group: context.graph[group].width for groups in self._attention.values() for group in groups}
        self._prune_({**self._widths(self._order[:number]), **with_attention})
        widths = self._widths(self._removed_(number))
        self._prune_(widths)
        self.pruned_for = list(context.targets)
        context.log({"phase": self.name, "attention_blocks": number, "widths": widths})

    def _choose_number(self) -> int:
        """The number of removed attention blocks with the smallest held-out loss; the largest one if none suffices."""
        context, full = self.context, self.context.graph.full_widths
        most = len(self._attention) - 1  # a language model finds the length of its cache in an attention block
        while len(self._order) < most and self._violation(self._without(full, self._order)) > 0:
            self._prune_(self._without(full, self._order))
            self._order = self._removed_(len(self._order) + 1, self._order)
        losses = {}
        for number in range(len(self._order) + 1):
            widths = self._widths(self._order[:number])
            if self._violation(widths) <= 0:
                self._prune_(widths)
                losses[number] = -context.held_out(context.model)
        return min(losses, key=losses.__getitem__) if losses else most

    def _widths(self, removed: Sequence[str]) -> dict[str, int]:
        """Widths without some attention blocks, with the widest MLPs that meet the targets."""
        context, full = self.context, self.context.graph.full_widths

        def widths(ratio: float) -> dict[str, int]:
            wanted = [ratio * width if name in self._importance else width for name, width in full.items()]
            return self._without(dict(zip(full, context.round_widths(wanted), strict=True)), removed)

        dense_mlps = widths(1.0)
        if self._violation(dense_mlps) <= 0:
            return dense_mlps
        return widths(largest_ratio(lambda ratio: self._violation(widths(ratio)) <= 0))

    def _without(self, widths: dict[str, int], removed: Sequence[str]) -> dict[str, int]:
        return {**widths, **{group: 0 for name in removed for group in self._attention[name]}}

    def _violation(self, widths: dict[str, int]) -> float:
        return self.context.constraint_violation(list(widths.values()))

    def _prune_(self, widths: dict[str, int]) -> None:
        """The dense network with these widths."""
        self.context.model.load_state_dict(self.dense_state)
        mask_(self.context, self._importance, widths)

    def _removed_(self, many: int, removed: Sequence[str] = ()) -> list[str]:
        """Remove attention blocks one by one, each time the one that raises the held-out loss least.

        Args:
            many: Number of removed blocks at the end.
            removed: Blocks that have been removed before.
        """
        context, removed = self.context, list(removed)
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
