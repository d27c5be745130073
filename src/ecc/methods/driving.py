"""`Drive`: lets a method work until its targets are met, weighs what it left, and corrects the targets.

For methods that take steps of their own (see `base.py`). ECC lands in its own way, while it trains (`landing.py`).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ecc.energy import Cost, dense_cost
from ecc.errors import InfeasibleBudget
from ecc.graph import ChannelGraph, live_masks
from ecc.run_records import CostCheck
from ecc.training import BatchStream, DistributedContext, Teacher, fused_on_gpu, train

from .base import Method, PruningContext
from .cost_evaluator import MeasuredCost
from .ecc.importance import ConsumerSlices
from .landing import BAND, shares_of, targets_after
from .settings import CompressSettings

MAX_CORRECTIONS = 6


@dataclass(frozen=True)
class _Bound:
    """A network that was weighed, and the targets that led to it."""

    targets: list[float]
    share: float
    """Of the budget."""
    weighing: CostCheck


class Drive:
    """A method at work, and what the scales say of it.

    Args:
        method: Has started on the work.
        work: Its targets are corrected here.
        limits: The budgets, each in the unit of its cost.
        scales: Tell what widths really cost.
        band: The shares of a budget between which the result should lie.
    """

    def __init__(
        self,
        method: Method,
        work: PruningContext,
        limits: Sequence[float],
        scales: Callable[[Mapping[str, int]], MeasuredCost],
        band: tuple[float, float] = BAND,
    ) -> None:
        self._method, self._work, self._scales, self._band = method, work, scales, band
        self._limits = tuple(limits)
        self.steps = 0
        self.weighings: list[CostCheck] = []
        self.landed = False
        self.note = ""
        """Why it did not land, or what should be known; empty if all is well."""
        self._within: _Bound | None = None  # the last network below the band
        self._above: _Bound | None = None  # the last one above the budget after that
        self._again = False  # whether the method is to cut anew although it is done

    def go(self, save: Callable[[], None]) -> None:
        """Works until the budget is met on the scales, or cannot be.

        Args:
            save: Called after each step and each weighing, when the state is whole; it may save or not.

        Raises:
            InfeasibleBudget: If the targets cannot be met with every group at its floor.
        """
        if not self.weighings and self._work.constraint_violation(self._work.min_widths()) > 0:
            raise InfeasibleBudget(
                "weighed against its energy model, the network cannot meet the budget with every group at its floor. "
                "Raise the budget, lower min_width_ratio, or shrink the input."
            )
        while not self.landed and not self.note:
            while self._again or not self._method.is_done:
                self._method.step()
                self.steps, self._again = self.steps + 1, False
                save()
            self._weigh()
            save()

    def _weigh(self) -> None:
        work = self._work
        widths = dict(zip(work.graph.full_widths, work.widths(), strict=True))
        if any(widths == one.widths for one in self.weighings):  # weighed often enough, it would pass by chance
            self._end(self.weighings[-1])
            return
        vector = work.graph.widths(widths)
        predicted = {cost.resource: float(cost.to("cpu").value(vector)) for cost in work.costs}
        weighed = self._scales(widths)
        targets = targets_after(weighed, predicted, work.costs, self._limits, self._band[1])
        shares = shares_of(weighed, predicted, work.costs, self._limits)
        tightest = max(shares, key=shares.__getitem__)
        self.weighings.append(
            CostCheck(
                step=self.steps,
                progress=1.0,
                widths=widths,
                predicted=predicted,
                measured=weighed.amounts,
                label=weighed.label,
                relative_ci=weighed.relative_ci,
                targets=targets,
            )
        )
        share = shares[tightest]
        if self._band[0] <= share <= self._band[1]:
            self.landed = True
        elif share < self._band[0] or self._within is not None:
            self._ask_for_another(share, targets)
        elif len(self.weighings) > MAX_CORRECTIONS:
            self.note = f"after {MAX_CORRECTIONS} corrections the result lies at {share:.1%} of the budget."
        else:
            work.targets = list(targets.values())
            if work.constraint_violation(work.min_widths()) > 0:
                self.note = f"the result lies at {share:.1%} of the budget, and the floors allow no less."

    def _ask_for_another(self, share: float, targets: Mapping[str, float]) -> None:
        """Asks a method that cuts anew for a network between one that is too small and one that is too large.

        Args:
            share: Of the budget, at which the last one lies: below the band, or above the budget after another below.
            targets: By which one that is too small is corrected as long as none was too large.
        """
        work, last = self._work, self.weighings[-1]
        if share < self._band[0]:
            self._within = _Bound(list(work.targets), share, last)
        else:
            self._above = _Bound(list(work.targets), share, last)
        assert self._within is not None  # or the first one would have been corrected downwards
        is_higher = self._above is not None or any(
            new > old for new, old in zip(targets.values(), work.targets, strict=True)
        )
        if (
            not is_higher
            or not getattr(self._method, "prunes_from_dense", False)
            or len(self.weighings) > MAX_CORRECTIONS
        ):
            self._end(last)
            return
        self._again = True
        if self._above is None:
            work.targets = list(targets.values())
        else:
            low, high, wanted = self._within, self._above, statistics.fmean(self._band)
            part = (wanted - low.share) / (high.share - low.share)
            work.targets = [one + part * (two - one) for one, two in zip(low.targets, high.targets, strict=True)]

    def _end(self, last: CostCheck) -> None:
        """No other network is to be had: back to the largest one within the budget, if there was any."""
        if self._within is None:
            share = max(shares_of(_weighed(last), last.predicted, self._work.costs, self._limits).values())
            self.note = f"the result lies at {share:.1%} of the budget, and {self._method.name} goes no lower."
            return
        if self._work.targets != self._within.targets:
            self._work.targets = list(self._within.targets)
            self._method.step()
        if last != self._within.weighing:
            self.weighings.append(self._within.weighing)
        self.landed, self.note = True, f"the result lies at {self._within.share:.1%} of the budget."

    def state(self) -> dict[str, Any]:
        """Plain values and tensors: the method's own state among them."""
        return {
            "steps": self.steps,
            "targets": list(self._work.targets),
            "again": self._again,
            "landed": self.landed,
            "note": self.note,
            "weighings": [asdict(weighing) for weighing in self.weighings],
            "bounds": [None if one is None else asdict(one) for one in (self._within, self._above)],
            "method": self._method.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse; network and stream are restored by their owner."""
        self.steps, self.landed, self.note = int(state["steps"]), bool(state["landed"]), str(state["note"])
        self._work.targets, self._again = [float(aim) for aim in state["targets"]], bool(state.get("again", False))
        self.weighings = [CostCheck(**weighing) for weighing in state["weighings"]]
        self._within, self._above = (
            None if one is None else _Bound(one["targets"], one["share"], CostCheck(**one["weighing"]))
            for one in state.get("bounds", (None, None))
        )
        self._method.load_state_dict(state["method"])


def _weighed(one: CostCheck) -> MeasuredCost:
    return MeasuredCost(one.measured, one.label, one.relative_ci)


def first_targets(costs: Sequence[Cost], limits: Sequence[float], dense: MeasuredCost) -> list[float]:
    """The budgets as they were on the day of the profile, if the dense network tells how the scales differ now."""
    known = [dense_cost(cost) for cost in costs]
    return [
        limit * then / dense.amounts.get(cost.resource, then)
        for cost, limit, then in zip(costs, limits, known, strict=True)
    ]


# ---------------------------------------------------------------- training with silent channels


class MaskedAdam(torch.optim.Adam):
    """Adam that keeps silent channels silent."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, lr: float, weight_decay: float) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(trained, lr=lr, weight_decay=weight_decay, fused=fused_on_gpu(trained))
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._readers = ConsumerSlices(model, graph, device)
        masks = zip(graph.groups, live_masks(model, graph), strict=True)
        alive = [torch.ones_like(mask) if group.frozen is not None else mask for group, mask in masks]
        self._readers.set_mask(torch.cat([mask.to(device) for mask in alive]))

    def step(self, closure: Any = None) -> Any:
        """One step; what was silent is silent after it."""
        loss = super().step(closure)
        self._readers.apply_mask_()
        return loss


def trainer(
    graph: ChannelGraph,
    loss: Callable[..., Tensor] | None,
    teacher: Teacher | None,
    settings: CompressSettings,
    distributed: DistributedContext,
) -> Callable[[nn.Module, int, float, BatchStream], None]:
    """`PruningContext.train`: short trainings of candidates, which are not checkpointed by themselves."""

    def go(model: nn.Module, steps: int, lr: float, stream: BatchStream) -> None:
        train(
            model,
            MaskedAdam(model, graph, lr, settings.train.weight_decay),
            stream,
            loss=loss,
            steps=steps,
            settings=replace(
                settings.train,
                seed=settings.train.seed + stream.lineage,
                checkpoint_steps=None,
                checkpoint_seconds=None,
            ),
            teacher=teacher,
            distributed=distributed,
        )

    return go
