"""CUDA graphs of the training step.

A small network cannot keep a large GPU busy: kernels end before the host has launched the next ones. A CUDA graph
launches all of them at once. `CudaGraphPass` captures forward and backward pass; data, optimizer and everything that a
method does between two passes stay outside. `CudaGraphFunction` captures a function of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from ecc.errors import EccError
from ecc.task import Batch
from ecc.torch_utils import CAPTURE_MODE, NotCapturable, capture_cuda_graph, sync_is_an_error

from .batches import tensors_in

WARMUP_PASSES = 3
"""Passes before the capture, in which libraries choose their kernels; their effect on the network is undone."""
MIN_STEPS = 20
"""A graph saves more time than its capture takes if there are at least as many steps."""
CALLS_BEFORE_CAPTURE = 3


class CudaGraphPass:
    """Runs a training pass as a CUDA graph, captured at the first batch. Batches of other shapes run without it.

    Args:
        model: Its parameters get gradients, and the pass may change its buffers.
        run: One pass: clears the gradients, computes new ones, and returns the loss. It must not wait for the device
            or depend on values of tensors.
    """

    def __init__(self, model: nn.Module, run: Callable[[Batch], Tensor]) -> None:
        self._model, self._run = model, run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss = torch.empty(0)
        self._gradients: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, batch: Batch) -> Tensor:
        """Compute gradients and return the loss.

        Raises:
            EccError: If the network or its loss cannot be captured.
        """
        if self._graph is None:
            self._capture(batch)
        if _shapes(batch) != _shapes(self._batch):
            return self._run(batch)
        assert self._graph is not None, "captured above"
        for static, new in zip(tensors_in(self._batch), tensors_in(batch), strict=True):
            static.copy_(new)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # a pass without the graph may have replaced it
        self._graph.replay()
        return self._loss.clone()

    def _capture(self, batch: Batch) -> None:
        for leaf in tree_leaves(batch):
            if not isinstance(leaf, Tensor):  # a replay would use the value of the first batch
                raise EccError(
                    f"cuda_graph needs batches of tensors only, and this batch holds a {type(leaf).__name__}; "
                    "leave out cuda_graph (--cuda-graph)."
                )
        self._batch = tree_map_only(Tensor, torch.clone, batch)
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        device = tensors_in(self._batch)[0].device
        random_state = torch.cuda.get_rng_state(device)
        try:
            with torch.cuda.device(device):
                self._graph, self._loss = capture_cuda_graph(lambda: self._run(self._batch), WARMUP_PASSES)
        except NotCapturable as error:
            raise EccError(
                f"the training step cannot be captured as a CUDA graph ({error}); leave out cuda_graph (--cuda-graph)."
            ) from error
        self._gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.cuda.set_rng_state(random_state, device)


class CudaGraphFunction:
    """A function of tensors that runs as a CUDA graph after its first calls.

    It runs without a graph on other devices, for inputs of other shapes, and if it cannot be captured.

    Args:
        function: Depends on its inputs, at least one, and on tensors that stay at their address. It may write into
            such tensors, and uses no random numbers.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Call the function; the returned tensors belong to the caller."""
        device = inputs[0].device
        if device.type != "cuda" or any(tensor.device != device for tensor in inputs):
            return self._function(*inputs)
        if torch.cuda.is_current_stream_capturing():
            return self._function(*inputs)
        self._calls += 1
        if self._calls == CALLS_BEFORE_CAPTURE:
            return self._capture(inputs)
        if self._graph is None or _shapes(list(inputs)) != _shapes(self._inputs):
            return self._function(*inputs)
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)

    def _capture(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Capture the function if possible; returns its outputs, computed without the graph."""
        try:
            with sync_is_an_error():
                outputs = self._function(*inputs)
        except RuntimeError:  # it reads values of tensors
            return self._function(*inputs)
        static, graph = [tensor.clone() for tensor in inputs], torch.cuda.CUDAGraph()
        with torch.cuda.device(inputs[0].device), suppress(RuntimeError):
            with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
                self._outputs = self._function(*static)
            self._inputs, self._graph = static, graph
        return outputs


def _shapes(batch: Batch) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(batch)]
