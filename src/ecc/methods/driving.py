"""`Drive`: lets a method work until its aims are met, weighs what it left, and corrects the aims.

For methods that take steps of their own (see `base.py`). ECC lands in its own way, while it trains (`landing.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from ecc.energy import Cost, dense_cost
from ecc.errors import InfeasibleBudget
from ecc.graph import ChannelGraph, live_masks
from ecc.training import BatchStream, Teacher, TrainSettings, World, train

from .base import Method, Work
from .ecc.scores import Readers
from .landing import BAND, Weighing, aims_after, shares_of
from .settings import CompressSettings
from .weighing import Weighed

MAX_CORRECTIONS = 6


class Drive:
    """A method at work, and what the scales say of it.

    Args:
        method: Has started on the work.
        work: Its aims are corrected here.
        limits: The budgets, each in the unit of its cost.
        scales: Tell what widths really cost.
        band: The shares of a budget between which the result should lie.
    """

    def __init__(
        self,
        method: Method,
        work: Work,
        limits: Sequence[float],
        scales: Callable[[Mapping[str, int]], Weighed],
        band: tuple[float, float] = BAND,
    ) -> None:
        self._method, self._work, self._scales, self._band = method, work, scales, band
        self._limits = tuple(limits)
        self.steps = 0
        self.weighings: list[Weighing] = []
        self.landed = False
        self.note = ""
        """Why it did not land, or what should be known; empty if all is well."""

    def go(self, save: Callable[[], None]) -> None:
        """Works until the budget is met on the scales, or cannot be.

        Args:
            save: Called after each step and each weighing, when the state is whole; it may save or not.

        Raises:
            InfeasibleBudget: If the aims cannot be met with every group at its floor.
        """
        if not self.weighings and self._work.excess(self._work.floors()) > 0:
            raise InfeasibleBudget(
                "weighed against its energy model, the network cannot meet the budget with every group at its floor. "
                "Raise the budget, lower min_share, or shrink the input."
            )
        while not self.landed and not self.note:
            while not self._method.is_done:
                self._method.step()
                self.steps += 1
                save()
            self._weigh()
            save()

    def _weigh(self) -> None:
        work = self._work
        widths = dict(zip(work.graph.full_widths, work.widths(), strict=True))
        vector = work.graph.widths(widths)
        predicted = {cost.resource: float(cost.to("cpu").value(vector)) for cost in work.costs}
        weighed = self._scales(widths)
        aims = aims_after(weighed, predicted, work.costs, self._limits, self._band[1])
        shares = shares_of(weighed, predicted, work.costs, self._limits)
        tightest = max(shares, key=shares.__getitem__)
        self.weighings.append(
            Weighing(
                step=self.steps,
                descent=1.0,
                widths=widths,
                predicted=predicted,
                weighed=weighed.amounts,
                label=weighed.label,
                relative_ci=weighed.relative_ci,
                aims=aims,
            )
        )
        if shares[tightest] <= self._band[1]:
            self.landed = True
            if shares[tightest] < self._band[0]:
                self.note = f"the result lies at {shares[tightest]:.1%} of the budget of {tightest}."
        elif len(self.weighings) > MAX_CORRECTIONS:
            self.note = f"after {MAX_CORRECTIONS} corrections the result lies at {shares[tightest]:.1%} of the budget."
        else:
            work.aims = list(aims.values())
            if work.excess(work.floors()) > 0:
                self.note = f"the result lies at {shares[tightest]:.1%} of the budget, and the floors allow no less."

    def state(self) -> dict[str, Any]:
        """Plain values and tensors: the method's own state among them."""
        return {
            "steps": self.steps,
            "aims": list(self._work.aims),
            "landed": self.landed,
            "note": self.note,
            "weighings": [asdict(weighing) for weighing in self.weighings],
            "method": self._method.state_dict(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """The reverse; network and stream are restored by their owner."""
        self.steps, self.landed, self.note = int(state["steps"]), bool(state["landed"]), str(state["note"])
        self._work.aims = [float(aim) for aim in state["aims"]]
        self.weighings = [Weighing(**weighing) for weighing in state["weighings"]]
        self._method.load_state_dict(state["method"])


def first_aims(costs: Sequence[Cost], limits: Sequence[float], dense: Weighed) -> list[float]:
    """The budgets as they were on the day of the profile, if the dense network tells how the scales differ now."""
    known = [dense_cost(cost) for cost in costs]
    return [
        limit * then / dense.amounts.get(cost.resource, then)
        for cost, limit, then in zip(costs, limits, known, strict=True)
    ]


# ---------------------------------------------------------------- training with silent channels


class SilentAdam(torch.optim.Adam):
    """Adam that keeps silent channels silent."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, lr: float, weight_decay: float) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(trained, lr=lr, weight_decay=weight_decay)
        device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
        self._readers = Readers(model, graph, device)
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
    loss: Callable[[Any, Any], Tensor],
    teacher: Teacher | None,
    settings: CompressSettings,
    world: World,
) -> Callable[[nn.Module, int, float, BatchStream], None]:
    """`Work.train`: short trainings of candidates, which are not checkpointed by themselves."""

    def go(model: nn.Module, steps: int, lr: float, stream: BatchStream) -> None:
        train(
            model,
            SilentAdam(model, graph, lr, settings.weight_decay),
            stream,
            loss=loss,
            settings=TrainSettings(
                steps=steps,
                precision=settings.precision,  # type: ignore[arg-type]  # checked by CompressSettings
                clip_norm=settings.clip_norm,
                micro_batch=settings.micro_batch,
                channels_last=settings.channels_last,
                cuda_graph=settings.cuda_graph,
                seed=settings.seed + stream.lineage,
                log_every=settings.log_every,
                checkpoint_seconds=None,
            ),
            teacher=teacher,
            world=world,
        )

    return go
