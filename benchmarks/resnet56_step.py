"""A fast training step of a CIFAR ResNet: aligned channels, fused norms, and the whole step as one CUDA graph.

Alignment: kernels in half precision need multiples of 8 channels, and a pruned network with other widths took longer than
the dense one. `widened` adds zero channels. Their weights and batch-norm parameters are zero, so their activations are
zero, the gradient of the ReLU behind them is zero, and they stay zero: the other channels train as they did.

Fusion: batch norm, the sum with the shortcut and ReLU are one function, which torch.compile can turn into one kernel.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import EccError
from ecc.torch_utils import NotCapturable, capture_cuda_graph
from ecc.zoo.resnet_cifar import BasicBlock, CifarResNet, PadShortcut

ALIGNMENT = 8
WARMUP = 3

# ---------------------------------------------------------------- forward pass


def _norm_relu(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, True, 0.1, eps))


def _norm_add_relu(
    x: Tensor, shortcut: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> Tensor:
    return F.relu(F.batch_norm(x, mean, variance, weight, bias, True, 0.1, eps) + shortcut)


class Forward:
    """The forward pass of a `CifarResNet` in train mode.

    Args:
        is_compiled: Whether norms, sums and ReLUs are compiled.
    """

    def __init__(self, *, is_compiled: bool = False) -> None:
        self._norm_relu: Callable[..., Tensor] = _norm_relu
        self._norm_add_relu: Callable[..., Tensor] = _norm_add_relu
        if is_compiled:
            for name in ("recompile_limit", "cache_size_limit"):  # one compilation for each shape
                if hasattr(torch._dynamo.config, name):
                    setattr(torch._dynamo.config, name, 128)
            self._norm_relu = torch.compile(_norm_relu, dynamic=False)
            self._norm_add_relu = torch.compile(_norm_add_relu, dynamic=False)

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Class scores; those of `model(images)`."""
        if not isinstance(model, CifarResNet) or not is_plain(model.bn1):
            scores: Tensor = model(images)
            return scores
        x = self._norm_relu(model.conv1(images), *_parts(model.bn1))
        for block in (*model.layer1, *model.layer2, *model.layer3):
            x = self._block(block, x)
        out: Tensor = model.linear(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return out

    def _block(self, block: Any, x: Tensor) -> Tensor:
        if not isinstance(block, BasicBlock) or not (is_plain(block.bn1) and is_plain(block.bn2)):
            return block(x)  # type: ignore[no-any-return]  # removed, or changed by pruning
        branch = block.conv2(self._norm_relu(block.conv1(x), *_parts(block.bn1)))
        shortcut = x if block.shortcut is None else block.shortcut(x, branch.shape[1])
        return self._norm_add_relu(branch, shortcut, *_parts(block.bn2))


def is_plain(norm: nn.Module) -> bool:
    """Whether a module is a batch norm with the default momentum."""
    return type(norm) is nn.BatchNorm2d and norm.momentum == 0.1


def _parts(norm: Any) -> tuple[Any, ...]:
    return norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps


# ---------------------------------------------------------------- alignment


class AlignedShortcut(nn.Module):
    """`PadShortcut` of a widened network: the channels are at the places that they have without the added ones."""

    def __init__(self, stride: int, before: int) -> None:
        super().__init__()
        self.stride, self.before = stride, before

    def forward(self, x: Tensor, channels: int) -> Tensor:
        """The input in the shape of the block's output; a negative padding cuts off added channels only."""
        kept = x[:, :, :: self.stride, :: self.stride]
        return F.pad(kept, (0, 0, 0, 0, self.before, channels - x.shape[1] - self.before))


def aligned(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def widened(model: nn.Module) -> nn.Module:
    """A copy in which all widths are multiples of `ALIGNMENT`; the network itself if it has other layers."""
    if not isinstance(model, CifarResNet):
        return model
    wide = copy.deepcopy(model)
    for name, layer in list(wide.named_modules()):
        if isinstance(layer, nn.Conv2d):
            out, into = aligned(layer.out_channels), layer.in_channels
            into = into if name == "conv1" else aligned(into)  # the images have 3
            layer.weight = nn.Parameter(grown(layer.weight.detach(), (out, into, *layer.weight.shape[2:])))
            layer.out_channels, layer.in_channels = out, into
        elif type(layer) is nn.BatchNorm2d:
            count = aligned(layer.num_features)
            for part in ("weight", "bias"):
                setattr(layer, part, nn.Parameter(grown(getattr(layer, part).detach(), (count,))))
            for part in ("running_mean", "running_var"):
                setattr(layer, part, grown(getattr(layer, part), (count,)))
            layer.num_features = count
        elif isinstance(layer, nn.Linear):
            layer.in_features = aligned(layer.in_features)
            layer.weight = nn.Parameter(grown(layer.weight.detach(), (layer.out_features, layer.in_features)))
    for block, before in zip(wide.modules(), model.modules(), strict=True):
        if isinstance(block, BasicBlock) and isinstance(block.shortcut, PadShortcut):
            conv, norm = getattr(before, "conv1", None), getattr(before, "bn2", None)
            if not isinstance(conv, nn.Conv2d) or not isinstance(norm, nn.BatchNorm2d):  # removed by pruning
                return model
            free = norm.num_features - conv.in_channels
            block.shortcut = AlignedShortcut(block.shortcut.stride, free // 2)  # type: ignore[assignment]
    return wide


def grown(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """The tensor with zeros behind its ends."""
    wide = tensor.new_zeros(tuple(shape))
    wide[tuple(slice(size) for size in tensor.shape)] = tensor
    return wide


def narrow_(model: nn.Module, wide: nn.Module) -> None:
    """Copy the values of a widened network into the network that it was made from."""
    values = wide.state_dict()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(values[name][tuple(slice(size) for size in tensor.shape)])


# ---------------------------------------------------------------- optimizer and graph


class Sgd:
    """SGD with Nesterov momentum and weight decay, with the learning rate in a tensor, so that a graph can contain it.

    Args:
        model: Its parameters are stepped.
        momentum: Of the gradient.
        weight_decay: Of all parameters.
        buffers: Momentum by name of the parameter, of an earlier run.
    """

    def __init__(
        self, model: nn.Module, momentum: float, weight_decay: float, buffers: Mapping[str, Tensor] | None = None
    ) -> None:
        named = dict(model.named_parameters())
        self._momentum, self._weight_decay = momentum, weight_decay
        self.parameters = [parameter.detach() for parameter in named.values()]
        self._owners = list(named.values())
        self.buffers = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
        for name, buffer in (buffers or {}).items():
            self.buffers[name].copy_(grown(buffer.to(self.buffers[name].device), self.buffers[name].shape))
        self.rate = torch.zeros((), device=self.parameters[0].device)

    @torch.no_grad()
    def step(self) -> None:
        """One step; `torch.optim.SGD` computes the same up to rounding."""
        gradients = [owner.grad for owner in self._owners]
        assert all(gradient is not None for gradient in gradients), "every parameter has a gradient"
        steps = torch._foreach_add(gradients, self.parameters, alpha=self._weight_decay)  # type: ignore[arg-type]
        buffers = list(self.buffers.values())
        torch._foreach_mul_(buffers, self._momentum)
        torch._foreach_add_(buffers, steps)
        torch._foreach_add_(steps, buffers, alpha=self._momentum)
        torch._foreach_mul_(steps, -self.rate)
        torch._foreach_add_(self.parameters, steps)


class WholeStep:
    """Forward pass, backward pass and optimizer as one CUDA graph; without a graph where it cannot be captured.

    Args:
        model: Its parameters and buffers are changed by a step.
        sgd: Steps the parameters.
        loss: Of a batch, a tuple of tensors.
    """

    def __init__(self, model: nn.Module, sgd: Sgd, loss: Callable[[Any], Tensor]) -> None:
        self._model, self._sgd, self._loss_of = model, sgd, loss
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: tuple[Tensor, ...] = ()
        self._loss = torch.empty(0)
        self._is_tried = False

    def __call__(self, batch: tuple[Tensor, ...], rate: float) -> Tensor:
        """Make a step and return the loss, which the next step overwrites."""
        self._sgd.rate.fill_(rate)
        if not self._is_tried and batch[0].is_cuda:
            self._capture(batch)
        if self._graph is None:
            return self._run(batch)
        for static, new in zip(self._batch, batch, strict=True):
            static.copy_(new)
        self._graph.replay()
        return self._loss

    def _run(self, batch: tuple[Tensor, ...]) -> Tensor:
        for parameter in self._model.parameters():
            parameter.grad = None
        loss = self._loss_of(batch)
        loss.backward()
        self._sgd.step()
        return loss.detach()

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        """Capture the step; what the first calls change is restored."""
        self._is_tried = True
        self._batch = tuple(tensor.clone() for tensor in batch)
        changed = [*self._sgd.parameters, *self._sgd.buffers.values(), *self._model.buffers()]
        before = [tensor.clone() for tensor in changed]
        try:
            self._graph, self._loss = capture_cuda_graph(lambda: self._run(self._batch), WARMUP)
        except (EccError, NotCapturable) as error:
            print(f"no CUDA graph: {error}", flush=True)
        with torch.no_grad():
            for tensor, value in zip(changed, before, strict=True):
                tensor.copy_(value)
