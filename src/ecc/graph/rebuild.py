"""A network rebuilt around other tensors.

Every module object of the copy is new, its tensors are the ones given, and everything else a module holds is
copied as `copy.deepcopy` would, with references to modules and tensors following into the copy, also those of lambdas
and other functions that a module keeps. Nothing of the original is copied whole, and nothing that the copy does in its
forward pass reaches the original.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import suppress
from types import CellType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ecc.errors import UntraceableModel
from ecc.graph.call import tensors_in

Net = TypeVar("Net", bound=nn.Module)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({dict, OrderedDict, set, list})
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, tied ones once."""
    found: dict[str, Tensor] = {}
    seen: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    found[prefix + name] = tensor
    return found


def unsaved_tensors(model: nn.Module) -> dict[str, Tensor]:
    """By name what `state_dict` leaves out, as buffers of `persistent=False`, whatever it calls the others."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return {name: tensor for name, tensor in named_tensors(model).items() if id(tensor) not in saved}


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The state of a network with all its buffers: those that are not saved may have been cut, too."""
    return {**model.state_dict(), **unsaved_tensors(model)}


@torch.no_grad()
def load_whole_state_(model: nn.Module, state: Mapping[str, Any]) -> None:
    """The reverse of `whole_state`, for a network of the same shapes; what it lacks of unsaved buffers stays."""
    unsaved = unsaved_tensors(model)
    model.load_state_dict({name: value for name, value in state.items() if name not in unsaved})
    for name, buffer in unsaved.items():
        if name in state:
            buffer.copy_(state[name])


def rebuilt(model: Net, made: Mapping[int, Tensor]) -> Net:
    """A copy of a module tree in which tensors are replaced, and references to modules follow."""
    modules = list(model.modules())
    twins = {id(module): module.__class__.__new__(module.__class__) for module in modules}
    memo: dict[int, Any] = {**twins, **made}
    for module in modules:
        state = module.__dict__.copy()
        for key, value in state.items():
            if type(value) in _PLAIN:
                continue
            if key in _TABLES:
                state[key] = {k: None if v is None else memo[id(v)] for k, v in value.items()}
            elif type(value) in _CONTAINERS and not value:
                state[key] = type(value)()
            elif isinstance(value, FunctionType):
                state[key] = _rebound(value, memo)
            elif type(value) is not tuple or not all(type(v) in _PLAIN for v in value):
                state[key] = _copied(value, memo, f"{type(module).__name__}.{key}")
        _update_sizes(module, state)
        twins[id(module)].__dict__.update(state)
    return twins[id(model)]  # type: ignore[return-value]


def _rebound(value: Any, memo: dict[int, Any]) -> Any:
    """A function whose captured modules, tensors and functions are those of the copy; others stay the very same."""
    if id(value) in memo or not isinstance(value, FunctionType) or not _captures(value, memo, set()):
        return memo.get(id(value), value)
    cells = tuple(CellType() for _ in value.__closure__ or ())
    twin = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
    memo[id(value)] = twin  # before its cells, one of which may hold it
    for name in ("__qualname__", "__doc__", "__module__"):
        setattr(twin, name, getattr(value, name))
    twin.__dict__.update(value.__dict__)
    twin.__defaults__ = value.__defaults__ and tuple(_rebound(one, memo) for one in value.__defaults__)
    twin.__kwdefaults__ = value.__kwdefaults__ and {k: _rebound(one, memo) for k, one in value.__kwdefaults__.items()}
    for cell, old in zip(cells, value.__closure__ or (), strict=True):
        with suppress(ValueError):  # nothing is captured yet
            cell.cell_contents = _rebound(old.cell_contents, memo)
    return twin


def _captures(function: FunctionType, memo: Mapping[int, Any], seen: set[int]) -> bool:
    """Whether a function holds something that has another in the copy, itself or by a function within."""
    seen.add(id(function))
    held = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        with suppress(ValueError):
            held.append(cell.cell_contents)
    inner = (one for one in held if isinstance(one, FunctionType) and id(one) not in seen)
    return any(id(one) in memo for one in held) or any(_captures(one, memo, seen) for one in inner)


def _copied(value: Any, memo: dict[int, Any], where: str) -> Any:
    for tensor in tensors_in(value):
        if tensor.grad_fn is not None and id(tensor) not in memo:  # kept from a forward pass; torch copies leaves only
            memo[id(tensor)] = tensor.detach().clone()
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise UntraceableModel(
            f"the network cannot be copied: attribute {where} is a {type(value).__name__} ({error}). "
            "Keep such objects outside the modules."
        ) from error


def _update_sizes(module: nn.Module, state: dict[str, Any]) -> None:
    """Bring a module's own record of its sizes in line with its new tensors."""
    weight = state["_parameters"].get("weight")
    if isinstance(module, nn.modules.conv._ConvNd) and weight is not None:
        rows, columns = weight.shape[:2]
        leading = ("in_channels", "out_channels") if module.transposed else ("out_channels", "in_channels")
        groups = rows * module.groups // getattr(module, leading[0]) if module.groups > 1 else 1
        state["groups"], state[leading[0]], state[leading[1]] = groups, rows, columns * groups
    elif isinstance(module, nn.Linear) and weight is not None:
        state["out_features"], state["in_features"] = weight.shape
    elif isinstance(module, nn.modules.batchnorm._NormBase):
        known = weight if weight is not None else state["_buffers"].get("running_mean")
        state["num_features"] = module.num_features if known is None else known.numel()
    elif isinstance(module, nn.PReLU):
        state["num_parameters"] = weight.numel()
    elif isinstance(module, nn.Embedding):
        state["num_embeddings"], state["embedding_dim"] = weight.shape
