"""`EccSolver`: replaces the optimizer of any training loop and prunes the network to its budget during training."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy.cost import Cost
from ecc.errors import EccWarning
from ecc.graph import ChannelGraph, mask_branches_, mask_channels_
from ecc.graph.slimming import check_before_slim
from ecc.graph.structure import Branch
from ecc.methods.ecc.admm import PaperSolver
from ecc.methods.ecc.constraints import Limit, channel_problem
from ecc.methods.ecc.importance import BranchExits, ConsumerSlices
from ecc.methods.ecc.optimizer_wrapper import Duals, PruningOptimizer, WidthSolver, adam_for, check_optimizer
from ecc.methods.ecc.planner import WidthPlanner
from ecc.methods.ecc.relative_admm import RelativeAdmmSolver
from ecc.methods.ecc.scheduled import RAMP, WARM_UP, Schedule, ScheduledSolver
from ecc.settings import SOLVERS, PaperSettings

__all__ = ["Duals", "EccSolver"]


class EccSolver(PruningOptimizer):
    """Optimizer that trains a network and prunes it to a budget.

        solver = EccSolver(model, graph, energy, budget="60%", steps=len(loader))
        for images, labels in loader:
            loss(model(images), labels).backward()
            solver.step()
            solver.zero_grad()
        small = slim(model, graph)

    It shares parameter groups and state with the optimizer it wraps, so learning-rate schedulers, gradient clipping and
    accumulation work as usual. A step that a GradScaler skips is not counted, since `step` is not called; call
    `skip_step` to count it. Averaged weights (EMA) still contain pruned channels: call `mask_` on the averaged model
    before you slim it. Dead channels still receive gradients. They have no effect, except on the norm that gradient
    clipping computes.

    Args:
        model: The traced network, with trained weights. Channels that are dead already stay dead.
        graph: Its channel graph.
        costs: The cost to limit, such as an energy model; a sequence if there are several budgets.
        budget: `"60%"` of the dense network's cost, a text such as `"24 mJ"`, or a number in the cost's unit; one for
            each cost.
        steps: Number of calls of `step`. The budget is met after a fraction `warm_up + ramp` of them; the rest trains
            the final structure.
        optimizer: Optimizer of the weights; Adam without weight decay by default. With `importance="adam_norm"`,
            Adam and its variants provide B, and any other optimizer has B = 1.
        lr: Learning rate of the default optimizer.
        min_width_ratio: Minimum fraction of channels kept in each group.
        width_multiple: Layers get multiples of so many channels; 8 suits most GPUs. A group that is not wider keeps its
            width. Attention heads have many channels, so they are pruned one by one (`StructureSpec.width_steps`).
            Concatenated groups are pruned in such steps (`StructureSpec.width_remainders`). Pass it to `slim` too.
        warm_up: Fraction of the steps before channels are removed.
        ramp: Fraction of the steps in which channels are removed.
        importance: Channel importance, `"taylor"` or `"adam_norm"` (the paper's). By default `"taylor"` with
            `solver="scheduled"` and `"adam_norm"` otherwise.
        solver: `"scheduled"` and `"admm"`, the paper's algorithm in relative units, meet the budget on schedule.
            `"paper"` is the algorithm as published, which may not converge within `steps`; pass `PaperSettings` to set
            its constants.
        uniform_floor: Minimum width of each group as a fraction of its width under uniform pruning to the same budget;
            0 turns it off. Only for `solver="scheduled"`.
        depth: Whether residual branches may be removed entirely (`ChannelGraph.branches`), where every cost is known
            without them. Only for `solver="scheduled"`.

    Raises:
        InfeasibleBudget: The network is above the budget with every group at its minimum width.
        BadWidths: The graph or a cost belongs to another network.
        EccError: The optimizer holds no parameter of the model. An optimizer that holds some of them is a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        costs: Cost | Sequence[Cost],
        budget: Limit | Sequence[Limit],
        steps: int,
        *,
        optimizer: Optimizer | None = None,
        lr: float = 1e-4,
        min_width_ratio: float = MIN_WIDTH_RATIO,
        width_multiple: int = 1,
        warm_up: float = WARM_UP,
        ramp: float = RAMP,
        importance: str | None = None,
        solver: str | PaperSettings = "scheduled",
        uniform_floor: float = 0.0,
        depth: bool = True,
    ) -> None:
        if isinstance(solver, str) and solver not in SOLVERS:
            raise ValueError(
                f"solver={solver!r} is unknown; choose one of {', '.join(SOLVERS)}, or pass PaperSettings."
            )
        if not 0 <= uniform_floor < 1:
            raise ValueError(f"uniform_floor={uniform_floor} must be at least 0 and below 1.")
        if uniform_floor and solver != "scheduled":
            raise ValueError(f"uniform_floor={uniform_floor} needs solver='scheduled'; the others have no plan.")
        if optimizer is not None:
            check_optimizer(model, optimizer)
        inner = adam_for(model, lr) if optimizer is None else optimizer
        given = [costs] if isinstance(costs, Cost) else list(costs)
        problem, alive = channel_problem(model, graph, given, min_width_ratio, width_multiple)
        ranking, constraints, device = problem.ranking, problem.constraints, alive.device
        advice = "min_width_ratio" if width_multiple == 1 else "min_width_ratio or width_multiple"
        branches = _removable_branches(model, graph, constraints.costs) if depth and solver == "scheduled" else []
        positions = {group.name: number for number, group in enumerate(graph.groups)}
        inside = [[positions[name] for name in branch.groups] for branch in branches]
        smallest = problem.min_widths.clone()
        smallest[[group for groups in inside for group in groups]] = 0
        ends = constraints.parse_feasible(budget, smallest, advice)
        width_solver: WidthSolver
        importance = importance or ("taylor" if solver == "scheduled" else "adam_norm")
        share = importance == "taylor"
        if solver == "scheduled":
            planner = WidthPlanner(
                problem, uniform_floor, per_remaining_share=share, branches=inside, streams=_streams(graph, branches)
            )
            width_solver = ScheduledSolver(problem, alive, planner=planner)
        elif solver == "admm":
            width_solver = RelativeAdmmSolver(problem, alive, WidthPlanner(problem, per_remaining_share=share))
        else:
            settings = solver if isinstance(solver, PaperSettings) else PaperSettings()
            width_solver = PaperSolver(settings, problem, alive)
        self._slices = ConsumerSlices(model, graph, device)
        super().__init__(
            inner,
            self._slices,
            ranking,
            constraints,
            smallest,
            width_solver,
            Schedule(constraints.fractions(ranking.widths(alive)), ends, steps, warm_up, ramp),
            names=tuple(graph.full_widths),
            network=graph.fingerprint,
            importance=importance,
            advice=advice,
            exits=BranchExits(model, branches, device) if branches else None,
        )
        self._model, self._graph, self.width_multiple, self._branches = model, graph, width_multiple, branches
        check_before_slim(model, self.warn_if_unmet)

    @property
    def widths(self) -> dict[str, int]:
        """Widths that `slim` would give now: live channels, rounded up. Synchronises with the device.

        A group that starts below its minimum width counts as whole in the solver, since it was not trained yet. `slim`
        still removes those of its channels that are zero.
        """
        return self._slim_widths(self._counts().tolist())

    @property
    def numbers(self) -> tuple[tuple[float, ...], Duals, dict[str, int]]:
        """`cost`, `duals` and `widths` with a single synchronisation."""
        y, z = self._solver.duals(self.inner.param_groups[0]["lr"])
        parts = [torch.stack(self.cost), y, z.view(1), self._counts()]
        found = torch.cat([part.to(torch.float64) for part in parts]).cpu().split([len(part) for part in parts])
        cost, width_duals, energy_dual, live = (part.tolist() for part in found)
        duals = Duals(dict(zip(self._names, width_duals, strict=True)), energy_dual[0])
        return tuple(cost), duals, self._slim_widths([int(count) for count in live])

    def _counts(self) -> Tensor:
        """(groups,) int64: channels that are not removed and that some layer consumes."""
        return self._ranking.widths(self._slices.live() & self._solver.alive)

    def _slim_widths(self, live: list[int]) -> dict[str, int]:
        return dict(zip(self._names, self._graph.structure.padded(live, self.width_multiple), strict=True))

    def warn_if_unmet(self) -> None:
        """Warn if a budget is not met, and say what to do. `slim` calls this. Synchronises with the device."""
        if text := self._unmet_message():
            warnings.warn(text, EccWarning, stacklevel=3)

    def mask_(self, model: nn.Module) -> None:
        """Zero the dead channels in a copy of the network, such as averaged weights."""
        masks = self._solver.alive.split(list(self._ranking.full_widths))
        named = zip(self._graph.groups, masks, strict=True)
        mask_channels_(model, self._graph, {group.name: ~mask for group, mask in named if group.frozen is None})
        removed = getattr(self._solver, "removed", ())
        mask_branches_(model, self._graph, [self._branches[number].name for number in removed])


def _streams(graph: ChannelGraph, branches: Sequence[Branch]) -> list[int]:
    """A number for each branch, the same for branches that add to activations with the same groups."""
    axes = {tensor.name: tensor.axes for tensor in graph.tensors}
    numbers: dict[object, int] = {}
    return [numbers.setdefault(frozenset(axes[name][0] for name in one.exits), len(numbers)) for one in branches]


def _removable_branches(model: nn.Module, graph: ChannelGraph, costs: Sequence[Cost]) -> list[Branch]:
    """Branches whose removal every cost is known for, and whose last parameters are trained."""
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return [
        branch
        for branch in graph.branches
        if all(branch.name in cost.branches for cost in costs) and trained.issuperset(branch.exits)
    ]
