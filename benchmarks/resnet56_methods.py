"""The methods that `resnet56.py` compares, each through its public interface and on the same training loop.

    dense             the dense network, without distillation
    dense_distilled   the dense network with distillation
    ecc...            `EccSolver` with a budget in MACs
    uniform           the same fraction of every channel group; channels chosen by ECC's Taylor importance
    greedy_taylor     one shot from the dense network by the same importance per MAC, without training in between
    greedy_branches   the same, and residual branches may be removed as well, as ECC may
    tp_...            Torch-Pruning by its public interface: magnitude, Taylor, and group norm with sparse training

The budget is a share of the MACs, or of the energy that a model of a recorded profile predicts; the results are measured.
One function counts the MACs of all results. Whatever a method computes on training batches (importance, sparse
training, pruning while training) is taken from the same total number of batches.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cells import Pause
from resnet56_training import FINISHING, Recipe, Trainer, accuracy
from torch import nn

from ecc.energy import CountedCost, EnergyModel, counted_cost, dense_cost
from ecc.errors import EccError
from ecc.export.slim_file import save_slim, slim_from_state
from ecc.graph import ChannelGraph, slim, slim_optimizer, trace_channels
from ecc.methods import EccSolver
from ecc.zoo.resnet_cifar import resnet20, resnet56

NETWORKS = {"resnet56": resnet56, "resnet20": resnet20}
WINDOW = 0.003
"""How far the share of the MACs may be from the wanted one."""
HEADLINE = "ecc"
"""The method that stands for ECC in comparisons: default settings, half of the epochs for pruning."""
CALIBRATION = 64
"""Batches for the importance of one-shot methods, which are taken from the training."""
TP_STEPS = 100  # of Torch-Pruning, from nothing to TP_RATIO; it stops at the budget
TP_RATIO = 0.95
REGULARIZE_EVERY = 8  # steps from one regularization of GroupNorm to the next, with so many times the coefficient


@dataclass(frozen=True)
class Variant:
    """ECC with some settings."""

    prune: float = 0.5
    """Fraction of all epochs for pruning; the network is slimmed at its end."""
    prune_epochs: int | None = None
    """Number of them in place of the fraction."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of `EccSolver`."""
    freeze: tuple[str, ...] = ()
    """Patterns of modules whose output channels are not pruned."""


TRUNK = ("conv1", "layer?.?.conv2")
ECC: dict[str, Variant] = {
    HEADLINE: Variant(),
    "ecc_widths": Variant(settings={"depth": False}),
    "ecc_early": Variant(prune_epochs=5),
    "ecc_early_inner": Variant(prune_epochs=5, settings={"depth": False}, freeze=TRUNK),
}


@dataclass(frozen=True)
class TorchPruning:
    """Torch-Pruning with some settings. The trunk is ignored: its graph does not follow the zero-padded shortcuts."""

    importance: str
    is_global: bool = False
    sparse: float = 0.0
    """Fraction of all epochs for sparse training."""


TORCH_PRUNING: dict[str, TorchPruning] = {
    "tp_magnitude": TorchPruning("magnitude"),
    "tp_magnitude_global": TorchPruning("magnitude", is_global=True),
    "tp_taylor": TorchPruning("taylor"),
    "tp_taylor_global": TorchPruning("taylor", is_global=True),
    "tp_group_norm": TorchPruning("magnitude", is_global=True, sparse=1 / 3),
}
DENSE = ("dense", "dense_distilled")
ONE_SHOT = ("uniform", "greedy_taylor", "greedy_branches")
METHODS = (*DENSE, *ECC, *ONE_SHOT, *TORCH_PRUNING)
DEFAULT_METHODS = (HEADLINE, "dense_distilled", "uniform", "tp_taylor", "tp_magnitude", "greedy_taylor", "dense")
"""In the order in which they are run."""
SEARCH = {HEADLINE: 1.0, "ecc_widths": 1.0, "tp_group_norm": 1.0}
"""Epochs of search in the published protocol, relative to those of fine-tuning: ECC prunes while it trains, and the sparse
training of Torch-Pruning has as many epochs as its fine-tuning (DepGraph: 100 and 100). The others only calibrate."""


def layers_of(model: nn.Module) -> list[tuple[str, Any]]:
    """Convolutions and linear layers by name."""
    return [(name, layer) for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d | nn.Linear)]


def layer_size(layer: Any) -> int:
    """Weights of a layer, which are its MACs for one position of the output."""
    return int(layer.weight.numel())


