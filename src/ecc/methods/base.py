"""`Method`: the interface of every pruning method, ECC included, and `PruningContext`: what a method works with.

A method masks channels of the dense network in place. The rest is the same for all methods: `BudgetController` measures
the result and corrects the targets, and `Compression` slims and finetunes the network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ecc.energy import Cost
from ecc.errors import BadTask, EccError
from ecc.graph import (
    ChannelGraph,
    live_masks,
    mask_branches_,
    mask_channels_,
    removed_branches,
    trace_channels,
    verify_graph,
)
from ecc.run_records import SolverLine
from ecc.settings import CompressSettings
from ecc.task import Inputs, Task, with_batch_size
from ecc.torch_utils import device_of
from ecc.training import BatchStream, OptimizerLike, Teacher, fused_on_gpu

from .ecc.constraints import group_min_widths
from .ecc.importance import ConsumerSlices


def _no_training(optimizer: OptimizerLike, steps: int) -> Iterator[int]:
    raise NotImplementedError("this context has no training loop")


@dataclass
class PruningContext:
    """A network, its target costs, and the tools to prune it."""

    model: nn.Module
    """The trained dense network. A method masks channels of it in place."""
    graph: ChannelGraph
    costs: tuple[Cost, ...]
    targets: list[float]
    """Upper bound of each cost as the cost itself predicts it. `BudgetController` changes them."""
    settings: CompressSettings
    width_multiple: int
    stream: BatchStream
    """Training batches. Candidates that are abandoned are trained on forks of it."""
    teacher: Teacher | None
    held_out: Callable[[nn.Module], float]
    """Score on held-out training data, higher is better. The only data that a method may choose by."""
    train: Callable[[nn.Module, int, float, BatchStream], None]
    """`train(model, steps, lr, stream)` trains in place and keeps masked channels masked."""
    log: Callable[[Mapping[str, Any]], None]
    """Write values to the history as a `MethodLine`."""
    log_solver: Callable[[SolverLine], None] = lambda _: None
    loss: Callable[..., Tensor] | None = None
    """Loss of the task, see `Task.loss`."""
    make_optimizer: Callable[[], torch.optim.Optimizer] | None = None
    """A new optimizer of `model` with the settings of the run."""
    training: Callable[[OptimizerLike, int], Iterator[int]] = _no_training
    """`training(optimizer, steps)` trains `model`; each `next` takes one step, which is logged and checkpointed."""

    def widths(self, model: nn.Module | None = None) -> list[int]:
        """Channels of each group that `slim` would keep, in the order of the graph."""
        masks = live_masks(self.model if model is None else model, self.graph)
        device = next((mask.device for mask in masks if mask.device.type != "cpu"), torch.device("cpu"))
        counts = torch.stack([mask.sum().to(device) for mask in masks]).tolist()  # waits for the device once
        removed = removed_branches(self.model if model is None else model, self.graph)
        return self.graph.structure.padded(counts, self.width_multiple, removed)

    def named_widths(self) -> dict[str, int]:
        """The widths by name of the group."""
        return dict(zip(self.graph.full_widths, self.widths(), strict=True))

    def predicted(self, widths: Mapping[str, int]) -> dict[str, float]:
        """Predicted (or counted) cost by resource."""
        vector = self.graph.widths(widths)
        return {cost.resource: float(cost.to("cpu").value(vector)) for cost in self.costs}

    def constraint_violation(self, widths: Sequence[float]) -> float:
        """The largest cost / target - 1; not above 0 where all targets are met."""
        vector = torch.tensor(widths, dtype=torch.float64)
        amounts = (float(cost.to("cpu").value(vector)) for cost in self.costs)
        return max(amount / target - 1 for amount, target in zip(amounts, self.targets, strict=True))

    def min_widths(self) -> list[int]:
        """Minimum width of each group."""
        return group_min_widths(self.graph, self.settings.min_width_ratio, self.width_multiple)

    def smallest_widths(self) -> list[int]:
        """Minimum widths, and 0 for the groups of branches whose removal every cost is known for."""
        known = [branch for branch in self.graph.branches if all(branch.name in cost.branches for cost in self.costs)]
        inside = {name for branch in known for name in branch.groups}
        pairs = zip(self.graph.groups, self.min_widths(), strict=True)
        return [0 if group.name in inside else width for group, width in pairs]

    def round_widths(self, widths: Sequence[float]) -> list[int]:
        """The largest allowed widths that are not above the given ones, and not below the minimum widths."""
        structure, found = self.graph.structure, []
        steps, remainders = (find(self.width_multiple) for find in (structure.width_steps, structure.width_remainders))
        parts = zip(self.graph.groups, widths, self.min_widths(), steps, remainders, strict=True)
        for group, width, least, step, rest in parts:
            rounded = rest + int((width - rest + 1e-9) // step) * step
            found.append(group.width if width >= group.width else max(least, rounded))
        return found

    def keep_channels_(self, model: nn.Module, importance: Mapping[str, Tensor], widths: Sequence[int]) -> None:
        """Mask all but the most important channels.

        Args:
            model: Changed in place.
            importance: One number per channel, of each group that is pruned.
            widths: How many channels to keep, in the order of the graph.
        """
        pairs = list(zip(self.graph.groups, widths, strict=True))
        pruned = {group.name: width for group, width in pairs if group.frozen is None and width < group.width}
        on_cpu = _to_cpu({name: importance[name] for name in pruned})
        masked = {}
        for name, width in pruned.items():
            masked[name] = torch.zeros(len(on_cpu[name]), dtype=torch.bool)
            masked[name][on_cpu[name].argsort(descending=True, stable=True)[width:]] = True
        mask_channels_(model, self.graph, masked)


class Method(Protocol):
    """A pruning method.

    Between two steps its state can be saved. After it is done, `BudgetController` may change the targets; the method is
    then no longer done, and continues.

    A method can have more attributes:

    - `progress`: Fraction of the pruning schedule that is done, for a method that prunes while it trains, along a
      schedule of `prune_steps` steps. It is done when its steps are used up, and is measured on the way.
    - `propose(targets)` and `fix_widths(widths)`: The widths that it would prune to for some targets, and the choice of
      such widths. They are measured before the network is pruned to them.
    - `prunes_from_dense`: True if each step prunes the dense network from the start, so that a result that is far below
      the budget can still be improved.
    """

    @property
    def name(self) -> str:
        """Short name, for tables."""

    @property
    def needs_held_out(self) -> bool:
        """Whether it uses `PruningContext.held_out`."""

    def config(self) -> dict[str, Any]:
        """Its settings as plain values. A run with other settings is another run."""

    def start(self, context: PruningContext) -> None:
        """Start on a network. Called once, before anything else, with the dense weights."""

    def step(self) -> None:
        """Take one step, which must bring it closer to being done."""

    @property
    def is_done(self) -> bool:
        """Whether the network meets the targets, or no steps are left."""

    def state_dict(self) -> dict[str, Any]:
        """What is needed to resume, besides the weights of the network and those given to `start`."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state, after `start`."""


