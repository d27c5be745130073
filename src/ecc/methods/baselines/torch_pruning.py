"""Torch-Pruning: the pruning library that many would use otherwise, through its public interface.

G. Fang, X. Ma, M. Song, M. B. Mi, X. Wang: DepGraph: Towards Any Structural Pruning, CVPR 2023. The package
`torch-pruning` (MIT) is an optional extra.

As in its examples: `BasePruner` with `GroupMagnitudeImportance` or `GroupTaylorImportance` (after backward passes of
some training batches) removes channels in many small steps, with the same ratio in all layers or by one global ranking,
until the goal is reached. Minimum widths are its `max_pruning_ratio`, multiples its `round_to`. Networks with attention
are pruned in one step, as in its examples, with the numbers of heads and the smallest ratio that reaches the goal.

`tp_group_norm` trains the dense network sparsely before that, which is the method of the paper. As in the authors'
code for CIFAR (`reproduce/main.py --method group_sl`): `GroupNormPruner` adds reg * gamma * w to the gradients of the
weights of a channel after each backward pass. reg is 5e-4, and gamma lies between 1, for the channel with the largest
norm of its group, and 2^4, for the one with the smallest. There is no other weight decay, and the learning rate is
divided by 10 after 60 % and 80 % of the steps. The norms are relative to the largest one of the group. One global
ranking of them removes channels in 400 steps. As published, sparse training is as long as fine-tuning (100 epochs
each); at equal numbers of batches, it has the pruning steps.

Changed for energy: it stops where the cost model meets the targets, not at a number of MACs. If a measurement corrects
the targets, the network is pruned again from the weights after sparse training, which is not repeated.

Changed besides, and why:
- It removes channels at once, and all methods here mask them first. So it prunes a copy, and the channels that it chose
  are masked in the network. Finetuning is that of all methods.
- Only groups that it sees as ECC does are pruned: where the same layers produce the channels, and no others. Its graph
  does not follow every operator, such as shortcuts with padded channels, and pruning those would change the outputs.
- Sparse training uses the optimizer, the learning rate and the teacher of the run, as all training here does; the
  authors use SGD. It ends with the last weights, not with those that were best on the test data.
- Its regularization does not support grouped and transposed convolutions: it fails, or changes the weights of other
  channels. Networks in which they belong to pruned channels are refused before the training.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import EccError, describe_error
from ecc.graph import ChannelGroup, Role, live_masks, mask_channels_
from ecc.methods.base import MaskedAdam, OneShotMethod, PruningContext
from ecc.options import check_options, option
from ecc.torch_utils import eval_mode
from ecc.training.distill import training_loss

from .calibration_loss import CalibrationBatches
from .widths import check_feasible

IMPORTANCES = ("magnitude", "taylor")
LR_DECAYS = (0.6, 0.8)
"""Fractions of the sparse training after which the learning rate is divided by 10, as in the authors' code."""
_HEAD_BISECTIONS = 12
_LAYERS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear,
)  # fmt: skip
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True, kw_only=True)
class TorchPruningSettings:
    """Settings of Torch-Pruning."""

    importance: str = option("magnitude", "Importance of a channel.", choices=IMPORTANCES)
    is_global: bool = option(False, "Rank the channels of all layers together; otherwise all lose the same ratio.")
    iterative_steps: int = option(100, "Steps from the dense network to the minimum widths.", range=(1, None))
    batches: int = option(16, "Training batches of the importance taylor.", range=(1, None))

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class GroupNormSettings(TorchPruningSettings):
    """Settings of Torch-Pruning with sparse training. The defaults are those of the authors' code for CIFAR."""

    importance: str = option("group_norm", "Importance of a channel.", choices=("group_norm",))
    is_global: bool = option(True, "Rank the channels of all layers together; otherwise all lose the same ratio.")
    iterative_steps: int = option(400, "Steps from the dense network to the minimum widths.", range=(1, None))
    batches: int = option(1, "Training batches for the example that is traced.", range=(1, None))
    regularization: float = option(5e-4, "Coefficient of the regularization.", above=0)
    share: float = option(
        1.0, "Fraction of the pruning steps for sparse training; the others are used for fine-tuning.", range=(0, 1)
    )
    within_prune_steps: bool = option(
        True, "Whether sparse training uses the pruning steps. Otherwise it is as long as fine-tuning, as published."
    )


