"""Channel energies a_i = ||w_i||_B^2, and the masks that keep dead channels dead.

`ConsumerSlices` collects the parameters (and axes of them) that read channels. A channel read by several layers has the sum
of its slices. All sums go in a fixed order, so that every process of a distributed run decides alike: no atomic
additions, which a GPU performs in any order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ecc.graph import ChannelGraph
from ecc.graph.model_copy import named_tensors
from ecc.methods.ecc.masks import SliceMasks
from ecc.training.cuda_graph import CudaGraphFunction

_AT_ONCE = 2**24
"""Elements that are multiplied at once: their products take memory."""


class ConsumerSlices:
    """The slices of a model with which layers read its cuttable channels.

    Args:
        model: The network that was traced.
        graph: Its channel graph; channels are numbered as its slots, less slot 0.
        device: Where scores and masks of channels live.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph, device: torch.device) -> None:
        tensors = named_tensors(model)
        places = [(group, place) for group in graph.prunable for place in group.slices if place.is_consumer]
        self._axes = list(dict.fromkeys((place.tensor, place.axis) for _, place in places))
        self.tensors = [tensors[name] for name, _ in self._axes]
        """One for each axis that reads; a tensor that reads along two axes comes twice."""
        self._device = device
        self._sizes = [tensor.shape[axis] for tensor, (_, axis) in zip(self.tensors, self._axes, strict=True)]
        starts = dict(zip(self._axes, accumulate(self._sizes, initial=0), strict=False))

        # All reading axes one behind the other: the channel that each index belongs to, the last one meaning none.
        channels = graph.num_channel_ids - 1
        channel_of = torch.full((sum(self._sizes),), channels, dtype=torch.long, device="cpu")
        columns: dict[str, list[Tensor]] = {}  # of each group: where the slices of its units lie
        for group, place in places:
            flat = starts[place.tensor, place.axis] + place.index
            channel_of[flat] = graph.channel_ids(group.name)[0] - 1 + torch.arange(group.width, device="cpu")[:, None]
            columns.setdefault(group.name, []).append(flat)
        self._channel_of = channel_of.to(device)
        self._sums, self._order = _by_degree(graph, columns, device)
        self._unread = self._order == sum(len(index) for index in self._sums)
        self._always = torch.ones(1, dtype=torch.bool, device=device)
        self._masks = SliceMasks(self.tensors, [axis for _, axis in self._axes], device)
        self._elements = sum(tensor.numel() for tensor in self.tensors)
        self._graphed_sums = CudaGraphFunction(self._sums_of)
        self._graphed_masks = CudaGraphFunction(self._write_masks)

    @torch.no_grad()
    def scores(self, metrics: Iterable[Tensor | None]) -> Tensor:
        """a of all channels, float32; 0 for those that no layer reads.

        Args:
            metrics: B for each of `tensors`; None for the identity.
        """
        return self._summed(
            _column_sums(_energies(tensor, metric), axis)
            for tensor, (_, axis), metric in zip(self.tensors, self._axes, metrics, strict=True)
        )

    @torch.no_grad()
    def products(self) -> Tensor:
        """The sum of w g of all channels, float32: how the loss answers when a channel is scaled.

        A tensor without a gradient (frozen, or a buffer) tells nothing. Its slices count as much as the others' of the
        same norm do on average, so that its channels are neither sacred nor free.
        """
        known = [tensor.grad is not None for tensor in self.tensors]
        if all(known) and self._elements <= _AT_ONCE and self.tensors:
            (sums,) = self._graphed_sums(*(product for product in _products(self.tensors) if product is not None))
            return sums
        found = self._summed(
            torch.zeros(tensor.shape[axis]) if product is None else _column_sums(product, axis)
            for tensor, (_, axis), product in zip(self.tensors, self._axes, _products(self.tensors), strict=True)
        )
        if all(known) or not any(known):
            return found
        zero = torch.zeros((), device=self._device)
        seen, unseen = (
            self.scores(
                None if here == wanted else zero.to(t.device) for t, here in zip(self.tensors, known, strict=True)
            )
            for wanted in (True, False)
        )
        rate = found.square().sum() / seen.sum().clamp(min=torch.finfo(torch.float32).tiny)
        return (found.square() + rate * unseen).sqrt()

    @torch.no_grad()
    def live(self) -> Tensor:
        """(channels,) bool: which channels some layer reads with a slice that is not zero, or no layer reads at all."""
        columns = (
            _column_sums(tensor.detach() != 0, axis) for tensor, (_, axis) in zip(self.tensors, self._axes, strict=True)
        )
        return (self._summed(columns) > 0) | self._unread

    def _sums_of(self, *products: Tensor) -> tuple[Tensor]:
        """What `products` gives, of what all tensors have: many small kernels, on a GPU one CUDA graph."""
        columns = (_column_sums(product, axis) for product, (_, axis) in zip(products, self._axes, strict=True))
        return (self._summed(columns),)

    def _summed(self, columns: Iterable[Tensor]) -> Tensor:
        """What the reading axes have, one value an index, summed for each channel."""
        found = [column.to(self._device) for column in columns]
        if not found:
            return torch.zeros(len(self._order), device=self._device)
        flat = torch.cat(found)
        parts = [flat[index].sum(1) for index in self._sums]
        return torch.cat([*parts, flat.new_zeros(1)])[self._order]

    def set_mask(self, alive: Tensor) -> None:
        """Prepares the masks that `apply_mask_` multiplies with."""
        if self._masks.arrange():
            self._graphed_masks = CudaGraphFunction(self._write_masks)
        if any(tensor.device != self._device for tensor in self.tensors):
            self._write_masks(alive)  # a CUDA graph is of one device
        else:
            self._graphed_masks(alive)

    def _write_masks(self, alive: Tensor) -> tuple[Tensor, ...]:
        self._masks.write(torch.cat([alive, self._always])[self._channel_of])
        return ()

    def apply_mask_(self) -> None:
        """Zeroes the slices of dead channels, which the optimizer's step has moved."""
        self._masks.apply_()