def trace_task(
    task: Task, batch: int | None = None, freeze: Sequence[str] = (), attention: str = "heads"
) -> tuple[ChannelGraph, Inputs]:
    """The channel graph of a task, verified at its own batch size, and the example input as it is measured.

    Args:
        task: Has the network.
        batch: Items per inference; that of the example input by default.
        freeze: Modules whose output channels are not pruned, as for `trace_channels`.
        attention: "heads" or "width", as for `trace_channels`.
    """
    example = task.example_input if batch is None else with_batch_size(task.example_input, batch)
    graph = trace_channels(task.model, example, freeze=freeze, attention=attention, verify=False)
    return verify_graph(task.model, graph, task.example_input), example


def schedule_progress(method: Method) -> float | None:
    """Fraction of the pruning schedule that is done; None for a method without a schedule."""
    return getattr(method, "progress", None)


def has_schedule(method: Method) -> bool:
    """Whether the method prunes while it trains, along a schedule."""
    return hasattr(type(method), "progress")


def check_needs_held_out(method: Method, task: Task) -> None:
    """Check that the task has held-out data if the method needs it.

    Raises:
        BadTask: If it has none.
    """
    if method.needs_held_out and task.evaluate_held_out is None:
        raise BadTask(
            f"method {method.name!r} compares candidates on held-out data, and task {task.name!r} has no "
            "evaluate_held_out. Add it, or use a method that does not need it, such as ecc."
        )


