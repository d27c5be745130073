"""Small helpers for torch modules and tensors, shared by all packages."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields, is_dataclass
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ecc.errors import EccError, first_line, option_hint

T = TypeVar("T")

_MAX_DEPTH = 8  # of plain objects inside each other, which may refer to each other


def device_of(model: nn.Module) -> torch.device:
    """Device of the first parameter, else of the first buffer, else the CPU."""
    tensors = chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def input_shapes(inputs: Any) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors of an input, by position or name."""
    if isinstance(inputs, Mapping):
        named = dict(inputs)
    else:
        named = dict(enumerate(inputs if isinstance(inputs, list | tuple) else (inputs,)))
    return {str(name): tuple(value.shape) for name, value in named.items() if isinstance(value, Tensor)}


@contextmanager
def preserve_modes(model: nn.Module) -> Iterator[None]:
    """Restore train or eval mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode, and restore the mode of every module at the end."""
    with preserve_modes(model):
        model.eval()
        yield


def usable_device(name: object = None) -> str:
    """The named device if torch can compute there; without a name a GPU, or the CPU.

    Raises:
        EccError: If torch does not know the device, or cannot use it.
    """
    device = str(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        torch.zeros(1, device=device).item()  # the device `meta` makes tensors, but has no numbers
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).strip().splitlines()[0].rstrip(".")
        hint = option_hint("device", "cpu")
        raise EccError(f"device {device!r} cannot be used: {reason}. Give {hint}, or leave it out.") from None
    return device


def to_device_of(tensor: Tensor, index: Tensor) -> Tensor:
    """A small tensor of the CPU on the device of another tensor, without synchronization on CUDA."""
    return index.to(tensor.device, non_blocking=tensor.device.type == "cuda")


