"""Random number generators: seeds by purpose, and states that can be saved and restored."""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ecc.errors import BadFile


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose, the same on every machine. Other purposes get unrelated seeds."""
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # torch accepts 63 bits


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators of Python, NumPy (if it is imported), torch, and of `device`."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would initialize CUDA
    numpy = _numpy_random()
    if numpy is not None:
        numpy.seed(seed % 2**32)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device is not None and device.type == "mps":
        torch.mps.manual_seed(seed)


def rng_state(device: torch.device | None = None) -> dict[str, Any]:
    """State of all generators as plain values and tensors, for `save_state`."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    numpy = _numpy_random()
    if numpy is not None:
        name, keys, *rest = numpy.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device is not None and device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore the generators to a state of `rng_state`.

    Raises:
        BadFile: If the state belongs to another device, or is damaged.
    """
    try:
        random.setstate(state["python"])
        torch.set_rng_state(state["torch"])
        numpy = _numpy_random()
        if numpy is not None and "numpy" in state:
            name, keys, *rest = state["numpy"]
            numpy.set_state((name, keys.numpy().astype("uint32"), *rest))
        if device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"], device)
        elif device is not None and device.type == "mps":
            torch.mps.set_rng_state(state["mps"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadFile(f"the random state does not fit this device or Python ({error}); start a new run.") from None


@contextmanager
def fork_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed all generators for a block, and restore their states afterwards.

    Args:
        seed: Seed inside the block.
        device: Include the generator of this device. Without it, entering the block is cheap enough for every batch.
    """
    before = rng_state(device)
    seed_everything(seed, device)
    try:
        yield
    finally:
        set_rng_state(before, device)


def _numpy_random() -> Any:
    """NumPy's global generator, which many libraries use; None if NumPy is not imported."""
    return getattr(sys.modules.get("numpy"), "random", None)
