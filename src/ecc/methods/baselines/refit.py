"""Closed-form refit: the weights with which a layer gives again, from fewer channels, what the dense layer gave.

`sampled` runs a network on calibration batches and notes, for some positions, what a layer read and what it gave.
`refit_` then solves

    minimise  |Y - X W' - b|^2 + ridge * |(W, b) - (W0, b0)|^2

for the weights that are not silent: X is what the pruned layer reads, Y what the dense one gave before any activation,
W0 and b0 are the weights as they are. The pull towards them, rather than towards zero, leaves alone what the samples
say nothing about, and makes sure that the error on the samples never grows.

Only plain `Conv2d` of one group and plain `Linear` can be refit. Grouped, depthwise and transposed convolutions,
subclasses, parametrized layers, layers that share their weights, and weights used outside of such modules keep theirs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.task import call_model
from ecc.training import fork_rng


@dataclass(frozen=True)
class Samples:
    """What a layer read and gave at some positions of the calibration batches."""

    inputs: Tensor
    """(rows, columns): a patch of a convolution is one row, laid out as one filter of its weight."""
    outputs: Tensor
    """(rows, outputs), before any activation."""


def fit_modules(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """The layers that can be refit, by path."""
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    found: dict[str, nn.Conv2d | nn.Linear] = {}
    for path, module in model.named_modules():
        # By type and not isinstance: a subclass may do anything with its weight.
        is_plain = type(module) is nn.Linear or (type(module) is nn.Conv2d and module.groups == 1)
        if is_plain and all(uses[id(parameter)] == 1 for parameter in module.parameters(recurse=False)):
            assert isinstance(module, nn.Conv2d | nn.Linear)  # for the type checker
            found[path] = module
    return found


# ---------------------------------------------------------------- samples


def sampled(
    model: nn.Module, paths: Sequence[str], batches: Sequence[Any], rows: int, seed: int = 0
) -> dict[str, Samples]:
    """Runs a network in evaluation mode, and notes what some of its layers read and give.

    Two networks of the same shapes are looked at in the same positions. Random states and modes are left as they were.

    Args:
        model: The network.
        paths: Of layers from `fit_modules`.
        batches: Inputs of the network.
        rows: At most about so many positions of each layer.
        seed: Of the choice of positions.

    Returns:
        By path; layers that were not called are missing.
    """
    modules = fit_modules(model)
    share = max(1, -(-rows // max(1, len(batches))))
    found: dict[str, list[Samples]] = {}

    def noting(path: str) -> Any:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            mine = found.setdefault(path, [])
            inputs = args[0] if args else kwargs["input"]
            generator = torch.Generator().manual_seed(seed + len(mine))
            assert isinstance(module, nn.Conv2d | nn.Linear)  # as `fit_modules` gave it
            mine.append(_some_rows(module, inputs.detach(), output.detach(), share, generator))

        return note

    handles = [modules[path].register_forward_hook(noting(path), with_kwargs=True) for path in paths]
    try:
        with in_evaluation(model), torch.no_grad(), fork_rng(seed, device_of(model)):
            for batch in batches:
                call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {
        path: Samples(torch.cat([one.inputs for one in parts]), torch.cat([one.outputs for one in parts]))
        for path, parts in found.items()
    }


def device_of(model: nn.Module) -> torch.device:
    """Where a network lies, by its first parameter."""
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


@contextmanager
def in_evaluation(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and back in its own after."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _some_rows(
    module: nn.Conv2d | nn.Linear, inputs: Tensor, output: Tensor, rows: int, generator: torch.Generator
) -> Samples:
    if isinstance(module, nn.Linear):
        inputs, output = inputs.reshape(-1, inputs.shape[-1]), output.reshape(-1, output.shape[-1])
        chosen = _chosen(len(inputs), rows, generator).to(inputs.device)
        return Samples(inputs[chosen], output[chosen])
    if inputs.dim() == 3:  # one image without a batch
        inputs, output = inputs[None], output[None]
    height, width = output.shape[-2:]
    chosen = _chosen(len(output) * height * width, rows, generator).to(inputs.device)
    item, y, x = chosen // (height * width), chosen // width % height, chosen % width
    return Samples(_patches(module, inputs, item, y, x), output[item, :, y, x])


def _chosen(count: int, rows: int, generator: torch.Generator) -> Tensor:
    if count <= rows:
        return torch.arange(count, device="cpu")
    return torch.randperm(count, generator=generator, device="cpu")[:rows].sort().values


def _patches(module: nn.Conv2d, inputs: Tensor, item: Tensor, y: Tensor, x: Tensor) -> Tensor:
    """What the filter sees at some positions of the output: `unfold`, of those positions alone."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
    (tall, wide), (down, right), (dilate_y, dilate_x) = module.kernel_size, module.stride, module.dilation
    rows = y[:, None] * down + torch.arange(tall, device=y.device) * dilate_y
    columns = x[:, None] * right + torch.arange(wide, device=x.device) * dilate_x
    patches = padded[item[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (rows, tall, wide, channels)
    return patches.permute(0, 3, 1, 2).flatten(1)


# ---------------------------------------------------------------- refit


def columns_of(module: nn.Conv2d | nn.Linear, index: Tensor) -> Tensor:
    """The columns of the samples that belong to indices of the weight's input axis.

    Args:
        module: The layer.
        index: (units, indices of one unit), as in a `ParamSlice`.

    Returns:
        (units, columns of one unit).
    """
    taps = module.weight[0, 0].numel()
    return (index[..., None] * taps + torch.arange(taps, device=index.device)).flatten(1)


@torch.no_grad()
def refit_(module: nn.Conv2d | nn.Linear, inputs: Tensor, targets: Tensor, ridge: float) -> None:
    """Gives a layer the weights, and the bias if it has one, that bring its outputs nearest to the targets.

    Input channels that the layer reads with zeros only stay silent.

    Args:
        module: Changed in place.
        inputs: (rows, columns), as `Samples.inputs`.
        targets: (rows, outputs).
        ridge: Pull towards the weights as they are, as in `least_squares`.
    """
    weight = module.weight.detach().flatten(1).double()
    reads = (module.weight != 0).transpose(0, 1).flatten(1).any(1)
    live = columns_of(module, reads.nonzero()).flatten()
    seen = inputs.double()[:, live]
    residual = targets.double() - seen @ weight[:, live].T
    if module.bias is not None:
        residual -= module.bias.double()
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
    change = least_squares(seen, residual, ridge).T
    weight[:, live] += change[:, : len(live)]
    module.weight.copy_(weight.view_as(module.weight))
    if module.bias is not None:
        module.bias += change[:, -1].to(module.bias.dtype)


def least_squares(inputs: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """The X' that minimises |inputs X' - targets|^2 + ridge * scale * |X'|^2, in closed form; all float64.

    The scale is the mean of the squared norms of the columns. Of the two equal ways, by the products of columns or of
    rows, the smaller is taken.

    Args:
        inputs: (rows, columns).
        targets: (rows, outputs).
        ridge: Above 0.

    Returns:
        (columns, outputs).
    """
    rows, columns = inputs.shape
    scale = float(inputs.square().sum()) / max(1, columns)
    if scale == 0:
        return inputs.new_zeros(columns, targets.shape[1])
    if columns <= rows:
        return _solved(inputs.T @ inputs, inputs.T @ targets, ridge * scale)
    return inputs.T @ _solved(inputs @ inputs.T, targets, ridge * scale)


def _solved(products: Tensor, right: Tensor, pull: float) -> Tensor:
    products.diagonal().add_(pull)
    return torch.cholesky_solve(right, torch.linalg.cholesky(products))


# ---------------------------------------------------------------- restore


@dataclass(frozen=True)
class View:
    """How one layer reads the units of a group: what is needed to tell which of them it misses most."""

    samples: Samples
    """What the pruned layer reads, and what the dense one gave."""
    module: nn.Conv2d | nn.Linear
    columns: Tensor
    """(units, columns of one unit), from `columns_of`."""


@torch.no_grad()
def restored(views: Sequence[View], removed: Sequence[int], count: int) -> list[int]:
    """Of units that are removed, those whose return lowers the error of the outputs most, one after the other.

    Errors are squared, relative to the dense outputs of each layer, and summed over the layers.

    Args:
        views: The layers that read the group, as they are before the units are removed.
        removed: Numbers of the units; of equal ones the earlier comes back.
        count: How many come back.

    Returns:
        Their numbers, in the order of their return.
    """
    parts = [_Misses(view, removed) for view in views]
    back: list[int] = []
    for _ in range(min(count, len(removed))):
        gains = torch.stack([part.gains() for part in parts]).sum(0)
        gains[[removed.index(unit) for unit in back]] = -torch.inf
        best = int(gains.argmax())
        back.append(removed[best])
        for part in parts:
            part.give_back(best)
    return back


class _Misses:
    """The error of one layer without the removed units, and what each of them would take from it."""

    def __init__(self, view: View, removed: Sequence[int]) -> None:
        inputs, outputs = view.samples.inputs.double(), view.samples.outputs.double()
        weight = view.module.weight.flatten(1).double()
        columns = view.columns.to(weight.device)[list(removed)]
        self._size = columns.shape
        self._inputs, self._weight = inputs[:, columns.flatten()], weight[:, columns.flatten()]
        without = weight.clone()
        without[:, columns.flatten()] = 0
        self._residual = outputs - inputs @ without.T
        if view.module.bias is not None:
            self._residual -= view.module.bias.double()
        self._whole = outputs.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
        seen, read = self._inputs.unflatten(1, self._size), self._weight.unflatten(1, self._size)
        products = torch.einsum("rui,ruj->uij", seen, seen) * torch.einsum("oui,ouj->uij", read, read)
        self._powers = products.sum((1, 2))  # |C|^2 of what each unit contributes

    def gains(self) -> Tensor:
        """|R|^2 - |R - C|^2 = 2 <R, C> - |C|^2 for each unit, as a share of the dense outputs."""
        along = ((self._inputs.T @ self._residual) * self._weight.T).sum(1).view(self._size).sum(1)
        return (2 * along - self._powers) / self._whole

    def give_back(self, number: int) -> None:
        mine = slice(number * self._size[1], (number + 1) * self._size[1])
        self._residual -= self._inputs[:, mine] @ self._weight[:, mine].T