class TorchPruning(OneShotMethod):
    """Prunes the channels that Torch-Pruning chooses."""

    def __init__(self, settings: TorchPruningSettings | None = None) -> None:
        self.settings = settings or TorchPruningSettings()

    @property
    def name(self) -> str:
        """tp_ and the importance."""
        return f"tp_{self.settings.importance}"

    def config(self) -> dict[str, Any]:
        """All settings."""
        return asdict(self.settings)

    def start(self, context: PruningContext) -> None:
        """Keep the dense weights.

        Raises:
            EccError: If torch-pruning is not installed.
        """
        self._package = import_torch_pruning()
        super().start(context)
        self._batches = CalibrationBatches(context, self.settings.batches)
        self._gradients: list[Tensor] | None = None

    def step(self) -> None:
        """Prune the dense network to the targets."""
        context = self.context
        check_feasible(context)
        context.model.load_state_dict(self.dense_state)
        model = copy.deepcopy(context.model)
        if self.settings.importance == "taylor":
            self._set_gradients_(model)
        dead = self._choose(model)
        mask_channels_(context.model, context.graph, dead)
        self.pruned_for = list(context.targets)
        context.log({"phase": self.name, "widths": context.widths()})

    def _choose(self, model: nn.Module) -> dict[str, Tensor]:
        """Units to remove by group; `model` may be pruned."""
        context = self.context
        example, roots = self._find_groups(model)
        heads = self._heads(model, roots)
        if not heads:
            return self._prune(model, example, roots, 1.0 - 1e-6, self.settings.iterative_steps).dead()
        # It prunes heads by their whole ratio in every step, so that one step is used, with a ratio that fits.
        low, high = 0.0, 1.0 - max(context.settings.min_width_ratio, 0.02)  # pruned
        for _ in range(_HEAD_BISECTIONS):
            ratio = 0.5 * (low + high)
            found = self._prune(_copied(model), example, roots, ratio, 1, heads)
            low, high = (low, ratio) if context.constraint_violation(found.widths()) <= 0 else (ratio, high)
        return self._prune(_copied(model), example, roots, high, 1, heads).dead()

    def _find_groups(self, model: nn.Module) -> tuple[Any, dict[str, str]]:
        """An example input, and the groups that can be pruned by their first layer; sets `_allowed`."""
        example = first_items(self._batches.inputs()[0])
        with eval_mode(model), _explain_errors("trace", "Use another method, such as isomorphic."):
            roots, self._allowed = self._common_groups(model, example)
        return example, roots

    def _importance(self) -> Any:
        """The importance of the package."""
        tp = self._package
        return {
            "magnitude": tp.importance.GroupMagnitudeImportance,
            "taylor": tp.importance.GroupTaylorImportance,
        }[self.settings.importance]()

    def _make_pruner(self, kind: Any, model: nn.Module, example: Any, **options: Any) -> Any:
        """A pruner of the package for the groups that can be pruned; the network must be in eval mode."""
        names = {id(module): name for name, module in model.named_modules()}
        return kind(
            model,
            example,
            importance=self._importance(),
            global_pruning=self.settings.is_global,
            ignored_layers=[
                module
                for module in model.modules()
                if isinstance(module, _LAYERS) and names[id(module)] not in self._allowed
            ],
            **options,
        )

    def _prune(
        self,
        model: nn.Module,
        example: Any,
        roots: Mapping[str, str],
        ratio: float,
        steps: int,
        heads: Mapping[str, int] | None = None,
    ) -> _Removable:
        """Prune a network by a ratio in some steps, until the targets are met; what is left of the channel graph."""
        context = self.context
        removable = _Removable(context, roots)
        names = {id(module): name for name, module in model.named_modules()}
        attention = {}
        if heads:
            least = min(heads.values())
            attention = {
                "num_heads": {model.get_submodule(path): count for path, count in heads.items()},
                "prune_num_heads": True,
                "prune_head_dims": False,
                "head_pruning_ratio": max(0.0, min(int(ratio * least), least - 1) / least - 1e-6),  # it rounds up
            }
        with eval_mode(model):
            pruner = self._make_pruner(
                self._package.pruner.BasePruner,
                model,
                example,
                pruning_ratio=ratio,
                max_pruning_ratio=1.0 - context.settings.min_width_ratio,
                iterative_steps=steps,
                round_to=context.width_multiple if context.width_multiple > 1 else None,
                **attention,
            )
            for _ in range(steps):
                for group in pruner.step(interactive=True):
                    for dependency, indices in group:  # of attention, the first one is not a producer
                        path = names.get(id(dependency.target.module), "")
                        if path in roots and pruner.DG.is_out_channel_pruning_fn(dependency.handler):
                            removable.remove(path, indices)
                            break
                    group.prune()
                    if context.constraint_violation(removable.widths()) <= 0:
                        return removable
        return removable

    def _heads(self, model: nn.Module, roots: Mapping[str, str]) -> dict[str, int]:
        """Projections of attention and their numbers of heads, which Torch-Pruning cannot know."""
        heads = {}
        for name in roots.values():
            group = self.context.graph[name]
            for path in _producers(group, model):
                if _producer_index(group, path).numel() > group.width:  # several channels for each unit
                    heads[path] = group.width
        return heads

    def _common_groups(self, model: nn.Module, example: Any) -> tuple[dict[str, str], set[str]]:
        """Groups by their first layer in Torch-Pruning, where it has the same layers as ECC for the channels.

        Torch-Pruning counts depthwise convolutions, which have the channels of their input, among these layers.

        Returns:
            The groups, and all their layers.
        """
        graph = self._package.DependencyGraph().build_dependency(model, example_inputs=example)
        names = {id(module): name for name, module in model.named_modules()}
        layers = {id(m) for m in model.modules() if isinstance(m, _LAYERS)}
        # A single channel cannot be pruned, and the regularization divides by the range of the norms, which is 0.
        prunable = [group for group in self.context.graph.prunable if group.width > 1]
        ours = {frozenset(_producers(group, model)): group for group in prunable}
        found: dict[str, str] = {}
        allowed: set[str] = set()
        for group in graph.get_all_groups():
            theirs = {
                names[id(dependency.target.module)]: dependency.target.module
                for dependency, _ in group
                if id(dependency.target.module) in layers and graph.is_out_channel_pruning_fn(dependency.handler)
            }
            producers = [path for path, layer in theirs.items() if not _is_depthwise(layer)]
            if producers and (same := ours.get(frozenset(producers))) is not None:
                found[producers[0]] = same.name
                allowed |= set(theirs)
        return found, allowed

    def _set_gradients_(self, model: nn.Module) -> None:
        """Gradients of the loss, summed over the batches, as backward passes without zero_grad leave them."""
        if self._gradients is None:
            with eval_mode(model):
                model.zero_grad(set_to_none=True)
                for batch in self._batches():
                    training_loss(model, batch, self.context.loss, None).backward()
            self._gradients = [
                torch.zeros_like(one) if one.grad is None else one.grad.clone() for one in model.parameters()
            ]
        for parameter, gradient in zip(model.parameters(), self._gradients, strict=True):
            parameter.grad = gradient.clone()

    def state_dict(self) -> dict[str, Any]:
        """The position of the calibration batches."""
        return {**super().state_dict(), "first_batch": self._batches.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._batches.restore(state["first_batch"])


class GroupNorm(TorchPruning):
    """Trains the dense network until weak channels are close to zero, and prunes those that Torch-Pruning chooses."""

    settings: GroupNormSettings

    def __init__(self, settings: GroupNormSettings | None = None) -> None:
        super().__init__(settings or GroupNormSettings())

    def start(self, context: PruningContext) -> None:
        """Keep the dense weights.

        Raises:
            EccError: If torch-pruning is not installed.
        """
        super().start(context)
        self._is_trained = False

    def step(self) -> None:
        """The sparse training; in later steps, prune the trained network to the targets.

        Raises:
            EccError: If Torch-Pruning cannot trace or regularize the network.
        """
        if self._is_trained:
            super().step()
            return
        check_feasible(self.context)
        if self.sparse_steps:
            self._train()
            self.dense_state = copy.deepcopy(self.context.model.state_dict())
        self._is_trained = True
        self.context.log({"phase": self.name, "sparse_steps": self.sparse_steps})

    @property
    def sparse_steps(self) -> int:
        """Steps of the sparse training. With the example they use no more batches than there are pruning steps."""
        settings, run = self.settings, self.context.settings
        if not settings.within_prune_steps:
            return run.finetune_steps
        return max(0, int(settings.share * run.prune_steps) - settings.batches)

    def _train(self) -> None:
        """Train the dense network with the regularization."""
        context, steps = self.context, self.sparse_steps
        trial = copy.deepcopy(context.model)
        example, roots = self._find_groups(trial)
        if not roots:
            raise EccError(
                "Torch-Pruning finds no channels that it can prune in the same way as ECC, so there is nothing to "
                "regularize. Use another method, such as isomorphic."
            )
        self._check_regularizer(trial, example)
        pruner = self._regularizer(context.model, example)
        optimizer = _RegularizedOptimizer(
            MaskedAdam(context.model, context.graph, context.settings.lr, 0.0)
            if context.make_optimizer is None
            else context.make_optimizer(),
            lambda: pruner.regularize(context.model),
        )
        decays = [int(part * steps) for part in LR_DECAYS]
        for step in context.training(optimizer, steps):
            if step in decays:
                optimizer.scale_lr_(0.1)

    def _importance(self) -> Any:
        """Sum of squares of all weights of a channel, relative to the largest one of the group."""
        return self._package.importance.GroupMagnitudeImportance(p=2, normalizer="max")

    def _regularizer(self, model: nn.Module, example: Any) -> Any:
        """The pruner whose `regularize` adds to the gradients of a network."""
        with eval_mode(model):
            return self._make_pruner(
                self._package.pruner.GroupNormPruner, model, example, reg=self.settings.regularization
            )

    def _check_regularizer(self, model: nn.Module, example: Any) -> None:
        """Refuse a network, given as a copy, that cannot be regularized."""
        names = {id(module): name for name, module in model.named_modules()}
        advice = "Use tp_magnitude, which does not train"
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        with _explain_errors("regularize", f"{advice}, or freeze the layers that it does not support (freeze=)."):
            pruner = self._regularizer(model, example)
            for group in pruner.DG.get_all_groups(pruner.ignored_layers, pruner.root_module_types):
                layers = [dependency.target.module for dependency, _ in group]
                unsupported = next((layer for layer in layers if not _is_regularizable(layer)), None)
                if unsupported is not None:
                    producer = names[id(layers[0])]
                    raise EccError(
                        f"Torch-Pruning cannot regularize the channels of {producer}, because "
                        f"{names[id(unsupported)]} is a grouped or transposed convolution. {advice}, or freeze them: "
                        f"freeze=[{producer!r}] (--freeze {producer})."
                    )
            pruner.regularize(model)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None and not bool(parameter.grad.isfinite().all()):
                raise EccError(
                    f"Torch-Pruning cannot regularize {name}: all channels of its group have the same norm. {advice}, "
                    "or freeze the layer (freeze=)."
                )

    def state_dict(self) -> dict[str, Any]:
        """The weights after sparse training, and the position of the example."""
        return {**super().state_dict(), "sparse": self.dense_state if self._is_trained else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state."""
        super().load_state_dict(state)
        self._is_trained = state["sparse"] is not None
        if self._is_trained:
            self.dense_state = state["sparse"]


class _RegularizedOptimizer:
    """An optimizer that adds the gradients of a regularization before each step, in place of weight decay."""

    def __init__(self, inner: torch.optim.Optimizer, regularize: Callable[[], None]) -> None:
        self._inner, self._regularize = inner, regularize
        for group in inner.param_groups:
            if "weight_decay" in group:
                group["weight_decay"] = 0.0
        self._share_state()

    def _share_state(self) -> None:
        self.param_groups, self.state = self._inner.param_groups, self._inner.state

    def step(self) -> None:
        """Regularize, and step the weights."""
        self._regularize()
        self._inner.step()

    def zero_grad(self) -> None:
        """Clear the gradients."""
        self._inner.zero_grad()

    def scale_lr_(self, factor: float) -> None:
        """Multiply the learning rates."""
        for group in self.param_groups:
            group["lr"] = group["lr"] * factor

    def state_dict(self) -> dict[str, Any]:
        """That of the optimizer."""
        return self._inner.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Restore a state."""
        self._inner.load_state_dict(state)
        self._share_state()  # loading replaces both


@contextmanager
def _explain_errors(verb: str, advice: str) -> Iterator[None]:
    """Raise errors of the package as `EccError`."""
    try:
        yield
    except EccError:
        raise
    except Exception as error:  # it raises IndexError, AttributeError, AssertionError and others
        raise EccError(f"Torch-Pruning cannot {verb} this network ({describe_error(error)}). {advice}") from error


def _copied(model: nn.Module) -> nn.Module:
    """A copy with the gradients, which `deepcopy` leaves out."""
    copied = copy.deepcopy(model)
    for new, old in zip(copied.parameters(), model.parameters(), strict=True):
        new.grad = None if old.grad is None else old.grad.clone()
    return copied


class _Removable:
    """Units of the channel graph that are left, while Torch-Pruning removes channels and numbers them anew."""

    def __init__(self, context: PruningContext, roots: Mapping[str, str]) -> None:
        self._context, self._roots = context, roots
        groups = context.graph.groups
        self._least = dict(zip((group.name for group in groups), context.min_widths(), strict=True))
        masks = live_masks(context.model, context.graph)
        self._alive = {group.name: mask.cpu().clone() for group, mask in zip(groups, masks, strict=True)}
        self._left: dict[str, list[int]] = {}
        """Units of the channels that are left, by layer, in the present order."""
        for root, name in roots.items():
            index = _producer_index(context.graph[name], root)
            owner = {int(channel): unit for unit, row in enumerate(index.tolist()) for channel in row}
            self._left[root] = [owner[channel] for channel in sorted(owner)]

    def remove(self, root: str, indices: list[int]) -> None:
        """Note that Torch-Pruning removes some channels of a layer. A unit is removed with its first channel."""
        name, left = self._roots[root], self._left[root]
        alive = self._alive[name]
        for unit in [left[index] for index in indices]:
            if alive[unit] and int(alive.sum()) > self._least[name]:
                alive[unit] = False
        gone = set(indices)
        self._left[root] = [unit for index, unit in enumerate(left) if index not in gone]

    def widths(self) -> list[int]:
        """Widths that `slim` would give."""
        live = [int(self._alive[group.name].sum()) for group in self._context.graph.groups]
        return self._context.graph.structure.padded(live, self._context.width_multiple)

    def dead(self) -> dict[str, Tensor]:
        """Units that were removed, by group."""
        prunable = [group.name for group in self._context.graph.prunable]
        return {name: ~self._alive[name] for name in prunable if not bool(self._alive[name].all())}


def import_torch_pruning() -> ModuleType:
    """The package.

    Raises:
        EccError: If it is not installed, or cannot be imported.
    """
    try:
        import torch_pruning
    except Exception as error:  # it imports timm where that is installed, which may fail in any way
        raise EccError(
            "the methods tp_magnitude, tp_taylor and tp_group_norm need torch-pruning, which cannot be imported "
            f"({error}); "
            'install it: pip install "ecc-compress[torch-pruning]".'
        ) from error
    return torch_pruning  # type: ignore[no-any-return]


def first_items(inputs: Any) -> Any:
    """The first two items of a batch of inputs, as an example for tracing."""
    if isinstance(inputs, Tensor):
        return inputs[:2]
    if isinstance(inputs, Mapping):
        return {name: first_items(one) for name, one in inputs.items()}
    return tuple(first_items(one) for one in inputs) if isinstance(inputs, tuple | list) else inputs


def _is_regularizable(layer: nn.Module) -> bool:
    """Whether `GroupNormPruner` regularizes the weights of the right channels, or leaves the layer as it is."""
    return not isinstance(layer, _TRANSPOSED) and (getattr(layer, "groups", 1) == 1 or _is_depthwise(layer))


def _is_depthwise(layer: nn.Module) -> bool:
    """Whether every output channel depends on the input channel of the same number only."""
    groups = getattr(layer, "groups", 1)
    return bool(groups > 1 and groups == layer.in_channels == layer.out_channels)


def _producers(group: ChannelGroup, model: nn.Module) -> list[str]:
    """Layers that produce the channels of a group; none if one of them has other channels too."""
    modules = dict(model.named_modules())
    layers = {path: modules[path] for path in group.layers(Role.PRODUCER) if isinstance(modules.get(path), _LAYERS)}
    for path, layer in layers.items():
        width = getattr(layer, "out_channels", getattr(layer, "out_features", None))
        if _producer_index(group, path).numel() != width:
            return []
    return list(layers)


def _producer_index(group: ChannelGroup, path: str) -> Tensor:
    """(units, channels of a unit): output channels of a layer."""
    return next(one.index for one in group.slices if one.tensor == f"{path}.weight" and Role.PRODUCER in one.roles)
