"""Hooks of a network that is traced, verified or measured.

A hook may change what the network computes, and then it is followed as any other code. Or it only observes, as one that
logs: then it would fill the user's records with the tensors of a trace, ask meta tensors for values and tie channels
that nothing ties. The two are told apart by running a copy of the network with and without the hook.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map_only

from ecc.errors import UntraceableModel, first_line
from ecc.graph.model_copy import named_tensors, rebuilt
from ecc.graph.numerics import seeded
from ecc.graph.side_effects import undone
from ecc.torch_utils import tensors_in

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = -1
_OUTPUTS = 1e-5  # of the largest output: the same operators on the same numbers, in float32
_GRADIENTS = 1e-3  # of the largest gradient, which some kernels add up in any order
_ROUNDINGS = 8


@dataclass(frozen=True)
class _Hook:
    """Where a hook is registered."""

    module: int
    """Its number in `model.modules()`, or `_GLOBAL` for hooks of all modules there are."""
    table: str
    number: int


@contextmanager
def without_observers(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[nn.Module]:
    """The network to run in place of `model`: it computes the same without hooks that only observe.

    It is the network itself where it has no hooks, else a copy on the same tensors. Hooks that change outputs, or
    gradients in train mode, are left in it, and what they change of the user's objects is put back at the end. Telling
    hooks apart takes a few passes on a copy, in which they are run.

    Args:
        model: Any network.
        args: With which it is called.
        kwargs: With which it is called.

    Raises:
        UntraceableModel: A hook fails on a copy of the network.
    """
    hooks = _hooks(model)
    if not hooks:
        yield model
        return
    tables = [getattr(module, table) for module in model.modules() for table in _TABLES]
    with undone([*hooks.values(), *tables], spare=model.modules()):
        observers = _observers(model, hooks, args, kwargs)
        with _suspended(observers):
            yield _without(rebuilt(model, {id(t): t for t in named_tensors(model).values()}), observers)


def hook_names(model: nn.Module) -> list[str]:
    """The forward and backward hooks of a network in words, such as `scale on conv1`."""
    paths = [path or "the network" for path, _ in model.named_modules()]
    return [
        f"{_name_of(hook)} on {paths[place.module] if place.module != _GLOBAL else 'all modules'}"
        for place, hook in _hooks(model).items()
    ]


def _hooks(model: nn.Module) -> dict[_Hook, Callable[..., Any]]:
    tables = {(place, table): getattr(m, table) for place, m in enumerate(model.modules()) for table in _TABLES}
    tables |= {(_GLOBAL, table): getattr(torch_module, f"_global{table}") for table in _TABLES}
    return {_Hook(*key, number): hook for key, table in tables.items() for number, hook in table.items()}


def _name_of(hook: Any) -> str:
    while isinstance(hook, partial):
        hook = hook.func
    return str(getattr(hook, "__qualname__", type(hook).__qualname__)).rpartition("<locals>.")[2]


def _kind(hook: Any) -> Any:
    """Hooks of one function are taken to be of one kind, whatever they are bound to."""
    while isinstance(hook, (partial, MethodType)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    return hook.__code__ if isinstance(hook, FunctionType) else type(hook)


# --- telling them apart -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Ran:
    outputs: list[Tensor]
    gradients: list[Tensor]


_Outcome = _Ran | Exception


@dataclass
class _Runs:
    """Passes of copies of a network with some of its hooks."""

    model: nn.Module
    hooks: Mapping[_Hook, Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool = False

    def outcome(self, dropped: Collection[_Hook]) -> _Outcome:
        """The outputs, in train mode the gradients too, or what was raised.

        Gradients are on in eval mode as well, since a hook may register others on tensors, which need them.
        """
        found: _Outcome = _Ran([], [])
        for gradients in (True, False):
            with ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # those that matter come again
                stack.enter_context(_repeatable(self.model))
                stack.enter_context(undone(self.hooks.values(), spare=self.model.modules()))
                stack.enter_context(_suspended(dropped))
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.set_grad_enabled(gradients))
                found = self._once(dropped)
            if not isinstance(found, Exception):
                break
        return found

    def _once(self, dropped: Collection[_Hook]) -> _Outcome:
        # Other weights than the network's, or what a hook left behind in an earlier pass would look up to date.
        made = {id(t): _changed(t) for t in named_tensors(self.model).values()}
        copy = _without(rebuilt(self.model, made), dropped)
        args, kwargs = tree_map_only(Tensor, lambda t: t.detach().clone(), (self.args, dict(self.kwargs)))
        try:
            copy.train(self.training)
            outputs = list(tensors_in(copy(*args, **kwargs)))
            gradients = _gradients(copy, outputs) if self.training and torch.is_grad_enabled() else []
            return _Ran([output.detach() for output in outputs], gradients)
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return error


def _observers(
    model: nn.Module, hooks: Mapping[_Hook, Callable[..., Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> frozenset[_Hook]:
    """The hooks without which the network gives the same outputs, in eval and in train mode, and the same gradients."""
    if not hooks or any(t.is_meta for t in (*named_tensors(model).values(), *tensors_in((args, kwargs)))):
        return frozenset()
    kinds: dict[Any, set[_Hook]] = {}
    for place, hook in hooks.items():
        kinds.setdefault(_kind(hook), set()).add(place)
    evaluation = _Runs(model, hooks, args, kwargs)
    wanted = [(evaluation, evaluation.outcome(()))]
    if isinstance(wanted[0][1], Exception):
        _refuse_failing(evaluation, wanted[0][1])
        return frozenset()
    training = _Runs(model, hooks, args, kwargs, training=True)
    outputs = training.outcome(())
    if isinstance(outputs, Exception):  # batch norm refuses to learn from a single value
        twice = tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, (args, dict(kwargs)))
        training.args, training.kwargs = twice
        outputs = training.outcome(())
    if not isinstance(outputs, Exception):
        wanted.append((training, outputs))

    def is_free_of(dropped: Collection[_Hook]) -> bool:
        return all(_agree(outputs, runs.outcome(dropped)) for runs, outputs in wanted)

    if is_free_of(hooks):
        return frozenset(hooks)
    found: frozenset[_Hook] = frozenset()
    for kind in kinds.values() if len(kinds) > 1 else ():
        if is_free_of(found | kind):
            found |= kind
    return found


def _refuse_failing(runs: _Runs, error: Exception) -> None:
    """A forward hook that fails on a copy of the network, as one that looks up modules by their id."""
    if not isinstance(runs.outcome(list(runs.hooks)), Exception):
        names = sorted({_name_of(hook) for hook in runs.hooks.values()})
        raise UntraceableModel(
            f"a hook ({', '.join(names)}) fails on a copy of the network: {first_line(error)}. "
            "Remove it with the handle that registering gave, and register it again afterwards."
        ) from error


def _gradients(model: nn.Module, outputs: list[Tensor]) -> list[Tensor]:
    """Of a sum of all outputs, each number of them with another weight."""
    parts = [o.flatten() for o in outputs if o.requires_grad and o.is_floating_point()]
    if parts:
        weighted = [(part * torch.arange(len(part), device=part.device).cos()).sum().cpu() for part in parts]
        torch.stack([one.double() for one in weighted]).sum().backward()
    return [torch.zeros(()) if p.grad is None else p.grad for p in model.parameters()]


def _agree(wanted: _Outcome, found: _Outcome) -> bool:
    if isinstance(wanted, Exception) or isinstance(found, Exception):
        return False
    # Gradients that cancel are rounding errors, so all are judged by the largest of them.
    largest = max((_allowed(gradient, _GRADIENTS) for gradient in wanted.gradients), default=0.0)
    return (
        len(wanted.outputs) == len(found.outputs)
        and len(wanted.gradients) == len(found.gradients)
        and all(_are_close(a, b, _allowed(a, _OUTPUTS)) for a, b in zip(wanted.outputs, found.outputs, strict=True))
        and all(map(partial(_are_close, allowed=largest), wanted.gradients, found.gradients))
    )


def _allowed(tensor: Tensor, share: float) -> float:
    """A share of the largest finite number, or a few roundings of a coarse type."""
    if not tensor.is_floating_point() or not tensor.numel():
        return 0.0
    largest = float(torch.where(tensor.isfinite(), tensor.abs(), 0.0).max())
    return largest * max(share, _ROUNDINGS * torch.finfo(tensor.dtype).eps)


def _are_close(one: Tensor, other: Tensor, allowed: float) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other) or not one.is_floating_point():
        return torch.equal(one, other)
    same = (one == other) | (one.isnan() & other.isnan())
    return bool(torch.where(same, 0.0, (one - other).abs()).max() <= allowed)


def _changed(tensor: Tensor) -> Tensor:
    new = tensor.detach().clone()
    if not isinstance(tensor, nn.Parameter):
        return new
    return nn.Parameter(new * 0.9 if new.is_floating_point() else new, requires_grad=tensor.requires_grad)


@contextmanager
def _repeatable(model: nn.Module) -> Iterator[None]:
    """The same numbers each time: one seed, and no choice of algorithms by their speed. All is put back."""
    devices = {t.device for t in named_tensors(model).values()}
    with seeded(devices), ExitStack() as stack:
        stack.callback(_set_cudnn, torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic)
        _set_cudnn(False, True)
        yield


def _set_cudnn(benchmark: bool, deterministic: bool) -> None:
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = benchmark, deterministic


def _without(model: nn.Module, dropped: Collection[_Hook]) -> nn.Module:
    """The same network, which is a copy, without these hooks."""
    modules = list(model.modules())
    for hook in dropped:
        if hook.module != _GLOBAL:
            getattr(modules[hook.module], hook.table).pop(hook.number, None)
    return model


@contextmanager
def _suspended(dropped: Collection[_Hook]) -> Iterator[None]:
    """Takes those of these hooks that are hooks of all modules out of torch's tables for a while."""
    tables = {name: getattr(torch_module, f"_global{name}") for name in _TABLES}
    saved = [(table, table.copy()) for table in tables.values()]
    for hook in dropped:
        if hook.module == _GLOBAL:
            tables[hook.table].pop(hook.number, None)
    try:
        yield
    finally:
        for table, before in saved:
            before.update(table)
            table.clear()
            table.update(before)