def check_trainable(task: Task) -> None:
    """Refuse a task that cannot be trained, before anything is measured."""
    if task.train_batches is None:
        raise BadTask(
            f"task {task.name!r} has no train_batches, which compressing needs; give them to ecc.Task. A language "
            "model hf:NAME gets them with --text FILE, a bundled network or an image classifier with --data FOLDER."
        )
    if not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise BadTask(f"no parameter of task {task.name!r} is trainable; call model.requires_grad_(True) first.")
    parameters = dict(task.model.named_parameters(remove_duplicate=False))
    for name, tensor in task.model.state_dict().items():
        if not tensor.is_floating_point():
            continue
        if name in parameters and not bool(torch.isfinite(tensor).all()):
            raise BadTask(f"{name} of task {task.name!r} contains NaN or infinite values.")
        if bool(torch.isnan(tensor).any()):  # infinite buffers are allowed: masks of causal attention contain -inf
            raise BadTask(f"{name} of task {task.name!r} contains NaN.")


def check_method(method: Method, task: Task, settings: CompressSettings) -> None:
    """Check that a method can be used for a task with these settings, before anything is measured.

    Raises:
        BadTask: If the task cannot be trained, or the method needs held-out data and the task has none.
        EccError: If it prunes while it trains, and there are no steps for it.
    """
    check_trainable(task)
    check_needs_held_out(method, task)
    if has_schedule(method) and settings.prune_steps < 1:
        raise EccError(
            f"method {method.name!r} prunes while it trains, and prune_steps is 0; give more steps, or the method "
            "one_shot, which does not train."
        )


class OneShotMethod:
    """Base of methods that prune the dense network from the start in every step, and have no settings."""

    needs_held_out = False
    prunes_from_dense = True

    def config(self) -> dict[str, Any]:
        """No settings."""
        return {}

    def start(self, context: PruningContext) -> None:
        """Keep a copy of the dense weights."""
        self.context = context
        self.dense_state = copy.deepcopy(context.model.state_dict())
        self.pruned_for: list[float] | None = None

    @property
    def is_done(self) -> bool:
        """Whether the targets are met, or a step has shown that the method cannot meet them."""
        if self.pruned_for == list(self.context.targets):
            return True
        return self.context.constraint_violation(self.context.widths()) <= 0

    def state_dict(self) -> dict[str, Any]:
        """The targets of the last step."""
        return {"pruned_for": self.pruned_for}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        self.pruned_for = state.get("pruned_for")


def magnitudes(context: PruningContext, model: nn.Module | None = None) -> dict[str, Tensor]:
    """Sum of squares of the consumer weights of each prunable channel, by group."""
    model = context.model if model is None else model
    flat = ConsumerSlices(model, context.graph, device_of(model)).norms()
    found = {}
    for group in context.graph.prunable:
        first, stop = context.graph.channel_ids(group.name)
        found[group.name] = flat[first - 1 : stop - 1]
    return found


def can_remove_branches(method: Method, settings: CompressSettings) -> bool:
    """Whether a method may remove residual branches entirely. Others only change widths."""
    return settings.depth and settings.solver == "scheduled" and bool(getattr(method, "removes_branches", False))


class _Masks:
    """The channels and branches of a network that are masked now."""

    def __init__(self, model: nn.Module, graph: ChannelGraph) -> None:
        device = device_of(model)
        self._slices = ConsumerSlices(model, graph, device)
        masks = zip(graph.groups, live_masks(model, graph), strict=True)
        live = [torch.ones_like(mask) if group.frozen is not None else mask for group, mask in masks]
        self._slices.set_mask(torch.cat([mask.to(device) for mask in live]))
        self._model, self._graph = model, graph
        self._removed = removed_branches(model, graph)

    def apply_(self) -> None:
        """Set them to zero again."""
        self._slices.apply_mask_()
        mask_branches_(self._model, self._graph, self._removed)


class MaskedAdam(torch.optim.Adam):
    """Adam that keeps masked channels masked."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, lr: float, weight_decay: float) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        super().__init__(trained, lr=lr, weight_decay=weight_decay, fused=fused_on_gpu(trained))
        self._masks = _Masks(model, graph)

    def step(self, closure: Any = None) -> Any:
        """One step; masked channels and branches are zero after it."""
        loss = super().step(closure)
        self._masks.apply_()
        return loss


def keep_masks(optimizer: torch.optim.Optimizer, model: nn.Module, graph: ChannelGraph) -> torch.optim.Optimizer:
    """Let the steps of an optimizer keep masked channels masked; the optimizer."""
    masks = _Masks(model, graph)
    optimizer.register_step_post_hook(lambda *_: masks.apply_())
    return optimizer


def _to_cpu(importance: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors in one transfer, because each transfer waits for the device."""
    if not importance:
        return {}
    flat = torch.cat(list(importance.values())).cpu()
    return dict(zip(importance, flat.split([len(one) for one in importance.values()]), strict=True))
