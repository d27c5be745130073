"""Statistics of a network on a few calibration batches, which methods without training choose channels by.

activation_statistics   sums over the inputs of the layers that consume channels (Wanda, FLAP, 2SSP)
taylor_products         sums of w g over the weights that consume a channel (Taylor criterion)
taylor_importance       their variance over batches
taylor_elements         sums of |w g| over all weights of a channel (LLM-Pruner)
block_influence         1 - cosine similarity of the input and output of each block (ShortGPT)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import EccError
from ecc.graph import ChannelGraph, ChannelGroup, ParamSlice, mask_branches_, mask_channels_
from ecc.graph.model_copy import named_tensors
from ecc.task import call_model, model_inputs_of
from ecc.torch_utils import eval_mode
from ecc.training.distill import training_loss

from .base import PruningContext
from .reconstruction import forward_hooks, model_inputs

BATCHES = 16
"""Calibration batches by default."""


def calibration_batches(context: PruningContext, count: int = BATCHES) -> list[Any]:
    """The next training batches. They are counted, and all methods get the same ones.

    Args:
        context: Its stream does not advance.
        count: Number of batches.
    """
    return list(islice(context.stream.fork(), count))


def batch_inputs(context: PruningContext, batches: Sequence[Any]) -> list[Any]:
    """Inputs of the network of some batches, without labels."""
    found = [model_inputs_of(context.model, batch, context.loss) for batch in batches]
    return [model_inputs(context.model, inputs) for inputs in found]


def inner_groups(graph: ChannelGraph) -> list[ChannelGroup]:
    """Prunable groups inside blocks: heads and hidden units, not the width of the residual stream."""
    return [group for group in graph.prunable if not group.zeroed]


@dataclass(frozen=True)
class ActivationStatistics:
    """Statistics of the channels of a group at one consumer, each of shape (units, indices per unit)."""

    square_sums: Tensor
    mean_norms: Tensor
    """Mean over the sequences of the norm over the tokens."""
    means: Tensor
    variances: Tensor
    weight_norms: Tensor
    """Sum of squares of the weights that consume each index."""
    absolute_weights: Tensor
    """Sum of absolute values of these weights."""


@torch.no_grad()
def activation_statistics(
    model: nn.Module, graph: ChannelGraph, inputs: Sequence[Any]
) -> dict[str, list[ActivationStatistics]]:
    """Statistics of the inputs of the linear layers that consume heads and hidden units, by group.

    Args:
        model: The dense network.
        graph: Its channel graph.
        inputs: Inputs of the network.
    """
    modules = dict(model.named_modules())
    consumers = {
        (group.name, one.tensor): (modules[path], one)
        for group in inner_groups(graph)
        for one in group.slices
        if one.is_consumer and _reads_last_axis(modules.get(path := one.tensor.rpartition(".")[0]), one)
    }
    sums: dict[nn.Module, list[Any]] = {module: [0, 0, 0.0, 0.0, 0.0] for module, _ in consumers.values()}

    def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
        seen = args[0].double()
        seen = seen.reshape(-1, *seen.shape[-2:])  # sequences, tokens, channels
        squares = seen.square().sum(1)
        total = sums[module]
        total[0] += seen.shape[0] * seen.shape[1]
        total[1] += seen.shape[0]
        total[2] = total[2] + seen.sum((0, 1))
        total[3] = total[3] + squares.sum(0)
        total[4] = total[4] + squares.sqrt().sum(0)

    _run_with_hooks(model, inputs, dict.fromkeys(sums, hook), before=True)
    found: dict[str, list[ActivationStatistics]] = {}
    for (name, _), (module, one) in consumers.items():
        count, sequences, total, squares, norms = sums[module]
        if not count:
            continue
        weight: Tensor = module.weight if one.axis == 1 else module.weight.T
        index, mean = one.index.to(weight.device), total / count
        found.setdefault(name, []).append(
            ActivationStatistics(
                square_sums=squares[index],
                mean_norms=(norms / sequences)[index],
                means=mean[index],
                variances=(squares / count - mean.square()).clamp(min=0)[index],
                weight_norms=weight.double().square().sum(0)[index],
                absolute_weights=weight.double().abs().sum(0)[index],
            )
        )
    return found


def taylor_products(context: PruningContext, batches: Sequence[Any]) -> list[dict[str, Tensor]]:
    """Sum of w g over the weights that consume each channel, by group, for each batch.

    Args:
        context: Its model is the dense network, and `context.loss` its loss.
        batches: Training batches.
    """
    model, tensors, found = context.model, named_tensors(context.model), []
    consumed = {one.tensor for group in context.graph.prunable for one in group.slices if one.is_consumer}
    with _gradients(model, consumed), eval_mode(model):
        for batch in batches:
            model.zero_grad(set_to_none=True)
            training_loss(model, batch, context.loss, None).backward()
            found.append({group.name: _products(tensors, group) for group in context.graph.prunable})
    return found


def taylor_importance(context: PruningContext, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Variance over batches of the sum of w g of each channel, by group, as `TaylorImportance` has it.

    Args:
        context: As for `taylor_products`.
        batches: At least two training batches.
    """
    products = taylor_products(context, batches)
    return {name: torch.stack([one[name] for one in products]).var(0) for name in products[0]}


def taylor_elements(context: PruningContext, batches: Sequence[Any]) -> dict[str, Tensor]:
    """Sum of |w g| over all weights of each channel of the groups inside blocks, where g is summed over the batches.

    Args:
        context: Its model is the dense network, and `context.loss` its loss.
        batches: Training batches.
    """
    model, tensors, groups = context.model, named_tensors(context.model), inner_groups(context.graph)
    with _gradients(model, {one.tensor for group in groups for one in group.slices}), eval_mode(model):
        for batch in batches:
            training_loss(model, batch, context.loss, None).backward()
        return {group.name: _elements(tensors, group) for group in groups}


