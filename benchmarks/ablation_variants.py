"""Variants of ECC that `ablation.py` compares, with those that were tried and are not part of the package."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ecc.energy import Cost
from ecc.graph import ChannelGraph
from ecc.methods import EccSolver
from ecc.methods.ecc import importance
from ecc.methods.ecc.importance import taylor_interval
from ecc.task import Task, split_batch

EARLY_RAMP = 0.2
CANDIDATE_STEPS = 0.1
"""Batches in which each candidate is pruned and trained, as a fraction of the pruning batches."""
CALIBRATIONS = 3
"""Calibrations at equal distances; each takes one batch."""
CANDIDATES: tuple[dict[str, Any], ...] = ({}, {"importance": "adam_norm"}, {"uniform_floor": 0.8})


@dataclass(frozen=True)
class Variant:
    """Settings of a solver and of its training."""

    solver: dict[str, Any] = field(default_factory=dict)
    lr_schedule: str = "constant"
    by_budget: bool = False
    """Whether mild budgets end their ramp early: it is 0.6 of the steps at half of the cost, and less above."""
    regrow: bool = False
    calibrate: bool = False
    candidates: bool = False
    ema: bool = False


VARIANTS = {
    "default": Variant(),
    "early": Variant({"ramp": EARLY_RAMP}),
    "cosine": Variant(lr_schedule="cosine"),
    "early, cosine": Variant({"ramp": EARLY_RAMP}, lr_schedule="cosine"),
    "by budget, cosine": Variant(lr_schedule="cosine", by_budget=True),
    "regrowth": Variant(regrow=True),
    "calibrated": Variant(calibrate=True),
    "candidate plans": Variant(candidates=True),
    "EMA": Variant(ema=True),
    "uniform floor": Variant({"uniform_floor": 0.8}),
    "adam_norm": Variant({"importance": "adam_norm"}),
    "admm, adam_norm": Variant({"solver": "admm"}),
    "admm, taylor": Variant({"solver": "admm", "importance": "taylor"}),
    "root": Variant(),
}


class RegrowingSolver(EccSolver):
    """Plans from all channels at each update, until the ramp ends: a removed channel may come back.

    It comes back with the weights that it had. Its importance is that of these weights with the present gradients.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        importance._BROADCAST.clear()  # masks of full shape
        super().__init__(*args, **options)
        self._initial = self._solver.alive
        self._tensors = self._slices._masks._small
        self._kept = [tensor.detach().clone() for tensor in self._tensors]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # without a closure
        """As that of `EccSolver`, with products of all channels."""
        self.inner.step()
        self._steps += 1
        if self._steps > self._schedule.ramp_end:
            self._parts.apply_mask_()
            return
        masks = self._slices._masks._factors
        for tensor, kept, mask in zip(self._tensors, self._kept, masks, strict=True):
            kept.copy_(torch.where(mask.bool(), tensor, kept) if self._is_masked else tensor)
            tensor.copy_(kept)
        assert self._taylor is not None
        if (self._steps - 1) % taylor_interval(self._schedule.steps) == 0:
            self._taylor.add(self._parts.products())
        if self._solver.is_due(self._schedule, self._steps):
            self._solver.state = self._solver.state._replace(alive=self._initial)  # type: ignore[attr-defined, misc]
            self._solver.update(self._taylor.values, self._schedule, self._steps, 1.0)
            self._set_masks(masked=True)
        if self._is_masked:
            self._parts.apply_mask_()


