"""A network as it is deployed: mode, precision, memory format, inputs. What is measured is what is shipped.

The caller's model and torch's global switches are left as they were found.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from ecc.errors import BadMeasurement
from ecc.graph.hooks import without_observer_hooks
from ecc.task import Inputs
from ecc.torch_utils import sync_is_an_error, torch_settings

Mode = Literal["auto", "eager", "graph", "compile"]
Precision = Literal["fp32", "tf32", "fp16", "bf16"]
MemoryFormat = Literal["contiguous", "channels_last"]
InputData = Literal["random", "example"]

MODES: tuple[Mode, ...] = get_args(Mode)
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
MEMORY_FORMATS: tuple[MemoryFormat, ...] = get_args(MemoryFormat)
INPUT_DATA: tuple[InputData, ...] = get_args(InputData)

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SEED = 20190613  # every network sees the same inputs

AS_ASKED = "as asked for"
"""Why a network runs in the mode that was asked for."""

CAPTURED = "the network can be captured as a CUDA graph, and a graph repeats better than launches one by one"
"""Why mode `auto` runs a network as a CUDA graph."""


@dataclass(frozen=True)
class InferenceRunner:
    """A network ready to run."""

    run: Callable[[], object]
    """One inference of the whole batch."""

    device: torch.device
    """Where it runs."""

    batch: int
    """Items in one inference."""

    mode: Mode
    """How it runs; never `auto`."""

    mode_reason: str
    """Why it runs so."""


@contextmanager
def prepare_runner(
    model: nn.Module,
    example_input: Inputs,
    *,
    mode: Mode = "auto",
    precision: Precision = "fp32",
    memory_format: MemoryFormat = "contiguous",
    cudnn_autotune: bool = True,
    input_data: InputData = "random",
) -> Iterator[InferenceRunner]:
    """Makes a model ready to be measured, and puts everything back afterwards.

    Args:
        model: Stays where it is; a copy is made where precision or memory format would change it.
        example_input: Gives the shapes; floating-point tensors are replaced by normal random numbers.
        mode: `eager`, `graph` (CUDA graph), `compile` (torch.compile), or `auto`: a graph on CUDA if the network can be
            captured, else eager.
        precision: `fp32` allows no TF32; `tf32` allows it; the others convert weights and inputs.
        memory_format: Of four-dimensional weights and inputs.
        cudnn_autotune: Lets cuDNN try its algorithms during the warm-up.
        input_data: `example` keeps the example's own numbers.

    Raises:
        BadMeasurement: If an input is all zeros, or the device cannot run this way.
    """
    tensors = _tensors(example_input)
    _refuse_zeros(tensors)
    first_weight = next(model.parameters(), next(iter(tensors.values())))
    device = first_weight.device
    if device.type != "cuda" and (mode == "graph" or precision == "tf32"):
        what = "mode 'graph'" if mode == "graph" else "precision 'tf32'"
        raise BadMeasurement(
            f"{what} needs a CUDA device, and the model is on {device}. Move it with model.to('cuda'), or "
            "measure with mode 'eager' and precision 'fp32'."
        )
    channels_last = memory_format == "channels_last"
    if precision in _HALF or channels_last:
        model = copy.deepcopy(model)
        model.to(dtype=_HALF.get(precision))
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
    inputs = _ready(tensors, device, _HALF.get(precision), channels_last, input_data)
    args = tuple(value for name, value in inputs.items() if isinstance(name, int))
    kwargs = {name: value for name, value in inputs.items() if isinstance(name, str)}
    was_training = {module: module.training for module in model.modules()}
    with ExitStack() as stack:
        model = stack.enter_context(without_observer_hooks(model, args, kwargs))  # hooks that log are not measured
        stack.callback(_restore_training, was_training)
        model.eval()
        if device.type == "cuda":
            stack.enter_context(torch_settings(tf32=precision == "tf32", cudnn_autotune=cudnn_autotune))
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.inference_mode())
        mode, reason = mode_on(mode, device)
        run, mode, reason = _runner(model, args, kwargs, mode, reason)
        yield InferenceRunner(run, device, _batch(tensors), mode, reason)


def mode_on(mode: Mode, device: torch.device) -> tuple[Mode, str]:
    """The mode and its reason as far as the device decides; `auto` stays on CUDA, until a network was captured."""
    if mode != "auto":
        return mode, AS_ASKED
    if device.type == "cuda":
        return mode, ""
    return "eager", f"CUDA graphs need a CUDA device, and the network runs on {device.type}"


def _runner(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], mode: Mode, reason: str
) -> tuple[Callable[[], object], Mode, str]:
    """One inference as a function, how it runs, and why so."""

    def run() -> object:
        return model(*args, **kwargs)

    if mode == "compile":
        # After eight networks of one class torch would give up compiling and run eagerly, without a word.
        torch.compiler.reset()
        compiled: Callable[..., object] = torch.compile(model, dynamic=False)
        return (lambda: compiled(*args, **kwargs)), mode, reason
    if mode == "eager":
        return run, mode, reason
    try:
        replay = _captured(run)
    except _NotCapturable as error:
        if mode == "auto":
            return run, "eager", f"the network cannot be captured as a CUDA graph ({error})"
        raise BadMeasurement(
            f"mode 'graph' was asked for, and the network cannot be captured as a CUDA graph ({error}). Measure in "
            "mode 'eager', or leave the mode out."
        ) from error
    return replay, "graph", CAPTURED if mode == "auto" else reason


class _NotCapturable(Exception):
    """Why a network that runs cannot be captured."""


def _captured(run: Callable[[], object]) -> Callable[[], object]:
    """A CUDA graph of one run. Warmed up on a side stream first, as torch asks for.

    Raises:
        _NotCapturable: If the network runs, but not inside a capture.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    try:
        with torch.cuda.stream(side), sync_is_an_error():
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise _NotCapturable(lines[0].rstrip(".")) from error
    return graph.replay


