"""Layer norm of a network with masked channels.

A layer norm computes mean and variance over all channels, so a channel that is masked would still change the others. In
the dense network with masked channels, modules that run a layer norm over prunable channels therefore compute mean and
variance over the live channels only. A channel is masked in a norm if its weight and bias are zero.

    dense network                                   every channel is live: the layer norm as it is
    dense network with masked channels              `masked_layer_norm`, the class of the module is changed
    slim network                                    no channel is masked: the layer norm as it is, with fewer channels

Parameters and their names stay the same. The class of a module is changed when its first channel is masked
(`mask_norms_`), and changed back in a smaller network without masked channels (`fit_norms_`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecc.errors import BadFile
from ecc.torch_utils import on_cpu

MASKED_NORMS = "_ecc_masked_norms"
"""Key of the modules with masked channels in a saved state."""


def masked_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Layer norm over those channels of the last axis whose weight or bias is not zero. The others are zero.

    As in torch, half precision is computed in float32, and the result under autocast on a GPU is float32.
    """
    live = weight != 0 if bias is None else (weight != 0) | (bias != 0)
    values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    count = live.sum().clamp(min=1)
    mean = torch.where(live, values, 0.0).sum(-1, keepdim=True) / count
    centered = torch.where(live, values - mean, 0.0)
    variance = centered.square().sum(-1, keepdim=True) / count
    y = centered * torch.rsqrt(variance + eps) * weight
    y = y if bias is None else y + bias
    kind = x.device.type
    return y if kind != "cpu" and torch.is_autocast_enabled(kind) else y.to(x.dtype)


class _OverLiveChannels(TorchFunctionMode):
    """Replaces `layer_norm` with the parameters of one module by `masked_layer_norm`."""

    def __init__(self, parameters: Collection[Tensor | None]) -> None:
        super().__init__()
        self._parameters = parameters

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if func in (F.layer_norm, torch.layer_norm):
            names = ("input", "normalized_shape", "weight", "bias", "eps")
            found = {"weight": None, "bias": None, "eps": 1e-5, **dict(zip(names, args, strict=False)), **given}
            if any(found["weight"] is one for one in self._parameters if one is not None):
                return masked_layer_norm(found["input"], found["weight"], found["bias"], found["eps"])
        return func(*args, **given)


class MaskedNorm(nn.Module):
    """Base of the classes of modules that run a layer norm over live channels only (see `masked_class`)."""

    ecc_original: type[nn.Module]
    """The class of the module without masked channels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the original class, with other layer norms."""
        with _OverLiveChannels(self._parameters.values()):
            return super().forward(*args, **kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the original class, since this one is created when it is needed."""
        return _new_masked, (self.ecc_original,), self.__dict__


def _new_masked(original: type[nn.Module]) -> nn.Module:
    cls = masked_class(original)
    return cls.__new__(cls)


_CLASSES: WeakKeyDictionary[type[nn.Module], type[MaskedNorm]] = WeakKeyDictionary()


def masked_class(original: type[nn.Module]) -> type[MaskedNorm]:
    """The class for modules of this class that have masked channels."""
    if original not in _CLASSES:
        _CLASSES[original] = type(f"Masked{original.__name__}", (MaskedNorm, original), {"ecc_original": original})
    return _CLASSES[original]


def can_mask_norm(module: nn.Module | None, weight: Tensor) -> bool:
    """Whether a layer norm with this weight, which a module runs, can leave out masked channels."""
    return module is not None and any(weight is one for one in module._parameters.values())


def use_masked_norms_(model: nn.Module, modules: Iterable[nn.Module]) -> None:
    """Let these modules of a network leave out masked channels."""
    changed = [module for module in modules if not isinstance(module, MaskedNorm)]
    for module in changed:
        module.__class__ = masked_class(type(module))
    if changed:
        _use_norm_modules_(model)


def use_plain_norms_(model: nn.Module) -> None:
    """Let all modules run the layer norm as it is, for a trace."""
    for module in model.modules():
        _use_plain_norm_(module)


def _use_plain_norm_(module: nn.Module) -> None:
    if isinstance(module, MaskedNorm):
        module.__class__ = module.ecc_original  # type: ignore[assignment]


def fit_norms_(model: nn.Module) -> None:
    """Let the modules of a network in which no channel is masked run the layer norm as it is."""
    norms = [module for module in model.modules() if isinstance(module, MaskedNorm)]
    zeros = [[(tensor == 0).any() for tensor in _norm_weights(module)] for module in norms]
    found = iter(on_cpu([flag for flags in zeros for flag in flags]))
    for module, flags in zip(norms, zeros, strict=True):
        may_be_masked = [bool(next(found)) for _ in flags]
        if not any(may_be_masked):
            _use_plain_norm_(module)


def _norm_weights(module: nn.Module) -> list[Tensor]:
    """The parameters that may be the weight of a layer norm."""
    tensors = [tensor for tensor in module._parameters.values() if tensor is not None and tensor.dim() == 1]
    weight = module._parameters.get("weight")
    if weight is not None and weight.dim() == 1:  # else any of them may be the weight
        tensors = [weight]
    return [tensor for tensor in tensors if not tensor.is_meta]


def _use_norm_modules_(model: nn.Module) -> None:
    """Keep torch's encoder layers from fused kernels, which do not call their norms."""
    for module in model.modules():
        parts = module.modules() if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerEncoder)) else ()
        if any(isinstance(part, MaskedNorm) for part in parts):
            name = "activation_relu_or_gelu" if isinstance(module, nn.TransformerEncoderLayer) else "use_nested_tensor"
            setattr(module, name, 0)


def masked_norms(model: nn.Module) -> list[str]:
    """Paths of the modules with masked channels."""
    return [path for path, module in model.named_modules() if isinstance(module, MaskedNorm)]


def read_masked_norms(model: nn.Module, found: Any, where: Any) -> list[str]:
    """The paths of `masked_norms` from a file, for a network of the same modules.

    Raises:
        BadFile: If the network does not have one of them.
    """
    paths = dict(model.named_modules())
    read = [path for path in found if isinstance(path, str)] if isinstance(found, list) else []
    missing = next((path for path in read if path not in paths), None)
    if missing is not None:
        raise BadFile(
            f"{where} belongs to another network: it has masked channels in {missing}, which the network lacks. "
            "Build the network as for the run."
        )
    return read
