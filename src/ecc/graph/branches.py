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
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch

import numpy as np
from torch import nn

from ecc.errors import first_line
from ecc.graph.channel_graph import ChannelGraph
from ecc.graph.data_flow import DataFlow, record_flow
from ecc.graph.forward_pass import Inputs
from ecc.graph.labels import Role
from ecc.graph.replacements import LAYERS, MAX_WALK, NORMS, ZERO_TO_ZERO, Candidate, NotRemovable, Replacements
from ecc.graph.structure import Branch, Replacement


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
        self._with_shapes = with_shapes
        self._model = model
        self._graph = graph
        self._flow = flow
        self._freeze = freeze
        self._shapes = {tensor.name: tensor for tensor in graph.tensors}
        self._unused = {
            number
            for number, op in enumerate(flow.ops)
            if not flow.op_users.get(number) and op.call.outs and not op.call.in_place
        }
        self._shared_names = _shared_names(model)
        self._kept: dict[str, str] = {}
        self._replacements = Replacements(model, graph, flow, self._shared_names)

    def run(self) -> ChannelGraph:
        """The graph with branches, replacements, and the reasons of branches that cannot be removed."""
        kept = self._kept
        found: list[Candidate] = []
        inside: set[str] = set()
        candidates = self._one_of_two(list(self._candidates()))
        self._name_all(candidates)
        for one in sorted(candidates, key=lambda one: len(one.dead)):
            if any(other.root in one.dead for other in found):
                continue  # it contains branches that can be removed one by one
            try:
                self._check(one)
                one.with_shapes = one.name in self._with_shapes
                one.replacements = self._replacements.of(one)
            except NotRemovable as reason:
                kept[one.name] = str(reason)
                continue
            if inside.isdisjoint(one.groups):
                found.append(one)
                inside.update(one.groups)
        found.sort(key=lambda one: one.root)
        blocks = self._replacements.blocks(found)
        self._keep_image_sizes(found, blocks)
        branches = tuple(Branch(one.name, one.groups, one.exits) for one in found)
        replacements = [
            replace(part, branches=(number,)) for number, one in enumerate(found) for part in one.replacements
        ]
        names = {branch.name for branch in branches}
        reasons = tuple((name, why) for name, why in kept.items() if name not in names)
        return replace(self._graph, branches=branches, replacements=(*replacements, *blocks), kept_branches=reasons)

    def _keep_image_sizes(self, found: Sequence[Candidate], blocks: Sequence[Replacement]) -> None:
        """Use zeros of the right shape in convolutional blocks that stay, such as those that reduce the image.

        There are few of them, and their shortcuts often read the shape of the branch.
        """
        whole = {block.branches for block in blocks}
        for number, one in enumerate(found):
            modules = [m for path in one.modules for m in self._model.get_submodule(path).modules()]
            if (number,) in whole or not any(isinstance(m, nn.modules.conv._ConvNd) for m in modules):
                continue
            one.with_shapes = True
            with suppress(NotRemovable):
                one.replacements = self._replacements.of(one)

    # --- candidates ------------------------------------------------------------------------------

    def _candidates(self) -> Iterator[Candidate]:
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
                    yield Candidate(number, trunk, output, exits, dead, groups, modules)
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

    def _one_of_two(self, candidates: Sequence[Candidate]) -> list[Candidate]:
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
        if producer is None or depth > MAX_WALK:
            return None
        op = flow.ops[producer]
        names = [flow.parameter.get(one) for one in op.inputs]
        parameters = tuple(name for name in names if name is not None and self._is_weight(name))
        if op.name in LAYERS and any(len(self._shapes[name].axes) > 1 for name in parameters):
            return parameters if all(name is None or self._is_weight(name) for name in names) else None
        if op.name in NORMS and parameters:
            return parameters
        if op.name in NORMS and op.name in ("batch_norm", "instance_norm"):
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
        if (op.name in ZERO_TO_ZERO or op.name in NORMS) and op.inputs and not op.call.kwargs.get("rounding_mode"):
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
            ranges = [(one.start, one.end) for one in flow.calls_by_path[call.path]]
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
            if any(one.masks for one in group.slices)
            and all(
                one.tensor.startswith(prefixes) and flow.parameter_users.get(one.tensor, set()) <= dead
                for one in group.slices
            )
        )
        return groups, tuple(modules)

    # --- checks ----------------------------------------------------------------------------------

    def _check(self, one: Candidate) -> None:
        flow = self._flow
        prefixes = tuple(f"{path}." for path in one.modules)
        for group in one.groups:
            if self._graph[group].frozen == "frozen by the argument `freeze`":
                raise NotRemovable(f"it contains {group}, which is frozen by the argument `freeze`")
        for path in one.modules:
            parts = path.split(".")
            around = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
            if any(fnmatch(name, pattern) for name in around for pattern in self._freeze):
                raise NotRemovable(f"{path} is frozen by the argument `freeze`")
        for name in self._shapes:
            if name.startswith(prefixes) and not flow.parameter_users.get(name, set()) <= one.dead | self._unused:
                raise NotRemovable(f"{name} is used outside the branch too")
            others = self._shared_names.get(name, ())
            if name.startswith(prefixes) and not all(other.startswith(prefixes) for other in others):
                raise NotRemovable(f"{name} is shared with {others[0]}, which is outside the branch")
        for name in one.exits:
            if not flow.parameter_users[name] <= one.dead:
                raise NotRemovable(f"{name}, which would be zero, is used outside the branch too")

    # --- names -----------------------------------------------------------------------------------

    def _largest(self, modules: Sequence[str]) -> str:
        sizes = {path: sum(p.numel() for p in self._model.get_submodule(path).parameters()) for path in modules}
        return max(modules, key=lambda path: sizes[path])

    def _name_all(self, found: Sequence[Candidate]) -> None:
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
