"""Least squares refit of a layer: weights with which the pruned layer reproduces the outputs of the dense one.

`collect_samples` runs a network on calibration batches and records inputs and outputs of layers at some positions.
`refit_` then solves

    minimise  |Y - X W' - b|^2 + ridge * |(W, b) - (W0, b0)|^2

for the weights of live channels. X are the inputs of the pruned layer, Y the outputs of the dense layer before any
activation, W0 and b0 the present weights. Regularisation towards them, not towards zero, keeps what the samples do not
determine, and the error on the samples never grows.

Only plain `Conv2d` with one group and plain `Linear` can be refit. Grouped, depthwise and transposed convolutions,
subclasses, parametrized layers and layers with shared weights keep their weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.task import call_model
from ecc.torch_utils import device_of, eval_mode
from ecc.training import fork_rng

MAX_COLUMNS = 4608
"""Inputs of a layer that `DenseRefit` refits at most; larger systems take too long to solve hundreds of times."""


@dataclass(frozen=True)
class Samples:
    """Inputs and outputs of a layer at some positions of the calibration batches."""

    inputs: Tensor
    """(rows, columns); for a convolution a row is a patch, in the layout of one filter."""
    outputs: Tensor
    """(rows, outputs), before any activation."""


def refittable_modules(model: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """Layers that can be refit, by path."""
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


def collect_samples(
    model: nn.Module, paths: Sequence[str], batches: Sequence[Any], rows: int, seed: int = 0
) -> dict[str, Samples]:
    """Run a network in eval mode, and record inputs and outputs of some of its layers.

    Two networks of the same shapes are sampled at the same positions. Random state and modes do not change.

    Returns:
        Samples by path. Layers that were not called are missing.
    """
    modules = refittable_modules(model)
    per_batch = max(1, -(-rows // max(1, len(batches))))
    found: dict[str, list[Samples]] = {}

    def recorder(path: str) -> Any:
        def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
            parts = found.setdefault(path, [])
            inputs = args[0] if args else kwargs["input"]
            generator = torch.Generator().manual_seed(seed + len(parts))
            assert isinstance(module, nn.Conv2d | nn.Linear)  # as `refittable_modules` gave it
            parts.append(_some_rows(module, inputs.detach(), output.detach(), per_batch, generator))

        return record

    handles = [modules[path].register_forward_hook(recorder(path), with_kwargs=True) for path in paths]
    try:
        with eval_mode(model), torch.no_grad(), fork_rng(seed, device_of(model)):
            for batch in batches:
                call_model(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    return {
        path: Samples(torch.cat([one.inputs for one in parts]), torch.cat([one.outputs for one in parts]))
        for path, parts in found.items()
    }


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
    """Input patches of some output positions: `unfold`, but only of those positions."""
    mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
    padded = F.pad(inputs, module._reversed_padding_repeated_twice, mode=mode)
    (tall, wide), (down, right), (dilate_y, dilate_x) = module.kernel_size, module.stride, module.dilation
    rows = y[:, None] * down + torch.arange(tall, device=y.device) * dilate_y
    columns = x[:, None] * right + torch.arange(wide, device=x.device) * dilate_x
    patches = padded[item[:, None, None], :, rows[:, :, None], columns[:, None, :]]  # (rows, tall, wide, channels)
    return patches.permute(0, 3, 1, 2).flatten(1)


# ---------------------------------------------------------------- refit


def columns_of(module: nn.Conv2d | nn.Linear, index: Tensor) -> Tensor:
    """Columns of the samples that belong to indices of the weight's input axis.

    Args:
        module: The layer.
        index: (units, indices of one unit), as in a `ParamSlice`.

    Returns:
        (units, columns of one unit).
    """
    taps = module.weight[0, 0].numel()
    return (index[..., None] * taps + torch.arange(taps, device=index.device)).flatten(1)


@torch.no_grad()
def refit_(
    module: nn.Conv2d | nn.Linear, inputs: Tensor, targets: Tensor, ridge: float, scales: Tensor | None = None
) -> None:
    """Set weights and bias of a layer to those whose outputs are closest to the targets.

    Input channels whose weights are all zero stay zero.

    Args:
        module: Changed in place.
        inputs: (rows, columns), as `Samples.inputs`.
        targets: (rows, outputs).
        ridge: Regularisation towards the present weights, as in `least_squares`.
        scales: Factor of the error of each row; 1 by default.
    """
    weight = module.weight.detach().flatten(1).double()
    reads = (module.weight != 0).transpose(0, 1).flatten(1).any(1)
    live = columns_of(module, reads.nonzero()).flatten()
    seen = inputs.double()[:, live]
    residual = targets.double() - seen @ weight[:, live].T
    if module.bias is not None:
        residual -= module.bias.double()
        seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
    if scales is not None:
        seen, residual = seen * scales.double()[:, None], residual * scales.double()[:, None]
    change = least_squares(seen, residual, ridge).T
    weight[:, live] += change[:, : len(live)]
    module.weight.copy_(weight.view_as(module.weight))
    if module.bias is not None:
        module.bias += change[:, -1].to(module.bias.dtype)


def least_squares(inputs: Tensor, targets: Tensor, ridge: float) -> Tensor:
    """Minimise |inputs X' - targets|^2 + ridge * scale * |X'|^2 over X' in closed form; all float64.

    The scale is the mean squared norm of the columns. The primal and the dual system have the same solution; the
    smaller one is solved.

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
        return _solve(inputs.T @ inputs, inputs.T @ targets, ridge * scale)
    return inputs.T @ _solve(inputs @ inputs.T, targets, ridge * scale)


