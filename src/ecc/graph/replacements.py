"""What takes the place of the modules of a residual branch that is removed.

The code between the modules of a branch still runs. If it allows that, the modules return zeros without axes, else
zeros of the right shape (`removal.py` has the modules that do so). A module that returns its input once all its
branches are removed is a block, which is replaced as a whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from ecc.graph.channel_graph import ChannelGraph
from ecc.graph.data_flow import DataFlow, ModuleCall, Op
from ecc.graph.structure import AffineSize, OutputValue, Replacement, SizeRule

_MAX_OUTWARD = 3  # modules around a sum that are considered as its block
MAX_WALK = 200  # operators between a sum and an exit

LAYERS = frozenset(
    "linear conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d addmm mm matmul".split()
)
NORMS = frozenset("batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm".split())
ZERO_TO_ZERO = frozenset(
    "relu relu6 hardswish silu gelu elu tanh leaky_relu mish prelu dropout feature_dropout alpha_dropout hardtanh neg "
    "abs clone contiguous view reshape _unsafe_view flatten unflatten permute transpose movedim t squeeze unsqueeze "
    "expand slice select narrow index to _to_copy detach alias mean sum div avg_pool1d avg_pool2d max_pool1d "
    "max_pool2d adaptive_avg_pool1d adaptive_avg_pool2d upsample_nearest2d upsample_bilinear2d roll sqrt pow "
    "native_dropout type_as chunk split unbind as_strided expand_as reshape_as".split()
)
"""Operators whose first result is zero if their first argument is zero."""
_SCALAR_OPS = frozenset(
    "relu relu6 hardswish hardsigmoid silu gelu elu tanh sigmoid leaky_relu mish dropout hardtanh neg abs clone "
    "contiguous to _to_copy detach alias add sub mul div native_dropout".split()
)
"""Operators that accept a zero without axes in place of any of their arguments."""
_AXIS_OPS = frozenset("permute transpose movedim moveaxis swapaxes".split())
"""Operators that accept a tensor whose axes have size one."""
_KEEPS_SIGN = frozenset(
    "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d "
    "adaptive_max_pool2d view reshape flatten permute transpose contiguous clone upsample_nearest2d "
    "upsample_bilinear2d cat add mean sum slice".split()
)
"""Operators whose results are not negative if their arguments are not."""
_NOT_NEGATIVE = frozenset("relu relu6 sigmoid softmax _softmax abs exp softplus square hardsigmoid".split())
_LAST_AXIS = frozenset("linear layer_norm rms_norm native_layer_norm addmm".split())


class NotRemovable(Exception):
    """Why a branch cannot be removed."""


@dataclass(eq=False)
class Candidate:
    """A branch that may be removable."""

    root: int
    """The operator that adds it."""
    trunk: int
    """The value that it is added to."""
    output: int
    """Its value."""
    exits: tuple[str, ...]
    dead: frozenset[int]
    """The operators that only the branch needs."""
    groups: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    """The largest modules that run dead operators only."""
    replacements: tuple[Replacement, ...] = ()
    name: str = ""
    with_shapes: bool = False
    """Whether its modules return zeros of the right shape, for code that reads it."""


class Replacements:
    """The replacements for branches of one data flow."""

    def __init__(
        self, model: nn.Module, graph: ChannelGraph, flow: DataFlow, shared_names: Mapping[str, Sequence[str]]
    ) -> None:
        self._model = model
        self._graph = graph
        self._flow = flow
        self._shared_names = shared_names
        self._shapes = {tensor.name: tensor for tensor in graph.tensors}

    def of(self, one: Candidate) -> tuple[Replacement, ...]:
        """What takes the place of the modules of a branch.

        Raises:
            NotRemovable: If the code between the modules does not allow it.
        """
        shapes = ("scalar", "ones", "full")
        for shape in shapes[2:] if one.with_shapes else shapes[self._trains_other_code(one) :]:
            found = self._replaced_as(one, shape)
            if found is not None:
                prefixes = tuple(f"{part.path}." for part in found)
                for group in one.groups:
                    outside = [s.tensor for s in self._graph[group].slices if not s.tensor.startswith(prefixes)]
                    if outside:
                        raise NotRemovable(f"{outside[0]} is used by code that stays")
                return found
        raise NotRemovable("the code between its modules needs sizes that are not known without them")

    def _trains_other_code(self, one: Candidate) -> bool:
        """Whether a value passes a module that does nothing in eval mode, such as stochastic depth.

        Such a module may read the number of items in train mode, so it is not given a zero without axes.
        """
        values = {value for number in one.dead for value in self._flow.ops[number].outputs}
        return any(
            call.start == call.end
            and not values.isdisjoint(call.arguments.values())
            and not type(self._model.get_submodule(call.path)).__module__.startswith("torch.nn.")
            for call in self._flow.calls
        )

    def _replaced_as(self, one: Candidate, shape: str) -> tuple[Replacement, ...] | None:
        found: list[Replacement] = []
        pending = list(one.modules)
        while pending:
            path = pending.pop(0)
            part = self._replacement(path, shape)
            if part is not None:
                found.append(part)
                continue
            children = [
                f"{path}.{name}"
                for name, _ in self._model.get_submodule(path).named_children()
                if f"{path}.{name}" in self._flow.calls_by_path
            ]
            if not children and next(self._model.get_submodule(path).parameters(), None) is not None:
                return None
            pending = children + pending
        if not found or not self._runs_on_zeros(one, found, shape):
            return None
        return self._without_needless_shapes(one, found) if shape == "full" else tuple(found)

    def _without_needless_shapes(self, one: Candidate, found: Sequence[Replacement]) -> tuple[Replacement, ...]:
        """Return the input instead of zeros that only other replaced modules see, and one zero before the sum."""
        trains_other_code = self._trains_other_code(one)
        calls = [call for part in found for call in self._flow.calls_by_path[part.path]]
        replaced = {number for call in calls for number in range(call.start, call.end)}
        parts = []
        for part in found:
            call = self._flow.calls_by_path[part.path][0]
            values = []
            for value, leaf in zip(part.values, call.leaves, strict=True):
                if value.kind == "zero" and leaf is not None:
                    source = self._flow.tensors[call.arguments[value.source]]
                    is_unseen = self._flow.value_users[leaf] <= replaced
                    if is_unseen and source.shape == self._flow.tensors[leaf].shape:
                        value = OutputValue("input", value.source)
                    elif not one.with_shapes and self._only_reaches_sum(one, leaf, replaced):
                        ones = tuple(SizeRule(size=AffineSize(1)) for _ in self._flow.tensors[leaf].shape)
                        value = OutputValue("zero", value.source, ones if trains_other_code else None)
                values.append(value)
            parts.append(replace(part, values=tuple(values)))
        return tuple(parts)

    def _only_reaches_sum(self, one: Candidate, value: int, replaced: Collection[int]) -> bool:
        """Whether a value reaches only the sum of its branch, through code that accepts a zero without axes."""
        for user in self._flow.value_users[value]:
            op = self._flow.ops[user]
            is_sum = user == one.root and not (op.call.in_place and op.inputs[0] == value)
            is_between = user in one.dead and user not in replaced and op.name in _SCALAR_OPS and not op.call.in_place
            if not is_sum and not (
                is_between and all(self._only_reaches_sum(one, out, replaced) for out in op.outputs)
            ):
                return False
        return True

    def _replacement(self, path: str, shape: str) -> Replacement | None:
        calls = self._flow.calls_by_path[path]
        first = calls[0]
        if first.container is None or not first.arguments or len({len(call.leaves) for call in calls}) != 1:
            return None
        values = []
        sources = {value: key for key, value in reversed(first.arguments.items())}
        for leaf in first.leaves:
            if leaf is None or not self._flow.value_users.get(leaf):
                values.append(OutputValue("none"))
                continue
            if leaf in sources:
                values.append(OutputValue("input", sources[leaf]))
                continue
            if not self._flow.tensors[leaf].is_floating_point():
                return None
            value = self._zero(path, first, leaf, shape)
            if value is None:
                return None
            values.append(value)
        return Replacement(path, (), str(first.container), tuple(values))

    def _zero(self, path: str, call: ModuleCall, leaf: int, shape: str) -> OutputValue | None:
        """Zeros in place of one value that a module returns; None if their shape is not known."""
        tensor = self._flow.tensors[leaf]
        source, given = next(iter(call.arguments.items()))
        if shape == "scalar":
            return OutputValue("zero", source)
        if shape == "ones":
            return OutputValue("zero", source, tuple(SizeRule(size=AffineSize(1)) for _ in tensor.shape))
        if len(self._flow.calls_by_path[path]) > 1:
            return None
        x = self._flow.tensors[given]
        if x.dim() != tensor.dim():
            return None
        last = self._last_layer(call, leaf)
        rules = [SizeRule(axis=axis) for axis in range(x.dim())]
        channels = None
        if last is not None:
            weight = next(n for v in last.inputs if (n := self._flow.parameter.get(v)) is not None)
            axis = 1 if last.name.startswith("conv_transpose") else 0
            channels = x.dim() - 1 if last.name in _LAST_AXIS else 1
            if channels >= x.dim() or round(self._size(weight, axis)) != tensor.shape[channels]:
                return None
            rules[channels] = SizeRule(size=self._shapes[weight].axes[axis])
        window = None if last is None else _window(last, call.end - call.start == 1)
        for axis in range(x.dim()):
            if axis == channels:
                continue
            if window is not None and axis >= 2:
                rules[axis] = SizeRule(axis=axis, window=window[axis - 2])
            elif x.shape[axis] != tensor.shape[axis]:
                return None
        return OutputValue("zero", source, tuple(rules))

    def _size(self, tensor: str, axis: int) -> float:
        return self._shapes[tensor].axes[axis].at([group.width for group in self._graph.groups])

    def _last_layer(self, call: ModuleCall, value: int) -> Op | None:
        """The last operator of a module that has its own number of output channels."""
        for _ in range(MAX_WALK):
            producer = self._flow.producer[value]
            if producer is None or not call.start <= producer < call.end:
                return None
            op = self._flow.ops[producer]
            if (op.name in LAYERS or op.name in NORMS) and any(v in self._flow.parameter for v in op.inputs):
                return op
            if op.name not in _SCALAR_OPS or not op.inputs:
                return None
            value = op.inputs[0]
        return None

    def _runs_on_zeros(self, one: Candidate, found: Sequence[Replacement], shape: str) -> bool:
        """Whether the code between the replaced modules accepts what they return."""
        flow = self._flow
        calls = [call for part in found for call in self._flow.calls_by_path[part.path]]
        replaced = {number for call in calls for number in range(call.start, call.end)}
        zeros = {leaf for call in calls for leaf in call.leaves if leaf is not None}
        zeros -= {value for call in calls for value in call.arguments.values()}
        inner = {value for number in replaced for value in flow.ops[number].outputs}
        inner -= {leaf for call in calls for leaf in call.leaves if leaf is not None}
        allowed = _SCALAR_OPS if shape == "scalar" else _SCALAR_OPS | _AXIS_OPS
        for number in sorted(one.dead - replaced):
            op = flow.ops[number]
            if inner.intersection(op.inputs):
                return False  # reads a value that a replaced module did not return
            if zeros.isdisjoint(op.inputs):
                continue
            zeros.update(op.outputs)
            if shape == "full":
                continue
            in_place = op.call.in_place and len(op.inputs) > 1
            if op.name not in allowed or (in_place and op.inputs[0] in zeros):
                return False
        root = flow.ops[one.root]
        writes_into = root.call.in_place and root.inputs[0] == one.output
        return one.output in zeros and (shape == "full" or not writes_into)

    # --- blocks ----------------------------------------------------------------------------------

    def blocks(self, found: Sequence[Candidate]) -> list[Replacement]:
        """Modules that return their input when all their branches are removed."""
        blocks: dict[str, Replacement] = {}
        for one in found:
            around = [call for call in self._flow.calls if call.path and call.start <= one.root < call.end]
            for call in reversed(around[-_MAX_OUTWARD:]):
                numbers = tuple(n for n, other in enumerate(found) if call.start <= other.root < call.end)
                block = self._block(call, [found[n] for n in numbers])
                if block is not None:
                    blocks[call.path] = replace(block, branches=numbers)
                    break
        return list(blocks.values())

    def _block(self, call: ModuleCall, branches: Sequence[Candidate]) -> Replacement | None:
        flow = self._flow
        if call.container is None or len(self._flow.calls_by_path[call.path]) != 1:
            return None
        prefix = f"{call.path}."
        ops = range(call.start, call.end)
        for name in self._shapes:
            if name.startswith(prefix) and (
                not flow.parameter_users.get(name, set()) <= set(ops)
                or not all(other.startswith(prefix) for other in self._shared_names.get(name, ()))
            ):
                return None
        removed = {one.output for one in branches}
        sources = {value: key for key, value in reversed(call.arguments.items())}
        values = []
        for leaf in call.leaves:
            if leaf is None or not flow.value_users.get(leaf):
                values.append(OutputValue("none"))
                continue
            source = self._same_as(leaf, removed)
            if source not in sources:
                return None
            if leaf in flow.written and not flow.value_users[source] <= set(ops):
                return None  # changed in place later, while its input is used elsewhere
            values.append(OutputValue("input", sources[source]))
        used_outside = {
            value
            for number in ops
            for value in flow.ops[number].outputs
            if any(user < call.start or user >= call.end for user in flow.value_users.get(value, ()))
        }
        if not used_outside <= {leaf for leaf in call.leaves if leaf is not None}:
            return None
        if not any(value.kind == "input" for value in values):
            return None
        return Replacement(call.path, (), str(call.container), tuple(values))

    def _same_as(self, value: int, removed: Collection[int]) -> int:
        """The value that this one equals when the branches with these values are removed."""
        flow = self._flow
        for _ in range(MAX_WALK):
            producer = flow.producer[value]
            if producer is None:
                return value
            op = flow.ops[producer]
            if op.name == "add" and len(op.inputs) == 2:
                zeros = [self._is_zero(one, removed, 0) for one in op.inputs]
                is_scaled = zeros[0] and op.call.get("alpha", 1) != 1
                if sum(zeros) != 1 or is_scaled:
                    return value
                value = op.inputs[zeros.index(False)]
            elif op.name in ("relu", "relu6", "hardtanh"):
                before = self._same_as(op.inputs[0], removed)
                if not self._is_fixed_by(op, before):
                    return value
                value = before
            elif op.name in ("clone", "contiguous", "alias") and op.inputs:
                value = op.inputs[0]
            else:
                return value
        return value

    def _is_zero(self, value: int, removed: Collection[int], depth: int) -> bool:
        """Whether a value is zero when branches are removed."""
        if value in removed:
            return True
        producer = self._flow.producer[value]
        if producer is None or depth > 8:
            return False
        op = self._flow.ops[producer]
        if op.name == "add" and len(op.inputs) == 2:
            return all(self._is_zero(one, removed, depth + 1) for one in op.inputs)
        is_kept = op.name in ZERO_TO_ZERO and len(op.inputs) == 1
        return is_kept and self._is_zero(op.inputs[0], removed, depth + 1)

    def _is_fixed_by(self, op: Op, value: int) -> bool:
        """Whether an activation does not change a value, since it was applied before."""
        if op.name == "relu":
            return self._is_not_negative(value, 0)
        producer = self._flow.producer[value]
        if producer is None:
            return False
        before = self._flow.ops[producer]
        return (
            before.name == op.name
            and before.call.args[1:] == op.call.args[1:]
            and op.call.kwargs == (before.call.kwargs)
        )

    def _is_not_negative(self, value: int, depth: int) -> bool:
        producer = self._flow.producer[value]
        if producer is None or depth > 8:
            return False
        op = self._flow.ops[producer]
        if op.name in _NOT_NEGATIVE:
            return True
        is_kept = op.name in _KEEPS_SIGN and not (op.name == "add" and op.call.get("alpha", 1) != 1)
        return is_kept and all(self._is_not_negative(one, depth + 1) for one in op.inputs)


def _window(op: Op, is_leaf: bool) -> list[tuple[int, int, int]] | None:
    """(size, padding, stride) of each spatial axis of a convolution; None if its sizes do not change."""
    if not is_leaf or not op.name.startswith("conv") or op.name.startswith("conv_transpose"):
        return None
    stride, padding, dilation = (op.call.get(name, None) for name in ("stride", "padding", "dilation"))
    kernel = op.call["weight"].shape[2:]
    if not all(isinstance(one, (list, tuple)) for one in (stride, padding, dilation)):
        return None
    return [
        (dilation[n % len(dilation)] * (size - 1) + 1, 2 * padding[n % len(padding)], stride[n % len(stride)])
        for n, size in enumerate(kernel)
    ]
