"""Random numbers that come from one integer: a seed of its own for each purpose, and states as plain tensors."""

from __future__ import annotations

import hashlib
import random
import struct
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ecc.errors import BadFile


def derived_seed(seed: int, purpose: str) -> int:
    """A seed for one purpose, unrelated to that of any other; the same on every machine.

    Without it, a second use of the seed 0 would draw the very numbers of the first.
    """
    digest = hashlib.sha256(f"{seed}/{purpose}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1  # 63 bits: torch refuses more


def seed_everything(seed: int, device: torch.device | None = None) -> None:
    """Seeds Python's, numpy's (where it is loaded) and torch's generators, and that of `device`."""
    _seed_host(seed)
    if device is not None and device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
    elif device is not None and device.type == "mps":
        torch.mps.manual_seed(seed)


def rng_state(device: torch.device | None = None) -> dict[str, Tensor]:
    """Where all generators stand, as tensors whose shapes never change, so that ranks can exchange them.

    Args:
        device: Its generator is told too, beside those of the host.
    """
    version, words, gauss = random.getstate()
    state = {
        "python": torch.tensor([version, *words, *_packed(gauss)], dtype=torch.int64),
        "torch": torch.get_rng_state(),
    }
    numpy = _numpy_random()
    if numpy is not None:
        _, keys, position, has_gauss, cached = numpy.get_state()
        numbers = [*keys.tolist(), position, *_packed(cached if has_gauss else None)]
        state["numpy"] = torch.tensor(numbers, dtype=torch.int64)
    if device is not None and device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    elif device is not None and device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def set_rng_state(state: Mapping[str, Tensor], device: torch.device | None = None) -> None:
    """Puts the generators back to where `rng_state` found them.

    Raises:
        BadFile: If the state is of another device, or is no state at all.
    """
    try:
        version, *words, has_gauss, gauss = state["python"].tolist()
        random.setstate((version, tuple(words), _unpacked(has_gauss, gauss)))
        # Clones, since torch 2.13 crashes on a state that is a row of a larger tensor.
        torch.set_rng_state(state["torch"].cpu().clone())
        numpy = _numpy_random()
        if numpy is not None and "numpy" in state:
            *keys, position, has_gauss, gauss = state["numpy"].tolist()
            numpy.set_state(("MT19937", keys, position, has_gauss, _unpacked(has_gauss, gauss) or 0.0))
        if device is not None and device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda"].cpu().clone(), device)
        elif device is not None and device.type == "mps":
            torch.mps.set_rng_state(state["mps"].cpu().clone())
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise BadFile(f"the random state does not fit this device or this Python ({error}); start anew.") from None


@contextmanager
def fork_rng(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """A block that draws from `seed`; after it, all generators stand where they stood before."""
    before = rng_state(device)
    seed_everything(seed, device)
    try:
        yield
    finally:
        set_rng_state(before, device)


@contextmanager
def fork_host_rng(seed: int) -> Iterator[None]:
    """As `fork_rng` for the generators of the host, and quick: it is entered for every batch."""
    numpy = _numpy_random()
    python_before, torch_before = random.getstate(), torch.get_rng_state()
    numpy_before = None if numpy is None else numpy.get_state()
    _seed_host(seed)
    try:
        yield
    finally:
        random.setstate(python_before)
        torch.set_rng_state(torch_before)
        if numpy is not None:
            numpy.set_state(numpy_before)


def _seed_host(seed: int) -> None:
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed every GPU, and start CUDA
    numpy = _numpy_random()
    if numpy is not None:
        numpy.seed(seed % 2**32)


def _numpy_random() -> Any:
    """numpy's global generators, which libraries still draw from; None where nobody has loaded numpy."""
    return getattr(sys.modules.get("numpy"), "random", None)


def _packed(gauss: float | None) -> tuple[int, int]:
    """The spare number that a generator of normal numbers keeps: whether there is one, and its bits."""
    return (0, 0) if gauss is None else (1, struct.unpack("<q", struct.pack("<d", gauss))[0])


def _unpacked(has_gauss: int, bits: int) -> float | None:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0]) if has_gauss else None