@contextmanager
def _gradients(model: nn.Module, names: Set[str]) -> Iterator[None]:
    """A block in which the parameters with these names have gradients, and no others."""
    kept = [parameter.requires_grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    try:
        for name, parameter in named_tensors(model).items():
            if isinstance(parameter, nn.Parameter):
                parameter.requires_grad_(name in names)
        yield
    finally:
        model.zero_grad(set_to_none=True)
        for parameter, needs in zip(model.parameters(), kept, strict=True):
            parameter.requires_grad_(needs)


@torch.no_grad()
def _elements(tensors: Mapping[str, Tensor], group: ChannelGroup) -> Tensor:
    total = torch.zeros(group.width, dtype=torch.float64)
    for one in group.slices:
        tensor = tensors[one.tensor]
        if tensor.grad is not None:
            others = [axis for axis in range(tensor.dim()) if axis != one.axis]
            product = (tensor * tensor.grad).abs().double()
            by_index = product.sum(others) if others else product
            total += by_index[one.index.to(tensor.device)].sum(1).cpu()
    return total


@torch.no_grad()
def _products(tensors: Mapping[str, Tensor], group: ChannelGroup) -> Tensor:
    total: Any = 0.0
    for one in group.slices:
        tensor = tensors[one.tensor]
        if not one.is_consumer or tensor.grad is None:
            continue
        others = [axis for axis in range(tensor.dim()) if axis != one.axis]
        product = (tensor * tensor.grad).double().sum(others)
        total = total + product[one.index.to(tensor.device)].sum(1)
    return total if isinstance(total, Tensor) else torch.zeros(group.width, dtype=torch.float64)


@torch.no_grad()
def block_influence(model: nn.Module, inputs: Sequence[Any]) -> dict[str, float]:
    """1 - mean cosine similarity of the input and output of each block, by path.

    Args:
        model: The network.
        inputs: Its inputs.

    Raises:
        EccError: If the network has no list of equal blocks.
    """
    blocks = find_blocks(model)
    totals = {path: [0.0, 0] for path in blocks}

    def hook(path: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            del module
            before = args[0] if args else kwargs["hidden_states"]
            after = output[0] if isinstance(output, tuple) else output
            near = F.cosine_similarity(before.float(), after.float(), dim=-1)
            totals[path][0] += float((1 - near).sum())
            totals[path][1] += near.numel()

        return record

    _run_with_hooks(model, inputs, {block: hook(path) for path, block in blocks.items()}, with_kwargs=True)
    return {path: total / max(1, count) for path, (total, count) in totals.items()}


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a transformer by path: the longest `ModuleList` of modules of one class.

    Raises:
        EccError: If there is none.
    """
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and len({type(one) for one in module}) == 1
    ]
    if not lists:
        raise EccError(
            f"{type(model).__name__} has no list of equal blocks, which this method needs; use the method one_shot."
        )
    path, blocks = max(lists, key=lambda item: len(item[1]))
    return {f"{path}.{number}": block for number, block in enumerate(blocks)}


# --- branches ----------------------------------------------------------------------------------------


def branch_groups(context: PruningContext) -> dict[str, tuple[str, ...]]:
    """Groups of each residual branch that can be removed at a known cost, by the name of the branch."""
    known = [set(cost.branches) for cost in context.costs]
    found = {branch.name: tuple(branch.groups) for branch in context.graph.branches if branch.groups}
    return {name: groups for name, groups in found.items() if all(name in names for names in known)}


def mask_(context: PruningContext, importance: Mapping[str, Tensor], widths: Mapping[str, int]) -> None:
    """Keep the most important channels of each group; branches whose groups have width 0 are masked whole.

    Args:
        context: Its model is changed in place.
        importance: By group.
        widths: By group; groups that are not named are left as they are.
    """
    branches = context.graph.branches
    removed = [one.name for one in branches if one.groups and not any(widths.get(name, 1) for name in one.groups)]
    dead = {}
    for group in context.graph.prunable:
        width = widths.get(group.name, group.width)
        if 0 < width < group.width:
            order = importance[group.name].argsort(descending=True, stable=True).cpu()
            dead[group.name] = order[width:]
    mask_channels_(context.model, context.graph, dead)
    mask_branches_(context.model, context.graph, removed)


@contextmanager
def restored_tensors(model: nn.Module, graph: ChannelGraph, groups: Sequence[str]) -> Iterator[None]:
    """A block after which the tensors of some groups, and of their branches, are as before."""
    names = {one.tensor for name in groups for one in graph[name].masked_slices}
    for branch in graph.branches:
        if set(branch.groups) & set(groups):
            names |= set(branch.exits)
    tensors = named_tensors(model)
    kept = {name: tensors[name].detach().clone() for name in names}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in kept.items():
                tensors[name].copy_(tensor)


def _run_with_hooks(model: nn.Module, inputs: Sequence[Any], hooks: Mapping[nn.Module, Any], **options: bool) -> None:
    """Run a network on some inputs with hooks, which `forward_hooks` describes."""
    with forward_hooks(hooks, **options), eval_mode(model):
        for one in inputs:
            call_model(model, one)


def _reads_last_axis(module: nn.Module | None, one: ParamSlice) -> bool:
    """Whether a module is linear and the slice is of its inputs. GPT-2's Conv1D has transposed weights."""
    if isinstance(module, nn.Linear):
        return one.axis == 1
    return type(module).__name__ == "Conv1D" and one.axis == 0
