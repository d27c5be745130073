"""Weights that are computed from other tensors in each forward pass, by a parametrization or by a hook of torch's.

Removing channels of the computed weight means changing what it is computed from, which each of them does in its own
way. Torch can make the computed values plain weights; the refusal names the statement.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ecc.errors import UntraceableModel


def refuse_computed_weights(model: nn.Module) -> None:
    """Refuses weights that are computed anew in each pass: by weight_norm, spectral_norm and the like.

    Raises:
        UntraceableModel: With the statement that makes them plain weights, for `model` as the network's name.
    """
    found = [(kind, path, name) for path, module in model.named_modules() for kind, name in _computed(module)]
    if not found:
        return
    kind, path, name = found[0]
    same = [one for one in found if one[0] == kind]
    if len(same) == 1:
        statement = _ONE[kind].format(module=_expression(model, path), name=name)
    else:
        statement = _MANY[kind]
    others = f" and {len(same) - 1} more weights" if len(same) > 1 else ""
    raise UntraceableModel(
        f"{f'{path}.{name}'.removeprefix('.')}{others} {'are' if others else 'is'} computed by {kind} in each pass, so "
        f"channels of it cannot be removed. Make the computed values the weights with: {statement}"
    )


def _computed(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(what computes it, its name) for each weight."""
    if "parametrizations" in module._modules and parametrize.is_parametrized(module):
        for name in module.parametrizations:  # type: ignore[union-attr]
            yield "a parametrization", name
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, WeightNorm):
            yield "weight_norm", hook.name
        elif isinstance(hook, SpectralNorm):
            yield "spectral_norm", hook.name
        elif isinstance(hook, prune.BasePruningMethod):
            yield "a mask of torch.nn.utils.prune", hook._tensor_name


_ONE = {
    "a parametrization": "torch.nn.utils.parametrize.remove_parametrizations({module}, {name!r})",
    "weight_norm": "torch.nn.utils.remove_weight_norm({module}, {name!r})",
    "spectral_norm": "torch.nn.utils.remove_spectral_norm({module}, {name!r})",
    "a mask of torch.nn.utils.prune": "torch.nn.utils.prune.remove({module}, {name!r})",
}
_HOOKED = (
    "for module, hook in [(m, h) for m in model.modules() for h in m._forward_pre_hooks.values() "
    "if {test}]: torch.nn.utils.{remove}"
)
_MANY = {
    "a parametrization": (
        "for module in filter(torch.nn.utils.parametrize.is_parametrized, list(model.modules())): "
        "[torch.nn.utils.parametrize.remove_parametrizations(module, name) for name in list(module.parametrizations)]"
    ),
    "weight_norm": _HOOKED.format(
        test="type(h).__name__ == 'WeightNorm'", remove="remove_weight_norm(module, hook.name)"
    ),
    "spectral_norm": _HOOKED.format(
        test="type(h).__name__ == 'SpectralNorm'", remove="remove_spectral_norm(module, hook.name)"
    ),
    "a mask of torch.nn.utils.prune": _HOOKED.format(
        test="isinstance(h, torch.nn.utils.prune.BasePruningMethod)", remove="prune.remove(module, hook._tensor_name)"
    ),
}


def _expression(model: nn.Module, path: str) -> str:
    """How to write a module of `model` in Python."""
    text, module = "model", model
    for name in path.split(".") if path else ():
        by_number = isinstance(module, (nn.Sequential, nn.ModuleList)) and name.isdecimal()
        if not by_number and not name.isidentifier():
            return f"model.get_submodule({path!r})"
        text += f"[{name}]" if by_number else f".{name}"
        module = module.get_submodule(name)
    return text
