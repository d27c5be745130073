"""`eager`: PyTorch runs one kernel after the other. Base class of the other runners of PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import BadMeasurement
from ecc.graph.hooks import without_observer_hooks
from ecc.settings import MeasureSettings
from ecc.task import Inputs
from ecc.torch_utils import eval_mode, tensors_in, torch_settings

from .inputs import by_argument

HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}


class EagerRunner:
    """Runs a network with PyTorch, in eval and inference mode, without logging hooks.

    Args:
        argument: Mode of `compile`; empty for the others.
        settings: Precision, memory format and cuDNN autotuning.
    """

    precisions = ("fp32", "tf32", "bf16", "fp16")
    has_memory_format = True

    def __init__(self, argument: str, settings: MeasureSettings) -> None:
        self.device = torch.device("cpu")
        self._argument, self._settings = argument, settings
        self._stack = ExitStack()
        self._args: tuple[Tensor, ...] = ()
        self._kwargs: dict[str, Tensor] = {}
        self._call: Callable[..., Any] = _closed

    @property
    def is_asynchronous(self) -> bool:
        """Whether `run` returns before the device is done."""
        return self.device.type == "cuda"

    def prepare(self, model: nn.Module, example_input: Inputs) -> None:
        """Copy the network where precision or memory format would change it, and set torch's settings.

        Raises:
            BadMeasurement: If the device does not have this precision.
        """
        settings, tensors = self._settings, by_argument(example_input)
        self.device = next(model.parameters(), next(iter(tensors.values()))).device
        if settings.precision == "tf32" and self.device.type != "cuda":
            raise BadMeasurement(
                f"precision 'tf32' needs a CUDA device, and the model is on {self.device}. Move the model to a CUDA "
                "device, or use precision 'fp32'."
            )
        dtype = HALF.get(settings.precision)
        if dtype is not None or settings.channels_last:
            model = copy.deepcopy(model)
            model.to(dtype=dtype)
            if settings.channels_last:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        ready = {name: self._convert(tensor) for name, tensor in tensors.items()}
        self._args = tuple(value for name, value in ready.items() if isinstance(name, int))
        self._kwargs = {name: value for name, value in ready.items() if isinstance(name, str)}
        enter = self._stack.enter_context
        model = enter(without_observer_hooks(model, self._args, self._kwargs))  # logging hooks are not measured
        enter(eval_mode(model))
        if self.device.type == "cuda":
            enter(torch_settings(tf32=settings.precision == "tf32", cudnn_autotune=settings.cudnn_autotune))
            enter(torch.cuda.device(self.device))
        enter(torch.inference_mode())
        self._load(model)

    def run(self) -> object:
        """Run one inference."""
        return self._call(*self._args, **self._kwargs)

    def infer(self, inputs: Inputs) -> list[Tensor]:
        """Outputs for other inputs."""
        ready = {name: self._convert(tensor) for name, tensor in by_argument(inputs).items()}
        args = tuple(value for name, value in ready.items() if isinstance(name, int))
        kwargs = {name: value for name, value in ready.items() if isinstance(name, str)}
        return [output.detach().clone() for output in tensors_in(self._call(*args, **kwargs))]

    def close(self) -> None:
        """Restore the model and torch's settings."""
        self._stack.close()
        self._args, self._kwargs, self._call = (), {}, _closed

    def _load(self, model: nn.Module) -> None:
        self._call = model

    def _convert(self, tensor: Tensor) -> Tensor:
        dtype = HALF.get(self._settings.precision) if tensor.is_floating_point() else None
        last = self._settings.channels_last and tensor.dim() == 4
        return tensor.to(device=self.device, dtype=dtype or tensor.dtype).contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )


def _closed(*_: object, **__: object) -> None:
    raise BadMeasurement("the runner was closed; prepare it again.")


open_runner = EagerRunner
