"""`trace_channels`: from a network to its channel graph.

1. Trace the network in eval and in train mode, with labels on every tensor (`tracer.py`).
2. Resolve labels into groups (`resolve.py`).
3. Cut a random part of every group and trace the cut network. Where its labels do not line up with the dense
   ones, or its code refuses the new size, take another reading of that line of code or freeze what enters it,
   and start again.
4. Prove it in numbers: the masked and the cut network give the same outputs (`verification.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecc.errors import UntraceableModel
from ecc.graph.channel_graph import ChannelGraph
from ecc.graph.forward_pass import (
    Inputs,
    ModelCopy,
    as_call,
    first_line,
    one_pass,
    refuse_unknown_patterns,
    refuse_untraceable,
)
from ecc.graph.grouping import ChannelPartition, build_graph, build_layers
from ecc.graph.hooks import without_observers
from ecc.graph.labels import ChannelLabels, Indices, Misaligned, PrunedLabels
from ecc.graph.model_copy import named_tensors
from ecc.graph.ops.registry import is_moving
from ecc.graph.slimming import with_widths
from ecc.graph.torch_settings import exact_arithmetic
from ecc.graph.tracer import Tracer
from ecc.graph.unreached import freeze_unreached, unreached_modules
from ecc.graph.verification import verify_graph

_MAX_ROUNDS = 200  # readings tried before everything left is frozen
_PARTS = 3  # cuts of a network that slices its channels: together they cut every unit
_SMALLEST = -1  # the cut that leaves two units of each group


def trace_channels(
    model: nn.Module, example_input: Inputs, *, freeze: str | Sequence[str] = (), verify: bool = True
) -> ChannelGraph:
    """Find out which channels of a network live and die together, and which can be cut.

    The network runs as it is (any Python control flow), on meta tensors where it can. It is not changed.

    Args:
        model: any network.
        example_input: a tensor, a sequence of positional or a mapping of keyword arguments. Costs refer to it.
        freeze: patterns (`head*`, `features.0`) of modules whose outputs stay whole.
        verify: compare the masked with the cut network in numbers, on the example input (four forward passes).
            Without it the structure is still checked by tracing a cut network.

    Raises:
        UntraceableModel: the network cannot run on the example input, or cannot be followed.

    Examples:
        >>> net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 10, 3))
        >>> graph = trace_channels(net, torch.randn(1, 3, 8, 8))
        >>> {g.name: g.width for g in graph.prunable}
        {'0': 16}
    """
    refuse_untraceable(model, example_input)
    freeze = [freeze] if isinstance(freeze, str) else list(freeze)
    refuse_unknown_patterns(model, freeze)
    with without_observers(model, *as_call(example_input)) as followed:
        return _traced(followed, example_input, freeze, verify)


def _traced(model: nn.Module, example_input: Inputs, freeze: list[str], verify: bool) -> ChannelGraph:
    on_meta = any(t.device.type == "meta" for t in named_tensors(model).values())
    search = _Search(model, example_input, freeze, verify)
    try:
        graph = search.run()
    except _NeedsValues as error:
        if on_meta:
            raise UntraceableModel(f"the network on meta tensors cannot run: {error}") from error.__cause__
        search = _Search(model, example_input, freeze, verify, on_meta=False)
        try:
            graph = search.run()
        except _NeedsValues as again:
            raise UntraceableModel(f"the network cannot run on the example input: {again}") from again.__cause__
    return verify_graph(model, graph, example_input) if verify else graph


class _NeedsValues(Exception):
    """The pass over meta tensors failed; real tensors may succeed."""


@dataclass
class _Search:
    """Readings of the network's code, until the cut network lines up with the dense one."""

    model: nn.Module
    example_input: Inputs
    freeze: list[str]
    verify: bool
    on_meta: bool = True
    choices: dict[str, int] = field(default_factory=dict)
    stops: dict[str, str] = field(default_factory=dict)
    frozen: list[tuple[list[Indices], str]] = field(default_factory=list)
    """What was frozen because a cut did not line up, and why."""
    trains: bool = True
    _train_example: Inputs | None = None

    def run(self) -> ChannelGraph:
        """Trace, cut and trace again until they agree."""
        default = torch.get_default_device()
        with exact_arithmetic(), nullcontext() if default.type == "cpu" else torch.device("cpu"):  # where labels live
            return self._run()

    def _run(self) -> ChannelGraph:
        book, passes = self._dense()
        for _ in range(_MAX_ROUNDS):
            resolved = ChannelPartition(book, freeze=self.freeze)
            if self._reconsider(resolved, passes):
                book, passes = self._dense()
                continue
            outline = build_graph(resolved, named_tensors(self.model), passes[0].attributes)
            mishap = self._first_mishap(outline, resolved, passes)
            if mishap is None:
                layers = build_layers(resolved, passes[0].records)
                return replace(outline, layers=layers, notes=self._notes(outline, passes))
            if self._learn(mishap, resolved, passes):
                book, passes = self._dense()
            else:
                book.freeze_indices(*self.frozen[-1])
        raise UntraceableModel(f"no consistent reading of the network after {_MAX_ROUNDS} rounds. Last: {mishap}.")

    def _dense(self) -> tuple[ChannelLabels, list[Tracer]]:
        """Eval mode, and train mode with gradients too, unless the same operators run in it."""
        book = ChannelLabels()
        twin = ModelCopy.of(self.model, on_meta=self.on_meta)
        passes = [self._pass(twin, self._tracer(book, recording=True), training=False)]
        for example in self._train_examples() if self.trains else ():
            try:
                train = self._pass(twin, self._tracer(book), training=True, example=example)
            except _NeedsValues:  # for example batch norm over a single value: try the batch twice over
                continue
            self.trains = train.sequence != passes[0].sequence
            if self.trains:
                self._train_example = example
                passes.append(train)
            break
        else:
            self.trains = False
        for indices, why in self.frozen:
            book.freeze_indices(indices, why)
        freeze_unreached(book, self.model, set().union(*(p.reached for p in passes)))
        return book, passes

    def _train_examples(self) -> Iterator[Inputs]:
        yield self.example_input
        yield tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, self.example_input)

    def _tracer(self, book: ChannelLabels, *, recording: bool = False, dense: Tracer | None = None) -> Tracer:
        return Tracer(book, recording, self.on_meta, self.choices, self.stops, dense)

    def _pass(self, twin: ModelCopy, tracer: Tracer, *, training: bool, example: Inputs | None = None) -> Tracer:
        try:
            return one_pass(twin, self.example_input if example is None else example, tracer, training=training)
        except Misaligned as error:
            if isinstance(tracer.book, PrunedLabels):
                raise
            cause = error.__cause__ or error
            raise _NeedsValues(f"{error}: {first_line(cause)}") from cause
        except UntraceableModel:
            raise
        except Exception as error:
            raise _NeedsValues(first_line(error)) from error

    def _notes(self, graph: ChannelGraph, passes: list[Tracer]) -> tuple[str, ...]:
        notes = []
        unreached = unreached_modules(self.model, set().union(*(p.reached for p in passes)))
        if unreached:
            some = ", ".join(unreached[:12]) + (f" and {len(unreached) - 12} more" if len(unreached) > 12 else "")
            notes.append(
                f"the example input did not reach {some}: they are not pruned, and neither are channels that may feed "
                "them. Trace with an input that reaches them, or remove them"
            )
        pairs = sum(group.frozen is None and group.width == 2 for group in graph.groups)
        if pairs and not self.verify:
            notes.append(f"{pairs} groups of two units are too small for the check by cutting; `verify` compares them")
        if not self.on_meta:
            notes.append("traced on real tensors, because the network's code asks for values")
        return tuple(notes)

    def _reconsider(self, resolved: ChannelPartition, passes: list[Tracer]) -> bool:
        """Whether a guess put channels on an axis where a rule found them odd, and another one is left to try."""
        doubts = [labels for p in passes for labels in p.doubts]
        if not doubts:
            return False
        odd = np.unique(resolved.unit[torch.cat(doubts).numpy()])
        return self._try_another(odd, passes, resolved)

    def _try_another(
        self, units: np.ndarray, passes: list[Tracer], resolved: ChannelPartition, line: str | None = None
    ) -> bool:
        """Move on to the next reading of the last line of code that had a choice and touches these units."""
        for guess, options, labels in reversed([guess for p in passes for guess in p.guesses]):
            tried = self.choices.get(guess, 0)
            involved = guess == line or np.isin(resolved.unit[labels.numpy()], units).any()
            if involved and tried < options - 1:
                self.choices[guess] = tried + 1
                return True
        return False

    def _first_mishap(self, graph: ChannelGraph, resolved: ChannelPartition, passes: list[Tracer]) -> Misaligned | None:
        """What goes wrong when the network is cut, if anything does."""
        if not graph.prunable:
            return None
        # One cut tells a size that follows from one that is written down. Where code splits or slices channels,
        # a single cut could line up by chance. Code that branches on widths is most likely seen at the smallest.
        immovable = resolved.immovable()
        risky = any(bool((~immovable[labels]).any()) for p in passes for labels in p.handled)
        for part in (*range(_PARTS if risky else 1), _SMALLEST):
            mishap = self._cut(graph, resolved, passes, part, odd=not risky)
            if mishap is not None:
                return mishap
        if risky or any(group.width == 2 for group in graph.prunable):
            return self._dry_run(graph, {group.name: group.min_width for group in graph.prunable}, passes[0])
        return None

    def _cut(
        self, graph: ChannelGraph, resolved: ChannelPartition, passes: list[Tracer], part: int, *, odd: bool
    ) -> Misaligned | None:
        """Trace the network with a random part of every group cut; the parts together are the whole group.

        Two units stay at least: an axis with one channel left would look like an axis without channels. `odd` leaves
        odd widths, beside the smallest one, which is even.
        """
        rng = np.random.default_rng(0)  # the same order of units for every part
        alive = np.ones(resolved.count, dtype=bool)
        widths: dict[str, int] = {}
        for group, units in zip(graph.groups, resolved.groups, strict=True):
            if group.frozen is None and group.width > 2:
                order = rng.permutation(units)
                bounds = [
                    0,
                    *np.sort(np.rint(group.width * rng.uniform((0.25, 0.6), (0.4, 0.75)))).astype(int),
                    group.width,
                ]
                if part == _SMALLEST:
                    gone = order[: group.width - 2]
                else:
                    gone = order[bounds[part] : bounds[part + 1]][: group.width - 2]
                    if odd and len(gone) > 1 and (group.width - len(gone)) % 2 == 0:
                        gone = gone[:-1]
                alive[gone] = False
                widths[group.name] = group.width - len(gone)
        by_label = torch.from_numpy(alive[resolved.unit])
        unit = torch.from_numpy(resolved.unit)
        book = PrunedLabels(resolved.book, by_label, unit, resolved.immovable(), resolved.manifold())
        small = self._small(graph, widths)
        try:
            done = [self._pass(small, self._tracer(book, dense=passes[0]), training=False)]
            if self.trains:
                tracer = self._tracer(book, dense=passes[1])
                done.append(self._pass(small, tracer, training=True, example=self._train_example))
        except Misaligned as mishap:
            return _misaligned(book) or mishap
        if any(len(a.sequence) != len(b.sequence) for a, b in zip(done, passes, strict=True)):
            nothing = torch.empty(0, dtype=torch.long)
            return Misaligned(nothing, "the network runs other operators at other widths", path=done[0].last_path)
        return _misaligned(book)

    def _dry_run(self, graph: ChannelGraph, widths: dict[str, int], dense: Tracer) -> Misaligned | None:
        """Run the network at the given widths; its labels, with one channel left here and there, say nothing."""
        tracer = self._tracer(ChannelLabels(), dense=dense)
        nothing = torch.empty(0, dtype=torch.long)
        try:
            one_pass(self._small(graph, widths), self.example_input, tracer, training=False)
        except Misaligned as stop:
            return Misaligned(nothing, str(stop), line=stop.line, path=tracer.last_path)
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return Misaligned(nothing, first_line(error), path=tracer.last_path)
        return None

    def _small(self, graph: ChannelGraph, widths: dict[str, int]) -> ModelCopy:
        return ModelCopy.itself(with_widths(self.model, graph, widths, device="meta" if self.on_meta else None))

    def _learn(self, mishap: Misaligned, resolved: ChannelPartition, passes: list[Tracer]) -> bool:
        """Take another reading, or freeze; True if the dense network must be traced anew."""
        guilty = np.unique(resolved.unit[mishap.labels.numpy()])
        guilty = guilty[~resolved.frozen[guilty]]
        if self._try_another(guilty, passes, resolved, mishap.line):
            return True
        if mishap.line is not None and is_moving(mishap.line) and mishap.line not in self.stops:
            self.stops[mishap.line] = str(mishap)
            return True
        if not len(guilty):
            guilty = _nearby(mishap.path, resolved)
        # Only the units that were kept show up in a cut network; those that were cut share their fate.
        guilty = np.flatnonzero(np.isin(resolved.group_of, resolved.group_of[guilty]) & ~resolved.frozen)
        labels = torch.from_numpy(np.flatnonzero(np.isin(resolved.unit, guilty)))
        self.frozen.append((resolved.book.indices(labels), str(mishap)))
        return False


def _nearby(path: str, resolved: ChannelPartition) -> np.ndarray:
    """The units that can be cut in a module, or in the smallest module around it that has any."""
    while True:
        here = np.zeros(resolved.count, dtype=bool)
        for key in resolved.book.axes:
            if not path or key[0].startswith(path + "."):
                here[resolved.units_on(key)] = True
        units = np.flatnonzero(here & ~resolved.frozen)
        if len(units) or not path:
            return units
        path = path.rpartition(".")[0]


def _misaligned(book: PrunedLabels) -> Misaligned | None:
    try:
        book.check()
    except Misaligned as mishap:
        return mishap
    return None
