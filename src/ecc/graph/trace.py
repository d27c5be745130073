"""`trace_channels`: from a network to its channel graph.

1. Trace the network in eval and train mode, with labels on every tensor (`tracer.py`).
2. Collect labels into units and groups (`grouping.py`).
3. Prune a random part of every group and trace the pruned network. If its labels do not line up with those of the dense
   network, or its code does not run with the new sizes, try another interpretation of that line of code or freeze the
   channels that enter it, and start again.
4. Verify numerically that the masked and the slim network have the same outputs (`verification.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from ecc.constants import ATTENTION_UNITS
from ecc.errors import BadWidths, UntraceableModel, first_line
from ecc.graph.branches import find_branches
from ecc.graph.channel_graph import ChannelGraph
from ecc.graph.forward_pass import (
    Inputs,
    ModelCopy,
    as_call,
    one_pass,
    refuse_unknown_patterns,
    refuse_untraceable,
)
from ecc.graph.grouping import ChannelPartition, build_graph, build_layers
from ecc.graph.hooks import without_observer_hooks
from ecc.graph.labels import ChannelLabels, Indices, Misaligned, Place, PrunedLabels
from ecc.graph.model_copy import named_tensors
from ecc.graph.ops.registry import is_moving
from ecc.graph.slimming import with_widths
from ecc.graph.tracer import Tracer
from ecc.graph.unreached import freeze_unreached, unite_copies, unreached_modules
from ecc.graph.verification import verify_graph
from ecc.torch_utils import exact_arithmetic, input_shapes

_MAX_ROUNDS = 200  # attempts at a consistent interpretation
_MAX_SEARCHES = 8  # for a single group that makes code fail: each traces the network some times
_PARTS = 3  # disjoint parts pruned in turn if code selects channels: together they contain every unit
_SMALLEST = -1  # the part that leaves two units of each group


def trace_channels(
    model: nn.Module,
    example_input: Inputs,
    *,
    freeze: str | Sequence[str] = (),
    attention: str = "heads",
    verify: bool = True,
) -> ChannelGraph:
    """Find which channels of a network must be pruned together, and which can be pruned.

    The network runs with its own Python control flow, on meta tensors if possible. It is not changed.

    Args:
        model: Any network.
        example_input: A tensor, a sequence of positional arguments or a mapping of keyword arguments. Costs are for
            its shapes.
        freeze: Patterns (`head*`, `features.0`) of modules whose outputs are not pruned.
        attention: What is pruned of attention layers: whole "heads", or the "width" inside heads, which is the same
            columns of all heads of a projection. Heads are pruned where the width cannot be.
        verify: Compare the outputs of the masked and the slim network (see `verify_graph`). Without it, the structure
            is still checked by tracing a pruned network.

    Returns:
        The channel graph.

    Raises:
        BadWidths: If a pattern matches nothing, or `attention` is neither "heads" nor "width".
        UntraceableModel: If the network cannot run on the example input, or cannot be traced.

    Examples:
        >>> net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 10, 3))
        >>> graph = trace_channels(net, torch.randn(1, 3, 8, 8))
        >>> {g.name: g.width for g in graph.prunable}
        {'0': 16}
    """
    refuse_untraceable(model, example_input)
    freeze = [freeze] if isinstance(freeze, str) else list(freeze)
    refuse_unknown_patterns(model, freeze)
    if attention not in ATTENTION_UNITS:
        raise BadWidths(f"attention={attention!r} is none of {', '.join(ATTENTION_UNITS)}.")
    with without_observer_hooks(model, *as_call(example_input)) as followed:
        return _traced(followed, example_input, freeze, attention, verify)


def _traced(model: nn.Module, example_input: Inputs, freeze: list[str], attention: str, verify: bool) -> ChannelGraph:
    on_meta = any(t.device.type == "meta" for t in named_tensors(model).values())
    search = _Search(model, example_input, freeze, attention, verify)
    try:
        graph = search.run()
    except _NeedsValues as error:
        if on_meta:
            raise UntraceableModel(f"the network on meta tensors cannot run: {error}") from error.__cause__
        search = _Search(model, example_input, freeze, attention, verify, on_meta=False)
        try:
            graph = search.run()
        except _NeedsValues as again:
            raise UntraceableModel(f"the network cannot run on the example input: {again}") from again.__cause__
    graph = find_branches(model, example_input, graph, freeze=freeze)
    graph = replace(graph, input_shapes=input_shapes(example_input))
    return verify_graph(model, graph, example_input) if verify else graph


class _NeedsValues(Exception):
    """The pass on meta tensors failed. Real tensors may work."""


@dataclass
class _Search:
    """Search for an interpretation of the network's code with which the pruned network lines up with the dense one."""

    model: nn.Module
    example_input: Inputs
    freeze: list[str]
    attention: str
    verify: bool
    on_meta: bool = True
    choices: dict[str, int] = field(default_factory=dict)
    stops: dict[str, str] = field(default_factory=dict)
    frozen: list[tuple[list[Indices], str]] = field(default_factory=list)
    """Channels frozen because the pruned network did not line up, and why."""
    united: dict[tuple[str, str], list[tuple[list[Place | None], list[Place | None]]]] = field(default_factory=dict)
    """By line of code and module: channels that are pruned together, since the code takes the number of the first from
    the second. Empty if that was tried in vain."""
    trains: bool = True
    rejected: set[str] = field(default_factory=set)
    """Lines that split channels in a way that attention rejected."""
    no_heads: dict[str, str] = field(default_factory=dict)
    """For lines that split channels: why they cannot be split into heads."""
    constant: set[tuple[str, str]] = field(default_factory=set)
    """Attributes that do not follow the number of channels, since a pruned network did not run with them."""
    width_numbers: dict[str, float] = field(default_factory=dict)
    """For lines with a number that follows the width of heads: its power (see `Tracer.width_numbers`)."""
    ends: dict[bool, int] = field(default_factory=dict)
    """Number of operators after which networks are not compared (see `Tracer.end`), by whether it is train mode."""
    _searches: int = _MAX_SEARCHES
    """Searches that are left for the group at which code between the modules fails."""
    _train_example: Inputs | None = None
    _first_equal: dict[str, str] = field(init=False)

    def __post_init__(self) -> None:
        self._first_equal = first_equal_modules(self.model)

    def run(self) -> ChannelGraph:
        """Trace the dense and the pruned network until they agree."""
        default = torch.get_default_device()
        with (
            exact_arithmetic(),
            nullcontext() if default.type == "cpu" else torch.device("cpu"),
        ):  # the device of labels
            return self._run()

    def _run(self) -> ChannelGraph:
        channel_labels, passes = self._dense()
        for _ in range(_MAX_ROUNDS):
            partition = ChannelPartition(channel_labels, freeze=self.freeze)
            if self._reconsider(partition, passes):
                channel_labels, passes = self._dense()
                continue
            outline = build_graph(partition, named_tensors(self.model))
            failure = self._first_failure(outline, partition, passes)
            if failure is None:
                layers = build_layers(partition, passes[0].records)
                return replace(outline, layers=layers, notes=self._notes(outline, passes))
            if self._unite(failure, channel_labels):
                continue
            if self._resolve(failure, outline, partition, passes):
                channel_labels, passes = self._dense()
            else:
                channel_labels.freeze_indices(*self.frozen[-1])
        raise UntraceableModel(
            f"tracing did not succeed after {_MAX_ROUNDS} attempts. Last problem: {failure}. Please report it."
        )

    def _dense(self) -> tuple[ChannelLabels, list[Tracer]]:
        """Trace the dense network in eval mode, and in train mode if it runs other operators there."""
        channel_labels = ChannelLabels()
        network = ModelCopy.of(self.model, on_meta=self.on_meta)
        passes = [self._pass(network, self._tracer(channel_labels, recording=True), training=False)]
        for example in self._train_examples() if self.trains else ():
            try:
                train = self._pass(network, self._tracer(channel_labels), training=True, example=example)
            except _NeedsValues:  # such as batch norm over a single value: repeat the batch
                continue
            self.trains = train.sequence != passes[0].sequence
            if self.trains:
                self._train_example = example
                passes.append(train)
            break
        else:
            self.trains = False
        for (line, _), pairs in self.united.items():
            for mine, theirs in pairs:
                channel_labels.unite_places(mine, theirs, _in_words(line))
        for indices, why in self.frozen:
            channel_labels.freeze_indices(indices, why)
        channel_labels.freeze_unscalable()
        channel_labels.fold_scores()
        if self.attention == "width":
            reached = set().union(*(p.reached for p in passes))
            passes[0].reached |= unite_copies(channel_labels, self.model, reached)
        freeze_unreached(channel_labels, self.model, set().union(*(p.reached for p in passes)))
        return channel_labels, passes

    def _train_examples(self) -> Iterator[Inputs]:
        yield self.example_input
        yield tree_map_only(Tensor, lambda t: torch.cat([t, t]) if t.dim() else t, self.example_input)

    def _tracer(self, channel_labels: ChannelLabels, *, recording: bool = False, dense: Tracer | None = None) -> Tracer:
        return Tracer(
            channel_labels,
            recording,
            self.on_meta,
            self.choices,
            self.stops,
            dense,
            first_equal=self._first_equal,
            constant=self.constant,
            no_heads=self.no_heads,
            attention=self.attention,
            width_numbers=self.width_numbers,
        )

    def _pass(self, network: ModelCopy, tracer: Tracer, *, training: bool, example: Inputs | None = None) -> Tracer:
        tracer.end = self.ends.get(training)
        try:
            return one_pass(network, self.example_input if example is None else example, tracer, training=training)
        except Misaligned as error:
            if isinstance(tracer.channel_labels, PrunedLabels):
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
                f"the example input does not run {some}: they are not pruned, nor are channels that may be their "
                "inputs. Trace with an input that runs them, or remove them"
            )
        pairs = sum(group.frozen is None and group.width == 2 for group in graph.groups)
        if pairs and not self.verify:
            notes.append(
                f"{pairs} groups of two units are too small to be checked without verification (`verify=True`)"
            )
        if not self.on_meta:
            notes.append("traced on real tensors, because the network's code reads values")
        return tuple(notes)

    def _reconsider(self, partition: ChannelPartition, passes: list[Tracer]) -> bool:
        """Try another interpretation if one put channels on an unusual axis; False if none is left."""
        if self._split_into_heads(partition, passes):
            return True
        unusual = [labels for p in passes for labels, _ in p.unusual]
        if not unusual:
            return False
        units = np.unique(partition.unit[torch.cat(unusual).numpy()])
        return self._try_another(units, passes, partition, why=next(why for p in passes for _, why in p.unusual))

    def _split_into_heads(self, partition: ChannelPartition, passes: list[Tracer]) -> bool:
        """Try another interpretation of every view whose channels attention rejected; False if none is left."""
        wanted = [labels for p in passes for labels in p.wants_heads]
        products = partition.channel_labels.inner_products  # over the width of heads, which may turn out to be frozen
        wanted += [one.labels for one in products if partition.frozen[partition.unit[one.labels.numpy()]].any()]
        if not wanted:
            return False
        units = np.unique(partition.unit[torch.cat(wanted).numpy()])
        again = {
            line
            for p in passes
            for line, options, labels in p.guesses
            if line in p.splits
            and self.choices.get(line, 0) < options - 2
            and np.isin(partition.unit[labels.numpy()], units).any()
        }
        self.choices |= {line: self.choices.get(line, 0) + 1 for line in again}
        self.rejected |= again
        return bool(again)

    def _try_another(
        self,
        units: np.ndarray,
        passes: list[Tracer],
        partition: ChannelPartition,
        failure: Misaligned | None = None,
        why: str | None = None,
    ) -> bool:
        """Choose the next interpretation of the last line of code that has one left and involves these units."""
        line, why = (None, why) if failure is None else (failure.line, str(failure))
        guesses = list(reversed([guess for p in passes for guess in p.guesses]))
        splits = set().union(*(p.splits for p in passes))
        for own in (True, False):  # first the line that failed
            for guess, options, labels in guesses:
                tried = self.choices.get(guess, 0)
                involved = guess == line if own else np.isin(partition.unit[labels.numpy()], units).any()
                if involved and tried < options - 1:
                    if why is not None and guess in self.rejected and tried == options - 3:
                        self.no_heads[guess] = why
                    again = guess in splits and guess not in self.rejected and tried == options - 3
                    self.choices[guess] = tried + (2 if again else 1)
                    if own:
                        self._follow_same_line(guess, options, tried, guesses)
                    return True
        return False

    def _follow_same_line(self, line: str, options: int, tried: int, guesses: list[tuple[str, int, Tensor]]) -> None:
        """Choose the same interpretation where modules of other sizes run the same line of code, which fails alike."""
        code = line.partition(" in ")[0]
        for other, count, _ in guesses:
            if other.partition(" in ")[0] == code and count == options and self.choices.get(other, 0) == tried:
                self.choices[other] = self.choices[line]
                if line in self.no_heads and other in self.rejected:
                    self.no_heads.setdefault(other, self.no_heads[line])

    def _same_line(self, line: str, passes: list[Tracer]) -> set[str]:
        """This line and, if all interpretations of it failed, the same line in other modules where all failed."""
        options = {guess: count for p in passes for guess, count, _ in p.guesses}
        failed = {guess for guess, count in options.items() if self.choices.get(guess, 0) == count - 1}
        code = line.partition(" in ")[0]
        return {line, *(other for other in failed if line in failed and other.partition(" in ")[0] == code)}

    def _first_failure(
        self, graph: ChannelGraph, partition: ChannelPartition, passes: list[Tracer]
    ) -> Misaligned | None:
        """The first problem of a pruned network, or None."""
        if not graph.prunable:
            return None
        # Pruning once distinguishes computed sizes from hard-coded ones. If code splits or slices channels, one pruned
        # network could line up by chance, so three parts are pruned in turn. The smallest widths are the most likely
        # to show code that branches on a width.
        frozen_mask = partition.frozen_mask()
        risky = any(bool((~frozen_mask[labels]).any()) for p in passes for labels in p.selected_from)
        for part in (*range(_PARTS if risky else 1), _SMALLEST):
            failure = self._trace_pruned(graph, partition, passes, part, odd=not risky)
            if failure is not None:
                return failure
        if risky or any(group.width == 2 for group in graph.prunable):
            return self._dry_run(graph, partition, passes[0])
        return None

    def _failing_units(
        self, units: np.ndarray, graph: ChannelGraph, partition: ChannelPartition, passes: list[Tracer]
    ) -> np.ndarray:
        """The units of one group that makes the code fail, of those of several; all if it takes more than one group."""
        pairs = list(zip(graph.groups, partition.groups, strict=True))
        names = [group.name for group, mine in pairs if np.isin(mine, units).any()]
        while len(names) > 1:
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            failing = (half for half in halves if self._trace_pruned(graph, partition, passes, 0, odd=True, only=half))
            if (half := next(failing, None)) is None:
                return units
            names = half
        mine = [mine for group, mine in pairs if group.name in names]
        return np.intersect1d(units, np.concatenate(mine)) if mine else units

    def _trace_pruned(
        self,
        graph: ChannelGraph,
        partition: ChannelPartition,
        passes: list[Tracer],
        part: int,
        *,
        odd: bool,
        only: Collection[str] | None = None,
    ) -> Misaligned | None:
        """Trace the network without a random part of every group, or of some. The parts together are the whole group.

        At least two units stay, since an axis with one channel would look like an axis without channels. `odd` leaves
        odd widths, which complement the smallest, even ones.
        """
        rng = np.random.default_rng(0)  # the same order of units for every part
        alive = np.ones(partition.count, dtype=bool)
        widths: dict[str, int] = {}
        taken: dict[int, set[int]] = defaultdict(set)
        for group, units in zip(graph.groups, partition.groups, strict=True):
            if group.frozen is None and group.width > 2 and (only is None or group.name in only):
                order = rng.permutation(units)
                first, second = np.sort(np.rint(group.width * rng.uniform((0.25, 0.6), (0.4, 0.75)))).astype(int)
                first = _unlike(first, group.width, taken[group.width], odd=odd)
                bounds = [0, first, max(first, second), group.width]
                if part == _SMALLEST:
                    gone = order[: group.width - 2]
                else:
                    gone = order[bounds[part] : bounds[part + 1]][: group.width - 2]
                    if odd and len(gone) > 1 and (group.width - len(gone)) % 2 == 0:
                        gone = gone[:-1]
                alive[gone] = False
                widths[group.name] = group.width - len(gone)
        by_label = torch.from_numpy(alive[partition.unit])
        unit = torch.from_numpy(partition.unit)
        channel_labels = PrunedLabels(
            partition.channel_labels, by_label, unit, partition.frozen_mask(), partition.repeated()
        )
        small = self._small(graph, widths)
        try:
            done = [self._pass(small, self._tracer(channel_labels, dense=passes[0]), training=False)]
            if self.trains:
                tracer = self._tracer(channel_labels, dense=passes[1])
                done.append(self._pass(small, tracer, training=True, example=self._train_example))
        except Misaligned as failure:
            return _misaligned(channel_labels) or failure
        for number, (mine, dense) in enumerate(zip(done, passes, strict=True)):
            if dense.end is None and len(mine.sequence) != len(dense.sequence):
                nothing = torch.empty(0, dtype=torch.long)
                found = Misaligned(nothing, "the code runs other operators at another width", path=mine.last_path)
                found.position = (number == 1, len(mine.sequence))
                return found
        return _misaligned(channel_labels)

    def _dry_run(self, graph: ChannelGraph, partition: ChannelPartition, dense: Tracer) -> Misaligned | None:
        """Run the network at its minimum widths. Sizes are compared, not labels: axes with one channel have none."""
        widths = {group.name: group.min_width for group in graph.prunable}
        alive = np.ones(partition.count, dtype=bool)
        for group, units in zip(graph.groups, partition.groups, strict=True):
            alive[units[widths.get(group.name, group.width) :]] = False
        tracer = self._tracer(ChannelLabels(), dense=dense)
        tracer.end = self.ends.get(False)
        tracer.alive = torch.from_numpy(alive[partition.unit])
        nothing = torch.empty(0, dtype=torch.long)
        try:
            one_pass(self._small(graph, widths), self.example_input, tracer, training=False)
        except Misaligned as stop:
            return Misaligned(nothing, str(stop), line=stop.line, path=tracer.last_path, confused=stop.confused)
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return Misaligned(nothing, first_line(error), path=tracer.last_path)
        return None

    def _small(self, graph: ChannelGraph, widths: dict[str, int]) -> ModelCopy:
        return ModelCopy.wrap(with_widths(self.model, graph, widths, device="meta" if self.on_meta else None))

    def _unite(self, failure: Misaligned, channel_labels: ChannelLabels) -> bool:
        """Prune channels together if code takes the number of some from others; False if that was tried in vain."""
        if not failure.confused or failure.line is None:
            return False
        key = (failure.line, failure.path)
        if key in self.united:
            self.united[key] = []
            return False
        self.united[key] = [(channel_labels.places(a), channel_labels.places(b)) for a, b in failure.confused]
        for mine, theirs in failure.confused:
            channel_labels.unite(mine, theirs, _in_words(failure.line))
        return True

    def _end_before(self, failure: Misaligned, passes: list[Tracer], *, anywhere: bool) -> bool:
        """Compare networks up to the last value that Python code reads before a failure; False if it reads none.

        Such a value is different in a pruned network, and the code may do anything with it. Unless `anywhere`, only if
        no parameter is used afterwards, as in the box code of a detector.
        """
        training, limit = failure.position or (False, -1)
        dense = passes[training]
        limit = min(limit, self.ends.get(training, limit + 1) - 1)
        reads = [read for read in dense.reads if read <= limit]
        if not reads or (not anywhere and any(names for _, _, names in dense.sequence[reads[-1] :])):
            return False
        self.ends[training] = reads[-1]
        return True

    def _keep_attributes(self, path: str, partition: ChannelPartition) -> bool:
        """Let no attribute of a module follow the number of channels; False if none does."""
        first = self._first_equal.get(path, path)
        mine = {
            (first, name) for at, name in partition.channel_labels.attributes if self._first_equal.get(at, at) == first
        }
        mine -= {*self.constant, (first, "num_features")}
        self.constant |= mine
        return bool(mine)

    def _resolve(
        self, failure: Misaligned, graph: ChannelGraph, partition: ChannelPartition, passes: list[Tracer]
    ) -> bool:
        """Choose another interpretation, or freeze channels. True if the dense network must be traced again."""
        if failure.number_power is not None and failure.line is not None and failure.line not in self.width_numbers:
            self.width_numbers[failure.line] = failure.number_power
            return True
        affected = np.unique(partition.unit[failure.labels.numpy()])
        affected = affected[~partition.frozen[affected]]
        if self._keep_attributes(failure.path, partition) or self._try_another(affected, passes, partition, failure):
            return True
        if failure.line is not None and is_moving(failure.line) and failure.line not in self.stops:
            self.stops |= dict.fromkeys(self._same_line(failure.line, passes), str(failure))
            return True
        if not len(affected):
            affected = _prunable_units_near(failure.path, partition)
            summed = [partition.unit[one.labels.numpy()] for one in partition.channel_labels.inner_products]
            width = np.intersect1d(np.concatenate(summed), affected) if summed else affected[:0]
            if len(width) and self._try_another(width, passes, partition, failure):  # heads instead of their width
                return True
            if self._end_before(failure, passes, anywhere=len(affected) == int((~partition.frozen).sum())):
                return True
            if not failure.path and self._searches:
                self._searches -= 1
                affected = self._failing_units(affected, graph, partition, passes)
        # Only units that were kept appear in a pruned network. Freeze their whole groups.
        affected = np.flatnonzero(np.isin(partition.group_of, partition.group_of[affected]) & ~partition.frozen)
        labels = torch.from_numpy(np.flatnonzero(np.isin(partition.unit, affected)))
        self.frozen.append((partition.channel_labels.indices(labels), str(failure)))
        return False