class CalibratedSolver(EccSolver):
    """Multiplies the importance of each group by measured / predicted increase of the loss, when it plans.

    A block of a quarter of the channels of each group, the least important ones, is removed on a batch that is counted.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        assert self._taylor is not None
        self._plain = self._taylor
        self._factors = torch.ones_like(self._solver.alive, dtype=torch.float32)
        self._taylor = _Scaled(self)  # type: ignore[assignment]
        self.calibrated_at: set[int] = set()

    @torch.no_grad()
    def calibrate(self, task: Task, batch: Any) -> None:
        """Measure the factors at the present weights."""
        assert task.loss is not None
        self.calibrated_at.add(self._steps)
        inputs, targets = split_batch(batch)
        saved = [tensor.detach().clone() for tensor in self._slices.tensors]
        alive, values = self._solver.alive, self._plain.values
        base = float(task.loss(self._model(inputs), targets))
        factors: dict[str, float] = {}
        for group in self._graph.prunable:
            first, stop = self._graph.channel_ids(group.name)
            here = torch.arange(first - 1, stop - 1)[alive[first - 1 : stop - 1]]
            removed = here[values[here].argsort()][: len(here) // 4]
            if not len(removed):
                continue
            mask = alive.clone()
            mask[removed] = False
            self._parts.set_mask(mask)
            self._parts.apply_mask_()
            increase = float(task.loss(self._model(inputs), targets)) - base
            predicted = float(values[removed].sum()) * group.width / (len(here) - len(removed))
            factors[group.name] = max(increase, 0.0) / max(predicted, 1e-30)
            for tensor, old in zip(self._slices.tensors, saved, strict=True):
                tensor.copy_(old)
        middle = sorted(factors.values())[len(factors) // 2]
        for name, factor in factors.items():
            first, stop = self._graph.channel_ids(name)
            self._factors[first - 1 : stop - 1] = min(max(factor / max(middle, 1e-30), 0.1), 10.0)
        self._set_masks(masked=self._is_masked)


class _Scaled:
    """The Taylor importance of a solver, times its factors."""

    def __init__(self, solver: CalibratedSolver) -> None:
        self._solver = solver

    def add(self, products: Tensor) -> None:
        """Add a sample."""
        self._solver._plain.add(products)

    @property
    def values(self) -> Tensor:
        """a of each channel."""
        return self._solver._plain.values * self._solver._factors


def make_solver(
    variant: Variant,
    model: nn.Module,
    task: Task,
    graph: ChannelGraph,
    cost: Cost,
    budget: str,
    options: Any,
    batches: Iterator[Any],
    train: Callable[..., None],
) -> tuple[EccSolver, int]:
    """The solver of a variant, and the pruning batches that are left for it."""

    def solver_of(net: nn.Module, steps: int, kind: type[EccSolver] = EccSolver, **settings: Any) -> EccSolver:
        adam = torch.optim.Adam(net.parameters(), lr=options.lr)
        given = {"width_multiple": options.width_multiple, "depth": False, **settings}
        return kind(net, graph, cost, budget, steps, optimizer=adam, **given)

    steps, settings = options.prune, dict(variant.solver)
    if variant.by_budget:
        settings["ramp"] = 0.6 * min(1.0, (1 - float(budget.rstrip("%")) / 100) / 0.5)
    if not variant.candidates:
        kind = RegrowingSolver if variant.regrow else CalibratedSolver if variant.calibrate else EccSolver
        made = solver_of(model, steps, kind, **settings)
        if not isinstance(made, CalibratedSolver):
            return made, steps
        each = steps // (CALIBRATIONS + 1)
        for _ in range(CALIBRATIONS):
            train(model, task, made, batches, each - 1, options.lr)
            made.calibrate(task, next(batches))
        return made, steps - CALIBRATIONS * each
    assert task.evaluate_held_out is not None
    tried: list[tuple[float, dict[str, int]]] = []
    each = int(CANDIDATE_STEPS * steps)
    for candidate in CANDIDATES:
        net = copy.deepcopy(model)
        solver = solver_of(net, each, warm_up=0.0, ramp=0.5, **candidate)
        train(net, task, solver, batches, each, options.lr)
        tried.append((_held_out_loss(net, task), solver.widths))
    left = steps - each * len(CANDIDATES)
    solver = solver_of(model, left, **settings)
    solver.fix_widths(min(tried, key=lambda one: one[0])[1])
    return solver, left


@torch.no_grad()
def _held_out_loss(model: nn.Module, task: Task) -> float:
    """Loss on the held-out split."""
    split = task.evaluate_held_out.args[0]  # type: ignore[union-attr]  # a partial of `accuracy`
    outputs: Tensor = model.eval()(split.images)
    assert task.loss is not None
    return float(task.loss(outputs, split.labels))
