"""`CudaGraphPass`: forward and backward of a step as one CUDA graph, replayed batch after batch.

A small network starves a large GPU: its kernels end before the host has started the next ones. A graph starts all of
them at once. Data, optimizer and everything a method does between two passes stay outside of it. `CudaGraphFunction` does
the same for a function of tensors, such as a method's decision.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import EccError
from ecc.torch_utils import sync_is_an_error

from .batches import Batch, leaves_in, mapped, tensors_in

WARM_UP = 3
"""Passes before the capture, in which libraries choose their kernels; what they did to the network is undone."""
WORTH_IT = 20
"""Steps from which on a graph saves more time than its making takes."""
CALLS = 3
"""Calls of a function before it is captured."""
ALONE = "thread_local"
"""What other threads do, such as pinning memory for a DataLoader, does not disturb a capture."""


class CudaGraphPass:
    """Runs a pass by its graph, made at the first batch. A batch of another shape runs without.

    Args:
        model: Whose parameters get gradients, and whose buffers the pass may change.
        run: One pass: forgets the old gradients, computes the new ones, returns the loss. It may not wait for the
            device, nor depend on values it finds there.
    """

    def __init__(self, model: nn.Module, run: Callable[[Batch], Tensor]) -> None:
        self._model, self._run = model, run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._batch: Any = None
        self._loss = torch.empty(0)
        self._gradients: list[tuple[Tensor, Tensor | None]] = []

    def __call__(self, batch: Batch) -> Tensor:
        """The loss; gradients are in place after.

        Raises:
            EccError: If the network or its loss cannot be captured.
        """
        if self._graph is None:
            self._capture(batch)
        if _shapes(batch) != _shapes(self._batch):
            return self._run(batch)
        assert self._graph is not None, "it was captured above"
        for mine, new in zip(tensors_in(self._batch), tensors_in(batch), strict=True):
            mine.copy_(new)
        for parameter, gradient in self._gradients:
            parameter.grad = gradient  # which a pass without the graph may have replaced
        self._graph.replay()
        return self._loss.clone()

    def _capture(self, batch: Batch) -> None:
        for leaf in leaves_in(batch):
            if not isinstance(leaf, Tensor):  # a replay would use the first one for ever
                raise EccError(
                    f"a batch holds a {type(leaf).__name__} beside its tensors, which a CUDA graph cannot follow; "
                    "leave out cuda_graph (--cuda-graph)."
                )
        self._batch = mapped(batch, torch.clone)
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        device = next(tensors_in(self._batch)).device
        random = torch.cuda.get_rng_state(device)
        aside = torch.cuda.Stream(device)
        aside.wait_stream(torch.cuda.current_stream(device))
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    self._run(self._batch)
                with sync_is_an_error():  # a capture that fails half-way would leave the random generator unusable
                    self._run(self._batch)
            torch.cuda.current_stream(device).wait_stream(aside)
            with torch.cuda.graph(graph, capture_error_mode=ALONE):
                self._loss = self._run(self._batch)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise EccError(
                f"the training step cannot be captured as a CUDA graph ({str(error).splitlines()[0]}); "
                "leave out cuda_graph (--cuda-graph)."
            ) from error
        self._gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        self._graph = graph
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        torch.cuda.set_rng_state(random, device)


class CudaGraphFunction:
    """A function of tensors, called as it is at first, and by its CUDA graph then.

    Off one GPU, for inputs of other shapes, and where it cannot be captured, it is always called as it is. To prepare a
    call by the graph takes the host as long as a few kernels, however many the function has.

    Args:
        function: Depends on its inputs, at least one, on tensors that stay where they are, and on nothing else. It may
            write into such tensors, and draws no random numbers.
    """

    def __init__(self, function: Callable[..., tuple[Tensor, ...]]) -> None:
        self._function = function
        self._calls = 0
        self._graph: torch.cuda.CUDAGraph | None = None
        self._inputs: list[Tensor] = []
        self._outputs: tuple[Tensor, ...] = ()

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What the function returns; the tensors are the caller's."""
        device = inputs[0].device
        if device.type != "cuda" or any(tensor.device != device for tensor in inputs):
            return self._function(*inputs)
        if torch.cuda.is_current_stream_capturing():
            return self._function(*inputs)
        self._calls += 1
        if self._calls == CALLS:
            return self._captured(inputs)
        if self._graph is None or _shapes((inputs, ())) != _shapes((self._inputs, ())):
            return self._function(*inputs)
        torch._foreach_copy_(self._inputs, list(inputs))
        self._graph.replay()
        return tuple(tensor.clone() for tensor in self._outputs)

    def _captured(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Captures the function if it can be; what it returns, without the graph."""
        try:
            with sync_is_an_error():
                found = self._function(*inputs)
        except RuntimeError:  # it looks at values, and cannot be captured
            return self._function(*inputs)
        mine, graph = [tensor.clone() for tensor in inputs], torch.cuda.CUDAGraph()
        with torch.cuda.device(inputs[0].device), suppress(RuntimeError):
            with torch.cuda.graph(graph, capture_error_mode=ALONE):
                self._outputs = self._function(*mine)
            self._inputs, self._graph = mine, graph
        return found


def _shapes(batch: Batch) -> list[tuple[torch.Size, torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in tensors_in(batch)]