def _unlike(count: int, width: int, taken: set[int], *, odd: bool) -> int:
    """A number of units near `count` to remove, so that no other group of the same width keeps as many, if possible.

    Otherwise, code that takes the number of some channels from others would run by chance.
    """
    for step in sorted(range(-(width // 8), width // 8 + 1), key=abs):
        removed = count + step
        kept = width - removed + (odd and (width - removed) % 2 == 0)
        if 1 < removed < width - 1 and kept not in taken:
            taken.add(kept)
            return removed
    return count


def _in_words(line: str) -> str:
    """A key of `Tracer.key` for messages."""
    name, _, place = line.partition("@")
    return f"`{name}` ({place})"


def _prunable_units_near(path: str, partition: ChannelPartition) -> np.ndarray:
    """The prunable units of a module, or of the smallest module around it that has any."""
    while True:
        here = np.zeros(partition.count, dtype=bool)
        for key in partition.channel_labels.axes:
            if not path or key[0].startswith(path + "."):
                here[partition.units_on(key)] = True
        units = np.flatnonzero(here & ~partition.frozen)
        if len(units) or not path:
            return units
        path = path.rpartition(".")[0]


def first_equal_modules(model: nn.Module) -> dict[str, str]:
    """For each module path, that of the first equal module: the same place in another block, class and sizes.

    Code that fails in one of them fails in all.
    """
    found: dict[Any, str] = {}
    first: dict[str, str] = {}
    for path, module in model.named_modules():
        place = re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", path)
        plain = [
            (name, value)
            for name, value in vars(module).items()
            if type(value) in (int, float, bool, str) and not name.endswith(("_idx", "_index", "_id"))
        ]
        shapes = [tuple(tensor.shape) for tensor in module.parameters()]
        first[path] = found.setdefault((place, type(module), repr(plain), repr(shapes)), path)
    return first


def _misaligned(channel_labels: PrunedLabels) -> Misaligned | None:
    try:
        channel_labels.check()
    except Misaligned as failure:
        return failure
    return None
