"""Inputs of a measured network: checked, and replaced by random numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ecc.errors import BadMeasurement
from ecc.task import Inputs

_SEED = 20190613  # every network gets the same inputs


def by_argument(example_input: Inputs) -> dict[int | str, Tensor]:
    """Input tensors by position or by argument name."""
    if isinstance(example_input, Tensor):
        return {0: example_input}
    tensors: dict[int | str, Tensor] = {}
    tensors.update(example_input if isinstance(example_input, dict) else enumerate(example_input))
    return tensors


def like_example(example_input: Inputs, tensors: Mapping[int | str, Tensor]) -> Inputs:
    """Tensors by argument in the form of the example input: the reverse of `by_argument`."""
    if isinstance(example_input, Tensor):
        return next(iter(tensors.values()))
    if isinstance(example_input, tuple):
        return tuple(tensors.values())
    return {str(name): tensor for name, tensor in tensors.items()}


def refuse_zeros(tensors: dict[int | str, Tensor]) -> None:
    """Refuse inputs that would make the network use less power than real data."""
    if not tensors:
        raise BadMeasurement("example_input contains no tensor; give one batch of inputs.")
    for name, tensor in tensors.items():
        if not bool(tensor.any()):
            raise BadMeasurement(
                f"input {name!r} of shape {tuple(tensor.shape)} is all zeros. Zeros use less power than real data (13 "
                f"% less on an H200). Give torch.randn{tuple(tensor.shape)} or real data."
            )


def draw_inputs(example_input: Inputs, device: torch.device | str) -> Inputs:
    """Normal random inputs of an example's shapes, as `input_data="random"` uses them; integers are kept.

    Drawing a large batch takes longer than a window, so a profile draws it once for all networks.
    """
    tensors = by_argument(example_input)
    refuse_zeros(tensors)
    generator = torch.Generator().manual_seed(_SEED)
    drawn: dict[int | str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            tensor = torch.randn(tensor.shape, generator=generator, dtype=torch.float32).to(tensor.dtype)
        drawn[name] = tensor.to(device)
    return like_example(example_input, drawn)
