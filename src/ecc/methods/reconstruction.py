"""Layer-wise reconstruction: after pruning, weights with which layers give the outputs of the dense network again.

One forward pass of the pruned network on calibration inputs visits its layers in order. When it reaches a linear layer
that consumes pruned channels, the layer is refit by least squares (`baselines/refit.py`) to the outputs of the dense
network, with the inputs that the pruned network really gives it. So later layers correct errors of earlier ones.

Where a layer adds to a residual stream that is normalized before each block (as in Llama, GPT-2 and ViT), it is refit
to the stream of the dense network rather than to its own output. It then also makes up for attention or MLP blocks
that were removed before it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecc.errors import BadTask
from ecc.task import call_model
from ecc.torch_utils import device_of, eval_mode, tensors_in

from .baselines.refit import refit_, refittable_modules

RIDGE = 1e-3
"""Regularisation towards the present weights, see `least_squares`."""


@dataclass(frozen=True)
class Refit:
    """How layers are refit."""

    ridge: float = RIDGE
    """Regularisation towards the present weights."""
    follows_stream: bool = True
    """Whether layers are refit to the residual stream rather than to their own outputs."""
    is_relative: bool = True
    """Whether errors count relative to the norm of the stream, which the next block divides it by. In language models a
    few tokens have streams with a much larger norm than the others, and would determine the weights."""


REFITS = (
    None,
    Refit(0.3),
    Refit(0.03),
    Refit(0.003),
    Refit(0.03, is_relative=False),
    Refit(0.03, follows_stream=False),
)
"""Choices of `reconstruct_best_`; None leaves the weights as they are, which is best with little calibration data."""


@dataclass
class DenseOutputs:
    """What the dense network computes on calibration inputs."""

    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """Outputs of linear layers by path, one for each batch."""
    residuals: dict[str, list[Tensor]] = field(default_factory=dict)
    """The residual stream that a layer adds to, for layers of which that was verified."""


@torch.no_grad()
def record_outputs(model: nn.Module, paths: Sequence[str], batches: Sequence[Any]) -> DenseOutputs:
    """Run the dense network, and record outputs of linear layers and the residual streams that they add to.

    Args:
        model: The dense network.
        paths: Linear layers.
        batches: Inputs of the network.

    Raises:
        BadTask: If the items of two batches have different shapes: layers are refit to all batches at once.
    """
    _check_shapes(batches)
    found, sums = DenseOutputs(), _Sums()
    modules = dict(model.named_modules())

    def record(path: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Tensor) -> None:
            del module, args
            found.outputs.setdefault(path, []).append(output.detach())
            sums.added(path, output)

        return hook

    with _hooked(model, sums), forward_hooks({modules[path]: record(path) for path in paths}), eval_mode(model):
        for batch in batches:
            sums.start()
            call_model(model, batch)
    found.residuals = {path: streams for path, streams in sums.streams.items() if path not in sums.refuted}
    found.residuals = {path: all_ for path, all_ in found.residuals.items() if path in sums.verified}
    return found


@torch.no_grad()
def reconstruct_(
    model: nn.Module, dense: DenseOutputs, paths: Sequence[str], batches: Sequence[Any], refit: Refit | None = None
) -> None:
    """Refit layers of a pruned network in place, in the order of its forward pass.

    Args:
        model: The pruned network with masked channels; only their linear consumers change.
        dense: From `record_outputs`, of the same batches.
        paths: Layers to refit, some of those of `dense`. Others are left as they are.
        batches: The same inputs, in one batch or in several of which all are kept in memory.
        refit: How; `Refit()` if None.
    """
    modules, refit = refittable_modules(model), refit or Refit()
    sums = _Sums()
    whole = _joined(batches)

    def refit_at(path: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            assert isinstance(module, nn.Linear)
            targets, scales = torch.cat(dense.outputs[path]).to(args[0].dtype), None
            if path in dense.residuals:
                stream = targets + torch.cat(dense.residuals[path])
                scales = 1 / stream.norm(dim=-1).clamp(min=1e-6).flatten() if refit.is_relative else None
                if refit.follows_stream and sums.stream is not None and sums.stream.shape == targets.shape:
                    targets = stream - sums.stream
            if bool((module.weight != 0).any()):
                masked = (module.weight == 0).all(1)  # channels of the residual stream that are pruned
                bias = None if module.bias is None else module.bias[masked].clone()
                refit_(module, args[0].flatten(0, -2), targets.flatten(0, -2), refit.ridge, scales)
                module.weight[masked] = 0
                if bias is not None:
                    module.bias[masked] = bias

        return hook

    chosen: dict[nn.Module, Any] = {
        modules[path]: refit_at(path) for path in paths if path in dense.outputs and _is_linear(modules.get(path))
    }
    with _hooked(model, sums), forward_hooks(chosen, before=True), eval_mode(model):
        call_model(model, whole)


@torch.no_grad()
def reconstruct_best_(
    model: nn.Module,
    dense: DenseOutputs,
    paths: Sequence[str],
    batches: Sequence[Any],
    score: Callable[[nn.Module], float],
    choices: Sequence[Refit | None] = REFITS,
) -> Refit | None:
    """Refit layers in each of several ways, and keep the one with the best score.

    Args:
        model: Changed in place.
        dense: From `record_outputs`.
        paths: Layers to refit.
        batches: Calibration inputs.
        score: Higher is better.
        choices: Ways to refit; None stands for the present weights.

    Returns:
        The best choice.
    """
    modules = dict(model.named_modules())
    before = {path: copy.deepcopy(modules[path].state_dict()) for path in paths}
    best: tuple[float, Refit | None, dict[str, Any]] | None = None
    for choice in choices:
        for path, state in before.items():
            modules[path].load_state_dict(state)
        if choice is not None:
            reconstruct_(model, dense, paths, batches, choice)
        reached = score(model)
        if best is None or reached > best[0]:
            best = (reached, choice, {path: copy.deepcopy(modules[path].state_dict()) for path in paths})
    assert best is not None  # there is at least one choice
    for path, state in best[2].items():
        modules[path].load_state_dict(state)
    return best[1]


def linear_consumers(model: nn.Module, tensors: Sequence[str]) -> list[str]:
    """Paths of the linear layers, among tensors that consume pruned channels, that can be refit."""
    modules = refittable_modules(model)
    paths = dict.fromkeys(name.rpartition(".")[0] for name in tensors if name.endswith(".weight"))
    return [path for path in paths if _is_linear(modules.get(path))]


# --- the residual stream -----------------------------------------------------------------------------


class _Sums:
    """Finds which stream a layer adds to: the input of the last norm before it, if the next norm takes their sum."""

    def __init__(self) -> None:
        self.stream: Tensor | None = None
        self.streams: dict[str, list[Tensor]] = {}
        self.verified: set[str] = set()
        self.refuted: set[str] = set()
        self._pending: tuple[str, Tensor] | None = None

    def start(self) -> None:
        """A new forward pass."""
        self.stream, self._pending = None, None

    def normalized(self, inputs: Tensor) -> None:
        """A norm takes these inputs."""
        if self._pending is not None and self._pending[1].shape == inputs.shape:
            path, expected = self._pending
            is_sum = torch.allclose(inputs.float(), expected.float(), rtol=1e-3, atol=1e-3)
            (self.verified if is_sum else self.refuted).add(path)
            self._pending = None
        if inputs.dim() >= 3:
            self.stream = inputs if self.stream is None or inputs.shape == self.stream.shape else self.stream

    def added(self, path: str, output: Tensor) -> None:
        """A layer gives this output."""
        if self.stream is None or self.stream.shape != output.shape:
            self.refuted.add(path)
            return
        self.streams.setdefault(path, []).append(self.stream.detach())
        self._pending = (path, self.stream + output)


def _is_norm(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return name.endswith("norm") and not any(True for _ in module.children())


@contextmanager
def _hooked(model: nn.Module, sums: _Sums) -> Iterator[None]:
    """Note the inputs of norms."""

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        if args and isinstance(args[0], Tensor):
            sums.normalized(args[0])

    with forward_hooks({module: hook for module in model.modules() if _is_norm(module)}, before=True):
        yield


@contextmanager
def forward_hooks(hooks: Mapping[nn.Module, Any], *, before: bool = False, with_kwargs: bool = False) -> Iterator[None]:
    """A block in which hooks of modules are called after their forward pass, or before it.

    Args:
        hooks: By module.
        before: Whether they are called before the forward pass.
        with_kwargs: Whether they get keyword arguments, too.
    """
    handles = [
        module.register_forward_pre_hook(hook, with_kwargs=with_kwargs)
        if before
        else module.register_forward_hook(hook, with_kwargs=with_kwargs)
        for module, hook in hooks.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _is_linear(module: nn.Module | None) -> bool:
    return isinstance(module, nn.Linear)


def _check_shapes(batches: Sequence[Any]) -> None:
    """Refuse batches that `_joined` cannot join."""
    shapes = [[tuple(tensor.shape[1:]) for tensor in tensors_in(batch)] for batch in batches]
    other = next((one for one in shapes if one != shapes[0]), None)
    if other is not None:
        first, second = (", ".join(map(str, some)) for some in (shapes[0], other))
        raise BadTask(
            f"training batches have items of different shapes, such as {first} and {second}, and layers are refit to "
            "several batches at once. Pad the batches to one length, or use another method."
        )


def _joined(batches: Sequence[Any]) -> Any:
    """All batches as one."""
    first = batches[0]
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, dict):
        return {
            key: torch.cat([one[key] for one in batches]) if isinstance(value, Tensor) else value
            for key, value in first.items()
        }
    return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))


def model_inputs(model: nn.Module, inputs: Any) -> Any:
    """Inputs without labels, on the device of a model; a language model computes one row of logits only."""
    if not isinstance(inputs, dict):
        return inputs
    from inspect import signature

    given = {key: value for key, value in inputs.items() if key != "labels"}
    kept = tree_map_only(Tensor, lambda tensor: tensor.to(device_of(model)), given)
    takes = signature(model.forward).parameters
    return {**kept, **({"logits_to_keep": 1} if "logits_to_keep" in takes else {})}
