"""Importance of channels: `TaylorImportance` by default, the paper's weight norm a_i = ||w_i||_B^2 with `adam_norm`.

`ConsumerSlices` collects the parameters, and axes of parameters, with which layers consume prunable channels. A channel
with several consumers has the sum over its slices; a channel without any (an inner product of two embedding tables) has
the sum over all of its slices. All sums have a fixed order (no atomic additions, which a GPU
performs in any order), so every process of a distributed run takes the same decisions. It also keeps the slices of
dead channels at zero (`SliceMasks`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.optim import Optimizer

from ecc.graph import ChannelGraph, ChannelGroup, ParamSlice
from ecc.graph.model_copy import named_tensors
from ecc.graph.slimming import mask_norms_
from ecc.graph.structure import Branch
from ecc.training.cuda_graph import CudaGraphFunction

# ---------------------------------------------------------------- the Taylor criterion

TAYLOR_SAMPLES = 1000
"""Samples of the gradients in a run: every step of a short one, every n-th step of a long one."""
MAX_TAYLOR_INTERVAL = 20
TAYLOR_DECAY = 0.98
"""Decay of the running means from sample to sample: they average about 50 of them."""


def taylor_interval(steps: int) -> int:
    """Steps from one sample of the gradients to the next, so that training is hardly slower."""
    return min(MAX_TAYLOR_INTERVAL, max(1, steps // TAYLOR_SAMPLES))


class TaylorImportance:
    """Running variance of the sum of w g for each channel.

    To first order, scaling a channel by 1 - t changes the loss by -t times the sum of w g over the weights that consume
    it. The variance of that sum over batches is the Fisher information along this scaling, which estimates the
    curvature of the loss, and so the increase of the loss when the channel is removed (compare Molchanov et al.,
    Importance Estimation for Neural Network Pruning, CVPR 2019, who use the mean square). The square of the mean is
    left out: it is not curvature, and differs between layers by how far each is from its optimum. In
    `benchmarks/importance.py` the variance predicts the increase better than the mean square.

    It does not depend on the scale of weights before a batch norm. Behind a batch norm, the products of a group sum to
    zero, because scaling all channels at once changes nothing. So the sum over removed channels says too little where
    few channels remain; `WidthPlanner` divides by the square root of the share that remains.

    The state is replaced and never changed in place.

    Args:
        count: Number of channels.
        device: Device of the importance.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self._square, self._mean = torch.zeros(count, device=device), torch.zeros(count, device=device)
        self._samples = 0

    @property
    def state(self) -> tuple[Tensor, Tensor, int]:
        """Running mean square and running mean, which start at zero, and the number of samples."""
        return self._square, self._mean, self._samples

    def load(self, state: Sequence[Tensor | int]) -> None:
        """Restore a state."""
        square, mean, samples = state
        self._square, self._mean = (torch.as_tensor(one).to(self._mean, copy=True) for one in (square, mean))
        self._samples = int(samples)

    @torch.no_grad()
    def add(self, products: Tensor) -> None:
        """Add a sample.

        Args:
            products: Sum of w g of each channel. Values that are not finite count as 0.
        """
        self._samples += 1
        finite = torch.nan_to_num(products, nan=0.0, posinf=0.0, neginf=0.0)
        self._square = self._square.lerp(finite.square(), 1 - TAYLOR_DECAY)
        self._mean = self._mean.lerp(finite, 1 - TAYLOR_DECAY)

    @property
    def samples(self) -> int:
        """Number of samples."""
        return self._samples

    @property
    def values(self) -> Tensor:
        """a of each channel: the running variance with bias correction. After one sample, its square."""
        if not self._samples:
            return self._square
        decayed = TAYLOR_DECAY**self._samples
        square, mean = self._square / (1 - decayed), self._mean / (1 - decayed)
        # The sum of squared weights of the running mean: 1 after one sample, then falling to 0.01.
        weights = (1 - TAYLOR_DECAY) / (1 + TAYLOR_DECAY) * (1 + decayed) / (1 - decayed)
        return (square - (1 - weights) * mean.square()).clamp(min=0)


# ---------------------------------------------------------------- the paper's criterion

_SQUARES = "exp_avg_sq"  # v, in the state of Adam, AdamW, NAdam and RAdam