def _solve(products: Tensor, right: Tensor, ridge: float) -> Tensor:
    products.diagonal().add_(ridge)
    return torch.cholesky_solve(right, torch.linalg.cholesky(products))


class DenseRefit:
    """Refits many pruned versions of one network, from products of the inputs and outputs of the dense layers.

    The products are computed once. A refit then solves one small system for each layer, as in the code of AMC: inputs
    are those of the dense network, so that a layer does not correct errors of the layers before it.

    Args:
        model: The dense network.
        paths: Layers. Those are refit that `refittable_modules` has and that have at most `MAX_COLUMNS` inputs.
        batches: Inputs of the network.
        rows: Output positions of each layer.
        ridge: Regularisation towards the present weights, as in `least_squares`.
        seed: Of the choice of positions.
    """

    def __init__(
        self, model: nn.Module, paths: Sequence[str], batches: Sequence[Any], rows: int, ridge: float, seed: int = 0
    ) -> None:
        self._ridge = ridge
        modules = refittable_modules(model)
        fits = [path for path in paths if path in modules and modules[path].weight[0].numel() <= MAX_COLUMNS]
        self._products: dict[str, tuple[Tensor, Tensor]] = {}
        """X^T X and X^T Y by path, with a last column of ones for the bias."""
        for path, samples in collect_samples(model, fits, batches, rows, seed).items():
            seen, outputs = samples.inputs.double(), samples.outputs.double()
            seen = torch.cat([seen, seen.new_ones(len(seen), 1)], 1)
            self._products[path] = (seen.T @ seen, seen.T @ outputs)

    @torch.no_grad()
    def apply_(self, model: nn.Module) -> None:
        """Refit the layers of a pruned network that lost inputs; channels whose weights are all zero stay zero."""
        modules = dict(model.named_modules())
        for path, (square, cross) in self._products.items():
            module = modules[path]
            assert isinstance(module, nn.Conv2d | nn.Linear)  # as in the dense network
            reads = (module.weight != 0).transpose(0, 1).flatten(1).any(1)
            if bool(reads.all()):
                continue
            live = columns_of(module, reads.nonzero()).flatten()
            weight = module.weight.flatten(1).double()
            used = live if module.bias is None else torch.cat([live, live.new_tensor([len(square) - 1])])
            now = weight[:, live].T
            if module.bias is not None:
                now = torch.cat([now, module.bias.double()[None]])
            inner = square[used][:, used]
            scale = float(inner.diagonal().mean())
            if scale == 0:
                continue
            change = _solve(inner.clone(), cross[used] - inner @ now, self._ridge * scale)
            weight[:, live] += change[: len(live)].T
            module.weight.copy_(weight.view_as(module.weight))
            if module.bias is not None:
                module.bias += change[-1].to(module.bias.dtype)


# ---------------------------------------------------------------- restore


@dataclass(frozen=True)
class ConsumerView:
    """How one layer consumes the channels of a group."""

    samples: Samples
    """Inputs of the pruned layer, and outputs of the dense one."""
    module: nn.Conv2d | nn.Linear
    columns: Tensor
    """(units, columns of one unit), from `columns_of`."""


@torch.no_grad()
def restore_best(views: Sequence[ConsumerView], removed: Sequence[int], count: int) -> list[int]:
    """Channels to restore: greedily, the one that lowers the error of the outputs most.

    Errors are squared, relative to the dense outputs of each layer, and summed over the layers.

    Returns:
        Channels in the order in which they are restored.
    """
    parts = [_OutputError(view, removed) for view in views]
    restored: list[int] = []
    for _ in range(min(count, len(removed))):
        gains = torch.stack([part.gains() for part in parts]).sum(0)
        gains[[removed.index(unit) for unit in restored]] = -torch.inf
        best = int(gains.argmax())
        restored.append(removed[best])
        for part in parts:
            part.restore(best)
    return restored


class _OutputError:
    """Error of one layer without the removed channels, and how much each of them would lower it."""

    def __init__(self, view: ConsumerView, removed: Sequence[int]) -> None:
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
        self._powers = products.sum((1, 2))  # |C|^2 of the contribution of each channel

    def gains(self) -> Tensor:
        """|R|^2 - |R - C|^2 = 2 <R, C> - |C|^2 for each channel, relative to the dense outputs."""
        along = ((self._inputs.T @ self._residual) * self._weight.T).sum(1).view(self._size).sum(1)
        return (2 * along - self._powers) / self._whole

    def restore(self, number: int) -> None:
        mine = slice(number * self._size[1], (number + 1) * self._size[1])
        self._residual -= self._inputs[:, mine] @ self._weight[:, mine].T
