"""Which operator of a network uses the results of which, recorded in one more forward pass."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor, nn

from ecc.graph.calls import Call
from ecc.graph.forward_pass import Inputs, ModelCopy, one_pass
from ecc.graph.labels import ChannelLabels
from ecc.graph.ops import registry
from ecc.graph.tracer import Tracer
from ecc.torch_utils import outputs_in

_OUTSIDE = -1  # stands for every use that is not an operator: an output of the network, a Python number


@dataclass(eq=False)
class Op:
    """One operator of the pass."""

    call: Call
    inputs: list[int]
    """Values of its tensor arguments."""
    outputs: list[int]

    @property
    def name(self) -> str:
        """Name of the operator."""
        return self.call.name


@dataclass(eq=False)
class ModuleCall:
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
    ops: list[Op] = field(default_factory=list)
    calls: list[ModuleCall] = field(default_factory=list)
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

    @cached_property
    def calls_by_path(self) -> dict[str, list[ModuleCall]]:
        """The calls of each module, by its path, once the pass has ended."""
        found: dict[str, list[ModuleCall]] = defaultdict(list)
        for call in self.calls:
            found[call.path].append(call)
        return found

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
        self.ops.append(Op(call, inputs, outputs))
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
        stack: list[ModuleCall] = []

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given = {**{str(n): one for n, one in enumerate(args)}, **kwargs}
            floats = {key: t for key, t in given.items() if isinstance(t, Tensor) and t.is_floating_point()}
            arguments = {key: self.value(tensor) for key, tensor in floats.items()}
            call = ModuleCall(names.get(id(module), ""), len(self.ops), arguments)
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
