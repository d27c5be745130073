"""A check of a pruned network that is independent of ECC's own verification.

The masked and the slim network run side by side, in float64 and with the same random seed, through a sequence of calls:
in eval and in train mode, with and without gradients, on the example input and on another one. State that a call leaves
behind (running statistics, counters, caches) stays for the next call.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

import ecc
from ecc.errors import UntraceableModel
from ecc.graph.channel_graph import WidthScale
from graph.exactness import masked_and_slim, without_dropout

RELATIVE, ABSOLUTE = 1e-7, 1e-12
"""Allowed difference of float64 sums in another order, relative to the largest value of the tensor."""
CALLS: tuple[tuple[int, bool, str], ...] = (
    (0, False, "no_grad"),
    (1, False, "inference"),
    (1, False, "grad"),
    (0, True, "grad"),
    (1, True, "grad"),
    (0, True, "no_grad"),
    (1, True, "grad"),
    (0, False, "no_grad"),
    (1, False, "no_grad"),
)
"""Which input, train mode or not, and the kind of gradient context, of each call."""
FEW_CALLS = ((1, False, "no_grad"), (0, True, "grad"), (1, True, "grad"), (1, False, "grad"))


def traced(net: nn.Module, example: Any) -> ecc.ChannelGraph | None:
    """The graph of a network, None if ECC refuses it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings are allowed
        try:
            return ecc.trace_channels(net, example)
        except UntraceableModel:
            return None


def assert_never_wrong(net: nn.Module, example: Any, second: Any, *, min_prunable: int = 0) -> None:
    """Check that every prunable group can be pruned, in every mode and for both inputs."""
    before = copy.deepcopy(net.state_dict())
    graph = traced(net, example)
    assert all(torch.equal(before[k].nan_to_num(), v.nan_to_num()) for k, v in net.state_dict().items())
    found = 0 if graph is None else len(graph.prunable)
    assert found >= min_prunable, f"{found} groups are prunable, expected {min_prunable}: {graph}"
    if graph is not None:
        for dead in masks(graph):
            assert_slim_is_masked(net, graph, dead, (example, second))