# ---------------------------------------------------------------- inputs


def random_inputs(example_input: Inputs, device: torch.device | str) -> Inputs:
    """Normal random numbers of an example's shapes, on a device: what `input_data="random"` runs on.

    Drawing a large batch takes longer than a window. Drawn once, it serves many networks as their example.

    Raises:
        BadMeasurement: If an input is all zeros.
    """
    tensors = _tensors(example_input)
    _refuse_zeros(tensors)
    ready = _ready(tensors, torch.device(device), None, False, "random")
    if isinstance(example_input, Tensor):
        return ready[0]
    if isinstance(example_input, tuple):
        return tuple(ready.values())
    return {str(name): tensor for name, tensor in ready.items()}


def _tensors(example_input: Inputs) -> dict[int | str, Tensor]:
    """By position or by argument name."""
    if isinstance(example_input, Tensor):
        return {0: example_input}
    tensors: dict[int | str, Tensor] = {}
    tensors.update(example_input if isinstance(example_input, dict) else enumerate(example_input))
    return tensors


def _refuse_zeros(tensors: dict[int | str, Tensor]) -> None:
    if not tensors:
        raise BadMeasurement("example_input holds no tensor; give the batch that the network is called with.")
    for name, tensor in tensors.items():
        if not bool(tensor.any()):
            raise BadMeasurement(
                f"input {name!r} of shape {tuple(tensor.shape)} is all zeros: zeros switch fewer "
                "transistors, so a device draws less than it will on real data (13 % less on an H200). "
                f"Give torch.randn{tuple(tensor.shape)} or real data."
            )


def _ready(
    tensors: dict[int | str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    channels_last: bool,
    input_data: InputData,
) -> dict[int | str, Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    ready = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            if input_data == "random":
                tensor = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
            tensor = tensor.to(dtype=dtype or tensor.dtype)
        last = channels_last and tensor.dim() == 4
        ready[name] = tensor.to(device).contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )
    return ready


def _batch(tensors: dict[int | str, Tensor]) -> int:
    first = next(iter(tensors.values()))
    return first.shape[0] if first.dim() else 1


# ---------------------------------------------------------------- torch's switches


def _restore_training(was_training: dict[nn.Module, bool]) -> None:
    for module, training in was_training.items():
        module.training = training
