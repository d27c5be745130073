"""Running a network for a trace: on meta tensors, in eval or train mode, leaving the user's alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecc.errors import BadWidths, UntraceableModel, first_line
from ecc.graph.computed_weights import refuse_computed_weights
from ecc.graph.labels import Misaligned, PrunedLabels, frozen_labels
from ecc.graph.model_copy import named_tensors, rebuilt
from ecc.graph.tracer import Tracer
from ecc.torch_utils import tensors_in

Inputs = Tensor | Sequence[Any] | Mapping[str, Any]
"""An example input: one tensor, a sequence of positional arguments, or a mapping of keyword arguments."""


def as_call(example_input: Inputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) with which the network is called."""
    if isinstance(example_input, Mapping):
        return (), dict(example_input)
    if isinstance(example_input, (list, tuple)):
        return tuple(example_input), {}
    return (example_input,), {}


@dataclass(frozen=True)
class ModelCopy:
    """A network that is ours to run: what its forward pass stores or changes reaches nobody else."""

    model: nn.Module
    tensors: Mapping[str, Tensor]
    paths: Mapping[int, str]
    """Module paths by module id."""

    @classmethod
    def of(cls, model: nn.Module, *, on_meta: bool) -> ModelCopy:
        """A copy of a user's network, on meta tensors or on copies of its own."""
        tensors = named_tensors(model)
        stand_ins = {name: _stand_in(tensor, on_meta) for name, tensor in tensors.items()}
        made = {id(tensor): stand_ins[name] for name, tensor in tensors.items()}
        return cls._named(rebuilt(model, made), stand_ins)

    @classmethod
    def itself(cls, model: nn.Module) -> ModelCopy:
        """A network that was built for tracing."""
        return cls._named(model, named_tensors(model))

    @classmethod
    def _named(cls, model: nn.Module, tensors: Mapping[str, Tensor]) -> ModelCopy:
        return cls(model, tensors, {id(module): path for path, module in model.named_modules()})


def one_pass(twin: ModelCopy, example_input: Inputs, tracer: Tracer, *, training: bool) -> Tracer:
    """One forward pass under a tracer; outputs are frozen."""
    book = tracer.book
    for name, tensor in twin.tensors.items():
        tracer.name(tensor, name)
    twin.model.train(training)
    args, kwargs = tree_map_only(Tensor, lambda t: _example(t, tracer.on_meta), as_call(example_input))
    # Inference mode shows composite operators whole. Code that asks whether gradients are enabled hears what it would
    # hear outside: that they are in train mode.
    try:
        with _quiet(), torch.inference_mode(), torch.set_grad_enabled(training), tracer.following(twin.paths), tracer:
            result = twin.model(*args, **kwargs)
    except Misaligned as stop:
        stop.path = tracer.last_path
        raise
    except Exception as error:
        if isinstance(book, PrunedLabels):
            raise Misaligned(torch.empty(0, dtype=torch.long), first_line(error), path=tracer.last_path) from error
        raise
    for tensor in tensors_in(result):
        if (labels := tracer.labels(tensor)) is not None:
            book.freeze(labels, "it is a network output")
    return tracer


def _stand_in(tensor: Tensor, on_meta: bool) -> Tensor:
    if not on_meta:
        return tensor.detach().clone()
    if tensor.device.type == "meta":
        return tensor.detach()
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dim() == 0:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return tensor.detach().to("cpu", copy=True)  # an index or mask: its values say where channels go


def _example(tensor: Tensor, on_meta: bool) -> Tensor:
    copy = torch.empty_like(tensor, device="meta") if on_meta else tensor.detach().clone()
    copy._ecc_state = frozen_labels(tensor.shape)  # type: ignore[attr-defined]
    return copy


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the random state, and the attention layers out of their fused kernels."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def refuse_untraceable(model: nn.Module, example_input: Inputs) -> None:
    """Say early and clearly what cannot be traced.

    Raises:
        UntraceableModel: compiled, scripted or lazy networks, computed weights, and networks without an input.
    """
    if isinstance(model, torch.jit.ScriptModule):
        raise UntraceableModel("the network is a TorchScript module. Trace the nn.Module it was made from.")
    if not isinstance(model, nn.Module):
        raise UntraceableModel(f"expected a torch.nn.Module, got {type(model).__name__}.")
    if hasattr(model, "_orig_mod"):
        raise UntraceableModel("the network was compiled. Trace the one given to torch.compile and compile later.")
    for name, tensor in named_tensors(model).items():
        if nn.parameter.is_lazy(tensor):
            raise UntraceableModel(f"{name} is not initialised yet (a lazy module). Run the network once first.")
        if tensor.is_quantized:
            raise UntraceableModel(f"{name} is quantised. Cut the float network, then quantise.")
    _refuse_nan(model)
    refuse_computed_weights(model)
    if not any(True for _ in tensors_in(as_call(example_input))):
        raise UntraceableModel("the example input holds no tensor.")


def _refuse_nan(model: nn.Module) -> None:
    weights = [(n, p) for n, p in model.named_parameters() if p.is_floating_point() and p.device.type != "meta"]
    flags = [weight.detach().isnan().any() for _, weight in weights]
    for device in {flag.device for flag in flags}:  # one wait for each device
        here = [(name, flag) for (name, _), flag in zip(weights, flags, strict=True) if flag.device == device]
        found = torch.stack([flag for _, flag in here]).tolist()
        if any(found):
            name = next(name for (name, _), is_nan in zip(here, found, strict=True) if is_nan)
            raise UntraceableModel(
                f"{name} holds NaN, so the outputs of the network cannot be compared. Load or train finite weights."
            )


def refuse_unknown_patterns(model: nn.Module, patterns: Sequence[str]) -> None:
    """A pattern that matches nothing is a slip of the pen.

    Raises:
        BadWidths: naming the pattern.
    """
    names = [*(path for path, _ in model.named_modules() if path), *named_tensors(model)]
    for pattern in patterns:
        if not any(fnmatch(name, pattern) for name in names):
            some = ", ".join(path for path, _ in list(model.named_modules())[1:6])
            raise BadWidths(f"freeze pattern {pattern!r} matches no module. Modules are {some}, ...")
