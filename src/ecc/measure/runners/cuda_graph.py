"""`cuda-graph`: PyTorch, captured once as a CUDA graph and replayed."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ecc.task import Inputs
from ecc.torch_utils import capture_cuda_graph, tensors_in

from .eager import EagerRunner
from .inputs import by_argument


class CudaGraphRunner(EagerRunner):
    """Replays a CUDA graph. `prepare` raises `NotCapturable` if the network cannot be captured."""

    def _load(self, model: nn.Module) -> None:
        super()._load(model)
        self._graph: Any
        self._outputs: Any
        self._graph, self._outputs = capture_cuda_graph(super().run, warmup=2)

    def run(self) -> object:
        """Replay the graph."""
        self._graph.replay()
        return self._outputs

    def infer(self, inputs: Inputs) -> list[Tensor]:
        """Outputs for other inputs, which are copied to where the graph reads them."""
        static: dict[int | str, Tensor] = dict(enumerate(self._args))
        static.update(self._kwargs)
        for name, tensor in by_argument(inputs).items():
            static[name].copy_(self._convert(tensor))
        self._graph.replay()
        return [output.detach().clone() for output in tensors_in(self._outputs)]

    def close(self) -> None:
        """Free the graph and its memory."""
        self._graph = self._outputs = None
        super().close()


open_runner = CudaGraphRunner
