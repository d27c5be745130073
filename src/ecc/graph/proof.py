"""The numeric proof of a trace: silence units in one copy of a network, remove them in another, compare.

The comparison runs with weights that hide nothing: tensors that are constant (zero-initialised scales, fresh batch
norm) get random values first, since a branch multiplied by zero would agree with anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecc.errors import UntraceableModel
from ecc.graph.call import tensors_in
from ecc.graph.capture import Inputs, as_call, first_line
from ecc.graph.channels import ChannelGraph, ChannelGroup
from ecc.graph.rebuild import named_tensors
from ecc.graph.surgery import resized, slim, zero_channels_

TOLERANCE = 1e-4
"""Largest difference, relative to the largest output, that float32 arithmetic in another order explains."""
ROUNDINGS = 8
"""As many roundings of a coarser type are explained, too."""


def prove(model: nn.Module, graph: ChannelGraph, example_input: Inputs, *, seed: int = 0) -> ChannelGraph:
    """The same graph with `proof` filled in; groups whose cut changes the outputs are frozen, if any.

    Args:
        model: the traced network.
        graph: its channel graph.
        example_input: what to run it on.
        seed: which units are cut.

    Raises:
        UntraceableModel: the network cannot run on the example input.
    """
    if not graph.prunable:
        return replace(graph, proof=0.0)
    worst = difference(model, graph, example_input, graph.prunable, seed=seed)
    if worst < float("inf"):
        return replace(graph, proof=worst)
    wrong = {g.name for g in graph.prunable if difference(model, graph, example_input, [g], seed=seed) == float("inf")}
    reason = "cutting it changes the outputs"
    groups = tuple(replace(g, frozen=reason) if g.name in wrong else g for g in graph.groups)
    fixed = replace(graph, groups=groups)
    rest = difference(model, fixed, example_input, fixed.prunable, seed=seed) if fixed.prunable else 0.0
    if rest == float("inf"):
        groups = tuple(g if g.frozen else replace(g, frozen=reason) for g in groups)
        fixed, rest = replace(graph, groups=groups), 0.0
    return replace(fixed, proof=rest)


@torch.no_grad()
def difference(
    model: nn.Module, graph: ChannelGraph, example_input: Inputs, groups: Sequence[ChannelGroup], *, seed: int = 0
) -> float:
    """Largest relative difference of the outputs when units of the given groups are silenced, or removed.

    Infinite where it is more than arithmetic explains. Two cuts, so that every unit is dead in one of them: a random
    part of each group, then all the others (at least one unit always lives).
    """
    generator = torch.Generator("cpu").manual_seed(seed)
    whole = _copy_with_visible_weights(model, graph, generator)
    first, second = {}, {}
    for group in groups:
        order = torch.randperm(group.width, generator=generator, device="cpu")
        count = int(group.width * (0.3 + 0.3 * torch.rand((), generator=generator, device="cpu").item()))
        count = min(max(count, 1), group.width - group.least)
        first[group.name] = order[:count]
        second[group.name] = order[count:][: group.width - group.least]
    try:
        return max(_difference(whole, graph, example_input, dead) for dead in (first, second))
    except _CannotRun as stop:
        refuse_what_cannot_run(resized(model, graph, {}), example_input)
        if isinstance(stop.__cause__, torch.OutOfMemoryError):
            raise UntraceableModel(f"the network cannot be proven: {first_line(stop.__cause__)}") from stop.__cause__
        return float("inf")  # it runs with its own weights alone


class _CannotRun(Exception):
    """The network with visible weights, or the cut one for want of memory."""


def _difference(model: nn.Module, graph: ChannelGraph, example_input: Inputs, dead: Mapping[str, Tensor]) -> float:
    masked = resized(model, graph, {})
    zero_channels_(masked, graph, dead)
    try:
        wanted = outputs_of(masked, example_input)
    except Exception as error:
        raise _CannotRun from error
    try:
        found = outputs_of(slim(masked, graph), example_input)
    except torch.OutOfMemoryError as error:
        raise _CannotRun from error
    except Exception:  # noqa: BLE001 - a cut network that cannot run is as wrong as one that differs
        return float("inf")
    apart = relative_error(wanted, found)
    return apart if apart <= tolerance_of(wanted) else float("inf")


def refuse_what_cannot_run(model: nn.Module, example_input: Inputs) -> None:
    """Refuses a network whose types or devices do not fit its input, which a trace does not see.

    Raises:
        UntraceableModel: If it cannot run.
    """
    try:
        outputs_of(model, example_input)
    except Exception as error:
        raise UntraceableModel(f"the network cannot run on the example input: {first_line(error)}") from error


def gap(one: nn.Module, other: nn.Module, example_input: Inputs) -> float:
    """Largest difference between the outputs of two networks, relative to the largest output of the first.

    Both are in evaluation mode afterwards.
    """
    return relative_error(outputs_of(one, example_input), outputs_of(other, example_input))


def tolerance_of(outputs: Sequence[Tensor]) -> float:
    """`TOLERANCE`, or more where outputs are of a coarser type than float32."""
    coarsest = max((torch.finfo(o.dtype).eps for o in outputs if o.is_floating_point()), default=0.0)
    return max(TOLERANCE, ROUNDINGS * coarsest)


def relative_error(wanted: Sequence[Tensor], found: Sequence[Tensor]) -> float:
    """Largest difference between two lists of outputs, relative to the largest finite output of the first.

    Infinite where shapes differ, a number is none, or one is infinite where the other is not: what a network masks
    with infinity stays masked. Only floating point is compared.
    """
    worst = 0.0
    for left, right in zip(wanted, found, strict=True):
        if left.shape != right.shape:
            return float("inf")
        if not left.is_floating_point() or not left.numel():
            continue
        apart = torch.where(left == right, 0.0, (left - right).abs())  # infinity less infinity is no number
        scale = torch.where(left.isfinite(), left.abs(), 0.0).max().clamp(min=1e-12)
        if not bool(apart.isfinite().all()):
            return float("inf")
        worst = max(worst, float(apart.max() / scale))
    return worst


@torch.no_grad()
def outputs_of(model: nn.Module, example_input: Inputs) -> list[Tensor]:
    """Every tensor that comes out, in evaluation mode, with one seed for whatever is drawn."""
    args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), as_call(example_input))
    with _seeded({t.device for t in (*named_tensors(model).values(), *tensors_in((args, kwargs)))}):
        model.eval()
        return list(tensors_in(model(*args, **kwargs)))


@contextmanager
def _seeded(devices: set[torch.device]) -> Iterator[None]:
    """One seed for the host and these devices, whose random states come back; no other device is touched."""
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus), ExitStack() as stack:
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU, for good
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        if any(device.type == "mps" for device in devices):
            stack.enter_context(torch.random.fork_rng(device_type="mps"))
            torch.mps.manual_seed(0)
        yield


def _copy_with_visible_weights(model: nn.Module, graph: ChannelGraph, generator: torch.Generator) -> nn.Module:
    copy = resized(model, graph, {})
    for name, tensor in named_tensors(copy).items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        if bool((tensor == tensor.flatten()[0]).all()):
            noise = torch.rand(tensor.shape, generator=generator, device="cpu").to(tensor)
            tensor.data.copy_(0.5 + noise if "mean" not in name and "bias" not in name else noise - 0.5)
    return copy
