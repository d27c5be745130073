"""One forward pass of a copy of the network under a tracer, and the checks before it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._pytree import tree_map_only

from ecc.errors import BadWidths, UntraceableModel, first_line
from ecc.graph.labels import Misaligned, PrunedLabels, frozen_labels
from ecc.graph.masked_norm import use_plain_norms_
from ecc.graph.model_copy import named_tensors, rebuild
from ecc.graph.multihead import use_head_attention_
from ecc.graph.ops.head_width import scores_of
from ecc.graph.size_attributes import SizeReader, track_sizes
from ecc.graph.tracer import Ended, Tracer
from ecc.task import check_model
from ecc.torch_utils import outputs_in, tensors_in

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""An example input: one tensor, a sequence of positional arguments, or a mapping of keyword arguments."""


def as_call(example_input: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of the call of a network with this input."""
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, (list, tuple)):
        return tuple(example_input), {}
    return (example_input,), {}


@dataclass(frozen=True)
class ModelCopy:
    """A copy of a network to run: what its forward pass stores or changes does not reach the user's network."""

    model: nn.Module
    tensors: Mapping[str, Tensor]
    paths: Mapping[int, str]
    """Module paths by module id."""

    @classmethod
    def of(cls, model: nn.Module, *, on_meta: bool) -> ModelCopy:
        """A copy of a user's network, on meta tensors or on copies of its tensors."""
        tensors = named_tensors(model)
        stand_ins = {name: _stand_in(tensor, on_meta) for name, tensor in tensors.items()}
        made = {id(tensor): stand_ins[name] for name, tensor in tensors.items()}
        copy = rebuild(model, made)
        use_head_attention_(copy)
        use_plain_norms_(copy)
        track_sizes(copy)
        return cls._named(copy, stand_ins)

    @classmethod
    def wrap(cls, model: nn.Module) -> ModelCopy:
        """A network that was built for tracing, without a further copy."""
        model.requires_grad_(False)  # as the tensors of `of`: some operators differ with it, such as embedding bags
        use_head_attention_(model)
        use_plain_norms_(model)
        return cls._named(model, named_tensors(model))

    @classmethod
    def _named(cls, model: nn.Module, tensors: Mapping[str, Tensor]) -> ModelCopy:
        return cls(model, tensors, {id(module): path for path, module in model.named_modules()})


def one_pass(network: ModelCopy, example_input: Inputs, tracer: Tracer, *, training: bool) -> Tracer:
    """Run one forward pass under a tracer, and freeze the outputs."""
    channel_labels = tracer.channel_labels
    for name, tensor in network.tensors.items():
        tracer.name(tensor, name)
    network.model.train(training)
    args, kwargs = tree_map_only(Tensor, lambda t: _example(t, tracer.on_meta), as_call(example_input))
    # Inference mode keeps composite operators whole. Gradients are enabled as in normal use, for code that checks.
    try:
        with (
            _without_side_effects(),
            torch.inference_mode(),
            torch.set_grad_enabled(training),
            tracer.track_modules(network.paths),
            SizeReader(tracer),
            tracer,
        ):
            result = network.model(*args, **kwargs)
    except Ended:
        return tracer
    except Misaligned as stop:
        stop.path = tracer.last_path
        stop.position = (training, len(tracer.sequence))
        raise
    except Exception as error:
        if isinstance(channel_labels, PrunedLabels):
            failure = Misaligned(torch.empty(0, dtype=torch.long), first_line(error), path=tracer.last_path)
            failure.position = (training, len(tracer.sequence))
            raise failure from error
        raise
    for tensor in outputs_in(result):
        if (labels := tracer.labels(tensor)) is not None:
            channel_labels.freeze(labels, "it is an output of the network")
        tracer.freeze_pending(tensor)
        if (power := getattr(tensor, "_ecc_power", None)) is not None:
            channel_labels.freeze(power.labels, "an output of the network is a mean over it")
        if (scores := scores_of(tensor)) is not None:
            scores.product.powers.add(scores.power)
    return tracer


def _stand_in(tensor: Tensor, on_meta: bool) -> Tensor:
    if not on_meta:
        return tensor.detach().clone()
    if tensor.device.type == "meta":
        return tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().to("cpu", copy=True)  # an index or mask, whose values are needed


def _example(tensor: Tensor, on_meta: bool) -> Tensor:
    copy = torch.empty_like(tensor, device="meta") if on_meta else tensor.detach().clone()
    copy._ecc_state = frozen_labels(tensor.shape)  # type: ignore[attr-defined]
    copy._ecc_computed = True  # type: ignore[attr-defined]
    return copy


@contextmanager
def _without_side_effects() -> Iterator[None]:
    """Preserve the random state, and keep attention layers out of fused kernels."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def refuse_untraceable(model: nn.Module, example_input: Inputs) -> None:
    """Check what cannot be traced before any work is done.

    Raises:
        BadTask: For an object that only wraps a network, such as `ultralytics.YOLO`.
        UntraceableModel: For compiled, scripted, lazy or quantized networks, computed weights, NaN weights, and inputs
            without a tensor.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UntraceableModel("the network is a TorchScript module. Trace the nn.Module that it was made from.")
    if not isinstance(model, nn.Module):
        raise UntraceableModel(f"expected a torch.nn.Module, got {type(model).__name__}.")
    check_model(model)
    for path, module in model.named_modules():
        if (reason := _refusal(module)) is not None:
            raise UntraceableModel(f"{f'module {path}' if path else 'the network'} {reason}")
    for name, tensor in named_tensors(model).items():
        if nn.parameter.is_lazy(tensor):
            raise UntraceableModel(f"{name} is not initialized (a lazy module). Run the network once first.")
        if tensor.is_quantized:
            raise UntraceableModel(f"{name} is quantized. Prune the float network, then quantize it.")
    _refuse_nan(model)
    refuse_computed_weights(model)
    inputs = list(tensors_in(as_call(example_input)))
    if not inputs:
        raise UntraceableModel("the example input holds no tensor.")
    if all(tensor.numel() == 0 for tensor in inputs):
        raise UntraceableModel(
            f"the example input is empty (shape {tuple(inputs[0].shape)}), so nothing can be compared. Give some items."
        )


def _refusal(module: nn.Module) -> str | None:
    """Why a network with this module cannot be traced; None if it can."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        return "is compiled. Trace the network before torch.compile, and compile afterwards."
    if isinstance(module, torch.jit.ScriptModule):
        return "is a TorchScript module. Trace the nn.Module that it was made from."
    bases = type(module).__mro__
    if any("FakeQuantize" in base.__name__ for base in bases):
        return "simulates quantization. Prune the float network, then prepare it for quantization."
    if any(base.__module__.startswith("torch.ao.nn.quantized") for base in bases):
        return "is quantized. Prune the float network, then quantize it."
    return None


def _refuse_nan(model: nn.Module) -> None:
    weights = [(n, p) for n, p in model.named_parameters() if p.is_floating_point() and p.device.type != "meta"]
    # A sum is NaN if a term is, and costs a fifth of `isnan().any()`. It may also overflow, so that is checked below.
    flags = [weight.detach().sum().isnan() for _, weight in weights]
    for device in {flag.device for flag in flags}:  # one synchronization per device
        here = [(name, flag) for (name, _), flag in zip(weights, flags, strict=True) if flag.device == device]
        found = torch.stack([flag for _, flag in here]).tolist()
        suspects = [name for (name, _), is_nan in zip(here, found, strict=True) if is_nan]
        name = next((name for name in suspects if bool(model.get_parameter(name).isnan().any())), None)
        if name is not None:
            raise UntraceableModel(
                f"{name} contains NaN, so the outputs of the network cannot be compared. Load or train finite weights."
            )


def refuse_unknown_patterns(model: nn.Module, patterns: Sequence[str]) -> None:
    """Check that every freeze pattern matches a module or tensor.

    Raises:
        BadWidths: If one matches nothing.
    """
    names = [*(path for path, _ in model.named_modules() if path), *named_tensors(model)]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            some = ", ".join(path for path, _ in list(model.named_modules())[1:6])
            raise BadWidths(f"freeze pattern {pattern!r} matches no module. Modules of this network: {some}, ...")


# --- computed weights -----------------------------------------------------------------------------


def refuse_computed_weights(model: nn.Module) -> None:
    """Check that no weight is computed in each pass, by weight_norm, spectral_norm, a parametrization or a mask.

    Removing channels of a computed weight would need to change what it is computed from. torch can store the computed
    values as plain weights; the error names the statement.

    Raises:
        UntraceableModel: With the statement for the user to run.
    """
    found = [(kind, path, name) for path, module in model.named_modules() for kind, name in _computed(module)]
    if not found:
        return
    kind, path, name = found[0]
    more = sum(one[0] == kind for one in found) - 1
    weights = f"{path}.{name}".removeprefix(".") + (f" and {more} more weights are" if more else " is")
    raise UntraceableModel(
        f"{weights} computed by {kind} in each pass, so channels cannot be removed. "
        f"Store the computed values as weights with: {_STORE[kind]}"
    )


def _computed(module: nn.Module) -> Iterator[tuple[str, str]]:
    """(what computes it, its name) for each computed weight of a module."""
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


_HOOKED = (
    "for module, hook in [(m, h) for m in model.modules() for h in m._forward_pre_hooks.values() "
    "if {test}]: torch.nn.utils.{remove}"
)
_STORE = {
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