def masks(graph: ecc.ChannelGraph) -> Iterator[dict[str, list[int]]]:
    """A random half of each group, and all but the minimum of all groups together."""
    generator = torch.Generator().manual_seed(5)
    half, most = {}, {}
    for group in graph.prunable:
        order = torch.randperm(group.width, generator=generator).tolist()
        half[group.name] = order[: min((group.width + 1) // 2, group.width - group.min_width)]
        most[group.name] = order[: group.width - group.min_width]
    yield from ({name: units} for name, units in half.items())
    if most:
        yield most


def assert_slim_is_masked(
    net: nn.Module,
    graph: ecc.ChannelGraph,
    dead: Mapping[str, list[int]],
    inputs: tuple[Any, Any],
    calls: Sequence[tuple[int, bool, str]] = CALLS,
) -> None:
    """Compare the two networks in a sequence of calls."""
    masked, slim = masked_and_slim(copy.deepcopy(net).double(), graph, dead)  # weights of norms are scaled in float64
    without_dropout(masked)
    without_dropout(slim)
    kept = kept_indices(graph, dead)
    full = [group.width for group in graph.groups]
    widths = [group.width - len(dead.get(group.name, ())) for group in graph.groups]
    factors = [(scale, scale.factor(full, widths)) for scale in graph.scales]
    for seed, (number, training, context) in enumerate(calls):
        what = f"{'train' if training else 'eval'} mode, {context}, input {number}, without {dict(dead)}"
        wanted = called(masked, inputs[number], training, context, seed)
        if isinstance(wanted, Exception):
            continue
        found = called(slim, inputs[number], training, context, seed)
        assert not isinstance(found, Exception), f"{what}: the slim network raises {found!r}, the masked one does not"
        assert_close(wanted, found, f"outputs in {what}")
        if training and context == "grad":
            found = gradients(slim, {})
            for scale, factor in factors:
                if scale.target in found:
                    found[scale.target] = found[scale.target] * slice_factors(graph, scale, factor, kept)
            assert_close(gradients(masked, kept), found, f"gradients in {what}")


def called(net: nn.Module, inputs: Any, training: bool, context: str, seed: int) -> dict[str, Tensor] | Exception:
    """The outputs by number, or the exception. With gradients, also run backward from a weighted sum of all outputs."""
    inputs = tree_map_only(Tensor, lambda t: t.double() if t.is_floating_point() else t.clone(), inputs)
    args, kwargs = (
        ((), inputs) if isinstance(inputs, dict) else (inputs if isinstance(inputs, tuple) else (inputs,), {})
    )
    net.train(training)
    net.zero_grad()
    modes = {"grad": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}
    with torch.random.fork_rng(devices=[]), modes[context]():
        torch.manual_seed(seed)
        try:
            leaves = [t for t in tree_flatten(net(*args, **kwargs))[0] if isinstance(t, Tensor)]
            if context == "grad":
                torch.manual_seed(100)
                loss = sum((t * torch.rand(t.shape, dtype=t.dtype)).sum() for t in leaves if t.requires_grad)
                if isinstance(loss, Tensor):
                    loss.backward()
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return error
    return {f"output {number}": t.detach() for number, t in enumerate(leaves)}


def kept_indices(graph: ecc.ChannelGraph, dead: Mapping[str, list[int]]) -> dict[str, dict[int, Tensor]]:
    """For each pruned tensor and axis, the remaining indices."""
    kept: dict[str, dict[int, Tensor]] = {}
    for name, units in dead.items():
        for one in graph[name].slices if units else ():
            size = graph.full_shapes[one.tensor][one.axis]
            axes = kept.setdefault(one.tensor, {})
            mask = axes.setdefault(one.axis, torch.ones(size, dtype=torch.bool))
            mask[one.index[units].flatten()] = False
    return {name: {axis: mask.nonzero().flatten() for axis, mask in axes.items()} for name, axes in kept.items()}


def slice_factors(
    graph: ecc.ChannelGraph, scale: WidthScale, factor: float, kept: Mapping[str, Mapping[int, Tensor]]
) -> Tensor:
    """The factor of each remaining slice of a scaled parameter."""
    shape = graph.full_shapes[scale.target]
    inside = torch.zeros(shape[scale.axis], dtype=torch.bool) if shape else torch.zeros(1, dtype=torch.bool)
    for start, end in scale.ranges or [(0, len(inside))]:
        inside[start:end] = True
    inside = inside[kept.get(scale.target, {}).get(scale.axis, torch.arange(len(inside)))]
    return (
        torch.where(inside, factor, 1.0).double().view([-1 if axis == scale.axis else 1 for axis in range(len(shape))])
    )


def gradients(net: nn.Module, kept: Mapping[str, Mapping[int, Tensor]]) -> dict[str, Tensor]:
    """Gradients of the parameters by name, zero where there is none, without the pruned indices."""
    found = {}
    for name, parameter in net.named_parameters():
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for axis, index in kept.get(name, {}).items():
            grad = grad.index_select(axis, index)
        found[name] = grad
    return found


def assert_close(wanted: Mapping[str, Tensor], found: Mapping[str, Tensor], what: str) -> None:
    assert list(wanted) == list(found), what
    values = [t[t.isfinite()] for t in wanted.values() if t.is_floating_point()]
    # A gradient that is zero (a bias before batch norm) is rounding noise of the other gradients.
    noise = ABSOLUTE * max([1.0, *(float(t.abs().max()) for t in values if t.numel())])
    for name, left in wanted.items():
        right = found[name]
        assert left.shape == right.shape, f"{what}: {name} has shape {tuple(right.shape)}, not {tuple(left.shape)}"
        finite = left.isfinite()
        if not left.is_floating_point() or not bool(finite.any()):
            continue
        left, right = left[finite], right[finite]
        apart, scale = float((left - right).abs().max()), float(left.abs().max())
        assert apart <= RELATIVE * scale + noise, f"{what}: {name} differs by {apart:.2g} of {scale:.2g}"
