"""A copy of a network with other tensors.

All modules of the copy are new, and its tensors are the given ones. Everything else that a module holds is copied as by
`copy.deepcopy`. References to modules and tensors, including those in lambdas and other functions, point into the copy.
The forward pass of the copy does not change the original.

Hooks of modules are copied. What a hook refers to (bound object, closure, arguments of `functools.partial`) is replaced
by its copy if it belongs to the network, and shared with the original otherwise, such as a list to which the hook
appends. Hooks of tensors are not copied, as in `copy.deepcopy`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, TypeVar
from weakref import ReferenceType, ref

import torch
import torch.fx
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecc.errors import UntraceableModel
from ecc.graph.masked_norm import MASKED_NORMS, masked_norms, use_masked_norms_
from ecc.graph.multihead import fit_attention_
from ecc.graph.removal import REMOVED, SIZES, removed_modules

Net = TypeVar("Net", bound=nn.Module)
_PLAIN = frozenset({int, float, bool, str, bytes, type(None), type, torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({dict, OrderedDict, set, list})
_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
)
_DEPTH = 4  # nested objects and containers that are searched for parts of the network


def named_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name. Shared tensors appear once."""
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
    """Parameters and buffers that `state_dict` leaves out, such as those with `persistent=False`, by name."""
    saved = {id(tensor) for tensor in model.state_dict(keep_vars=True).values()}
    return {name: tensor for name, tensor in named_tensors(model).items() if id(tensor) not in saved}


def whole_state(model: nn.Module) -> dict[str, Any]:
    """The state of a network with all buffers, since non-persistent ones may have been pruned too.

    If `slim` set attributes such as `num_heads`, the state has their values under `SIZES`. If it replaced modules of
    removed branches, the state describes them under `REMOVED`. Modules with a layer norm over live channels only are
    listed under `MASKED_NORMS`.
    """
    modules = {path: module for path, module in model.named_modules() if SIZES in vars(module)}
    sizes = {
        path: {name: _plain(getattr(module, name)) for name in vars(module)[SIZES]} for path, module in modules.items()
    }
    removed = removed_modules(model)
    parts = {SIZES: sizes, REMOVED: removed, MASKED_NORMS: masked_norms(model)}
    plain = {key: value for key, value in parts.items() if value}
    return {**model.state_dict(), **unsaved_tensors(model), **plain}


def set_sizes_(model: nn.Module, sizes: Mapping[tuple[str, str], int | float]) -> None:
    """Set attributes of modules, by module path and attribute, and note which ones were set."""
    for (path, name), size in sizes.items():
        module = model.get_submodule(path)
        setattr(module, name, (size,) if name == "normalized_shape" else size)
        if name == "head_dim":
            fit_attention_(module)
        if name != "num_features":
            vars(module)[SIZES] = tuple(sorted({*vars(module).get(SIZES, ()), name}))


def _plain(value: Any) -> Any:
    """The size in a `normalized_shape`, or the value itself."""
    return value[0] if type(value) is tuple else value


def scale_attributes_(model: nn.Module, factors: Mapping[str, float]) -> None:
    """Multiply float attributes of modules, by module path and attribute, and note which ones were set.

    `nn.RMSNorm` has eps None for the machine epsilon of its type.
    """
    for target, factor in factors.items():
        path, _, name = target.rpartition(".")
        module = model.get_submodule(path)
        value = getattr(module, name)
        if value is None:
            first = next(module.parameters(), None)
            value = torch.finfo(torch.get_default_dtype() if first is None else first.dtype).eps
        setattr(module, name, value * factor)
        vars(module)[SIZES] = tuple(sorted({*vars(module).get(SIZES, ()), name}))