def on_cpu(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same tensors on the CPU, with one synchronization per device and type."""
    found = list(tensors)
    places: dict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for number, tensor in enumerate(tensors):
        if tensor.device.type != "cpu":
            places[tensor.device, tensor.dtype].append(number)
    for numbers in places.values():
        flat = torch.cat([found[number].flatten() for number in numbers]).cpu()
        parts = flat.split([found[number].numel() for number in numbers])
        for number, part in zip(numbers, parts, strict=True):
            found[number] = part.view(found[number].shape)
    return found


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in a nested value: sequences, mappings, dataclasses and plain objects, but not modules."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, depth + 1)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from tensors_in(item, depth + 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for item in fields(value):
            yield from tensors_in(getattr(value, item.name), depth + 1)
    elif hasattr(value, "__dict__") and depth < _MAX_DEPTH and not isinstance(value, (nn.Module, type)):
        for item in vars(value).values():
            yield from tensors_in(item, depth + 1)


def outputs_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in the outputs of a network, without caches and intermediate values.

    A cache of keys and values is state for the next call. Its sizes follow the heads of the network that wrote it.
    Hugging Face's models return intermediate values beside their result if `output_hidden_states=True`. Their sizes
    follow the widths of the network.
    """
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not is_intermediate(value, name):
                yield from outputs_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from outputs_in(item)
    elif not type(value).__module__.startswith("transformers.cache_utils"):
        yield from tensors_in(value)


def is_intermediate(outputs: Mapping[str, Any], name: str) -> bool:
    """Whether an entry of a network's outputs is a cache, or an intermediate value of a Hugging Face model."""
    if name == "past_key_values":
        return True
    if not type(outputs).__module__.startswith("transformers."):
        return False
    return name.endswith(("hidden_states", "attentions")) or (
        name == "encoder_last_hidden_state" and not {"logits", "last_hidden_state"}.isdisjoint(outputs)
    )


# --- settings ------------------------------------------------------------------------------------

# torch has two sets of TF32 settings: `fp32_precision` since 2.9, one for each backend and kind of operator, and the
# older `allow_tf32` and `set_float32_matmul_precision`. Reading an older one raises if the two contradict each other,
# so both are set and both are restored.

_PRECISION_BACKENDS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Parts of `torch.backends` that have an `fp32_precision`."""


@contextmanager
def torch_settings(*, tf32: bool, cudnn_autotune: bool) -> Iterator[None]:
    """Set TF32 and cuDNN autotuning, and restore the old settings at the end.

    Args:
        tf32: Allow TF32 in float32 convolutions and matrix products, instead of full precision on every backend.
        cudnn_autotune: Let cuDNN measure its algorithms and choose the fastest (`cudnn.benchmark`).
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    precision = "tf32" if tf32 else "ieee"
    backends = {path: backend for path in _PRECISION_BACKENDS if hasattr(backend := _backend(path), "fp32_precision")}
    with ExitStack() as stack:
        # Callbacks run in reverse order: the older settings, which change several newer ones, are restored first.
        for backend in backends.values():
            stack.callback(setattr, backend, "fp32_precision", backend.fp32_precision)
        stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        if (precision_before := _matmul_precision()) is not None:
            stack.callback(torch.set_float32_matmul_precision, precision_before)
        for backend in (matmul, cudnn):
            if (before := _value(backend, "allow_tf32")) is not None:
                stack.callback(setattr, backend, "allow_tf32", before)
        if not tf32:
            torch.set_float32_matmul_precision("highest")
        matmul.allow_tf32 = cudnn.allow_tf32 = tf32
        cudnn.benchmark = cudnn_autotune
        for path, backend in backends.items():
            if not (tf32 and path.startswith("mkldnn")):  # the reduced precision of a CPU is bf16, which is coarser
                backend.fp32_precision = precision
        yield


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """Make results independent of the caller's settings, which are restored at the end.

    Disables TF32, autocast, autotuning, inference mode, and deterministic mode, in which torch replaces some operators
    and others raise.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_deterministic = torch.backends.cudnn.deterministic
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch_settings(tf32=False, cudnn_autotune=False))
        stack.callback(setattr, torch.backends.cudnn, "deterministic", cudnn_deterministic)
        if deterministic:  # only if needed, since setting it imports torch's compiler
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=warn_only)
            torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        for device in ("cpu", "cuda", "mps", "xpu"):
            if _is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    """Raise on GPU synchronization. In a CUDA graph capture, that would leave torch's generator unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns that it does not detect everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


# --- CUDA graphs ---------------------------------------------------------------------------------


CAPTURE_MODE = "thread_local"
"""Other threads, such as a DataLoader that pins memory, do not disturb a capture."""


class NotCapturable(Exception):
    """Why a function that runs cannot be captured as a CUDA graph."""


def capture_cuda_graph(run: Callable[[], T], warmup: int) -> tuple[torch.cuda.CUDAGraph, T]:
    """Capture a function as a CUDA graph on the current device.

    Args:
        run: The function. It is called `warmup` + 2 times.
        warmup: Calls on a side stream before the capture, in which libraries choose their kernels.

    Returns:
        The graph, and the result of the captured call, whose tensors each replay overwrites.

    Raises:
        NotCapturable: If the function runs, but not inside a capture.
    """
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(warmup):
            run()
    try:
        # A capture that fails half-way would leave the random generator unusable, so try without one first.
        with torch.cuda.stream(side), sync_is_an_error():
            run()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph, capture_error_mode=CAPTURE_MODE):
            result = run()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise NotCapturable(first_line(error).removeprefix("RuntimeError: ").rstrip(".")) from error
    return graph, result


def _backend(path: str) -> Any:
    found: Any = torch.backends
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _value(backend: Any, name: str) -> object:
    try:
        return getattr(backend, name)
    except RuntimeError:  # the caller's settings contradict each other; the newer ones apply
        return None


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # as above
        return None


def _is_autocast_enabled(device: str) -> bool:
    try:
        return bool(torch.is_autocast_enabled(device))
    except RuntimeError:  # a device type that this build does not have
        return False


@contextmanager
def fork_seed(devices: set[torch.device]) -> Iterator[None]:
    """Seed the CPU and these devices with 0, and restore their random states at the end."""
    gpus = [device for device in devices if device.type == "cuda"]
    with torch.random.fork_rng(devices=gpus), ExitStack() as stack:
        torch.default_generator.manual_seed(0)  # torch.manual_seed would seed every GPU permanently
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        if any(device.type == "mps" for device in devices):
            stack.enter_context(torch.random.fork_rng(device_type="mps"))
            torch.mps.manual_seed(0)
        yield