def macs_of_layers(model: nn.Module) -> dict[str, int]:
    """Multiply-accumulates of the convolutions and linear layers that run, for one image of 32 x 32 pixels."""
    found: dict[str, int] = {}

    def hook(name: str) -> Any:
        def count(layer: Any, inputs: Any, output: torch.Tensor) -> None:
            del inputs
            found[name] = output[0, 0].numel() * layer_size(layer)

        return count

    hooks = [layer.register_forward_hook(hook(name)) for name, layer in layers_of(model)]
    parameter, was_training = next(model.parameters()), model.training
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, 3, 32, 32, device=parameter.device, dtype=parameter.dtype))
    finally:
        model.train(was_training)
        for one in hooks:
            one.remove()
    return found


def count_macs(model: nn.Module) -> int:
    """Multiply-accumulates of a network for one image, counted in the same way for all methods."""
    return sum(macs_of_layers(model).values())


def widths_of(model: nn.Module) -> dict[str, int]:
    """Output channels of the convolutions that are left."""
    return {name: layer.out_channels for name, layer in model.named_modules() if isinstance(layer, nn.Conv2d)}


def build(network: str, state: Mapping[str, Any]) -> nn.Module:
    """The network with given weights."""
    model = NETWORKS[network]()
    model.load_state_dict(dict(state), strict=False)
    return model


def match_widths(
    full: Mapping[str, int],
    least: Mapping[str, int],
    cost: Callable[[Mapping[str, int]], float],
    limit: float,
    multiple: int = 1,
) -> dict[str, int]:
    """Widths as uniform as possible whose cost is just below a limit.

    The largest ratio is found at which all widths, rounded down, meet the limit. Then groups get a few more channels,
    those first that lost most by rounding, as long as the limit holds.

    Args:
        full: Full widths by group.
        least: Minimum widths.
        cost: Cost of a network with some widths.
        limit: Largest cost.
        multiple: Of all widths.
    """

    def at(ratio: float) -> dict[str, int]:
        return {name: max(least[name], int(ratio * width / multiple + 1e-9) * multiple) for name, width in full.items()}

    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if cost(at(middle)) <= limit else (low, middle)
    widths = at(low)
    lost = {name: low * full[name] - widths[name] for name in full}
    for name in sorted(full, key=lambda name: -lost[name]):
        raised = {**widths, name: min(full[name], widths[name] + multiple)}
        if cost(raised) <= limit:
            widths = raised
    return widths


# ---------------------------------------------------------------- pruning


@dataclass
class Run:
    """One method on one seed: the trainer, and what the methods need."""

    trainer: Trainer
    share: float
    """Wanted share of the MACs."""
    vendor: Path | None = None
    search_steps: int | None = None
    """Steps of the search in the published protocol; None for a part of the epochs."""
    energy: EnergyModel | None = None
    """What the share is of; None for the MACs."""
    multiple: int = 1
    """Of all widths."""

    @property
    def notes(self) -> dict[str, Any]:
        """What the cell records besides its score."""
        return self.trainer.notes

    def graph(self, model: nn.Module, freeze: tuple[str, ...] = ()) -> ChannelGraph:
        """Its channel graph, traced on the CPU."""
        return trace_channels(copy.deepcopy(model).cpu(), torch.randn(2, 3, 32, 32), freeze=freeze)

    def cost(self, graph: ChannelGraph) -> CountedCost | EnergyModel:
        """What the budget limits."""
        return counted_cost(graph, "macs") if self.energy is None else self.energy

    def predicted_share(self, model: nn.Module) -> float | None:
        """Share of the energy that is predicted for the result; None without an energy model, or if widths are unknown."""
        if self.energy is None or "group_widths" not in self.notes:
            return None
        graph = self.graph(model)
        return float(self.energy.value(graph.widths(self.notes["group_widths"]))) / dense_cost(self.energy)

    def finish(self, model: nn.Module, momentum: Mapping[str, torch.Tensor] | None = None) -> nn.Module:
        """Train with the batches that are left."""
        model = self.trainer.prepared(model)
        self.trainer.train_to_end(model, momentum)
        return model

    def finish_pruned(self, model: nn.Module) -> nn.Module:
        """Recalibrate the batch norms of a network that was pruned at once, and train it."""
        model = self.trainer.prepared(model)
        self.trainer.recalibrate(model)
        return self.finish(model)