@torch.no_grad()
def load_whole_state_(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load a `whole_state` into a network of the same shapes. Missing non-persistent buffers stay as they are."""
    unsaved = unsaved_tensors(model)
    others = (*unsaved, SIZES, REMOVED, MASKED_NORMS)
    model.load_state_dict({name: value for name, value in state.items() if name not in others})
    use_masked_norms_(model, [model.get_submodule(path) for path in state.get(MASKED_NORMS, ())])
    for name, buffer in unsaved.items():
        if name in state:
            buffer.copy_(state[name])


def rebuild(model: Net, made: Mapping[int, Tensor]) -> Net:
    """A copy of a network in which tensors are replaced.

    Args:
        model: The network.
        made: For each tensor of the network, by id, the tensor of the copy.
    """
    modules = list(model.modules())
    copies = {id(module): _new(module) for module in modules}
    memo: dict[int, Any] = {**copies, **made}
    hooks = [table for module in modules for name in _HOOKS if (table := vars(module).get(name))]
    memo.update({id(table): OrderedDict() for table in hooks})  # handles refer to these tables
    functions: list[tuple[dict[str, Any], str]] = []
    for module in modules:
        state = copies[id(module)].__dict__
        state.update(module.__dict__)
        for key, value in state.items():
            if type(value) in _PLAIN or id(value) in memo:
                state[key] = memo.get(id(value), value)
            elif key in _TABLES:
                state[key] = {k: None if v is None else memo[id(v)] for k, v in value.items()}
            elif type(value) in _CONTAINERS and not value:
                state[key] = memo[id(value)] = type(value)()
            elif isinstance(value, FunctionType):
                functions.append((state, key))
            elif type(value) is not tuple or not all(type(v) in _PLAIN for v in value):
                state[key] = _copied(value, memo, f"{type(module).__name__}.{key}")
        _update_sizes(module, state)
    for copied in copies.values():
        fit_attention_(copied)
    rebinding = _Rebinding(memo)
    for state, key in functions:  # last, since they may refer to anything above
        state[key] = rebinding(state[key])
    for table in hooks:
        memo[id(table)].update({number: rebinding(hook) for number, hook in table.items()})
    return copies[id(model)]  # type: ignore[return-value]


def _new(module: nn.Module) -> nn.Module:
    """A module of the same class, without attributes."""
    cls = module.__class__
    if not isinstance(module, torch.fx.GraphModule):
        return cls.__new__(cls)
    # The class of a GraphModule holds its generated code. The copy gets its own, so that it can be recompiled.
    members = {name: value for name, value in vars(cls).items() if name not in ("__dict__", "__weakref__")}
    wrapped = members.pop("_wrapped_call", None)
    own = type(cls.__name__, cls.__bases__, members)
    if wrapped is not None:
        own._wrapped_call = type(wrapped)(own, wrapped.cls_call)  # type: ignore[attr-defined]
    copied: nn.Module = object.__new__(own)
    return copied


class _Rebinding:
    """Replaces references to a network by references to its copy in functions, methods and other callables.

    An object without such a reference is returned unchanged.
    """

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo

    def __call__(self, value: Any) -> Any:
        if id(value) in self._memo:
            return self._memo[id(value)]
        if not self._refers(value, set(), 0):
            return value
        if isinstance(value, FunctionType):
            return self._function(value)
        if isinstance(value, MethodType):
            return MethodType(value.__func__, self(value.__self__))
        if isinstance(value, partial):
            keywords = {name: self(one) for name, one in value.keywords.items()}
            return partial(self(value.func), *map(self, value.args), **keywords)
        if isinstance(value, ReferenceType):
            return ref(self(value()))
        if isinstance(value, tuple):
            return value._make(map(self, value)) if hasattr(value, "_make") else tuple(map(self, value))
        copied = self._memo[id(value)] = self._shallow(value)  # first, since references may be circular
        if isinstance(value, dict):
            copied.clear()
            copied.update({self(key): self(one) for key, one in value.items()})
        elif isinstance(value, (list, set, deque)):
            copied.clear()
            (copied.update if isinstance(value, set) else copied.extend)(map(self, value))
        else:
            vars(copied).update({name: self(one) for name, one in vars(value).items()})
        return copied

    @staticmethod
    def _shallow(value: Any) -> Any:
        try:
            return copy.copy(value)
        except Exception as error:
            raise UntraceableModel(
                "the network cannot be copied: one of its hooks or functions refers to it through a "
                f"{type(value).__name__}, which cannot be copied ({error}). Remove the hook, and add it afterwards."
            ) from error

    def _function(self, value: FunctionType) -> FunctionType:
        cells = tuple(CellType() for _ in value.__closure__ or ())
        copied = FunctionType(value.__code__, value.__globals__, value.__name__, None, cells)
        self._memo[id(value)] = copied  # first, since a cell may refer to it
        for name in ("__qualname__", "__doc__", "__module__"):
            setattr(copied, name, getattr(value, name))
        copied.__dict__.update(value.__dict__)
        copied.__defaults__ = value.__defaults__ and tuple(map(self, value.__defaults__))
        copied.__kwdefaults__ = value.__kwdefaults__ and {k: self(one) for k, one in value.__kwdefaults__.items()}
        for cell, old in zip(cells, value.__closure__ or (), strict=True):
            with suppress(ValueError):  # the variable has no value yet
                cell.cell_contents = self(old.cell_contents)
        return copied

    def _refers(self, value: Any, seen: set[int], depth: int) -> bool:
        """Whether an object refers to something that has a copy."""
        if id(value) in self._memo:
            return True
        if id(value) in seen or type(value) in _PLAIN or depth > _DEPTH or isinstance(value, Tensor):
            return False
        seen.add(id(value))
        return any(self._refers(one, seen, depth + 1) for one in references_of(value))


def references_of(value: Any) -> Iterator[Any]:
    """The objects that a callable, a container or an object refers to."""
    if isinstance(value, FunctionType):
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
        for cell in value.__closure__ or ():
            with suppress(ValueError):
                yield cell.cell_contents
    elif isinstance(value, MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, ReferenceType):
        yield value()
    elif isinstance(value, dict):
        yield from (*value.keys(), *value.values())
    elif isinstance(value, (list, tuple, set, deque)):
        yield from value
    elif hasattr(value, "__dict__") and not isinstance(value, (type, ModuleType)):
        yield from vars(value).values()


class _CopiesAnyTensor(TorchFunctionMode):
    """Lets `copy.deepcopy` copy tensors of a graph, which modules may keep; torch copies leaves only."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            if tensor.grad_fn is not None and id(tensor) not in memo:
                memo[id(tensor)] = tensor.detach().clone()
            if id(tensor) in memo:
                return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


def _copied(value: Any, memo: dict[int, Any], where: str) -> Any:
    try:
        with _CopiesAnyTensor():
            return copy.deepcopy(value, memo)
    except Exception as error:
        raise UntraceableModel(
            f"the network cannot be copied: attribute {where} is a {type(value).__name__} ({error}). "
            "Keep such objects outside the modules."
        ) from error


def _update_sizes(module: nn.Module, state: dict[str, Any]) -> None:
    """Set the size attributes of a module from its new tensors."""
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
    elif len(state.get("normalized_shape") or ()) == 1 and weight is not None and weight.dim() == 1:
        state["normalized_shape"] = type(state["normalized_shape"])(weight.shape)
    elif isinstance(module, nn.GroupNorm) and weight is not None:
        state["num_groups"] = module.num_groups * weight.numel() // module.num_channels
        state["num_channels"] = weight.numel()
    elif isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
        _update_recurrent_sizes(module, state)


def _update_recurrent_sizes(module: nn.RNNBase | nn.RNNCellBase, state: dict[str, Any]) -> None:
    suffix = "_l0" if isinstance(module, nn.RNNBase) else ""
    old: Tensor = getattr(module, f"weight_ih{suffix}")
    rows, state["input_size"] = state["_parameters"][f"weight_ih{suffix}"].shape
    state["hidden_size"] = module.hidden_size * rows // old.shape[0]
    if state.get("proj_size"):
        state["proj_size"] = state["_parameters"]["weight_hr_l0"].shape[0]
