"""Finding residual branches that can be removed entirely.

One more forward pass records which operator uses the results of which (`DataFlow`). Branches are searched for at each
sum of two activations:

    trunk ─┬──────────────────────────────┐
           └─ norm ─ layers ─ last layer ─ + ─      the branch: operators whose results only reach the sum

1. *Exits.* From the sum backwards, through operators that map zero to zero, to the last parameters whose zeros make the
   branch zero: weight and bias of a layer or norm, or a scale.
2. *Dead operators.* Those that are used by nothing but the branch.
3. *Modules to replace.* The largest modules that run dead operators only. The code between them still runs, on zeros
   without axes if it allows that, else on zeros of the right shape (`removal.py`).
4. *Blocks.* If a module returns its input once all its branches are removed, it is replaced as a whole. This includes
   the last `relu` of a block whose input has passed a `relu` already.

`verification.py` then compares masked and slim networks numerically. A branch that fails is not offered.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

import numpy as np
from torch import Tensor, nn

from ecc.errors import first_line
from ecc.graph.calls import Call
from ecc.graph.channel_graph import ChannelGraph
from ecc.graph.forward_pass import Inputs, ModelCopy, one_pass
from ecc.graph.labels import ChannelLabels, Role
from ecc.graph.ops import registry
from ecc.graph.structure import AffineSize, Branch, OutputValue, Replacement, SizeRule
from ecc.graph.tracer import Tracer
from ecc.torch_utils import outputs_in

_OUTSIDE = -1  # stands for every use that is not an operator: an output of the network, a Python number
_MAX_OUTWARD = 3  # modules around a sum that are considered as its block
_MAX_WALK = 200  # operators between a sum and an exit

_LAYERS = frozenset(
    "linear conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d addmm mm matmul".split()
)
_NORMS = frozenset("batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm".split())
_ZERO_TO_ZERO = frozenset(
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


# --- data flow -----------------------------------------------------------------------------------


@dataclass(eq=False)
class _Op:
    """One operator of the pass."""

    call: Call
    inputs: list[int]
    """Values of its tensor arguments."""
    outputs: list[int]

    @property
    def name(self) -> str:
        return self.call.name


@dataclass(eq=False)
class _ModuleCall:
    """One call of a module: the operators from `start` to `end`, its tensor arguments and what it returned."""

    path: str
    start: int
    arguments: dict[str, int]
    """Values of its floating-point arguments, by position or keyword."""
    end: int = 0
    container: str | None = None
    """tensor, tuple or list; None for any other result."""
    leaves: tuple[int | None, ...] = ()
    """Values that it returned; None for None."""


@dataclass(eq=False)
class DataFlow(Tracer):
    """Records which operator uses the results of which, without labels."""

    network: ModelCopy | None = None
    ops: list[_Op] = field(default_factory=list)
    calls: list[_ModuleCall] = field(default_factory=list)
    producer: list[int | None] = field(default_factory=list)
    """By value: the operator that computed it; None for parameters, inputs and constants."""
    tensors: list[Tensor] = field(default_factory=list)
    """By value: the tensor. All are kept, since ids of deleted ones would be reused."""
    parameter: dict[int, str] = field(default_factory=dict)
    """Names of the values that are parameters or buffers."""
    op_users: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    value_users: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))
    parameter_users: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    written: set[int] = field(default_factory=set)
    """Values that an operator changed in place afterwards."""
    _values: dict[int, int] = field(default_factory=dict)
    _shared: dict[int, int] = field(default_factory=dict)
    """Value -> value whose memory it shares."""
    _writers: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operator and record it."""
        name = func._schema.name.removeprefix("aten::")
        if registry.rule_for(func, name) is None:
            with self:
                result = func.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        self.last_path = self.path[-1] if self.path else ""
        call = Call(func, name.rstrip("_"), args, kwargs or {}, None, self.last_path, name.endswith("_"))
        call.result = self._run(call)
        if call.in_place or not call.outs or not all(any(out is t for t in call.tensors) for out in call.outs):
            self._record(call)  # else it returned its argument, as `contiguous` may
        return call.result

    def value(self, tensor: Tensor) -> int:
        """The value that a tensor holds now."""
        if id(tensor) not in self._values:
            self._new(tensor, None)
            if (name := getattr(tensor, "_ecc_own", None)) is not None:
                self.parameter[self._values[id(tensor)]] = name
        return self._values[id(tensor)]

    def _new(self, tensor: Tensor, producer: int | None) -> int:
        self._values[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        self.producer.append(producer)
        return len(self.tensors) - 1

    def _memory(self, value: int) -> int:
        while value in self._shared:
            value = self._shared[value]
        return value

    def _record(self, call: Call) -> None:
        number = len(self.ops)
        inputs = [self.value(tensor) for tensor in call.tensors]
        for value in inputs:
            self.value_users[value].add(number)
            producer = self.producer[value]
            if producer is not None:
                self.op_users[producer].add(number)
            if value in self.parameter:
                self.parameter_users[self.parameter[value]].add(number)
            for writer in self._writers.get(self._memory(value), ()):
                self.op_users[writer].add(number)
        schema = call.func._schema
        changed = [
            call.args[position]
            for position, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write and position < len(call.args)
        ]
        outputs = []
        for tensor in (t for one in changed for t in (one if isinstance(one, (list, tuple)) else [one])):
            old = self.value(tensor)
            self.written.add(old)
            outputs.append(self._new(tensor, number))
            self._shared[outputs[-1]] = self._memory(old)
            self._writers[self._memory(old)].append(number)
        is_view = any(one.alias_info is not None for one in schema.returns) and not changed
        for tensor in call.outs:
            if not any(tensor is one for one in (*call.tensors, *changed)):
                outputs.append(self._new(tensor, number))
                if is_view and inputs:
                    self._shared[outputs[-1]] = inputs[0]
        self.ops.append(_Op(call, inputs, outputs))
        if not call.outs:
            self._use_outside(inputs)

    def _use_outside(self, values: Collection[int]) -> None:
        for value in values:
            self.value_users[value].add(_OUTSIDE)
            producer = self.producer[value]
            if producer is not None:
                self.op_users[producer].add(_OUTSIDE)

    @contextmanager
    def track_modules(self, names: Mapping[int, str]) -> Iterator[None]:
        """Record the calls of all modules."""
        assert self.network is not None, "set before the pass"
        stack: list[_ModuleCall] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {**{str(n): one for n, one in enumerate(args)}, **kwargs}
            floats = {key: t for key, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}
            arguments = {key: self.value(tensor) for key, tensor in floats.items()}
            call = _ModuleCall(names.get(id(module), ""), len(self.ops), arguments)
            stack.append(call)
            self.calls.append(call)
            self.path.append(call.path)

        def leave(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:  # noqa: ARG001 - torch's signature
            call = stack.pop()
            self.path.pop()
            call.end = len(self.ops)
            if isinstance(result, Tensor):
                call.container = "tensor"
            elif type(result) in (tuple, list):
                call.container = type(result).__name__
            many = result if call.container in ("tuple", "list") else [result]
            if all(one is None or isinstance(one, Tensor) for one in many):
                call.leaves = tuple(None if one is None else self.value(one) for one in many)
            else:
                call.container = None
            if not stack:
                self._use_outside([self.value(tensor) for tensor in outputs_in(result)])

        with ExitStack() as hooks:
            for module in self.network.model.modules():
                for handle in (
                    module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True),
                    module.register_forward_hook(leave, with_kwargs=True),
                ):
                    hooks.callback(handle.remove)
            yield


def record_flow(model: nn.Module, example_input: Inputs) -> DataFlow:
    """The data flow of one forward pass in eval mode, on meta tensors unless the code reads values."""
    try:
        return _record_flow(model, example_input, on_meta=True)
    except Exception:  # noqa: BLE001 - whatever a network's code raises
        return _record_flow(model, example_input, on_meta=False)


def _record_flow(model: nn.Module, example_input: Inputs, *, on_meta: bool) -> DataFlow:
    network = ModelCopy.of(model, on_meta=on_meta)
    flow = DataFlow(ChannelLabels(), on_meta=on_meta, network=network)
    one_pass(network, example_input, flow, training=False)
    return flow


# --- branches ------------------------------------------------------------------------------------


class _NotRemovable(Exception):
    """Why a branch cannot be removed."""


@dataclass(eq=False)
class _Candidate:
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


def find_branches(
    model: nn.Module,
    example_input: Inputs,
    graph: ChannelGraph,
    *,
    freeze: Sequence[str] = (),
    with_shapes: Collection[str] = (),
) -> ChannelGraph:
    """The graph with the residual branches that can be removed, not verified yet.

    Args:
        model: The traced network.
        example_input: Its example input.
        graph: Its channel graph.
        freeze: Patterns of modules that are not pruned.
        with_shapes: Names of branches whose modules return zeros of the right shape, for code that reads it.
    """
    try:
        flow = record_flow(model, example_input)
    except Exception as error:  # noqa: BLE001 - whatever a network's code raises
        note = f"branches that can be removed were not searched for: {first_line(error)}"
        return replace(graph, notes=(*graph.notes, note))
    return _BranchSearch(model, graph, flow, freeze, with_shapes).run()


class _BranchSearch:
    """The search for branches in a data flow."""

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        flow: DataFlow,
        freeze: Sequence[str],
        with_shapes: Collection[str],
    ) -> None:
        self._with_shapes = set(with_shapes)
        self._model = model
        self._graph = graph
        self._flow = flow
        self._freeze = freeze
        self._shapes = {tensor.name: tensor for tensor in graph.tensors}
        self._calls: dict[str, list[_ModuleCall]] = defaultdict(list)
        for call in flow.calls:
            self._calls[call.path].append(call)
        self._unused = {
            number
            for number, op in enumerate(flow.ops)
            if not flow.op_users.get(number) and op.call.outs and not op.call.in_place
        }
        self._twice = _shared_names(model)
        self._kept: dict[str, str] = {}

    def run(self) -> ChannelGraph:
        """The graph with branches, replacements, and the reasons of branches that cannot be removed."""
        kept = self._kept
        found: list[_Candidate] = []
        inside: set[str] = set()
        candidates = self._one_of_two(list(self._candidates()))
        self._name_all(candidates)
        for one in sorted(candidates, key=lambda one: len(one.dead)):
            if any(other.root in one.dead for other in found):
                continue  # it contains branches that can be removed one by one
            try:
                self._check(one)
                one.replacements = self._replacements(one)
            except _NotRemovable as reason:
                kept[one.name] = str(reason)
                continue
            if inside.isdisjoint(one.groups):
                found.append(one)
                inside.update(one.groups)
        found.sort(key=lambda one: one.root)
        blocks = self._blocks(found)
        self._keep_image_sizes(found, blocks)
        branches = tuple(Branch(one.name, one.groups, one.exits) for one in found)
        replacements = [
            replace(part, branches=(number,)) for number, one in enumerate(found) for part in one.replacements
        ]
        names = {branch.name for branch in branches}
        reasons = tuple((name, why) for name, why in kept.items() if name not in names)
        return replace(self._graph, branches=branches, replacements=(*replacements, *blocks), kept_branches=reasons)

    def _keep_image_sizes(self, found: Sequence[_Candidate], blocks: Sequence[Replacement]) -> None:
        """Use zeros of the right shape in convolutional blocks that stay, such as those that reduce the image.

        There are few of them, and their shortcuts often read the shape of the branch.
        """
        whole = {block.branches for block in blocks}
        for number, one in enumerate(found):
            modules = [m for path in one.modules for m in self._model.get_submodule(path).modules()]
            if (number,) in whole or not any(isinstance(m, nn.modules.conv._ConvNd) for m in modules):
                continue
            self._with_shapes.add(one.name)
            with suppress(_NotRemovable):
                one.replacements = self._replacements(one)

    # --- candidates ------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[_Candidate]:
        flow = self._flow
        for number, op in enumerate(flow.ops):
            if op.name != "add" or len(op.inputs) != 2 or op.inputs[0] == op.inputs[1]:
                continue
            shapes = {flow.tensors[value].shape for value in (*op.inputs, *op.outputs)}
            if len(shapes) != 1 or any(value in flow.parameter for value in op.inputs):
                continue
            for side in (0, 1):
                output, trunk = op.inputs[side], op.inputs[1 - side]
                producer = flow.producer[output]
                if producer is None or flow.value_users[output] != {number} or flow.op_users[producer] != {number}:
                    continue
                exits = self._exits(output, 0)
                if exits is None:
                    continue
                dead = self._dead(producer)
                groups, modules = self._inside(dead)
                if groups:
                    yield _Candidate(number, trunk, output, exits, dead, groups, modules)
                elif (why := self._why_shared(exits, modules)) is not None:
                    self._kept[_common_path(modules)] = why

    def _why_shared(self, exits: Sequence[str], modules: Sequence[str]) -> str | None:
        """Why a branch without groups of its own stays, if channels that it computes are used elsewhere too."""
        prefixes = tuple(f"{path}." for path in modules)
        for group in self._graph.groups if prefixes else ():
            inside = [one for one in group.slices if one.tensor.startswith(prefixes)]
            outside = [one.tensor for one in group.slices if not one.tensor.startswith(prefixes)]
            computes = any(Role.PRODUCER in one.roles and one.tensor not in exits for one in inside)
            if outside and computes and any(one.is_consumer and one.tensor in exits for one in inside):
                return f"its channels belong to the group {group.name}, which {outside[0]} uses too"
        return None

    def _one_of_two(self, candidates: Sequence[_Candidate]) -> list[_Candidate]:
        """Of two paths without a shortcut, only the longer one, unless their sum is added to something else."""
        found = []
        for one in candidates:
            others = [other for other in candidates if other.root == one.root and other is not one]
            is_inner = any(one.root in other.dead for other in candidates)
            if is_inner or all(len(other.dead) < len(one.dead) for other in others):
                found.append(one)
        return found

    def _exits(self, value: int, depth: int) -> tuple[str, ...] | None:
        """The last parameters that make a value zero if they are zero; None if there are none."""
        flow = self._flow
        producer = flow.producer[value]
        if producer is None or depth > _MAX_WALK:
            return None
        op = flow.ops[producer]
        names = [flow.parameter.get(one) for one in op.inputs]
        parameters = tuple(name for name in names if name is not None and self._is_weight(name))
        if op.name in _LAYERS and any(len(self._shapes[name].axes) > 1 for name in parameters):
            return parameters if all(name is None or self._is_weight(name) for name in names) else None
        if op.name in _NORMS and parameters:
            return parameters
        if op.name in _NORMS and op.name in ("batch_norm", "instance_norm"):
            return None  # without weights, it subtracts a running mean
        if op.name == "mul":
            found = [exits for one in op.inputs if (exits := self._exits(one, depth + 1)) is not None]
            return found[0] if found else parameters[:1] or None
        if op.name in ("add", "cat", "stack") and op.inputs:
            parts = [
                (name,) if name in parameters else self._exits(one, depth + 1)
                for one, name in zip(op.inputs, names, strict=True)
            ]
            return None if None in parts else tuple(dict.fromkeys(name for part in parts for name in part or ()))
        if (op.name in _ZERO_TO_ZERO or op.name in _NORMS) and op.inputs and not op.call.kwargs.get("rounding_mode"):
            return self._exits(op.inputs[0], depth + 1)
        return None

    def _is_weight(self, name: str) -> bool:
        return name in self._shapes and self._shapes[name].is_parameter

    def _dead(self, last: int) -> frozenset[int]:
        """The operators whose results are used by the operator `last` alone, directly or not."""
        flow = self._flow
        dead = {last}
        queue = [-last]
        seen = {last}
        while queue:
            number = -heapq.heappop(queue)
            users = flow.op_users[number] - self._unused
            if number != last and not (users and users <= dead):
                continue
            dead.add(number)
            for value in flow.ops[number].inputs:
                producer = flow.producer[value]
                if producer is not None and producer not in seen:
                    seen.add(producer)
                    heapq.heappush(queue, -producer)
        return frozenset(dead)

    def _inside(self, dead: frozenset[int]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Names of the groups inside a branch, and paths of its largest modules."""
        flow = self._flow
        marks = np.zeros(len(flow.ops) + 1, dtype=np.int64)
        marks[1:][list(dead | self._unused)] = 1
        count = marks.cumsum()
        alive = np.zeros(len(flow.ops) + 1, dtype=np.int64)
        alive[1:][list(dead)] = 1
        really = alive.cumsum()
        modules: list[str] = []
        for call in flow.calls:
            if not call.path or any(call.path.startswith(f"{path}.") for path in modules[-1:]):
                continue
            if call.path in modules:
                continue
            ranges = [(one.start, one.end) for one in self._calls[call.path]]
            if all(count[end] - count[start] == end - start for start, end in ranges) and any(
                really[end] > really[start] for start, end in ranges
            ):
                modules.append(call.path)
        prefixes = tuple(f"{path}." for path in modules)
        if not prefixes:
            return (), ()
        groups = tuple(
            group.name
            for group in self._graph.groups
            if any(one.is_consumer for one in group.slices)
            and all(
                one.tensor.startswith(prefixes) and flow.parameter_users.get(one.tensor, set()) <= dead
                for one in group.slices
            )
        )
        return groups, tuple(modules)

    # --- checks ----------------------------------------------------------------------------------

    def _check(self, one: _Candidate) -> None:
        flow = self._flow
        prefixes = tuple(f"{path}." for path in one.modules)
        for group in one.groups:
            if self._graph[group].frozen == "frozen by the argument `freeze`":
                raise _NotRemovable(f"it contains {group}, which is frozen by the argument `freeze`")
        for path in one.modules:
            parts = path.split(".")
            around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
            if any(fnmatch(name, pattern) for name in around for pattern in self._freeze):
                raise _NotRemovable(f"{path} is frozen by the argument `freeze`")
        for name in self._shapes:
            if name.startswith(prefixes) and not flow.parameter_users.get(name, set()) <= one.dead | self._unused:
                raise _NotRemovable(f"{name} is used outside the branch too")
            others = self._twice.get(name, ())
            if name.startswith(prefixes) and not all(other.startswith(prefixes) for other in others):
                raise _NotRemovable(f"{name} is shared with {others[0]}, which is outside the branch")
        for name in one.exits:
            if not flow.parameter_users[name] <= one.dead:
                raise _NotRemovable(f"{name}, which would be zero, is used outside the branch too")

    # --- replacements ----------------------------------------------------------------------------

    def _replacements(self, one: _Candidate) -> tuple[Replacement, ...]:
        """What takes the place of the modules of a branch.

        Raises:
            _NotRemovable: If the code between the modules does not allow it.
        """
        shapes = ("scalar", "ones", "full")
        for shape in shapes[2:] if one.name in self._with_shapes else shapes[self._trains_other_code(one) :]:
            found = self._replaced_as(one, shape)
            if found is not None:
                prefixes = tuple(f"{part.path}." for part in found)
                for group in one.groups:
                    outside = [s.tensor for s in self._graph[group].slices if not s.tensor.startswith(prefixes)]
                    if outside:
                        raise _NotRemovable(f"{outside[0]} is used by code that stays")
                return found
        raise _NotRemovable("the code between its modules needs sizes that are not known without them")

    def _trains_other_code(self, one: _Candidate) -> bool:
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

    def _replaced_as(self, one: _Candidate, shape: str) -> tuple[Replacement, ...] | None:
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
                if f"{path}.{name}" in self._calls
            ]
            if not children and next(self._model.get_submodule(path).parameters(), None) is not None:
                return None
            pending = children + pending
        if not found or not self._runs_on_zeros(one, found, shape):
            return None
        return self._without_needless_shapes(one, found) if shape == "full" else tuple(found)

    def _without_needless_shapes(self, one: _Candidate, found: Sequence[Replacement]) -> tuple[Replacement, ...]:
        """Return the input instead of zeros that only other replaced modules see, and one zero before the sum."""
        trains_other_code = self._trains_other_code(one)
        calls = [call for part in found for call in self._calls[part.path]]
        replaced = {number for call in calls for number in range(call.start, call.end)}
        parts = []
        for part in found:
            call = self._calls[part.path][0]
            values = []
            for value, leaf in zip(part.values, call.leaves, strict=True):
                if value.kind == "zero" and leaf is not None:
                    source = self._flow.tensors[call.arguments[value.source]]
                    is_unseen = self._flow.value_users[leaf] <= replaced
                    if is_unseen and source.shape == self._flow.tensors[leaf].shape:
                        value = OutputValue("input", value.source)
                    elif one.name not in self._with_shapes and self._only_reaches_sum(one, leaf, replaced):
                        ones = tuple(SizeRule(size=AffineSize(1)) for _ in self._flow.tensors[leaf].shape)
                        value = OutputValue("zero", value.source, ones if trains_other_code else None)
                values.append(value)
            parts.append(replace(part, values=tuple(values)))
        return tuple(parts)

    def _only_reaches_sum(self, one: _Candidate, value: int, replaced: Collection[int]) -> bool:
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
        calls = self._calls[path]
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

    def _zero(self, path: str, call: _ModuleCall, leaf: int, shape: str) -> OutputValue | None:
        """Zeros in place of one value that a module returns; None if their shape is not known."""
        tensor = self._flow.tensors[leaf]
        source, given = next(iter(call.arguments.items()))
        if shape == "scalar":
            return OutputValue("zero", source)
        if shape == "ones":
            return OutputValue("zero", source, tuple(SizeRule(size=AffineSize(1)) for _ in tensor.shape))
        if len(self._calls[path]) > 1:
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

    def _last_layer(self, call: _ModuleCall, value: int) -> _Op | None:
        """The last operator of a module that has its own number of output channels."""
        for _ in range(_MAX_WALK):
            producer = self._flow.producer[value]
            if producer is None or not call.start <= producer < call.end:
                return None
            op = self._flow.ops[producer]
            if (op.name in _LAYERS or op.name in _NORMS) and any(v in self._flow.parameter for v in op.inputs):
                return op
            if op.name not in _SCALAR_OPS or not op.inputs:
                return None
            value = op.inputs[0]
        return None

    def _runs_on_zeros(self, one: _Candidate, found: Sequence[Replacement], shape: str) -> bool:
        """Whether the code between the replaced modules accepts what they return."""
        flow = self._flow
        calls = [call for part in found for call in self._calls[part.path]]
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

    def _blocks(self, found: Sequence[_Candidate]) -> list[Replacement]:
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

    def _block(self, call: _ModuleCall, branches: Sequence[_Candidate]) -> Replacement | None:
        flow = self._flow
        if call.container is None or len(self._calls[call.path]) != 1:
            return None
        prefix = f"{call.path}."
        ops = range(call.start, call.end)
        for name in self._shapes:
            if name.startswith(prefix) and (
                not flow.parameter_users.get(name, set()) <= set(ops)
                or not all(other.startswith(prefix) for other in self._twice.get(name, ()))
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
        for _ in range(_MAX_WALK):
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
        is_kept = op.name in _ZERO_TO_ZERO and len(op.inputs) == 1
        return is_kept and self._is_zero(op.inputs[0], removed, depth + 1)

    def _is_fixed_by(self, op: _Op, value: int) -> bool:
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

    # --- names -----------------------------------------------------------------------------------

    def _largest(self, modules: Sequence[str]) -> str:
        sizes = {path: sum(p.numel() for p in self._model.get_submodule(path).parameters()) for path in modules}
        return max(modules, key=lambda path: sizes[path])

    def _name_all(self, found: Sequence[_Candidate]) -> None:
        """Name branches by the module that contains them, unless it contains others too."""
        innermost = [one for one in found if not any(other.root in one.dead for other in found)]
        paths = [path for one in innermost for path in one.modules]
        for one in found:
            name = _common_path(one.modules)
            others = [path for path in paths if path not in one.modules]
            if not name or any(path == name or path.startswith(f"{name}.") for path in others):
                name = self._largest(one.modules)
            one.name = name
        taken: dict[str, int] = {}
        for one in found:
            taken[one.name] = taken.get(one.name, 0) + 1
            if taken[one.name] > 1:
                one.name = f"{one.name}#{taken[one.name]}"


def _window(op: _Op, is_leaf: bool) -> list[tuple[int, int, int]] | None:
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


def _common_path(paths: Sequence[str]) -> str:
    """The module around all of these modules."""
    if len(paths) == 1:
        return paths[0]
    split = [path.split(".") for path in paths]
    common = []
    for parts in zip(*split, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


def _shared_names(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """For each tensor with several names, by its first name, the other names."""
    names: dict[int, list[str]] = defaultdict(list)
    for path, module in model.named_modules(remove_duplicate=False):
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    names[id(tensor)].append(f"{path}.{name}".removeprefix("."))
    return {first: tuple(others) for first, *others in names.values() if others}


def keep_branches(graph: ChannelGraph, reasons: Mapping[str, str]) -> ChannelGraph:
    """The graph without these branches, which cannot be removed for the given reasons."""
    if not reasons:
        return graph
    numbers = [number for number, branch in enumerate(graph.branches) if branch.name not in reasons]
    position = {number: new for new, number in enumerate(numbers)}
    replacements = tuple(
        replace(one, branches=tuple(position[number] for number in one.branches))
        for one in graph.replacements
        if all(number in position for number in one.branches)
    )
    return replace(
        graph,
        branches=tuple(graph.branches[number] for number in numbers),
        replacements=replacements,
        kept_branches=(*graph.kept_branches, *reasons.items()),
    )


def parameters_removed(graph: ChannelGraph, names: Collection[str]) -> int:
    """Number of parameters of the dense network that are removed with these branches."""
    widths = {group: 0 for name in names for group in graph.branch(name).groups}
    return round(float(graph.parameters() - graph.parameters(widths)))


__all__ = ["DataFlow", "find_branches", "keep_branches", "parameters_removed", "record_flow"]
