"""`prepare_runner`: a network ready to run as it is deployed (execution mode, precision, memory format, inputs).

The caller's model and torch's global settings are restored afterwards.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ecc.errors import BadMeasurement
from ecc.graph.hooks import without_observer_hooks
from ecc.settings import MeasureSettings, Mode
from ecc.task import Inputs, batch_size_of
from ecc.torch_utils import NotCapturable, capture_cuda_graph, eval_mode, torch_settings

_HALF = {"fp16": torch.float16, "bf16": torch.bfloat16}
_SEED = 20190613  # every network gets the same inputs

_CHOSEN_BY_USER = "chosen by the user"
_CAPTURED = "the network can be captured as a CUDA graph, which repeats better than single kernel launches"


@dataclass(frozen=True)
class InferenceRunner:
    """A network ready to run."""

    run: Callable[[], object]
    """Runs one inference of the whole batch."""
    device: torch.device
    """Where it runs."""
    batch: int
    """Items in one inference."""
    mode: Mode
    """Execution mode; never `auto`."""
    mode_reason: str
    """Why this mode was chosen."""


@contextmanager
def prepare_runner(
    model: nn.Module, example_input: Inputs, settings: MeasureSettings | None = None
) -> Iterator[InferenceRunner]:
    """Prepare a model for measurement, and restore everything afterwards.

    Args:
        model: The network. A copy is made where precision or memory format would change it.
        example_input: One batch. With `input_data="random"`, floating-point tensors are replaced by random numbers.
        settings: Execution mode, precision, memory format and input data.

    Raises:
        BadMeasurement: If an input is all zeros, or the device cannot run this way.
    """
    settings = settings or MeasureSettings()
    tensors = _by_argument(example_input)
    _refuse_zeros(tensors)
    device = next(model.parameters(), next(iter(tensors.values()))).device
    if device.type != "cuda" and (settings.mode == "graph" or settings.precision == "tf32"):
        what = "mode 'graph'" if settings.mode == "graph" else "precision 'tf32'"
        raise BadMeasurement(
            f"{what} needs a CUDA device, and the model is on {device}. Move the model to a CUDA device, or use mode "
            "'eager' and precision 'fp32'."
        )
    channels_last = settings.memory_format == "channels_last"
    dtype = _HALF.get(settings.precision)
    if dtype is not None or channels_last:
        model = copy.deepcopy(model)
        model.to(dtype=dtype)
        if channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
    inputs = _prepare_inputs(tensors, device, dtype, channels_last, settings.input_data == "random")
    args = tuple(value for name, value in inputs.items() if isinstance(name, int))
    kwargs = {name: value for name, value in inputs.items() if isinstance(name, str)}
    with ExitStack() as stack:
        model = stack.enter_context(without_observer_hooks(model, args, kwargs))  # logging hooks are not measured
        stack.enter_context(eval_mode(model))
        if device.type == "cuda":
            stack.enter_context(
                torch_settings(tf32=settings.precision == "tf32", cudnn_autotune=settings.cudnn_autotune)
            )
            stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.inference_mode())
        run, mode, reason = _make_run(model, args, kwargs, *resolve_mode(settings.mode, device))
        yield InferenceRunner(run, device, batch_size_of(example_input), mode, reason)


def resolve_mode(mode: Mode, device: torch.device) -> tuple[Mode, str]:
    """Mode and its reason, as far as the device decides. On CUDA, `auto` is only decided by capturing the network."""
    if mode != "auto":
        return mode, _CHOSEN_BY_USER
    if device.type == "cuda":
        return mode, ""
    return "eager", f"CUDA graphs need a CUDA device, and the network runs on {device.type}"


def _make_run(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], mode: Mode, reason: str
) -> tuple[Callable[[], object], Mode, str]:
    """A function that runs one inference, its execution mode, and the reason for that mode."""

    def run() -> object:
        return model(*args, **kwargs)

    if mode == "compile":
        torch.compiler.reset()  # after eight networks of one class, torch would silently fall back to eager
        compiled: Callable[..., object] = torch.compile(model, dynamic=False)
        return (lambda: compiled(*args, **kwargs)), mode, reason
    if mode == "eager":
        return run, mode, reason
    try:
        graph, _ = capture_cuda_graph(run, warmup=2)
    except NotCapturable as error:
        if mode == "auto":
            return run, "eager", f"the network cannot be captured as a CUDA graph ({error})"
        raise BadMeasurement(
            f"the network cannot be captured as a CUDA graph ({error}). Use mode 'eager' or 'auto'."
        ) from error
    return graph.replay, "graph", _CAPTURED if mode == "auto" else reason


# --- inputs ------------------------------------------------------------------------------------------


def random_inputs(example_input: Inputs, device: torch.device | str) -> Inputs:
    """Normal random inputs of an example's shapes, as `input_data="random"` uses them.

    Drawing a large batch takes longer than a window, so a profile draws it once for all networks.

    Raises:
        BadMeasurement: If an input is all zeros.
    """
    tensors = _by_argument(example_input)
    _refuse_zeros(tensors)
    ready = _prepare_inputs(tensors, torch.device(device), None, False, True)
    if isinstance(example_input, Tensor):
        return ready[0]
    if isinstance(example_input, tuple):
        return tuple(ready.values())
    return {str(name): tensor for name, tensor in ready.items()}


def _by_argument(example_input: Inputs) -> dict[int | str, Tensor]:
    """Input tensors by position or by argument name."""
    if isinstance(example_input, Tensor):
        return {0: example_input}
    tensors: dict[int | str, Tensor] = {}
    tensors.update(example_input if isinstance(example_input, dict) else enumerate(example_input))
    return tensors


def _refuse_zeros(tensors: dict[int | str, Tensor]) -> None:
    if not tensors:
        raise BadMeasurement("example_input contains no tensor; give one batch of inputs.")
    for name, tensor in tensors.items():
        if not bool(tensor.any()):
            raise BadMeasurement(
                f"input {name!r} of shape {tuple(tensor.shape)} is all zeros. Zeros use less power than real data (13 "
                f"% less on an H200). Give torch.randn{tuple(tensor.shape)} or real data."
            )


def _prepare_inputs(
    tensors: dict[int | str, Tensor],
    device: torch.device,
    dtype: torch.dtype | None,
    channels_last: bool,
    is_random: bool,
) -> dict[int | str, Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    ready = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            if is_random:
                tensor = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
            tensor = tensor.to(dtype=dtype or tensor.dtype)
        last = channels_last and tensor.dim() == 4
        ready[name] = tensor.to(device).contiguous(
            memory_format=torch.channels_last if last else torch.contiguous_format
        )
    return ready
