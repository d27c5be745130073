"""torch's global numerical settings: set for a block of code, put back afterwards.

torch has two sets of TF32 settings: `fp32_precision` since 2.9, one for each backend and kind of operator, and the
older `allow_tf32` and `set_float32_matmul_precision`. Reading an older one raises where the two contradict each other,
so both are set and both are put back.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

_PLACES = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
"""Where torch keeps an `fp32_precision`, below `torch.backends`."""


@contextmanager
def torch_settings(*, tf32: bool, cudnn_autotune: bool) -> Iterator[None]:
    """Sets TF32 and cuDNN autotuning for a block.

    Args:
        tf32: Whether float32 convolutions and matrix products may be rounded to TF32. Without it they are computed in
            full precision on every backend.
        cudnn_autotune: Whether cuDNN measures its algorithms and takes the fastest (`cudnn.benchmark`).
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    precision = "tf32" if tf32 else "ieee"
    places = {path: place for path in _PLACES if hasattr(place := _backend(path), "fp32_precision")}
    with ExitStack() as stack:
        # Callbacks run in reverse: the older settings, which change several of the newer ones, are put back first.
        for place in places.values():
            stack.callback(setattr, place, "fp32_precision", place.fp32_precision)
        stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
        if (precision_before := _matmul_precision()) is not None:
            stack.callback(torch.set_float32_matmul_precision, precision_before)
        for place in (matmul, cudnn):
            if (before := _value(place, "allow_tf32")) is not None:
                stack.callback(setattr, place, "allow_tf32", before)
        if not tf32:
            torch.set_float32_matmul_precision("highest")
        matmul.allow_tf32 = cudnn.allow_tf32 = tf32
        cudnn.benchmark = cudnn_autotune
        for path, place in places.items():
            if not (tf32 and path.startswith("mkldnn")):  # what a CPU has in place of TF32 (bf16) is coarser
                place.fp32_precision = precision
        yield


@contextmanager
def exact_arithmetic() -> Iterator[None]:
    """A block whose results do not depend on the caller's settings.

    No TF32, no autocast, no autotuning, no deterministic mode (under which some operators run as others, and some
    raise), no inference mode. Everything is put back, also when the block raises.
    """
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    cudnn_deterministic = torch.backends.cudnn.deterministic
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch_settings(tf32=False, cudnn_autotune=False))
        stack.callback(setattr, torch.backends.cudnn, "deterministic", cudnn_deterministic)
        if deterministic:  # to ask costs nothing, to set imports torch's compiler
            stack.callback(torch.use_deterministic_algorithms, True, warn_only=warn_only)
            torch.use_deterministic_algorithms(False)
        torch.backends.cudnn.deterministic = False
        for device in ("cpu", "cuda", "mps", "xpu"):
            if _is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextmanager
def waiting_is_an_error() -> Iterator[None]:
    """A block in which waiting for a GPU raises: a CUDA graph that fails for it leaves torch's generator unusable."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it does not see everything
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def _backend(path: str) -> Any:
    found: Any = torch.backends
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


def _value(place: Any, name: str) -> object:
    try:
        return getattr(place, name)
    except RuntimeError:  # the caller's own settings contradict each other; the newer ones count
        return None


def _matmul_precision() -> str | None:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # as above
        return None


def _is_autocast_enabled(device: str) -> bool:
    try:
        return bool(torch.is_autocast_enabled(device))
    except RuntimeError:  # a device type that this build does not know
        return False
