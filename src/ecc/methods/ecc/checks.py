"""Mistakes in a training loop that would prune a network without training it."""

from __future__ import annotations

import warnings

from torch import nn
from torch.optim import Optimizer

from ecc.errors import EccError, EccWarning


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuses an optimizer of another network, and warns of parameters that an optimizer does not train.

    Parameters that need no gradient are meant to stay as they are, and are not counted.

    Raises:
        EccError: The optimizer holds no parameter of the model.
    """
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    named = dict(model.named_parameters())
    kind = type(optimizer).__name__
    if named and not any(id(parameter) in held for parameter in named.values()):
        raise EccError(
            f"the optimizer ({kind}) holds none of the model's {len(named)} parameters, such as {next(iter(named))!r}: "
            "the model would be pruned and not trained. Make the optimizer of the same model: "
            f"{kind}(model.parameters(), ...)."
        )
    trainable = {name: id(parameter) for name, parameter in named.items() if parameter.requires_grad}
    missing = [name for name, key in trainable.items() if key not in held]
    if missing:
        warnings.warn(
            f"the optimizer ({kind}) does not hold {len(missing)} of the model's {len(trainable)} parameters that need "
            f"gradients, such as {missing[0]!r}: they are not trained, while channels are removed from them as from "
            "others. Add them to the optimizer; or call requires_grad_(False) on them, if they are to stay constant.",
            EccWarning,
            stacklevel=3,
        )


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether any parameter of the optimizer has a gradient."""
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])


def warn_no_gradients(optimizer: Optimizer, stacklevel: int) -> None:
    """Warns that `step` was called before `backward`.

    Args:
        optimizer: Which steps.
        stacklevel: As of `warnings.warn`, seen from the caller.
    """
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    warnings.warn(
        f"step() was called, and none of the optimizer's {count} parameters has a gradient: nothing is trained, but "
        "the network is pruned. Call loss.backward() before step(), and zero_grad() after it.",
        EccWarning,
        stacklevel=stacklevel + 1,
    )