def adam_preconditioners(optimizer: Optimizer, tensors: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """B of each tensor, Eq. (7): sqrt(v_hat) + eps of Adam and its variants; None if the optimizer has no such state.

    Paper: "as in Adam". Authors' code: no bias correction, so about 32 times too small at first. We: corrected.
    A tensor that never had a gradient (frozen, or a buffer) has no B. It takes the mean of the others, so that its
    channels are neither always kept nor always pruned. Returns an iterator: all B together are as large as the network.
    """
    settings = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    states = [optimizer.state.get(tensor, {}) for tensor in tensors]
    known = [k for k, state in enumerate(states) if _SQUARES in state]
    mean: Tensor | None = None
    if 0 < len(known) < len(states):
        sums = [_preconditioner(states[k], settings[id(tensors[k])]).sum().to(tensors[known[0]].device) for k in known]
        mean = torch.stack(sums).sum() / sum(tensors[k].numel() for k in known)
    for tensor, state in zip(tensors, states, strict=True):
        if _SQUARES in state:
            yield _preconditioner(state, settings[id(tensor)])
        else:
            yield None if mean is None else mean.to(tensor.device)


def _preconditioner(state: Mapping[str, Any], settings: Mapping[str, Any]) -> Tensor:
    """sqrt(v_hat) + eps in float32.

    Adam counts steps in a tensor on the CPU, so using it synchronises with no device. Fused optimizers of other
    libraries count steps in the parameter group.
    """
    second: Tensor = state["max_exp_avg_sq" if settings.get("amsgrad") else _SQUARES].to(torch.float32)
    step = state["step"] if "step" in state else settings.get("step")
    correction = 1.0 if step is None else 1 - settings["betas"][1] ** step
    return (second / correction).sqrt_().add_(settings["eps"])


def squared_norm(tensor: Tensor, preconditioner: Tensor | None) -> Tensor:
    """w^2 B of every weight, float32."""
    squares = tensor.detach().to(torch.float32).square()
    return squares if preconditioner is None else squares.mul_(preconditioner)


# ---------------------------------------------------------------- slices

_MAX_PRODUCTS = 2**24
"""Elements whose products w g are computed at once, to bound the memory."""


class ConsumerSlices:
    """The slices of parameters with which layers consume prunable channels.

    Args:
        model: The traced network.
        graph: Its channel graph. Channels are numbered by channel id, without id 0.
        device: Device of importance and masks.
    """

    def __init__(self, model: nn.Module, graph: ChannelGraph, device: torch.device) -> None:
        mask_norms_(model, graph)  # now, since a CUDA graph of the training pass may follow
        ranked = [(group, place) for group in graph.prunable for place in group.ranked_slices]
        masked = [(group, place) for group in graph.variable for place in group.masked_slices]
        self._ranked = _SliceTable(model, graph, ranked, device)
        self._masked = _SliceTable(model, graph, masked, device)
        self.tensors = self._ranked.tensors
        """One for each consuming axis; a tensor that consumes along two axes appears twice."""
        self._axes = self._ranked.axes
        self._device = device
        self._always = torch.ones(1, dtype=torch.bool, device=device)
        self._masks = SliceMasks(self._masked.tensors, self._masked.axes, device)
        self._elements = sum(tensor.numel() for tensor in self.tensors)
        self.sign = -1.0
        self._products_graph = CudaGraphFunction(self._sum_products)
        self._masks_graph = CudaGraphFunction(self._write_masks)

    @torch.no_grad()
    def norms(self, preconditioners: Iterable[Tensor | None] | None = None) -> Tensor:
        """a_i = ||w_i||_B^2 of all channels, float32; 0 for channels without a consumer.

        Args:
            preconditioners: B for each of `tensors`; None for the identity.
        """
        given = [None] * len(self.tensors) if preconditioners is None else preconditioners
        return self._sum_slices(
            _column_sums(squared_norm(tensor, preconditioner), axis)
            for tensor, axis, preconditioner in zip(self.tensors, self._axes, given, strict=True)
        )

    @torch.no_grad()
    def products(self) -> Tensor:
        """Sum of w g of all channels, float32: minus the derivative of the loss when a channel is scaled down.

        A tensor without a gradient (frozen, or a buffer) has no product. Its slices count as much as those of the other
        tensors with the same norm do on average, so that its channels are neither always kept nor always pruned. The
        sign of such products alternates, since their variance over batches is what counts.
        """
        known = [tensor.grad is not None for tensor in self.tensors]
        if all(known) and all(tensor.device.type == "cpu" for tensor in self.tensors):
            return self._sum_slices(map(_column_products, self.tensors, self._axes))
        if all(known) and self._elements <= _MAX_PRODUCTS and self.tensors:
            (sums,) = self._products_graph(*(product for product in _products(self.tensors) if product is not None))
            return sums
        found = self._sum_slices(
            torch.zeros(tensor.shape[axis]) if product is None else _column_sums(product, axis)
            for tensor, axis, product in zip(self.tensors, self._axes, _products(self.tensors), strict=True)
        )
        if all(known) or not any(known):
            return found
        zero = torch.zeros((), device=self._device)
        with_gradient, without = (
            self.norms(
                None if here == wanted else zero.to(t.device) for t, here in zip(self.tensors, known, strict=True)
            )
            for wanted in (True, False)
        )
        rate = found.square().sum() / with_gradient.sum().clamp(min=torch.finfo(torch.float32).tiny)
        self.sign = -self.sign
        return torch.where(without > 0, self.sign * (found.square() + rate * without).sqrt(), found)

    @torch.no_grad()
    def live(self) -> Tensor:
        """(channels,) bool: channels with a nonzero slice among those that masking sets to zero, or without any."""
        pairs = zip(self._masked.tensors, self._masked.axes, strict=True)
        columns = (_column_sums(tensor.detach() != 0, axis) for tensor, axis in pairs)
        return (self._masked.sum_slices(columns) > 0) | self._masked.without

    def set_mask(self, alive: Tensor) -> None:
        """Prepare the masks that `apply_mask_` multiplies with."""
        if self._masks.allocate():
            self._masks_graph = CudaGraphFunction(self._write_masks)
        if any(tensor.device != self._device for tensor in self._masked.tensors):
            self._write_masks(alive)  # a CUDA graph has one device
        else:
            self._masks_graph(alive)

    def apply_mask_(self) -> None:
        """Zero the slices of dead channels, which the optimizer's step has changed."""
        self._masks.apply_()

    def _sum_products(self, *products: Tensor) -> tuple[Tensor]:
        """`products` where every tensor has a gradient: many small kernels, on a GPU one CUDA graph."""
        columns = (_column_sums(product, axis) for product, axis in zip(products, self._axes, strict=True))
        return (self._sum_slices(columns),)

    def _sum_slices(self, columns: Iterable[Tensor]) -> Tensor:
        """Sum values of the consuming axes, one value per index, for each channel."""
        return self._ranked.sum_slices(columns)

    def _write_masks(self, alive: Tensor) -> tuple[Tensor, ...]:
        self._masks.write(torch.cat([alive, self._always])[self._masked.channel_of])
        return ()


class BranchExits:
    """The last parameters of residual branches: a branch adds nothing if they are zero.

    Scaling them by 1 - t scales the branch, so the importance of a branch is that of a channel with these slices.

    Args:
        model: The traced network.
        branches: The branches that may be removed; their exits must be trained.
        device: Device of the importance.
    """

    def __init__(self, model: nn.Module, branches: Sequence[Branch], device: torch.device) -> None:
        tensors = named_tensors(model)
        self._exits = [[tensors[name] for name in branch.exits] for branch in branches]
        self.tensors = [tensor for exits in self._exits for tensor in exits]
        self.count = len(branches)
        self._device = device
        # (branches, most exits): positions in `tensors`, and one past the last for none.
        places = list(torch.arange(len(self.tensors), device="cpu").split([len(exits) for exits in self._exits]))
        self._places = pad_sequence(places, batch_first=True, padding_value=len(self.tensors)).to(device)
        self._zeroed: list[Tensor] = []

    @torch.no_grad()
    def products(self) -> Tensor:
        """Sum of w g of each branch, float32."""
        return self._sum(
            torch.zeros(()) if tensor.grad is None else _dot(tensor.detach(), tensor.grad) for tensor in self.tensors
        )

    @torch.no_grad()
    def norms(self, preconditioners: Iterable[Tensor | None]) -> Tensor:
        """||w||_B^2 of each branch, float32, given B for each of `tensors`."""
        return self._sum(squared_norm(*pair).sum() for pair in zip(self.tensors, preconditioners, strict=True))

    def _sum(self, values: Iterable[Tensor]) -> Tensor:
        found = [value.to(self._device) for value in values]
        return torch.stack([*found, torch.zeros((), device=self._device)])[self._places].sum(1)

    def remove(self, numbers: Sequence[int]) -> None:
        """Set which branches `apply_mask_` zeroes."""
        self._zeroed = [tensor.detach() for number in numbers for tensor in self._exits[number]]

    def apply_mask_(self) -> None:
        """Zero the exits of removed branches, which the optimizer's step has changed."""
        if self._zeroed:
            torch._foreach_zero_(self._zeroed)


class _SliceTable:
    """Axes of tensors that hold channels, concatenated.

    Args:
        model: The traced network.
        graph: Its channel graph.
        places: Slices with their groups.
        device: Device of the result.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        places: Sequence[tuple[ChannelGroup, ParamSlice]],
        device: torch.device,
    ) -> None:
        tensors = named_tensors(model)
        keys = list(dict.fromkeys((place.tensor, place.axis) for _, place in places))
        self.tensors = [tensors[name] for name, _ in keys]
        self.axes = [axis for _, axis in keys]
        self._device = device
        sizes = [tensor.shape[axis] for tensor, axis in zip(self.tensors, self.axes, strict=True)]
        starts = dict(zip(keys, accumulate(sizes, initial=0), strict=False))
        channels = graph.num_channel_ids - 1
        channel_of = torch.full((sum(sizes),), channels, dtype=torch.long, device="cpu")
        columns: dict[str, list[Tensor]] = {}  # by group: the indices of each of its channels
        for group, place in places:
            flat = starts[place.tensor, place.axis] + place.index
            channel_of[flat] = graph.channel_ids(group.name)[0] - 1 + torch.arange(group.width, device="cpu")[:, None]
            columns.setdefault(group.name, []).append(flat)
        self.channel_of = channel_of.to(device)
        """The channel of each index; the last channel means none."""
        self._sums, self._order = _sum_indices(graph, columns, device)
        self.without = self._order == sum(len(index) for index in self._sums)
        """(channels,) bool: channels without a slice."""

    def sum_slices(self, columns: Iterable[Tensor]) -> Tensor:
        """Sum values of the axes, one value per index, for each channel."""
        found = [column.to(self._device) for column in columns]
        if not found:
            return torch.zeros(len(self._order), device=self._device)
        flat = torch.cat(found)
        parts = [flat[index].sum(1) for index in self._sums]
        return torch.cat([*parts, flat.new_zeros(1)])[self._order]


def _products(tensors: Sequence[Tensor]) -> Iterator[Tensor | None]:
    """w g of each tensor in float32, None without a gradient; one kernel for many tensors."""
    some: list[Tensor] = []
    elements = 0
    for number, tensor in enumerate(tensors, start=1):
        some.append(tensor)
        elements += tensor.numel()
        if number < len(tensors) and elements <= _MAX_PRODUCTS:
            continue
        weights = [one.detach().float() for one in some if one.grad is not None]
        gradients = [one.grad.float() for one in some if one.grad is not None]
        found = iter(torch._foreach_mul(weights, gradients) if weights else ())
        for one in some:
            yield None if one.grad is None else next(found)
        some, elements = [], 0


def _sum_indices(
    graph: ChannelGraph, columns: Mapping[str, list[Tensor]], device: torch.device
) -> tuple[list[Tensor], Tensor]:
    """How to sum slices into channels without atomic additions.

    Channels with the same number of slices form one matrix of indices (channels, slices), so that a gather and a sum
    along the rows add their slices in a fixed order.

    Returns:
        One matrix for each number of slices that occurs; and for each channel its row in all matrices together, or one
        past the last row if it has no slice.
    """
    by_count: dict[int, list[tuple[str, Tensor]]] = {}
    for name, parts in columns.items():
        index = torch.cat(parts, 1)
        by_count.setdefault(index.shape[1], []).append((name, index))
    count = sum(graph[name].width for name in columns)
    order = torch.full((graph.num_channel_ids - 1,), count, dtype=torch.long, device="cpu")
    row = 0
    for same in by_count.values():
        for name, index in same:
            first, stop = graph.channel_ids(name)
            order[first - 1 : stop - 1] = torch.arange(row, row + len(index), device="cpu")
            row += len(index)
    return [torch.cat([index for _, index in same]).to(device) for same in by_count.values()], order.to(device)


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Sum of the products of two tensors, float32, in one pass over the memory and without a product tensor."""
    return torch.dot(one.float().flatten(), other.float().flatten())


def _column_sums(values: Tensor, axis: int) -> Tensor:
    """Sums over all axes but one."""
    others = [k for k in range(values.dim()) if k != axis]
    return values.sum(others) if others else values


def _column_products(tensor: Tensor, axis: int) -> Tensor:
    """Sums of w g over all axes but one, on a CPU, where one operator for a matrix is twice as fast as two."""
    assert tensor.grad is not None
    weight, gradient = tensor.detach().float(), tensor.grad.float()
    if weight.dim() == 2:
        dots: Tensor = torch.linalg.vecdot(weight, gradient, dim=1 - axis)
        return dots
    return _column_sums(weight * gradient, axis)


# ---------------------------------------------------------------- masks

_BROADCAST = {"cpu"}
"""Types of devices on which all masks are broadcast, which takes little memory. A CPU vectorizes that for matrices."""
_SMALL = 2**22
"""Elements of a tensor on another device up to which a kernel launch takes longer than reading a mask of full size."""


class SliceMasks:
    """Keeps slices of tensors at zero, with few kernels. All masks are set from one vector.

    On a GPU all masks have the full shape: a kernel with a broadcast operand reads one number at a time, a kernel for
    contiguous operands four. One kernel multiplies many small tensors. The masks of large tensors have one byte per
    weight. Memory and views are allocated once, and again if a tensor changes its strides (channels_last).

    Args:
        tensors: One for each axis; a tensor that is masked along two axes appears twice.
        axes: Axis of each tensor.
        device: Device of the vector.
    """

    def __init__(self, tensors: Sequence[Tensor], axes: Sequence[int], device: torch.device) -> None:
        self._tensors, self._axes = list(tensors), list(axes)
        self._sizes = [tensor.shape[axis] for tensor, axis in zip(tensors, axes, strict=True)]
        self._vector = torch.ones(sum(self._sizes), device=device)
        self._strides: list[tuple[int, ...]] | None = None
        self._broadcast: list[tuple[Tensor, list[Tensor]]] = []  # with views of the vector
        self._small: list[Tensor] = []
        self._factors: list[Tensor] = []  # a mask for each small tensor
        self._large: list[Tensor] = []
        self._dead: list[Tensor] = []  # a bool mask for each large tensor
        self._views: list[list[Tensor]] = []  # views of the vector whose product is each mask, small tensors first

    def allocate(self) -> bool:
        """Allocate memory and views if there are none that fit. Returns whether it did."""
        strides = [tensor.stride() for tensor in self._tensors]
        if strides == self._strides:
            return False
        self._strides = strides
        views: dict[int, tuple[Tensor, list[Tensor]]] = {}
        for tensor, axis, part in zip(self._tensors, self._axes, self._vector.split(self._sizes), strict=True):
            view = part.view([-1 if k == axis else 1 for k in range(tensor.dim())])
            views.setdefault(id(tensor), (tensor, []))[1].append(view)
        self._broadcast = [pair for pair in views.values() if pair[0].device.type in _BROADCAST]
        full = [pair for pair in views.values() if pair[0].device.type not in _BROADCAST]
        full.sort(key=lambda pair: pair[0].numel() > _SMALL)
        self._small = [tensor for tensor, _ in full if tensor.numel() <= _SMALL]
        self._large = [tensor for tensor, _ in full if tensor.numel() > _SMALL]
        self._factors = [torch.empty_like(tensor, requires_grad=False) for tensor in self._small]
        self._dead = [torch.empty_like(tensor, dtype=torch.bool, requires_grad=False) for tensor in self._large]
        self._views = [found for _, found in full]
        return True

    @torch.no_grad()
    def write(self, kept: Tensor) -> None:
        """Set which slices are kept. Always the same operations on the same memory, for CUDA graphs.

        Args:
            kept: 1 or True for slices that are kept, the axes of all tensors concatenated.
        """
        self._vector.copy_(kept)
        small, large = self._views[: len(self._small)], self._views[len(self._small) :]
        if small:
            torch._foreach_copy_(self._factors, [views[0] for views in small])
        for factors, views in zip(self._factors, small, strict=True):
            for view in views[1:]:
                factors.mul_(view.to(factors.device))
        for dead, views in zip(self._dead, large, strict=True):
            dead.copy_(views[0] == 0)
            for view in views[1:]:
                dead.logical_or_((view == 0).to(dead.device))

    @torch.no_grad()
    def apply_(self) -> None:
        """Zero the slices that are not kept."""
        if self._small:
            torch._foreach_mul_(self._small, self._factors)
        for tensor, dead in zip(self._large, self._dead, strict=True):
            tensor.masked_fill_(dead, 0)
        for tensor, views in self._broadcast:
            for view in views:
                tensor.mul_(view.to(tensor.device, tensor.dtype))
