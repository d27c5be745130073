"""Hooks of a network that is traced, verified or measured.

A hook that changes what the network computes is traced like any other code. A hook that only observes (a logger) must
not run: it would record tensors of the trace, read values of meta tensors, and tie channels. ECC distinguishes the two
by running a copy of the network with and without the hook.
"""

from __future__ import annotations

import inspect
import sysconfig
import warnings
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils._pytree import tree_map_only

from ecc.errors import UntraceableModel, first_line
from ecc.graph.model_copy import named_tensors, rebuild, references_of
from ecc.graph.numerics import RunResult, relative_error, run_without_randomness
from ecc.torch_utils import tensors_in

_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_GLOBAL = -1
_OUTPUTS = 1e-5  # allowed difference relative to the largest output: same operators, same values, float32
_GRADIENTS = 1e-3  # relative to the largest gradient, which some kernels sum in any order
_ROUNDINGS = 8


@dataclass(frozen=True)
class _Hook:
    """Where a hook is registered."""

    module: int
    """Position in `model.modules()`, or `_GLOBAL` for hooks of all modules."""
    table: str
    number: int


@contextmanager
def without_observer_hooks(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[nn.Module]:
    """The network to run in place of `model`, without hooks that only observe.

    It is the network itself if it has no hooks, else a copy with the same tensors. Hooks that change outputs, or
    gradients in train mode, stay in the copy. What they change in the user's objects is restored at the end.
    Distinguishing hooks takes a few passes of a copy with the hooks.

    Args:
        model: Any network.
        args: Positional arguments of its call.
        kwargs: Keyword arguments of its call.

    Raises:
        UntraceableModel: If a hook fails on a copy of the network.
    """
    hooks = _hooks(model)
    if not hooks:
        yield model
        return
    tables = [getattr(module, table) for module in model.modules() for table in _TABLES]
    with undo_changes([*hooks.values(), *tables], spare=model.modules()):
        observers = _observers(model, hooks, args, kwargs)
        with _suspended(observers):
            yield _without(rebuild(model, {id(t): t for t in named_tensors(model).values()}), observers)


def hook_names(model: nn.Module) -> list[str]:
    """Descriptions of the forward and backward hooks of a network, such as `scale on conv1`."""
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
    """Hooks with the same function are of one kind, whatever they are bound to."""
    while isinstance(hook, (partial, MethodType)):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    return hook.__code__ if isinstance(hook, FunctionType) else type(hook)


# --- observers ----------------------------------------------------------------------------------


_Outcome = RunResult | Exception


@dataclass
class _Runs:
    """Runs copies of a network with some of its hooks."""

    model: nn.Module
    hooks: Mapping[_Hook, Callable[..., Any]]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool = False

    def outcome(self, dropped: Collection[_Hook]) -> _Outcome:
        """Outputs, and gradients in train mode, or the exception that was raised.

        Gradients are enabled in eval mode too, since a hook may register hooks on tensors, which need them.
        """
        found: _Outcome = RunResult([], [], 0.0)
        for gradients in (True, False):
            with ExitStack() as stack:
                stack.enter_context(warnings.catch_warnings())
                warnings.simplefilter("ignore")  # relevant ones appear again later
                stack.enter_context(_deterministic_cudnn())
                stack.enter_context(undo_changes(self.hooks.values(), spare=self.model.modules()))
                stack.enter_context(_suspended(dropped))
                stack.enter_context(torch.inference_mode(False))
                stack.enter_context(torch.set_grad_enabled(gradients))
                found = self._once(dropped)
            if not isinstance(found, Exception):
                break
        return found

    def _once(self, dropped: Collection[_Hook]) -> _Outcome:
        # Change the weights, so that values that a hook stored in an earlier pass differ.
        made = {id(t): _changed(t) for t in named_tensors(self.model).values()}
        copied = _without(rebuild(self.model, made), dropped)
        enabled = torch.is_grad_enabled()
        try:
            return run_without_randomness(
                copied,
                self.args,
                self.kwargs,
                training=self.training,
                gradients=self.training and enabled,
                grad_enabled=enabled,
            )
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return error


def _observers(
    model: nn.Module, hooks: Mapping[_Hook, Callable[..., Any]], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> frozenset[_Hook]:
    """The hooks without which outputs in eval and train mode and gradients stay the same."""
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
    if isinstance(outputs, Exception):  # batch norm does not train on a single value
        twice = tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, (args, dict(kwargs)))
        training.args, training.kwargs = twice
        outputs = training.outcome(())
    if not isinstance(outputs, Exception):
        wanted.append((training, outputs))

    def is_equal_without(dropped: Collection[_Hook]) -> bool:
        return all(_agree(outputs, runs.outcome(dropped)) for runs, outputs in wanted)

    if is_equal_without(hooks):
        return frozenset(hooks)
    found: frozenset[_Hook] = frozenset()
    for kind in kinds.values() if len(kinds) > 1 else ():
        if is_equal_without(found | kind):
            found |= kind
    return found


def _refuse_failing(runs: _Runs, error: Exception) -> None:
    """Raise if a hook fails on a copy of the network, such as one that looks up modules by id."""
    if not isinstance(runs.outcome(list(runs.hooks)), Exception):
        names = sorted({_name_of(hook) for hook in runs.hooks.values()})
        raise UntraceableModel(
            f"a hook ({', '.join(names)}) fails on a copy of the network: {first_line(error)}. "
            "Remove it with its handle, and register it again afterwards."
        ) from error


def _agree(wanted: _Outcome, found: _Outcome) -> bool:
    if isinstance(wanted, Exception) or isinstance(found, Exception) or len(wanted.outputs) != len(found.outputs):
        return False
    for one, other in zip(wanted.outputs, found.outputs, strict=True):
        if one.dtype != other.dtype or not (one.is_floating_point() or torch.equal(one, other)):
            return False
    rounding = _ROUNDINGS * max(wanted.epsilon, found.epsilon)
    return relative_error(wanted.outputs, found.outputs) <= max(_OUTPUTS, rounding) and relative_error(
        wanted.gradients, found.gradients, together=True
    ) <= max(_GRADIENTS, rounding)


def _changed(tensor: Tensor) -> Tensor:
    new = tensor.detach().clone()
    if not isinstance(tensor, nn.Parameter):
        return new
    return nn.Parameter(new * 0.9 if new.is_floating_point() else new, requires_grad=tensor.requires_grad)


@contextmanager
def _deterministic_cudnn() -> Iterator[None]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.deterministic
    cudnn.benchmark, cudnn.deterministic = False, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before


def _without(model: nn.Module, dropped: Collection[_Hook]) -> nn.Module:
    """Remove these hooks from a copied network."""
    modules = list(model.modules())
    for hook in dropped:
        if hook.module != _GLOBAL:
            getattr(modules[hook.module], hook.table).pop(hook.number, None)
    return model


@contextmanager
def _suspended(dropped: Collection[_Hook]) -> Iterator[None]:
    """Remove those of these hooks that are global from torch's tables, and restore them at the end."""
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


# --- undoing side effects of hooks ---------------------------------------------------------------
#
# Everything that a function can reach is saved before and restored after: containers, arrays and tensors, attributes of
# objects, variables that it closes over, and global variables that it names. Objects of installed libraries are left
# alone, since they may be in use elsewhere (a connection, a logger), and so is what is outside the process, as files.

_DEPTH = 5  # nested objects
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ABSENT = object()


@contextmanager
def undo_changes(functions: Iterable[Any], spare: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Restore what these functions change, however the block ends.

    Args:
        functions: Functions and other callables.
        spare: Modules that do not change.
    """
    snapshot = _Snapshot({id(module) for module in spare})
    for function in functions:
        snapshot.take(function)
    try:
        yield
    finally:
        for restore in snapshot.undo:
            restore()


class _Snapshot:
    """Saved values of everything that a function can reach."""

    def __init__(self, seen: set[int]) -> None:
        self.undo: list[Callable[[], None]] = []
        self._seen = seen
        self._alive: list[Any] = []  # otherwise another object could get the same id

    def take(self, value: Any, depth: int = 0) -> None:
        """Save a value and everything that it refers to."""
        if id(value) in self._seen or depth > _DEPTH:
            return
        self._seen.add(id(value))
        self._alive.append(value)
        if isinstance(value, (dict, list, set, deque)):
            self.undo.append(partial(_refill, value, value.copy()))
        elif isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.is_meta:
                self.undo.append(partial(_rewrite, value, value.detach().clone()))
            return
        elif isinstance(value, np.ndarray):
            self.undo.append(partial(np.copyto, value, value.copy()))
            return
        elif isinstance(value, FunctionType):
            self._function(value, depth)
        elif not isinstance(value, (tuple, MethodType, partial)):
            if not hasattr(value, "__dict__") or not _is_users(value.__class__):
                return
            self.undo.append(partial(_refill, vars(value), vars(value).copy()))
        for one in references_of(value):
            self.take(one, depth + 1)

    def _function(self, function: FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # the variable has no value yet
                self.undo.append(partial(_refill_cell, cell, cell.cell_contents))
        for name in sorted(_names(function.__code__)):
            value = function.__globals__.get(name, _ABSENT)
            self.undo.append(partial(_rename, function.__globals__, name, value))
            is_ours = not isinstance(value, FunctionType) or _is_users(value)
            if not isinstance(value, (type, ModuleType)) and is_ours:
                self.take(value, depth + 1)


def _names(code: CodeType) -> set[str]:
    """All names in a function that may be global variables."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


@cache
def _is_users(thing: Hashable) -> bool:
    """Whether a class or function belongs to the user and not to an installed library. Modules always count."""
    if isinstance(thing, type) and issubclass(thing, nn.Module):
        return True
    file = getattr(inspect.getmodule(thing), "__file__", None)
    return getattr(thing, "__module__", "") != "builtins" and (file is None or not file.startswith(_LIBRARIES))


def _refill(container: Any, before: Any) -> None:
    if len(container) == len(before) and _same(container, before):
        return
    container.clear()
    (container.extend if isinstance(container, (list, deque)) else container.update)(before)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return all(key in other and other[key] is value for key, value in one.items())
    return (isinstance(one, set) and one == other) or all(a is b for a, b in zip(one, other, strict=True))


def _refill_cell(cell: CellType, before: Any) -> None:
    cell.cell_contents = before


def _rename(variables: dict[str, Any], name: str, before: Any) -> None:
    if before is _ABSENT:
        variables.pop(name, None)
    else:
        variables[name] = before


@torch.no_grad()
def _rewrite(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape == before.shape and not torch.equal(tensor, before):  # without a version counter, as in batch norm
        with torch.inference_mode(tensor.is_inference()):
            tensor.copy_(before)
