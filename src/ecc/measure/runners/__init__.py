"""Inference runners: a network ready to run as it is deployed.

eager                           PyTorch, one kernel after the other
cuda-graph                      PyTorch, captured once as a CUDA graph and replayed
compile, compile:max-autotune   torch.compile, with its mode
onnxruntime:PROVIDER            ONNX file, run by onnxruntime: CPUExecutionProvider, CUDAExecutionProvider
openvino:DEVICE                 ONNX file run by OpenVINO: CPU, GPU, ...
file.py:MyRunner                your own class with prepare(), run() and close()

Without a runner, a CUDA device uses `cuda-graph` if the network can be captured, which repeats better than single
kernel launches, and every other device uses `eager`. Precision and memory format belong to the runner.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from ecc.errors import BadMeasurement, EccError, first_line
from ecc.io import execute_file
from ecc.settings import COMPILE_MODES, RUNNERS, MeasureSettings, is_own_runner
from ecc.task import Inputs, batch_size_of
from ecc.torch_utils import NotCapturable, device_of

from .inputs import by_argument, draw_inputs, like_example, refuse_zeros
from .runtime import SESSIONS

_CHOSEN_BY_USER = "chosen by the user"
_CAPTURED = "the network can be captured as a CUDA graph, which repeats better than single kernel launches"
_MODULES = {"cuda-graph": "cuda_graph"}  # runner names that are no module names


@runtime_checkable
class InferenceRunner(Protocol):
    """Runs a network. A runner of your own needs only these three methods.

    Its class is called with the argument of its spec (a string) and the `MeasureSettings`. Optional attributes:

        precisions        the values of `precision` that it supports; ("fp32",) by default
        device            torch.device on which it computes, for the meter; the CPU by default
        is_asynchronous   whether `run` returns before the device is done; False by default
        versions()        versions of its software, recorded in the profile
        infer(inputs)     output tensors for other inputs of the same shapes, for `--runner auto`
    """

    def prepare(self, model: nn.Module, example_input: Inputs) -> None:
        """Convert and load the network. The model is not changed."""

    def run(self) -> object:
        """Run one inference of the whole batch, on the example input."""

    def close(self) -> None:
        """Free everything."""


@dataclass(frozen=True)
class PreparedRunner:
    """A network ready to run."""

    run: Callable[[], object]
    """Runs one inference of the whole batch."""
    device: torch.device
    """Where it runs."""
    batch: int
    """Items in one inference."""
    runner: str
    """Spec of the runner."""
    reason: str
    """Why this runner was chosen."""
    is_asynchronous: bool
    """Whether `run` returns before the device is done."""
    versions: dict[str, str]
    """Versions of the runtime."""
    infer: Callable[[Inputs], list[Tensor]] | None
    """Output tensors for inputs of the shapes of the example; None if the runner does not return outputs."""


@contextmanager
def prepare_runner(
    model: nn.Module,
    example_input: Inputs,
    settings: MeasureSettings | None = None,
    *,
    calibration: Sequence[Inputs] = (),
) -> Iterator[PreparedRunner]:
    """Prepare a model for measurement, and restore everything afterwards.

    Args:
        model: The network. A copy is made where precision or memory format would change it.
        example_input: One batch. With `input_data="random"`, floating-point tensors are replaced by random numbers.
        settings: Runner, precision, memory format and input data.
        calibration: Batches for the calibration of int8; the example input by default.

    Raises:
        BadMeasurement: If an input is all zeros, or the network cannot be run this way.
        EccError: If the runtime is not installed; the message says what to install.
    """
    settings = settings or MeasureSettings()
    tensors = by_argument(example_input)
    refuse_zeros(tensors)
    device = next(model.parameters(), next(iter(tensors.values()))).device
    spec, reason = resolve_runner(settings.runner, device.type)
    if settings.input_data == "random":
        example_input = draw_inputs(example_input, device)
    runner = open_runner(spec or "cuda-graph", replace(settings, runner=spec))
    if calibration and hasattr(runner, "calibration"):
        runner.calibration = calibration
    try:
        try:
            runner.prepare(model, example_input)
        except NotCapturable as error:
            runner.close()
            if spec is not None:
                raise BadMeasurement(
                    f"the network cannot be captured as a CUDA graph ({error}). Use runner 'eager', or give none."
                ) from error
            reason = f"the network cannot be captured as a CUDA graph ({error})"
            spec, runner = "eager", open_runner("eager", settings)
            runner.prepare(model, example_input)
        yield PreparedRunner(
            run=runner.run,
            device=getattr(runner, "device", torch.device("cpu")),
            batch=batch_size_of(example_input),
            runner=spec or "cuda-graph",
            reason=reason or _CAPTURED,
            is_asynchronous=getattr(runner, "is_asynchronous", False),
            versions=runner_versions(runner),
            infer=getattr(runner, "infer", None),
        )
    finally:
        runner.close()


def resolve_runner(spec: str | None, device_type: str) -> tuple[str | None, str]:
    """Spec and its reason, as far as the device decides. On CUDA the default is only decided by capturing the network.

    Raises:
        BadMeasurement: If the spec is `auto`, which `choose_runner` resolves, or does not suit the device.
        EccError: If the runtime is not installed.
    """
    if spec == "auto":
        raise BadMeasurement("runner 'auto' has to be resolved by measuring: call choose_runner() first.")
    if spec is None:
        if device_type == "cuda":
            return None, ""
        return "eager", f"CUDA graphs need a CUDA device, and the network runs on {device_type}"
    if spec == "cuda-graph" and device_type != "cuda":
        raise BadMeasurement(
            f"runner 'cuda-graph' needs a CUDA device, and the model is on {device_type}. Move the model, or use "
            "runner 'eager'."
        )
    name, _, argument = spec.partition(":")
    if name in SESSIONS and not argument:
        spec = f"{name}:{_module(name).default_argument(device_type)}"
    return spec, _CHOSEN_BY_USER


def runner_device_type(spec: str | None) -> str | None:
    """torch device type on which a runner computes; None if it computes where the model is."""
    name, _, argument = (spec or "").partition(":")
    if name not in SESSIONS or not argument:
        return None
    kind: str = _module(name).device_type_of(argument)
    return kind


def _module(name: str) -> Any:
    return importlib.import_module(f".{_MODULES.get(name, name)}", __package__)


def open_runner(spec: str, settings: MeasureSettings) -> InferenceRunner:
    """Create a runner; nothing is loaded yet.

    Raises:
        BadMeasurement: If it does not support the precision or memory format.
        EccError: If its runtime is not installed, or a file has no such class.
    """
    if is_own_runner(spec):
        runner = _load_own(spec, settings)
    else:
        name, _, argument = spec.partition(":")
        runner = _module(name).open_runner(argument, settings)
    precisions = tuple(getattr(runner, "precisions", ("fp32",)))
    if settings.precision not in precisions:
        raise BadMeasurement(
            f"runner {spec!r} does not support precision {settings.precision!r}; it supports {', '.join(precisions)}."
        )
    if settings.channels_last and not getattr(runner, "has_memory_format", False):
        raise BadMeasurement(
            f"channels_last has no effect with runner {spec!r}, which chooses its own memory format. Leave it out."
        )
    return runner


def runner_versions(runner: InferenceRunner) -> dict[str, str]:
    """Versions of the software of a runner besides torch."""
    versions = getattr(runner, "versions", None)
    return dict(versions()) if callable(versions) else {}


def available_runners(device_type: str) -> dict[str, str]:
    """Every built-in runner for a device, with the reason why it cannot be used, or an empty string.

    Args:
        device_type: torch device type of the network.
    """
    found = {}
    for name in RUNNERS:
        if name == "cuda-graph" and device_type != "cuda":
            continue
        try:
            spec = resolve_runner(name, device_type)[0] or name
            found[spec] = ""
        except EccError as error:
            found[name] = str(error)
    return found


def _load_own(spec: str, settings: MeasureSettings) -> InferenceRunner:
    """The runner `file.py:MyRunner`, or `file.py:MyRunner:ARGUMENT`."""
    text, _, rest = spec.partition(".py:")
    path, (attribute, _, argument) = Path(f"{text}.py"), rest.partition(":")
    if not path.is_file():
        raise EccError(f"runner {spec!r}: the file {path} does not exist.")
    try:
        runner = getattr(execute_file(path), attribute)(argument, settings)
    except EccError:
        raise
    except Exception as error:
        raise EccError(f"runner {spec!r} cannot be created: {first_line(error)}") from error
    if not isinstance(runner, InferenceRunner):
        missing = [name for name in ("prepare", "run", "close") if not callable(getattr(runner, name, None))]
        raise EccError(f"runner {spec!r} has no method {missing[0]}(); it needs prepare(), run() and close().")
    return runner


class RunnerModule(nn.Module):
    """A prepared runner as a module, so that a task can evaluate it. Batches of any size are split and padded.

    Args:
        ready: The runner; it must have `infer`.
        model: The network that it runs; its outputs show how outputs are nested.
        example_input: The batch for which it was prepared.
    """

    def __init__(self, ready: PreparedRunner, model: nn.Module, example_input: Inputs) -> None:
        super().__init__()
        from torch.utils._pytree import tree_flatten

        from ecc.task import call_model

        assert ready.infer is not None
        self._infer, self._batch = ready.infer, ready.batch
        self._inputs = example_input
        self._device = device_of(model)
        was_training = model.training
        with torch.no_grad():
            self._nesting = tree_flatten(call_model(model.eval(), example_input))[1]
        model.train(was_training)

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """Outputs, nested like those of the network."""
        from torch.utils._pytree import tree_unflatten

        given: dict[int | str, Tensor] = dict(enumerate(args))
        given.update(kwargs)
        names = list(by_argument(self._inputs))
        size, parts = len(next(iter(given.values()))), []
        for start in range(0, size, self._batch):
            index = torch.arange(start, start + self._batch).clamp(max=size - 1)
            part = {name: tensor[index.to(tensor.device)] for name, tensor in given.items()}
            found = self._infer(like_example(self._inputs, {name: part[name] for name in names}))
            parts.append([output[: min(self._batch, size - start)].float().to(self._device) for output in found])
        outputs = [torch.cat(column) for column in zip(*parts, strict=True)]
        return tree_unflatten(outputs, self._nesting)


__all__ = [
    "COMPILE_MODES",
    "InferenceRunner",
    "PreparedRunner",
    "RunnerModule",
    "available_runners",
    "by_argument",
    "draw_inputs",
    "open_runner",
    "prepare_runner",
    "resolve_runner",
    "runner_device_type",
]
