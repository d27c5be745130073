"""One forward pass with channel labels on every tensor.

`Tracer` is a `TorchDispatchMode`: the network's Python code runs, on meta tensors if possible, and each operator that
reaches torch is looked up in the registry of rules (`ops/registry.py`). torch decomposes composite operators without a
rule. An operator that still has no rule freezes all channels that enter it.

A pruned network is traced with `dense` set to the trace of the dense network, and compared with it (`consistency.py`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ecc.graph.calls import Call, OpRecord, amount, quick_result
from ecc.graph.consistency import check_numbers, check_order, check_sizes, confused_channels, run_selection
from ecc.graph.labels import (
    ChannelLabels,
    Deferred,
    Labels,
    Misaligned,
    PrunedLabels,
    Role,
    WidthPower,
    compact,
    frozen_labels,
    varying_axes,
)
from ecc.graph.ops import registry
from ecc.graph.ops.head_width import COPIES, follow_rows, followed_channels
from ecc.graph.ops.sums import follow_parameter, follow_power, parameter_of
from ecc.graph.size_attributes import SizeAttribute, follow_created, follow_sizes, note_axes

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)
_EMPTY = "runs on an empty tensor. Trace with an input for which it is not empty"


class Ended(BaseException):
    """The rest of a pruned network is not compared. Its code does not catch this."""


@dataclass(eq=False)
class Tracer(TorchDispatchMode):
    """Runs a network once and records what its operators do to channels."""

    channel_labels: ChannelLabels
    recording: bool = False
    on_meta: bool = True
    choices: dict[str, int] = field(default_factory=dict)
    """For each line of code with several interpretations (see `choose`), the one to follow."""
    stops: dict[str, str] = field(default_factory=dict)
    """Lines of code with hard-coded sizes and the reason; the channels that enter them are frozen."""
    dense: Tracer | None = None
    """For a pruned network: the trace of the dense network in the same mode."""
    records: list[OpRecord] = field(default_factory=list)
    guesses: list[tuple[str, int, Tensor]] = field(default_factory=list)
    """(line, number of interpretations, labels) of every choice made in this pass."""
    selections: list[tuple[str, Tensor, list[int]]] = field(default_factory=list)
    """(operator, labels, sizes of the parts) of every selection of channels (slice, split, index), in order."""
    selected_from: list[Tensor] = field(default_factory=list)
    """Labels of the tensors that channels were selected from."""
    numbers: list[tuple[OpOverload, list[float], WidthPower | None, WidthPower | None]] = field(default_factory=list)
    """Python numbers among the arguments of elementwise operators, in order, the factor of the operand, and the power
    of the width that the numbers follow."""
    unusual: list[tuple[Tensor, str]] = field(default_factory=list)
    """Labels that were frozen on an axis where channels are unusual, such as a spatial one, and why."""
    wants_heads: list[Tensor] = field(default_factory=list)
    """Labels along an axis that attention sums over: an earlier view should split them into heads."""
    no_heads: Mapping[str, str] = field(default_factory=dict)
    """For lines that split channels: why they cannot be split into heads."""
    headless: list[tuple[Tensor, str]] = field(default_factory=list)
    """Labels that such a line splits, and why."""
    splits: set[str] = field(default_factory=set)
    """Those lines of `guesses` that split a channel axis."""
    first_equal: Mapping[str, str] = field(default_factory=dict)
    """For each module, the first equal one. Equal modules share `choices` and `stops`."""
    constant: Set[tuple[str, str]] = frozenset()
    """Attributes, by the first equal module and name, that do not follow the number of channels."""
    viewed: dict[tuple[str, int], Tensor] = field(default_factory=dict)
    """Channels of the views in a module, by module path and number of channels."""
    sizes: Sequence[tuple[int | None, SizeAttribute]] = ()
    """Attributes of modules among the sizes of the current operator, with the axis if it is known."""
    sequence: list[tuple[Any, ...]] = field(default_factory=list)
    """Operators in order, with their result shapes and the parameters among their arguments."""
    attention: str = "heads"
    """What is a unit of attention: "heads", or "width" for the columns of all heads."""
    width_numbers: Mapping[str, float] = field(default_factory=dict)
    """For lines with a number that follows the number of channels d: the power p of `d ** -p`."""
    lines: dict[int, tuple[str, type | None]] = field(default_factory=dict)
    """Line of code and class of the module of the reshapes in `sequence`, by position, in a dense network."""
    results: list[list[Any]] = field(default_factory=list)
    """Labels of the results of the operators in `sequence`."""
    selected: list[tuple[OpOverload, list[torch.Size], Any]] = field(default_factory=list)
    """Masks and positions on which sizes of results depend, in order: operator, shapes of what they were computed from,
    and their values."""
    reads: list[int] = field(default_factory=list)
    """Numbers of operators that ran before Python code read a value that was computed from the inputs."""
    end: int | None = None
    """Number of operators after which networks are not compared, since values decide which code runs. The channels that
    are used after them are frozen."""
    alive: Tensor | None = None
    """For a pruned network without labels: by label of the dense network, whether it is kept."""
    reached: set[str] = field(default_factory=set)
    """Names of the parameters and buffers that are an argument of some operator."""
    constants: Counter[str] = field(default_factory=Counter)
    """Number of constants beside channels so far, by operator and module."""
    path: list[str] = field(default_factory=list)
    """Paths of the modules that are running, innermost last."""
    last_path: str = ""
    """The module that ran the latest operator."""
    modules: list[nn.Module] = field(default_factory=list)
    """The modules that are running, innermost last."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Called by torch. True would import dynamo, which takes seconds."""
        return False

    # --- labels of tensors -----------------------------------------------------------------------

    def name(self, tensor: Tensor, name: str) -> None:
        """Register a parameter or buffer under its name."""
        axes = [a for a, size in enumerate(tensor.shape) if size > 1]
        state: Any = None
        if len(axes) > 1 and tensor.is_floating_point():
            state = Deferred(name, tensor.shape, tuple(range(tensor.dim())))
        elif len(axes) == 1 and tensor.is_floating_point():
            state = (name, axes[0])
        elif axes:
            state = frozen_labels(tensor.shape)
        tensor._ecc_name, tensor._ecc_own, tensor._ecc_state = name, name, state  # type: ignore[attr-defined]

    def labels(self, tensor: Tensor | None, role: Role = Role.PER_CHANNEL, *, defer: bool = False) -> Tensor | None:
        """The labels of a tensor, None if it belongs to no channel. Unknown tensors are frozen."""
        if tensor is None:
            return None
        state = getattr(tensor, "_ecc_state", Ellipsis)
        if state is Ellipsis:
            return frozen_labels(tensor.shape) if tensor.numel() > 1 else None
        if isinstance(state, Deferred):
            return None if defer else frozen_labels(tensor.shape)
        if isinstance(state, tuple):
            name, axis = state
            own = self.channel_labels.axis(name, axis, tensor.shape[axis], role)
            return own.view([-1 if a == axis else 1 for a in range(tensor.dim())])
        if state is None or state.shape == tensor.shape:
            return cast(Labels, state)
        self.channel_labels.freeze(
            state, "it is reshaped in place, as by `transpose_` or `squeeze_`. Use the version without underscore"
        )
        return frozen_labels(tensor.shape)

    def movable(self, tensor: Tensor) -> Tensor | None:
        """What follows data movement: the labels of a tensor, or the element numbers of a deferred parameter."""
        state = getattr(tensor, "_ecc_state", None)
        if isinstance(state, Deferred):
            return state.elements()
        return self.labels(tensor)

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter whose channel axis is not known yet."""
        return isinstance(getattr(tensor, "_ecc_state", None), Deferred)

    def is_computed(self, tensor: Tensor) -> bool:
        """Whether a tensor was computed from the inputs of the network, so that its values differ with another one."""
        return tensor.device.type == "meta" or hasattr(tensor, "_ecc_computed")

    def is_zero(self, tensor: Tensor) -> bool:
        """Whether the channels of masked units are zero in a tensor, if masking sets all of their slices to zero."""
        known: bool | None = getattr(tensor, "_ecc_zero", None)
        if known is None or isinstance(getattr(tensor, "_ecc_state", None), tuple):
            return isinstance(getattr(tensor, "_ecc_state", None), tuple)  # a parameter with one axis
        return known

    def is_scores(self, tensor: Tensor) -> bool:
        """Whether a tensor has scores of heads, or softmax of them, and the width inside these heads is pruned."""
        return getattr(tensor, "_ecc_is_scores", False)

    @property
    def module(self) -> nn.Module | None:
        """The module that is running."""
        return self.modules[-1] if self.modules else None

    def is_view(self, tensor: Tensor) -> bool:
        """Whether a tensor is a view of another one."""
        return hasattr(tensor, "_ecc_base")

    def weight_name(self, tensor: Tensor) -> str | None:
        """The name of a parameter that is passed unchanged or permuted, None for a computed tensor."""
        state = getattr(tensor, "_ecc_state", None)
        if isinstance(state, Deferred) and state.index is None:
            return state.name
        if state is None or isinstance(state, tuple):
            return getattr(tensor, "_ecc_name", None)
        return None

    def axis_order(self, weight: Tensor) -> tuple[int, ...]:
        """The parameter's axes in their order in `weight`."""
        state = getattr(weight, "_ecc_state", None)
        return state.order if isinstance(state, Deferred) else tuple(range(weight.dim()))

    def weight_axis(self, weight: Tensor, axis: int, role: Role) -> Tensor | None:
        """Labels along an axis of a parameter or of a part of one (`Deferred.places`); None for other tensors."""
        state = getattr(weight, "_ecc_state", None)
        if not isinstance(state, Deferred):
            name = self.weight_name(weight)
            return None if name is None else self.channel_labels.axis(name, axis, weight.shape[axis], role)
        if state.index is None:
            return self.channel_labels.axis(state.name, state.order[axis], weight.shape[axis], role)
        places = state.places()
        if places is None or places[axis][0] < 0:
            return None
        own, index = places[axis]
        return self.channel_labels.axis(state.name, own, state.shape[own], role)[index]

    def freeze(self, labels: Tensor, why: str, *, unusual: bool = False) -> Tensor:
        """Freeze channels, and return frozen labels.

        `unusual` marks channels on an axis that normally has none. A wrong interpretation of an earlier reshape may
        have put them there.
        """
        self.channel_labels.freeze(labels, why)
        if unusual:
            self.unusual.append((compact(labels).reshape(-1), why))
        return frozen_labels(labels.shape)

    def freeze_pending(self, value: Any) -> None:
        """Freeze the channels that a used result of a reduction depends on."""
        pending = getattr(value, "_ecc_pending", None)
        if pending is not None:
            self.freeze(*pending, unusual=True)
            del value._ecc_pending

    def freeze_all(self, many: Sequence[Tensor | None], why: str) -> None:
        """Freeze the channels of several tensors."""
        for labels in many:
            if labels is not None:
                self.channel_labels.freeze(labels, why)

    def freeze_others(self, call: Call, but: Tensor) -> None:
        """Freeze the channels of every argument but one: indices or grids, whose values are positions."""
        others = [labels for t in call.tensors if t is not but and (labels := self.labels(t)) is not None]
        self.freeze_all(others, f"{call.here} uses its values as positions")

    def constant_labels(self, call: Call, size: int) -> Tensor:
        """Labels of a constant number of positions that an operator places beside channels."""
        place = f"{call.name}@{call.path}"
        self.constants[place] += 1
        why = f"{call.here}{self.at()} adds a hard-coded number of channels. Compute it from `x.shape` of both tensors"
        return self.channel_labels.constant(f"{place}#{self.constants[place]}", size, why)

    def choose(self, call: Call, options: int, *, splits: bool = False) -> int:
        """Which of several interpretations of a line of code to follow: the next one after each failure."""
        line = self.key(call)
        if splits:
            self.splits.add(line)
        labels = self.labels(call.tensors[0])
        if labels is not None:
            self.guesses.append((line, options, compact(labels).reshape(-1)))
        return min(self.choices.get(line, 0), options - 1)

    def note_headless(self, call: Call, labels: Tensor) -> None:
        """Remember why channels that a view splits cannot be heads, for the reason shown if they are frozen."""
        if (reason := self.no_heads.get(self.key(call))) is not None:
            self.headless.append((compact(labels).reshape(-1), reason))

    # --- records ---------------------------------------------------------------------------------

    def record(
        self,
        call: Call,
        kind: str,
        macs: int,
        factors: Sequence[Tensor],
        tensors: Sequence[Tensor | None],
        *,
        traffic: bool = True,
    ) -> None:
        """Record an operator that does work: `macs` times the sizes of `factors` multiply-accumulates.

        Use `traffic=False` for a second record of the same call, so that its activations count once.
        """
        if not self.recording:
            return
        names = [n for t in tensors if t is not None and (n := getattr(t, "_ecc_name", None)) is not None]
        inputs = [t for t in call.tensors if getattr(t, "_ecc_name", None) is None] if traffic else []
        self.records.append(
            OpRecord(
                path=self.path[-1] if self.path else "",
                kind=kind,
                macs=macs,
                factors=list(factors),
                reads=[amount(t, self.labels(t)) for t in inputs],
                writes=[],
                tensors=names,
                item_bytes=call.out.element_size() if call.outs else 0,
            )
        )

    # --- the pass --------------------------------------------------------------------------------

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        rule = registry.rule_for(func, name)
        if rule is None:
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            rule = registry.UNKNOWN
        self.last_path = self.path[-1] if self.path else ""
        for value in (*args, *kwargs.values()):
            for one in value if isinstance(value, (list, tuple)) else (value,):
                self.freeze_pending(one)
        call = Call(func, name.rstrip("_"), args, kwargs, None, self.last_path, name.endswith("_"))
        try:
            call.result = self._run(call)
        except Exception as error:
            raise self.stopped(call, error) from error
        if not call.outs:
            self._freeze_read_by_python(call)
            return call.result
        names = [n for t in call.tensors if (n := getattr(t, "_ecc_name", None)) is not None]
        if not call.out.is_floating_point() and call.out.dim() == 0 and call.in_place:
            return call.result  # the batch counter of batch norm
        self.reached.update(names)
        own = [n for t in call.tensors if (n := getattr(t, "_ecc_own", None)) is not None]
        counted = name != "contiguous"  # with one head, a transposed tensor is contiguous already
        if counted:
            self.sequence.append((func, [out.shape for out in call.outs], own))
            if rule is registry.RESHAPE and self.dense is None:
                self.lines[len(self.sequence) - 1] = (self.line(), type(self.module))
            check_order(self, call)
            check_sizes(self, call, is_reshape=rule is registry.RESHAPE)
        started = len(self.records)
        self._label(call, rule)
        if counted:
            self.results.append([getattr(out, "_ecc_state", None) for out in call.outs])
        for record in self.records[started : started + 1]:
            record.writes = [amount(t, self.labels(t)) for t in call.outs]
        return call.result

    def _freeze_after_end(self, call: Call) -> None:
        """Freeze what an operator uses after the end of the comparison.

        Raises:
            Ended: In a pruned network, of which the rest is not compared.
        """
        if self.dense is not None:
            raise Ended
        why = f"{call.here}{self.at()} runs after Python code reads values"
        for parameter in filter(self.is_deferred, call.tensors):
            parameter._ecc_state.freeze(self.channel_labels, why)  # type: ignore[attr-defined]
        self.freeze_all([self.labels(t, defer=True) for t in call.tensors], why)

    def _freeze_read_by_python(self, call: Call) -> None:
        """Freeze a value that becomes a Python number (`.item()`): the code may do anything with it."""
        known = [labels for t in call.tensors if (labels := self.labels(t)) is not None]
        known += [labels for t in call.tensors for labels in getattr(t, "_ecc_summed", ())]
        known += [power.labels for t in call.tensors if (power := getattr(t, "_ecc_power", None)) is not None]
        self.freeze_all(known, f"Python code reads its value with {call.here}")
        if not self.on_meta and any(map(self.is_computed, call.tensors)):
            self.reads.append(len(self.sequence))

    def _run(self, call: Call) -> Any:
        args, kwargs = call.args, call.kwargs
        if self.end is not None and len(self.sequence) >= self.end:
            self._freeze_after_end(call)
        if self.on_meta and (quick := quick_result(call)) is not None:
            return quick
        if self.on_meta and registry.mixes_devices(args, kwargs):
            if call.in_place:  # into a constant; from here on only its labels matter
                return args[0]

            def to_meta(tensor: Tensor) -> Tensor:
                return tensor if tensor.device.type == "meta" else tensor.to("meta")

            args, kwargs = tree_map_only(Tensor, to_meta, (args, dict(kwargs)))
        if not self.on_meta and registry.selects_by_value(call.func):
            return run_selection(self, call)
        return call.func(*args, **kwargs)

    def _label(self, call: Call, rule: registry.Rule) -> None:
        """Label the results of a call."""
        self._stop(call, rule)
        source = call.tensors[0] if call.tensors else None
        state = getattr(source, "_ecc_state", None)
        if rule not in registry.USES_WEIGHTS:
            for parameter in filter(self.is_deferred, call.tensors):
                whole = cast(Deferred, parameter._ecc_state)  # type: ignore[attr-defined]
                whole.freeze(self.channel_labels, f"{call.here} uses all values of {whole.name}")  # its mean, its norm
        found = self._follow(call, rule)
        many = found if isinstance(found, list) else [found] * len(call.outs)
        shifted = self._follow_values(call, rule)
        computed = any(map(self.is_computed, call.tensors))
        for out, label in zip(call.outs, many, strict=True):
            self._set_state(call, rule, out, label, state)
            out._ecc_zero, out._ecc_power, out._ecc_shifted = call.zero, call.power, shifted  # type: ignore[attr-defined]
            if computed:
                out._ecc_computed = True  # type: ignore[attr-defined]
            if call.pending is not None:
                out._ecc_pending = call.pending  # type: ignore[attr-defined]
            out._ecc_summed = call.summed if out.numel() == 1 else ()  # type: ignore[attr-defined]
            if call.in_place:
                self._written(out)
            elif rule in registry.MOVING:
                out._ecc_base = source  # type: ignore[attr-defined]
        if self.attention == "width":
            moves = rule in registry.MOVING or call.name in COPIES
            follow_rows(self, call, moves=moves, keeps_scores=moves or rule in registry.KEEPS_SCORES)
        if rule is registry.RESHAPE:
            note_axes(self, call.path, many[0])
        if self.sizes and rule in registry.MOVING and not isinstance(state, Deferred):
            follow_sizes(self, state, many)
        elif self.sizes and rule is registry.CONSTANT:
            follow_created(self, call)

    def _follow_values(self, call: Call, rule: registry.Rule) -> tuple[str, float] | None:
        """Follow zeros, powers of a width, and parameters (see `ops.sums`). Returns the parameter of the result."""
        moves = registry.keeps_values(rule, call.name)
        if moves:
            call.zero = self.is_zero(call.tensors[0])
        elif call.name in ("zeros", "new_zeros", "zeros_like", "zero"):
            call.zero = True
        if call.power is None and not call.multiplied:
            follow_power(self, call, moves=moves, consumes=rule in registry.LAYERS)
        if call.out.numel() == 1:
            call.summed += tuple(labels for t in call.tensors for labels in getattr(t, "_ecc_summed", ()))
        shifted = follow_parameter(call, moves=moves)
        if shifted is None:
            names = {parameter_of(tensor)[0] for tensor in call.tensors}
            self.channel_labels.used.update(name for name in names - call.absorbed if name is not None)
        return shifted

    def _set_state(self, call: Call, rule: registry.Rule, out: Tensor, label: Labels, state: Any) -> None:
        """Attach labels to a result, or follow a parameter whose channel axis is not known yet."""
        if isinstance(state, Deferred) and rule in registry.FOLLOWING and label is not None:
            state.move(call, out, label)
        elif isinstance(state, Deferred) and rule is registry.POINTWISE and out.shape == call.tensors[0].shape:
            out._ecc_state = label if label is not None else state.scaled()  # type: ignore[attr-defined]
        elif rule is registry.POINTWISE and (moved := self._broadcast_parameter(call, label)) is not None:
            out._ecc_state = moved  # type: ignore[attr-defined]
        elif not hasattr(out, "_ecc_name"):
            out._ecc_state = label  # type: ignore[attr-defined]

    def _broadcast_parameter(self, call: Call, label: Labels) -> Deferred | None:
        """A parameter whose axis is still unknown after arithmetic with a tensor that is broadcast over it.

        An example is a table of position biases, with a head axis, plus a mask, without one.
        """
        found = [t for t in call.tensors if self.is_deferred(t)]
        others = [t for t in call.tensors if not self.is_deferred(t) and t.numel() > 1]
        if len(found) != 1 or not others or call.in_place or (label is not None and varying_axes(label)):
            return None
        table, size = found[0], call.out.shape
        alone = [a for a in range(1, table.dim() + 1) if table.shape[-a] > 1]
        if not any(all(t.dim() < a or t.shape[-a] == 1 for t in others) for a in alone):
            return None
        state = cast(Deferred, table._ecc_state)  # type: ignore[attr-defined]
        return replace(state, index=state.elements().expand(size), order=())

    def _stop(self, call: Call, rule: registry.Rule) -> None:
        """Freeze the channels that enter a line of code with hard-coded sizes."""
        stop = self.stops.get(self.key(call)) if self.stops and rule in registry.MOVING else None
        for tensor in call.tensors if stop is not None else ():
            if (labels := self.labels(tensor, defer=True)) is not None:
                tensor._ecc_state = self.freeze(labels, str(stop))  # type: ignore[attr-defined]

    def _written(self, tensor: Tensor) -> None:
        """Freeze a constant after part of it was written: its positions differ now."""
        while (base := getattr(tensor, "_ecc_base", None)) is not None:
            if getattr(base, "_ecc_state", None) is None and base.numel() > 1:
                base._ecc_state = frozen_labels(base.shape)
            if self.is_computed(tensor):
                base._ecc_computed = True
            tensor = base

    def _follow(self, call: Call, rule: registry.Rule) -> Labels | list[Labels]:
        """Apply a rule. If the rule fails, freeze its arguments and continue."""
        is_empty = any(t.numel() == 0 for t in (*call.tensors, *call.outs))
        if is_empty and rule in registry.WEIGHTED:
            return self._freeze_empty(call)
        try:
            if rule is registry.POINTWISE:
                follows = followed_channels(self, call) if self.attention == "width" else None
                check_numbers(self, call, follows)
            return rule(self, call)
        except Misaligned as stop:
            if isinstance(self.channel_labels, PrunedLabels):
                raise
            reason = str(stop)
        except Exception as error:
            if is_empty:
                return self._freeze_empty(call)
            if isinstance(self.channel_labels, PrunedLabels):
                raise self.stopped(call, error) from error
            reason = f"{type(error).__name__}: {error}"
        known = [labels for t in call.tensors if (labels := self.labels(t)) is not None]
        self.freeze_all(known, f"the rule for {call.here} failed ({reason}). Please report this")
        return [frozen_labels(out.shape) for out in call.outs]

    def _freeze_empty(self, call: Call) -> list[Labels]:
        """Freeze what enters an operator on tensors without elements, which show no channels."""
        why = f"{call.here}{self.at()} {_EMPTY}"
        for parameter in filter(self.is_deferred, call.tensors):
            parameter._ecc_state.freeze(self.channel_labels, why)  # type: ignore[attr-defined]
        self.freeze_all([self.labels(t) for t in call.tensors], why)
        return [frozen_labels(out.shape) for out in call.outs]

    def stopped(self, call: Call, error: Exception, why: str | None = None) -> Misaligned:
        """The error for an operator that cannot run. In a pruned network it shows a hard-coded size."""
        if isinstance(error, Misaligned):
            return error
        if self.dense is None:
            why = f"{call.here}{self.at()} failed"
        elif why is None and any(t.numel() == 0 for t in call.tensors):
            why = f"{call.here}{self.at()} {_EMPTY}"
        elif why is None and registry.is_moving(call.name):
            why = f"{call.described}{self.at()} has a hard-coded channel count.{call.fix}"
        elif why is None:
            why = f"{call.here}{self.at()} does not run after pruning, because a channel count is hard-coded"
        states = [getattr(t, "_ecc_state", None) for t in call.tensors]
        flat = [compact(state).reshape(-1) for state in states if isinstance(state, Tensor)]
        entering = torch.cat(flat) if flat else torch.empty(0, dtype=torch.long)
        confused = confused_channels(self, call, len(self.sequence))
        return Misaligned(entering, why.rstrip("."), line=self.key(call), confused=confused)

    # --- location --------------------------------------------------------------------------------

    def at(self) -> str:
        """The line of code in parentheses, for messages."""
        line = self.line()
        return f" ({line})" if line else ""

    def key(self, call: Call) -> str:
        """Operator, line of code and module, for `choices` and `stops`."""
        module = self.first_equal.get(self.last_path, self.last_path)
        return f"{call.name}@{self.line()}" + (f" in {module}" if module else "")

    def line(self) -> str:
        """File and line of the network's code that called the current operator; empty for torch's own modules."""
        frame = sys._getframe(1)
        while frame is not None and not _is_user_code(frame.f_code):
            if frame.f_code.co_name == "one_pass":  # beyond it is the code that called the trace
                return ""
            frame = frame.f_back  # type: ignore[assignment]
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""

    @contextmanager
    def track_modules(self, names: Mapping[int, str]) -> Iterator[None]:
        """Keep `path` at the module that is running. `names` has the module paths by module id."""

        def enter(module: nn.Module, _: Any) -> None:
            self.path.append(names.get(id(module), self.path[-1] if self.path else ""))
            self.modules.append(module)

        def leave(*_: Any) -> None:
            if self.path:
                self.path.pop()
                self.modules.pop()

        hooks = [
            nn.modules.module.register_module_forward_pre_hook(enter),
            nn.modules.module.register_module_forward_hook(leave, always_call=True),
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self.path.clear()
            self.modules.clear()


@cache
def _is_user_code(code: CodeType) -> bool:
    is_generated = code.co_filename.startswith("<eval_with_key>")  # the code of a torch.fx.GraphModule
    return is_generated or not code.co_filename.startswith((_TORCH, _HERE, "<"))
