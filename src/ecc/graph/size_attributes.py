"""Sizes that a forward pass reads from attributes of modules, such as `self.num_heads` in a view.

In the copy of a network that is traced, int attributes of modules are `SizeAttribute`s. They compute like ints and
remember where they come from. `SizeReader` sees them among the arguments of a view or split, before torch turns them
into plain numbers. If the axis of such a size has channels, the attribute follows their number in a pruned network.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ecc.graph.labels import Labels, channel_vector, varies, varying_axes

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer

_CREATION = frozenset({"zeros", "ones", "empty", "full"})
_PER_AXIS = _CREATION | {"view", "reshape", "expand", "new_zeros", "new_ones", "new_empty", "new_full"}
"""Functions whose sizes are those of the axes of their result, in order."""
_SIZED = _PER_AXIS | {"unflatten", "split", "split_with_sizes", "narrow"}
"""Functions with sizes among their arguments."""


class SizeAttribute(int):
    """An int with the attributes that it was computed from: their values by module path and name."""

    sources: Mapping[tuple[str, str], int]

    def __new__(cls, value: int, sources: Mapping[tuple[str, str], int]) -> SizeAttribute:
        """An int with its sources."""
        made = super().__new__(cls, value)
        made.sources = sources
        return made

    def __deepcopy__(self, memo: Any) -> SizeAttribute:
        return self

    def __reduce__(self) -> Any:
        return int, (int(self),)


def _arithmetic(name: str, compute: Callable[[Any, Any], Any]) -> None:
    def forward(self: SizeAttribute, other: Any) -> Any:
        return _combined(compute(int(self), other), self, other)

    def backward(self: SizeAttribute, other: Any) -> Any:
        return _combined(compute(other, int(self)), self, other)

    setattr(SizeAttribute, f"__{name}__", forward)
    setattr(SizeAttribute, f"__r{name}__", backward)


def _combined(value: Any, one: SizeAttribute, other: Any) -> Any:
    if type(value) is not int:
        return value
    return SizeAttribute(value, {**one.sources, **getattr(other, "sources", {})})


for _name in ("add", "sub", "mul", "floordiv"):
    _arithmetic(_name, getattr(operator, _name))


def track_sizes(model: nn.Module) -> None:
    """Replace the int attributes of a network's own modules by `SizeAttribute`s."""
    for path, module in model.named_modules():
        if not type(module).__module__.startswith("torch."):
            for name, value in vars(module).items():
                if type(value) is int and value > 1:
                    vars(module)[name] = SizeAttribute(value, {(path, name): value})


class SizeReader(TorchFunctionMode):
    """Tells a tracer which `SizeAttribute`s are among the arguments of the current operator."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer = tracer

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _SIZED:
            return func(*args, **kwargs)
        sizes: list[Any] = []
        for value in (*(args if name in _CREATION else args[1:]), *kwargs.values()):
            if isinstance(value, (list, tuple)):
                sizes.extend(value)
            else:
                sizes.append(value)
        found = [(axis, size) for axis, size in enumerate(sizes) if type(size) is SizeAttribute]
        if not found:
            return func(*args, **kwargs)
        self.tracer.sizes = [(axis if name in _PER_AXIS else None, size) for axis, size in found]
        try:
            return func(*args, **kwargs)
        finally:
            self.tracer.sizes = []


def note_axes(trace: Tracer, path: str, labels: Labels) -> None:
    """Remember the channels of a view in this module, by their number."""
    if labels is None:
        return
    for axis in varying_axes(labels):
        trace.viewed[path, labels.shape[axis]] = channel_vector(labels, axis, labels.shape[axis])


def follow_created(trace: Tracer, call: Call) -> None:
    """Label a new tensor, such as `zeros(1, num_heads, n, n)`, if one of its sizes is that of an earlier view."""
    for position, size in trace.sizes:
        vector = trace.viewed.get((call.path, int(size)))
        if position is not None and vector is not None and list(size.sources.values()) == [size]:
            path, name = next(iter(size.sources))
            is_known = trace.attention == "heads" or (path, name) in trace.channel_labels.attributes
            if is_known and (trace.first_equal.get(path, path), name) not in trace.constant:
                trace.channel_labels.size_attribute(path, name, vector)
                shape = [-1 if axis == position else 1 for axis in range(call.out.dim())]
                call.out._ecc_state = vector.reshape(shape).expand(call.out.shape)  # type: ignore[attr-defined]
                return


def follow_sizes(trace: Tracer, before: Any, after: Sequence[Labels]) -> None:
    """Let attributes follow the number of channels if they are the size of an axis with channels."""
    tensors = [labels for labels in (*after, before) if isinstance(labels, Tensor)]
    anywhere = [(labels, axis) for labels in tensors for axis in range(labels.dim())]
    following = trace.channel_labels.attributes
    for position, size in trace.sizes:  # `num_heads` in view(n, l, num_heads, head_dim)
        if list(size.sources.values()) == [size]:
            there = anywhere if position is None else [(after[0], position)]
            _follow_one(trace, next(iter(size.sources)), size, there)
    if trace.attention == "width" and isinstance(before, Tensor):
        _follow_head_width(trace, before, after[0])
    for _, size in trace.sizes:  # `embed_dim` in view(n, l, num_heads, embed_dim // num_heads)
        if any(source in following for source in size.sources):
            for source, value in size.sources.items():
                if source not in following:
                    _follow_one(trace, source, value, anywhere)


def _follow_head_width(trace: Tracer, before: Tensor, after: Labels) -> None:
    """Let `embed_dim` in `view(n, l, num_heads, embed_dim // num_heads)` follow the number of channels before."""
    for position, size in trace.sizes:
        is_width = position is not None and after is not None and after.shape[position] == size
        if after is None or position is None or not is_width or not varies(after, position):
            continue
        for source, value in size.sources.items() if len(size.sources) > 1 else ():
            _follow_one(trace, source, value, [(before, axis) for axis in range(before.dim())])


def _follow_one(trace: Tracer, source: tuple[str, str], value: int, axes: Sequence[tuple[Labels, int]]) -> None:
    path, name = source
    if (trace.first_equal.get(path, path), name) in trace.constant:
        return
    for labels, axis in axes:
        if labels is not None and labels.shape[axis] == value and varies(labels, axis):
            trace.channel_labels.size_attribute(path, name, channel_vector(labels, axis, value))
            return