def run_ecc(run: Run, model: nn.Module, variant: Variant) -> nn.Module:
    """`EccSolver` around the optimizer, `slim` at its end, and training with the same state of the optimizer."""
    trainer, graph = run.trainer, run.graph(model, variant.freeze)
    steps = int(variant.prune * trainer.steps)
    if variant.prune_epochs is not None:
        steps = variant.prune_epochs * trainer.epoch_steps
    steps = run.search_steps or max(1, min(steps, trainer.steps - 1))
    solver = EccSolver(
        model,
        graph,
        run.cost(graph),
        f"{100 * run.share:g}%",
        steps,
        optimizer=trainer.optimizer(model),
        width_multiple=run.multiple,
        **variant.settings,
    )
    trainer.train(model, solver, steps)
    small = trainer.prepared(slim(model, graph, width_multiple=run.multiple))
    optimizer = slim_optimizer(solver, model, small, graph)
    momentum = {
        name: optimizer.state[parameter]["momentum_buffer"]
        for name, parameter in small.named_parameters()
        if optimizer.state[parameter].get("momentum_buffer") is not None
    }
    run.notes.update(prune_batches=steps, group_widths=solver.widths)
    return run.finish(small, momentum)


def run_one_shot(run: Run, model: nn.Module, *, is_uniform: bool = False, depth: bool = False) -> nn.Module:
    """One-shot pruning by the Taylor importance of ECC over some batches at constant weights."""
    trainer, graph = run.trainer, run.graph(model)
    cost = run.cost(graph)
    batches = max(2, min(CALIBRATION, trainer.left // 4))
    solver = EccSolver(
        model,
        graph,
        cost,
        f"{100 * run.share:g}%",
        batches,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0),
        warm_up=(batches - 1) / batches - 1e-9,
        ramp=1 / batches,  # one update after the last batch
        depth=depth,
        width_multiple=run.multiple,
    )
    if is_uniform:
        full = {group.name: group.width for group in graph.groups}
        least = {group.name: run.multiple if group.frozen is None else group.width for group in graph.groups}
        limit = run.share * dense_cost(cost)
        some = match_widths(full, least, lambda some: float(cost.value(graph.widths(some))), limit, run.multiple)
        solver.fix_widths(some)
    trainer.accumulate(model, batches, solver)
    run.notes.update(calibration_batches=batches, group_widths=solver.widths)
    return run.finish_pruned(slim(model, graph, width_multiple=run.multiple))


def import_torch_pruning(vendor: Path | None) -> Any:
    """The package, from a folder if one is given. It does not need timm, and fails to import with some versions."""
    if vendor is not None and str(vendor) not in sys.path:
        sys.path.insert(0, str(vendor))
    if "torch_pruning" not in sys.modules:
        hidden = sys.modules.pop("timm", None)
        sys.modules["timm"] = None  # type: ignore[assignment]  # an import of it fails
        try:
            import torch_pruning  # noqa: F401 - kept in sys.modules
        finally:
            del sys.modules["timm"]
            if hidden is not None:
                sys.modules["timm"] = hidden
    return sys.modules["torch_pruning"]


def run_torch_pruning(run: Run, model: nn.Module, settings: TorchPruning) -> nn.Module:
    """Sparse training if asked for, then steps of its pruner until the MACs are met, as in its examples."""
    tp, trainer = import_torch_pruning(run.vendor), run.trainer
    is_met = (
        is_met_by_macs(model, run.share)
        if run.energy is None
        else is_met_by_energy(model, run.graph(model), run.energy, run.share)
    )
    importance = {"magnitude": tp.importance.GroupMagnitudeImportance, "taylor": tp.importance.GroupTaylorImportance}
    ignored = [layer for name, layer in model.named_modules() if name in ("conv1", "linear") or name.endswith("conv2")]
    kind = tp.pruner.GroupNormPruner if settings.sparse else tp.pruner.BasePruner
    example = torch.randn(1, 3, 32, 32, device=trainer.device)
    model.eval()
    pruner = kind(
        model,
        example,
        importance=importance[settings.importance](),
        global_pruning=settings.is_global,
        pruning_ratio=TP_RATIO,
        iterative_steps=TP_STEPS,
        ignored_layers=ignored,
        round_to=None if run.multiple == 1 else run.multiple,
    )
    if settings.sparse:
        pruner.reg *= REGULARIZE_EVERY
        steps = run.search_steps or max(1, int(settings.sparse * trainer.steps))

        def regularize(number: int) -> None:
            if number % REGULARIZE_EVERY == 0:
                pruner.regularize(model)

        pruner.update_regularizer()
        trainer.train(model, trainer.optimizer(model), steps, before_step=regularize)
        run.notes.update(sparse_batches=steps)
    elif settings.importance == "taylor":
        batches = max(2, min(CALIBRATION, trainer.left // 4))
        sums = GradientSums(model)
        trainer.accumulate(model, batches, sums)
        sums.set_gradients_()
        run.notes.update(calibration_batches=batches)
    prune_until(pruner, is_met)
    model.zero_grad(set_to_none=True)
    return run.finish_pruned(copy.deepcopy(model))


class GradientSums:
    """Has the form of an optimizer; adds up gradients of several batches, as `backward` without `zero_grad` does."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = list(model.parameters())  # all of which get a gradient
        self._sums = [torch.zeros_like(parameter) for parameter in self._parameters]

    def step(self) -> None:
        """Add the gradients."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_add_(self._sums, gradients)

    def set_gradients_(self) -> None:
        """The sums become the gradients."""
        for parameter, total in zip(self._parameters, self._sums, strict=True):
            parameter.grad = total


def prune_until(pruner: Any, is_met: Callable[[], bool]) -> None:
    """Steps of a pruner of Torch-Pruning, group by group, until the share is met."""
    for _ in range(TP_STEPS):
        for group in pruner.step(interactive=True):
            group.prune()
            if is_met():
                return
    raise EccError(f"Torch-Pruning did not reach the share in {TP_STEPS} steps; it does not prune the trunk.")


def is_met_by_macs(model: nn.Module, share: float) -> Callable[[], bool]:
    """Whether the layers of a network that is being pruned have at most a share of its present MACs."""
    layers, dense = dict(layers_of(model)), macs_of_layers(model)
    before, limit = {name: layer_size(layer) for name, layer in layers.items()}, share * sum(dense.values())
    return lambda: sum(dense[name] * layer_size(layer) / before[name] for name, layer in layers.items()) <= limit


def is_met_by_energy(model: nn.Module, graph: ChannelGraph, energy: EnergyModel, share: float) -> Callable[[], bool]:
    """Whether a network of which only inner convolutions are pruned has at most a share of the dense energy."""
    inner = {name: layer for name, layer in layers_of(model) if name.startswith("layer") and name.endswith("conv1")}
    limit, full = share * dense_cost(energy), graph.full_widths

    def is_met() -> bool:
        widths = {**full, **{name: layer.out_channels for name, layer in inner.items()}}
        return float(energy.value(graph.widths(widths))) <= limit

    return is_met


def run_method(run: Run, method: str, model: nn.Module) -> nn.Module:
    """Prune and train a network by a method; all batches are used."""
    if (saved := run.trainer.saved(FINISHING)) is not None:
        small = slim_from_state(model.cpu(), saved["slim"], Path("saved state"))
        return run.finish(small, saved["momentum"])
    model = run.trainer.prepared(model)
    if method in DENSE:
        return run.finish(model)
    if method in ECC:
        return run_ecc(run, model, ECC[method])
    if method in ONE_SHOT:
        return run_one_shot(run, model, is_uniform=method == "uniform", depth=method == "greedy_branches")
    return run_torch_pruning(run, model, TORCH_PRUNING[method])


def run_cell(
    method: str,
    seed: int,
    recipe: Recipe,
    share: float,
    model: nn.Module,
    data: Mapping[str, Any],
    logits: torch.Tensor | None,
    vendor: Path | None,
    *,
    energy: EnergyModel | None = None,
    multiple: int = 1,
    is_published: bool = False,
    pause: Pause | None = None,
    result: Path | None = None,
) -> dict[str, Any]:
    """One method and seed: prune, train, and score once.

    Args:
        method: One of `METHODS`.
        seed: Of the batches.
        recipe: Of the training.
        share: Of the MACs, or of the energy.
        model: The dense network.
        data: `train` (padded) and `score`, on the device.
        logits: Of the teacher.
        vendor: Folder of Torch-Pruning.
        energy: What the share is of; None for the MACs.
        multiple: Of all widths.
        is_published: Whether the search is not counted, and all epochs are fine-tuning.
        pause: When to save the state, and where.
        result: File for the network.
    """
    torch.manual_seed(seed)
    trainer = Trainer(data["train"], recipe, seed, None if method == "dense" else logits, pause=pause)
    run = Run(trainer, share, vendor, energy=energy, multiple=multiple)
    if is_published and method not in DENSE:
        search = round(SEARCH.get(method, 0.0) * recipe.epochs) * trainer.epoch_steps
        run.search_steps = search or None
        trainer.steps += search or CALIBRATION
    dense_macs = count_macs(model)
    small = run_method(run, method, copy.deepcopy(model))
    trainer.recalibrate(small)
    if result is not None:
        save_slim(small, result)
    macs = count_macs(small)
    found, predicted = macs / dense_macs, run.predicted_share(model)
    is_met = abs(found - share) <= WINDOW if energy is None else predicted is None or predicted <= share * (1 + 1e-6)
    return {
        "accuracy": accuracy(small, data["score"]),
        "macs_share": found,
        "predicted_share": predicted,
        "share_is_met": method in DENSE or is_met,
        "macs": macs,
        "params": sum(parameter.numel() for parameter in small.parameters()),
        "widths": widths_of(small),
        "batches": trainer.step,
        "train_loss": float(torch.stack(trainer.losses[-3:]).mean()) if trainer.losses else None,
        **run.notes,
    }
