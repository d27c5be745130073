"""Modules that stand for removed ones.

The forward code of a user's class cannot be changed, so modules are replaced to remove a branch:

    a block that returns its input without its branches      returns its input: no kernel at all
    a module inside a removed branch                         returns a zero, without computing

A zero without axes broadcasts in the sum that follows, so nothing is written or read for it. Where the code between the
module and the sum needs a shape, the zeros have one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from ecc.errors import BadFile
from ecc.graph.structure import AffineSize, OutputValue, Replacement, SizeRule
from ecc.records import from_builtins, to_builtins

SIZES = "_ecc_sizes"
"""Attribute of a module with the names of the size attributes that `slim` set, and their key in a saved state."""
REMOVED = "_ecc_removed"
"""Key of the replaced modules in a saved state."""
_INTERNALS = frozenset(vars(nn.Module()))
_INNER_INPUTS = ("key_value_states", "encoder_hidden_states")  # of cross-attention, whose keys are not in the cache


class RemovedModule(nn.Module):
    """Stands for a module that was removed with its branch. It has no parameters and accepts any arguments.

    Plain attributes of the module stay, since code around it may read them.

    Args:
        original: The module that it stands for.
        replacement: What it returns, with sizes that do not depend on widths.
    """

    def __init__(self, original: nn.Module, replacement: Replacement) -> None:
        super().__init__()
        for name, value in vars(original).items():
            if name not in _INTERNALS and name != SIZES and not isinstance(value, (Tensor, nn.Module)):
                setattr(self, name, value)
        self.training = original.training
        self.replacement = replacement
        if isinstance(original, nn.MultiheadAttention):
            self.in_proj_bias = None  # what `nn.TransformerEncoderLayer` and `nn.TransformerEncoder` read
        if isinstance(original, nn.TransformerEncoderLayer):
            self.self_attn = SimpleNamespace(batch_first=original.self_attn.batch_first)
        layers = [layer for m in original.modules() if type(layer := getattr(m, "layer_idx", None)) is int]
        self.cache_layer: int | None = layers[0] if layers else None
        self.is_block = len(layers) > 1  # else it has a single attention, which may be a cross-attention

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The zeros or the input that the module was replaced by."""
        if self.cache_layer is not None:
            self._note_length(args, kwargs)
        values = [_value(one, args, kwargs) for one in self.replacement.values]
        if self.replacement.container == "tensor":
            return values[0]
        return values if self.replacement.container == "list" else tuple(values)

    def _note_length(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Tell the cache of a decoder how many tokens there were, as a removed attention would have."""
        many = (*args, *kwargs.values())
        cache = next((one for one in many if hasattr(one, "get_seq_length") and hasattr(one, "update")), None)
        is_cross_attention = not self.is_block and any(kwargs.get(name) is not None for name in _INNER_INPUTS)
        x = next((one for one in many if isinstance(one, Tensor) and one.is_floating_point() and one.dim() == 3), None)
        if cache is None or x is None or is_cross_attention:
            return
        entry = x.new_zeros((x.shape[0], 1, x.shape[1], 1))
        getattr(cache, "self_attention_cache", cache).update(entry, entry, self.cache_layer)

    def extra_repr(self) -> str:
        """What it returns."""
        return ", ".join(one.kind for one in self.replacement.values)


def _value(one: OutputValue, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    if one.kind == "none":
        return None
    x = _argument(one.source, args, kwargs)
    if one.kind == "input" or not x.dim():  # a zero without axes, from another removed module
        return x
    return x.new_zeros(() if one.sizes is None else [_size(rule, x) for rule in one.sizes])


def _argument(source: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """The argument with this position or keyword; the first tensor if the call is written in another way."""
    found = args[int(source)] if source.isdecimal() and int(source) < len(args) else kwargs.get(source)
    if isinstance(found, Tensor):
        return found
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor) and value.is_floating_point())


def _size(rule: SizeRule, x: Tensor) -> int:
    if rule.axis is None:
        return rule.size.fixed if rule.size is not None else 1
    size = x.shape[rule.axis]
    if rule.window is None:
        return size
    covered, padding, stride = rule.window
    return (size + padding - covered) // stride + 1


def replace_modules_(model: nn.Module, replacements: Iterable[Replacement]) -> None:
    """Replace modules of a network. A module inside another replaced module is left out."""
    by_path = {one.path: one for one in replacements}
    for path, one in by_path.items():
        parts = path.split(".")
        if any(".".join(parts[:count]) in by_path for count in range(1, len(parts))):
            continue
        parent = model.get_submodule(path.rpartition(".")[0])
        parent._modules[parts[-1]] = RemovedModule(model.get_submodule(path), one)
        for count in range(len(parts)):
            _leave_fused_kernel_(model.get_submodule(".".join(parts[:count])))


def _leave_fused_kernel_(module: nn.Module) -> None:
    """Let a transformer of torch run its layers one by one: its fused kernels read the weights of removed modules."""
    if isinstance(module, nn.TransformerEncoderLayer):
        module.activation_relu_or_gelu = 0
    if isinstance(module, nn.TransformerEncoder):
        module.use_nested_tensor = False


def at_widths(one: Replacement, widths: Sequence[float]) -> Replacement:
    """The replacement with sizes at these widths, for `RemovedModule`."""

    def fixed(rule: SizeRule) -> SizeRule:
        return rule if rule.size is None else replace(rule, size=AffineSize(round(rule.size.at(widths))))

    values = [
        value if value.sizes is None else replace(value, sizes=tuple(map(fixed, value.sizes))) for value in one.values
    ]
    return replace(one, branches=(), values=tuple(values))


def removed_modules(model: nn.Module) -> dict[str, Any]:
    """The replaced modules of a network by path, as plain values for a file."""
    modules = model.named_modules()
    return {path: to_builtins(one.replacement) for path, one in modules if isinstance(one, RemovedModule)}


def read_removed(model: nn.Module, found: Any, where: Any) -> list[Replacement]:
    """The replaced modules from a file, for a dense network.

    Raises:
        BadFile: If the network does not have one of the modules.
    """
    paths = {path for path, _ in model.named_modules() if path}
    read = []
    for path, value in found.items() if isinstance(found, dict) else ():
        one = from_builtins(value, Replacement, where)
        if path not in paths or not one.values:
            raise BadFile(
                f"{where} belongs to another network: it removes {path}, which the network lacks. "
                "Build the network as for the run."
            )
        read.append(replace(one, path=path))
    return read


def tensors_inside(names: Iterable[str], paths: Iterable[str]) -> set[str]:
    """Those of these tensors that belong to one of the modules, by name and path."""
    prefixes = tuple(f"{path}." for path in paths)
    return {name for name in names if name.startswith(prefixes)} if prefixes else set()
