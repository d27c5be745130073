"""One forward pass with channel labels on every tensor.

`Tracer` is a `TorchDispatchMode`: the network's own Python runs, on meta tensors where possible, and each
operator that reaches torch is looked up in a table of rules. Composite operators without a rule are taken apart
by torch; what then remains without a rule freezes whatever it touches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import CodeType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from ecc.graph.call import Call, Record, amount
from ecc.graph.consistency import check_numbers, check_way
from ecc.graph.deferred import Deferred
from ecc.graph.labels import (
    ChannelLabels,
    Labels,
    Misaligned,
    PrunedLabels,
    Role,
    compact,
    frozen_labels,
)
from ecc.graph.ops import registry
from ecc.graph.shapes import quick_result

_TORCH = str(Path(torch.__file__).parent)
_HERE = str(Path(__file__).parent)


@dataclass(eq=False)
class Tracer(TorchDispatchMode):
    """Runs a network once and writes down what its operators do to channels."""

    book: ChannelLabels
    """Where labels are kept."""
    recording: bool = False
    on_meta: bool = True
    choices: dict[str, int] = field(default_factory=dict)
    """How often the guess at a line of the network's code was refuted so far."""
    stops: dict[str, str] = field(default_factory=dict)
    """Lines of code that do not follow a cut, with the reason: what enters them is frozen."""
    dense: Tracer | None = None
    """In a cut network, the same pass over the dense one."""
    records: list[Record] = field(default_factory=list)
    guesses: list[tuple[str, int, Tensor]] = field(default_factory=list)
    """(line, number of guesses, labels) of every guess made in this pass."""
    landmarks: list[tuple[str, Tensor]] = field(default_factory=list)
    """(operator, labels) of everything that took part of the channels, in order."""
    handled: list[Tensor] = field(default_factory=list)
    """Labels of everything that channels were taken from."""
    numbers: list[tuple[OpOverload, tuple[str, ...]]] = field(default_factory=list)
    """Plain numbers among the arguments of elementwise operators, in order."""
    doubts: list[Tensor] = field(default_factory=list)
    """Labels that were frozen on an axis where channels are odd."""
    attributes: dict[str, Tensor] = field(default_factory=dict)
    """Labels of the channels of norm modules that have no tensors, by module path."""
    sequence: list[tuple[Any, ...]] = field(default_factory=list)
    """Operators in the order in which they ran, with their result shapes and the parameters they took as they are."""
    reached: set[str] = field(default_factory=set)
    """Names of the parameters and buffers that some operator took as an argument."""
    path: list[str] = field(default_factory=list)
    """Paths of the modules that are running, innermost last."""
    last_path: str = ""
    """Where the latest operator ran."""

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Asked by torch: to keep dynamo away would import it, which takes seconds."""
        return False

    # --- labels of tensors -----------------------------------------------------------------------

    def name(self, tensor: Tensor, name: str) -> None:
        """Declare a parameter or buffer."""
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
        """The labels of a tensor, None if it belongs to no channel. Unheard-of tensors are frozen."""
        if tensor is None:
            return None
        state = getattr(tensor, "_ecc_state", Ellipsis)
        if state is Ellipsis:
            return frozen_labels(tensor.shape) if tensor.numel() > 1 else None
        if isinstance(state, Deferred):
            return None if defer else frozen_labels(tensor.shape)
        if isinstance(state, tuple):
            name, axis = state
            own = self.book.axis(name, axis, tensor.shape[axis], role)
            return own.view([-1 if a == axis else 1 for a in range(tensor.dim())])
        if state is None or state.shape == tensor.shape:
            return cast(Labels, state)
        self.book.freeze(state, "it was reshaped in place")  # transpose_, squeeze_
        return frozen_labels(tensor.shape)

    def movable(self, tensor: Tensor) -> Tensor | None:
        """What moves with a tensor: its labels, or the element numbers of a deferred parameter."""
        state = getattr(tensor, "_ecc_state", None)
        if isinstance(state, Deferred):
            return state.elements()
        return self.labels(tensor)

    def is_deferred(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter whose channel axis is not known yet."""
        return isinstance(getattr(tensor, "_ecc_state", None), Deferred)

    def is_view(self, tensor: Tensor) -> bool:
        """Whether a tensor shows part of another one."""
        return hasattr(tensor, "_ecc_base")

    def weight_name(self, tensor: Tensor) -> str | None:
        """The name of a parameter passed as it is (or only permuted), None for anything computed."""
        state = getattr(tensor, "_ecc_state", None)
        if isinstance(state, Deferred) and state.index is None:
            return state.name
        if state is None or isinstance(state, tuple):
            return getattr(tensor, "_ecc_name", None)
        return None

    def axis_order(self, weight: Tensor) -> tuple[int, ...]:
        """The parameter's axes in the order in which they stand in `weight`."""
        state = getattr(weight, "_ecc_state", None)
        return state.order if isinstance(state, Deferred) else tuple(range(weight.dim()))

    def freeze(self, labels: Tensor, why: str, *, doubt: bool = False) -> Tensor:
        """Freeze channels; from here on they need not be followed.

        `doubt` says that channels on this axis are odd, so that a guess at a reshape before it may be wrong.
        """
        self.book.freeze(labels, why)
        if doubt:
            self.doubts.append(compact(labels).reshape(-1))
        return frozen_labels(labels.shape)

    def freeze_all(self, many: Sequence[Tensor | None], why: str) -> None:
        """Freeze the channels of several tensors."""
        for labels in many:
            if labels is not None:
                self.book.freeze(labels, why)

    def freeze_others(self, call: Call, but: Tensor) -> None:
        """Freeze the channels of every argument but one: they say where, not what (indices, grids)."""
        others = [labels for t in call.tensors if t is not but and (labels := self.labels(t)) is not None]
        self.freeze_all(others, f"{call.here} takes positions from it")

    def choose(self, call: Call, options: int) -> int:
        """Which of several readings of a line of code to follow; later ones after earlier ones failed."""
        line = f"{call.name}@{self.line()}"
        labels = self.labels(call.tensors[0])
        if labels is not None:
            self.guesses.append((line, options, compact(labels).reshape(-1)))
        return min(self.choices.get(line, 0), options - 1)

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
        """Note an operator that does work: `macs` times the sizes of `factors` multiply-accumulates.

        `traffic=False` for a second note about the same call, whose activations were noted before.
        """
        if not self.recording:
            return
        names = [n for t in tensors if t is not None and (n := getattr(t, "_ecc_name", None)) is not None]
        inputs = [t for t in call.tensors if getattr(t, "_ecc_name", None) is None] if traffic else []
        self.records.append(
            Record(
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
        call = Call(func, name.rstrip("_"), args, kwargs, None, self.location(name), name.endswith("_"))
        try:
            call.result = self._run(call)
        except Exception as error:
            raise self.stopped(call, error) from error
        if not call.outs:
            self._read_by_code(call)
            return call.result
        names = [n for t in call.tensors if (n := getattr(t, "_ecc_name", None)) is not None]
        if not call.out.is_floating_point() and call.out.dim() == 0 and call.in_place:
            return call.result  # batch norm counts its batches
        self.reached.update(names)
        own = [n for t in call.tensors if (n := getattr(t, "_ecc_own", None)) is not None]
        self.sequence.append((func, [out.shape for out in call.outs], own))
        check_way(self, call)
        started = len(self.records)
        self._label(call, rule)
        for record in self.records[started : started + 1]:
            record.writes = [amount(t, self.labels(t)) for t in call.outs]
        return call.result

    def _read_by_code(self, call: Call) -> None:
        """A value that leaves the tensors (`.item()`) may do anything in the network's code."""
        known = [labels for t in call.tensors if (labels := self.labels(t)) is not None]
        self.freeze_all(known, f"the network's code reads its value in {call.here}")

    def _run(self, call: Call) -> Any:
        args, kwargs = call.args, call.kwargs
        if self.on_meta and (quick := quick_result(call)) is not None:
            return quick
        if self.on_meta and registry.mixes_devices(args, kwargs):
            if call.in_place:  # into a constant that the code made itself: only its labels matter from here on
                return args[0]

            def to_meta(tensor: Tensor) -> Tensor:
                return tensor if tensor.device.type == "meta" else tensor.to("meta")

            args, kwargs = tree_map_only(Tensor, to_meta, (args, dict(kwargs)))
        return call.func(*args, **kwargs)

    def _label(self, call: Call, rule: registry.Rule) -> None:
        """Give the results of a call their labels."""
        self._stop(call, rule)
        source = call.tensors[0] if call.tensors else None
        state = getattr(source, "_ecc_state", None)
        if rule not in registry.USES_WEIGHTS:
            for parameter in filter(self.is_deferred, call.tensors):
                parameter._ecc_state.freeze(self.book, call.here)  # type: ignore[attr-defined]
        found = self._follow(call, rule)
        many = found if isinstance(found, list) else [found] * len(call.outs)
        for out, label in zip(call.outs, many, strict=True):
            if isinstance(state, Deferred) and rule in registry.FOLLOWING and label is not None:
                state.move(call, out, label)
            elif isinstance(state, Deferred) and rule is registry.POINTWISE and out.shape == call.tensors[0].shape:
                out._ecc_state = label if label is not None else state.scaled()  # type: ignore[attr-defined]
            elif not hasattr(out, "_ecc_name"):
                out._ecc_state = label  # type: ignore[attr-defined]
            if call.in_place:
                self._written(out)
            elif rule in registry.MOVING:
                out._ecc_base = source  # type: ignore[attr-defined]

    def _stop(self, call: Call, rule: registry.Rule) -> None:
        """At a line of code that was seen not to follow a cut, freeze what enters it."""
        stop = self.stops.get(f"{call.name}@{self.line()}") if self.stops and rule in registry.MOVING else None
        for tensor in call.tensors if stop is not None else ():
            if (labels := self.labels(tensor, defer=True)) is not None:
                tensor._ecc_state = self.freeze(labels, str(stop))  # type: ignore[attr-defined]

    def _written(self, tensor: Tensor) -> None:
        """Part of a constant was written to: it is no longer the same at every position."""
        while (base := getattr(tensor, "_ecc_base", None)) is not None:
            if getattr(base, "_ecc_state", None) is None and base.numel() > 1:
                base._ecc_state = frozen_labels(base.shape)
            tensor = base

    def _follow(self, call: Call, rule: registry.Rule) -> Labels | list[Labels]:
        """Apply a rule. One that fails must not stop a trace: it counts as no rule, which freezes."""
        try:
            if rule is registry.POINTWISE:
                check_numbers(self, call)
            return rule(self, call)
        except Misaligned as stop:
            if isinstance(self.book, PrunedLabels):
                raise
            reason = str(stop)
        except Exception as error:
            if isinstance(self.book, PrunedLabels):
                raise self.stopped(call, error) from error
            reason = f"{type(error).__name__}: {error}"
        known = [labels for t in call.tensors if (labels := self.labels(t)) is not None]
        self.freeze_all(known, f"the rule of {call.here} failed ({reason})")
        return [frozen_labels(out.shape) for out in call.outs]

    def stopped(self, call: Call, error: Exception, why: str = "has a fixed size") -> Exception:
        """An operator that cannot run: in a cut network, a sign that the code does not follow the cut."""
        if isinstance(error, Misaligned):
            return error
        states = [getattr(t, "_ecc_state", None) for t in call.tensors]
        flat = [compact(state).reshape(-1) for state in states if isinstance(state, Tensor)]
        entering = torch.cat(flat) if flat else torch.empty(0, dtype=torch.long)
        return Misaligned(entering, f"{call.here} {why}", line=f"{call.name}@{self.line()}")

    # --- where we are ----------------------------------------------------------------------------

    def location(self, name: str) -> str:
        """The operator and the module it runs in, for people."""
        self.last_path = self.path[-1] if self.path else ""
        return f"{self.last_path} ({name.rstrip('_')})" if self.last_path else name.rstrip("_")

    def line(self) -> str:
        """File and line of the network's code that called the current operator."""
        frame = sys._getframe(1)
        while frame is not None and not _is_user_code(frame.f_code):
            frame = frame.f_back  # type: ignore[assignment]
        return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""

    @contextmanager
    def following(self, names: Mapping[int, str]) -> Iterator[None]:
        """Keep `path` at the module that is running; `names` are paths by module id."""

        def enter(module: nn.Module, _: Any) -> None:
            self.path.append(names.get(id(module), self.path[-1] if self.path else ""))

        def leave(*_: Any) -> None:
            if self.path:
                self.path.pop()

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


@cache
def _is_user_code(code: CodeType) -> bool:
    return not code.co_filename.startswith((_TORCH, _HERE, "<"))