def _products(tensors: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """w g of each tensor in float32, None where there is no gradient; some at a time, by one kernel each time."""
    some: list[Tensor] = []
    elements = 0
    for number, tensor in enumerate(tensors, start=1):
        some.append(tensor)
        elements += tensor.numel()
        if number < len(tensors) and elements <= _AT_ONCE:
            continue
        weights = [one.detach().float() for one in some if one.grad is not None]
        gradients = [one.grad.float() for one in some if one.grad is not None]
        found = iter(torch._foreach_mul(weights, gradients) if weights else ())
        for one in some:
            yield None if one.grad is None else next(found)
        some, elements = [], 0


def _by_degree(
    graph: ChannelGraph, columns: Mapping[str, list[Tensor]], device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """How to sum slices into channels without atomics.

    Returns:
        Matrices of indices (channels, slices each), one for each number of slices that occurs; and for each channel
        the row it has in all of them together, one past the last where it has none.
    """
    by_degree: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parts in columns.items():
        index = torch.cat(parts, 1)
        by_degree.setdefault(index.shape[1], []).append((name, index))
    count = sum(graph[name].width for name in columns)
    order = torch.full((graph.num_channel_ids - 1,), count, dtype=torch.long, device="cpu")
    row = 0
    for same in by_degree.values():
        for name, index in same:
            first, stop = graph.channel_ids(name)
            order[first - 1 : stop - 1] = torch.arange(row, row + len(index), device="cpu")
            row += len(index)
    return [torch.cat([index for _, index in same]).to(device) for same in by_degree.values()], order.to(device)


def _energies(tensor: Tensor, metric: Tensor | None) -> Tensor:
    """w^2 B of every weight."""
    energies = tensor.detach().to(torch.float32).square()
    return energies if metric is None else energies.mul_(metric)


def _column_sums(values: Tensor, axis: int) -> Tensor:
    """Sums over all axes but one."""
    others = [k for k in range(values.dim()) if k != axis]
    return values.sum(others) if others else values


# ---------------------------------------------------------------- the metric

IMPORTANCES = ("taylor", "adam_norm")
"""What a channel counts for: what the loss says of it (`Taylor`), or the paper's norm of its weights."""


def adam_metrics(optimizer: Optimizer, tensors: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """B of each tensor, Eq. (7): sqrt(v_hat) + eps of Adam and its kin; None where the optimizer has no such state.

    Paper: as in Adam. Authors' code: no bias correction, so about 32 times too small at first. We: corrected. A tensor
    that never had a gradient (frozen, or a buffer) has no B of its own and takes the mean of the others', so that its
    channels are neither sacred nor free. One after the other, since together they are as large as the network.
    """
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    states = [optimizer.state.get(tensor, {}) for tensor in tensors]
    known = [k for k, state in enumerate(states) if _SQUARES in state]
    mean: Tensor | None = None
    if 0 < len(known) < len(states):
        sums = [_metric(states[k], settings[id(tensors[k])]).sum().to(tensors[known[0]].device) for k in known]
        mean = torch.stack(sums).sum() / sum(tensors[k].numel() for k in known)
    for tensor, state in zip(tensors, states, strict=True):
        if _SQUARES in state:
            yield _metric(state, settings[id(tensor)])
        else:
            yield None if mean is None else mean.to(tensor.device)


_SQUARES = "exp_avg_sq"  # v, in the state of Adam, AdamW, NAdam and RAdam


def _metric(state: Mapping[str, Any], settings: Mapping[str, Any]) -> Tensor:
    """sqrt(v_hat) + eps in float32. Adam counts steps in a tensor on the CPU: using it as such waits for no device.

    Fused ones of other libraries count them in the group.
    """
    second: Tensor = state["max_exp_avg_sq" if settings.get("amsgrad") else _SQUARES].to(torch.float32)
    step = state["step"] if "step" in state else settings.get("step")
    correction = 1.0 if step is None else 1 - settings["betas"][1] ** step
    return (second / correction).sqrt_().add_(settings["eps"])
