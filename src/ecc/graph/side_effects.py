"""Undoing what a function of the user's does to the user's objects, as a hook that appends to a list.

What the function can reach is noted before and put back after: containers, arrays and tensors, attributes of objects,
variables that it closes over, and global variables that it names. Objects of installed libraries are left alone, since
they may be in use elsewhere (a connection, a logger); so is what is outside the process, as files.
"""

from __future__ import annotations

import inspect
import sysconfig
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecc.graph.model_copy import held_by

_DEPTH = 5  # of objects inside each other
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_ABSENT = object()


@contextmanager
def undone(functions: Iterable[Any], spare: Iterable[nn.Module] = ()) -> Iterator[None]:
    """Puts back what the functions change, however the block ends.

    Args:
        functions: And other callables.
        spare: Modules that nobody will change.
    """
    notes = _Notes({id(module) for module in spare})
    for function in functions:
        notes.take(function)
    try:
        yield
    finally:
        for put_back in notes.undo:
            put_back()


class _Notes:
    """How things were."""

    def __init__(self, seen: set[int]) -> None:
        self.undo: list[Callable[[], None]] = []
        self._seen = seen
        self._alive: list[Any] = []  # or another object could have the same id

    def take(self, value: Any, depth: int = 0) -> None:
        """Note a value and what it refers to."""
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
        for one in held_by(value):
            self.take(one, depth + 1)

    def _function(self, function: FunctionType, depth: int) -> None:
        for cell in function.__closure__ or ():
            with suppress(ValueError):  # nothing is captured yet
                self.undo.append(partial(_refill_cell, cell, cell.cell_contents))
        for name in sorted(_names(function.__code__)):
            value = function.__globals__.get(name, _ABSENT)
            self.undo.append(partial(_rename, function.__globals__, name, value))
            is_ours = not isinstance(value, FunctionType) or _is_users(value)
            if not isinstance(value, (type, ModuleType)) and is_ours:
                self.take(value, depth + 1)


def _names(code: CodeType) -> set[str]:
    """All names in a function that may be global."""
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names, inner))


@cache
def _is_users(thing: Hashable) -> bool:
    """Whether a class or function is not of an installed library. Modules count: they do nothing behind one's back."""
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
    if tensor.shape == before.shape and not torch.equal(tensor, before):  # batch norm counts up no version
        with torch.inference_mode(tensor.is_inference()):
            tensor.copy_(before)
