"""`optimizer_factory`: the optimizer that a user gives to `compress`, for the dense and for the slim network."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ecc.errors import EccError
from ecc.settings import CompressSettings

from .runner import OptimizerFactory


def optimizer_factory(optimizer: Any, lr: float | None = None) -> OptimizerFactory | None:
    """What `optimizer=` of `compress` means: a function from parameters to an optimizer; None for Adam.

    Args:
        optimizer: None, a class, an optimizer with one parameter group, or a function.
        lr: Learning rate in place of that of the optimizer.

    Raises:
        EccError: If it is something else; or later, if the function does not return an optimizer.
    """
    if optimizer is None:
        return None
    make, options = optimizer, {}
    if isinstance(optimizer, torch.optim.Optimizer):
        if len(optimizer.param_groups) > 1:
            raise EccError(
                f"optimizer has {len(optimizer.param_groups)} parameter groups, which belong to the dense network; "
                "give a function from parameters to an optimizer instead."
            )
        make = type(optimizer)
        known = inspect.signature(make).parameters
        options = {key: value for key, value in optimizer.param_groups[0].items() if key in known and key != "params"}
    elif isinstance(optimizer, type):
        rate = inspect.signature(optimizer).parameters.get("lr")
        if rate is not None and rate.default is rate.empty:  # not one of PyTorch's
            options = {"lr": CompressSettings().lr}
    if not callable(make):
        raise EccError(
            f"optimizer is {type(optimizer).__name__}; give an optimizer class, an optimizer, or a function from "
            "parameters to an optimizer."
        )

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = make(parameters, **options)
        if not isinstance(made, torch.optim.Optimizer):
            raise EccError(f"optimizer returned {type(made).__name__}; it must return a torch.optim.Optimizer.")
        for group in made.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        return made

    return build
