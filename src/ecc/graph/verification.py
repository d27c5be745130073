"""Numeric verification: mask units and branches in one copy of a network, remove them in another, and compare.

The result does not depend on the caller's settings. Both copies compute in float64 if the network allows it, without
TF32, autocast or autotuning, and with constants in place of random numbers. The allowed difference follows from the
epsilon floating-point type of any operator: a network that casts to float32 is compared with float32 tolerance.

    units removed          branches removed   mode                    input
    a random part          a random half      eval                    the example
    the other units        the other half     train, with gradients   other values
    all but the minimum    none               eval and train          other values
    none                   all                eval                    the example

Each unit is removed in a run in which its branch stays. If a comparison fails, the groups and then the branches that
cause it are found by bisection. Groups that fail are frozen, branches that fail are not offered. If several fail only
together, all of them are.

A network that counts its calls runs several more times. Constant tensors (zero-initialized scales, new batch norms) get
random values first, since a branch that is multiplied by zero would hide every difference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from ecc.errors import EccWarning, UntraceableModel, first_line
from ecc.graph.branches import find_branches, keep_branches
from ecc.graph.channel_graph import ChannelGraph, ChannelGroup
from ecc.graph.forward_pass import Inputs, as_call
from ecc.graph.hooks import hook_names, without_observer_hooks
from ecc.graph.model_copy import named_tensors
from ecc.graph.numerics import (
    CannotVerify,
    Decisions,
    RunResult,
    allowed_difference,
    layer_outputs,
    materialize,
    other_inputs,
    outputs_of,
    perturbed,
    plain_state,
    randomize_constants_,
    relative_error,
    run_without_randomness,
    to_float64,
)
from ecc.graph.slimming import Slices, mask_branches_, mask_channels_, slim_and_slices, with_widths
from ecc.graph.structure import Branch
from ecc.torch_utils import exact_arithmetic, tensors_in

MAX_FLOAT64_MACS = 1 << 31
"""Multiply-accumulates up to which verification on a CPU starts in float64. Above, it starts in float32, which is much
faster, and uses float64 only to confirm a failure."""
MORE_CALLS = 8
"""Most further calls of a network whose state changes in each call, since its code may change after some of them."""
MAX_CHECKS = 100
"""Comparisons to find the groups or branches that fail. After that, all that failed together count as failed."""
AMPLIFICATION = 100.0
"""Allowed difference of a network that amplifies rounding errors, as a multiple of the effect of a few of them in its
input."""
MAX_AMPLIFIED = 0.1
"""If more would have to be allowed, the mode counts as not verified."""
TRAIN_FACTOR = 1e3
"""How much larger the difference may be in train mode. Batch norm divides by the standard deviation of few items there,
which amplifies rounding errors in every layer."""


def verify_graph(model: nn.Module, graph: ChannelGraph, example_input: Inputs, *, seed: int = 0) -> ChannelGraph:
    """Compare the outputs of the masked and the slim network.

    Groups that fail are frozen with the reason. Branches that fail cannot be removed; the reasons are in
    `kept_branches`.

    Args:
        model: The traced network.
        graph: Its channel graph.
        example_input: The input to run it on.
        seed: Seed for the choice of units and branches to remove.

    Returns:
        The graph with `max_relative_diff` set to the largest difference of the groups that passed. If verification
        could not run, it stays None, no branch is offered, and a warning and a note of the graph say why.

    Raises:
        UntraceableModel: If the network cannot run on the example input.
    """
    if not graph.prunable and not graph.branches:
        return replace(graph, max_relative_diff=0.0)
    with without_observer_hooks(model, *as_call(example_input)) as followed:
        verified = _verified(followed, graph, example_input, seed)
    names = {branch.name for branch in graph.branches}
    failed = names - {branch.name for branch in verified.branches}
    if not failed or verified.max_relative_diff is None:
        return verified
    # The code may read the shape of a branch, which no operator shows. Try again with zeros of the right shape.
    again = find_branches(model, example_input, verified, with_shapes=failed)
    again = keep_branches(again, {b.name: "" for b in again.branches if b.name not in names})
    again = replace(again, kept_branches=graph.kept_branches)
    with without_observer_hooks(model, *as_call(example_input)) as followed:
        again = _verified(followed, again, example_input, seed)
    reasons = dict(verified.kept_branches)
    kept = tuple((name, reasons.get(name, why)) for name, why in again.kept_branches)
    return replace(again, kept_branches=kept, notes=tuple(dict.fromkeys(again.notes)))


def _verified(model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int) -> ChannelGraph:
    try:
        network, inputs = materialize(model, example_input)
        check, result = _first_check(network, graph, inputs, seed)
        with exact_arithmetic():
            failed, broken, difference = _causes(check, graph, result)
    except CannotVerify as error:
        reason = f"verification could not run because {error}"
        return _unverified(keep_branches(graph, {branch.name: reason for branch in graph.branches}), reason)
    if failed and (hooks := hook_names(model)):
        some = ", ".join(hooks[:3]) + (", ..." if len(hooks) > 3 else "")
        failed = {name: f"{why}. These hooks change tensors: {some}" for name, why in failed.items()}
    _warn_of_many(failed, graph)
    groups = tuple(replace(g, frozen=failed[g.name]) if g.name in failed else g for g in graph.groups)
    notes = (*graph.notes, *dict.fromkeys(check.notes))
    return keep_branches(replace(graph, groups=groups, max_relative_diff=difference, notes=notes), broken)


def _causes(check: Check, graph: ChannelGraph, result: Result) -> tuple[dict[str, str], dict[str, str], float]:
    """Reasons of the groups and of the branches that fail, by name, and the largest difference of the others."""
    if result.passed:
        return {}, {}, result.difference
    alone = check(graph.prunable, ()) if graph.branches else result
    failed = {} if alone.passed else dict(_failed(lambda some: check(some, ()), graph.prunable, alone, check))
    groups = [group for group in graph.prunable if group.name not in failed]
    if not graph.branches:
        return failed, {}, check(groups, ()).difference if groups else 0.0
    both = check(groups, graph.branches)
    if both.passed:
        return failed, {}, both.difference
    alone = check((), graph.branches)
    broken = {} if alone.passed else dict(_failed(lambda some: check((), some), graph.branches, alone, check))
    branches = [branch for branch in graph.branches if branch.name not in broken]
    both = check(groups, branches)
    if not both.passed:  # they fail only together
        assert both.reason is not None, "the comparison failed"
        broken.update({branch.name: both.reason for branch in branches})
        both = check(groups, ())
    return failed, broken, both.difference


def max_relative_diff(one: nn.Module, other: nn.Module, example_input: Inputs) -> float:
    """Largest difference between the outputs of two networks, relative to the largest output of the first.

    Both run in their own precision, without TF32, and are in eval mode afterwards.
    """
    with exact_arithmetic():
        return relative_error(outputs_of(one, example_input), outputs_of(other, example_input))


@dataclass(frozen=True)
class Result:
    """Result of comparing the masked with the slim network."""

    difference: float = 0.0
    """Largest difference of the outputs that was allowed."""
    reason: str | None = None
    """Why the comparison failed; None if it passed."""

    @property
    def passed(self) -> bool:
        """Whether the comparison passed."""
        return self.reason is None


@dataclass
class Check:
    """Compares masked with slim networks, for any set of groups.

    Args:
        network: A copy of the user's network with random values in place of constants.
        graph: Its channel graph.
        example_input: The example input in the types of `network`.
        seed: Seed for the choice of units to remove.
    """

    network: nn.Module
    graph: ChannelGraph
    example_input: Inputs
    seed: int
    notes: list[str] = field(default_factory=list)
    count: int = 0
    """Number of comparisons so far."""
    decides: bool = False
    """Whether a comparison passed only with repeated decisions (see `_compare_values`). Later ones begin with them."""

    def __call__(self, groups: Sequence[ChannelGroup], branches: Sequence[Branch]) -> Result:
        """The first failure, or the largest difference.

        Raises:
            CannotVerify: If the masked network cannot run, or memory runs out.
        """
        self.count += 1
        worst = 0.0
        for result in self._results(groups, branches):
            if not result.passed:
                return result
            worst = max(worst, result.difference)
        return Result(worst)

    def _results(self, groups: Sequence[ChannelGroup], branches: Sequence[Branch]) -> Iterator[Result]:
        first, second = self._halves(branches)
        some, others, most = self._patterns(groups, first)
        train = () if self._train_input is None else (self._train_input,)
        yield from self._compared(some, first, [Run(self.example_input)])
        runs = [Run(inputs, training=True, gradients=True) for inputs in train]
        yield from self._compared(others, second, runs or [Run(self._eval_input)])
        trained = [Run(inputs, training=True, gradients=bool(branches), random_value=0.75) for inputs in train]
        yield from self._compared(most, (), [Run(self._eval_input), *trained])
        yield from self._compared({}, branches, [Run(self.example_input)])

    def _halves(self, branches: Sequence[Branch]) -> tuple[list[Branch], list[Branch]]:
        """A random half of the branches, and the other half."""
        generator = torch.Generator("cpu").manual_seed(self.seed)
        order = torch.randperm(len(branches), generator=generator, device="cpu").tolist()
        half = (len(branches) + 1) // 2
        return [branches[n] for n in sorted(order[:half])], [branches[n] for n in sorted(order[half:])]

    def _patterns(self, groups: Sequence[ChannelGroup], removed: Sequence[Branch]) -> tuple[dict[str, Tensor], ...]:
        """Three sets of units to remove: a random part of each group, the other units, and all but the minimum width.

        The first and the last together contain every unit; the second and the last for groups of branches that are
        removed with the first.
        """
        generator = torch.Generator("cpu").manual_seed(self.seed)
        gone = {name for branch in removed for name in branch.groups}
        some, others, most = {}, {}, {}
        for group in groups:
            order = torch.randperm(group.width, generator=generator, device="cpu")
            count = int(group.width * (0.3 + 0.3 * torch.rand((), generator=generator, device="cpu").item()))
            least = group.min_width
            count = min(max(count, 1), group.width - least)
            some[group.name] = order[:count]
            others[group.name] = order[max(count, least) :]
            most[group.name] = order[: group.width - least] if group.name in gone else order[least:]
        return some, others, most

    def _compared(
        self, dead: Mapping[str, Tensor], branches: Sequence[Branch], runs: Sequence[Run]
    ) -> Iterator[Result]:
        if not dead and not branches:
            return
        masked = with_widths(self.network, self.graph, {})  # without state of an earlier run
        mask_channels_(masked, self.graph, dead)
        removed = [branch.name for branch in branches]
        mask_branches_(masked, self.graph, removed)
        try:
            small, slices, factors = slim_and_slices(masked, self.graph, dead, removed)
        except torch.OutOfMemoryError as error:
            raise CannotVerify(first_line(error)) from error
        before = plain_state(masked)
        for run in runs:
            decided = self._compare_decided(masked, small, slices, run, factors) if self.decides else None
            yield decided or self._compare(masked, small, slices, run, factors)
        for _ in range(MORE_CALLS):
            after = plain_state(masked)
            if after == before:  # a flag that the first call sets is no counter
                break
            before = after
            yield self._compare(masked, small, slices, runs[-1], factors)

    def _compare(
        self, masked: nn.Module, small: nn.Module, slices: Slices, run: Run, factors: Mapping[str, Tensor]
    ) -> Result:
        mode = run.mode
        try:
            wanted = run.of(masked, slices)
        except Exception as error:
            raise CannotVerify(f"the masked network raised {first_line(error)} ({mode})") from error
        if not wanted.has_finite:
            raise CannotVerify(f"the outputs of the masked network are not finite ({mode})")
        try:
            found = run.of(small, factors=factors)
        except torch.OutOfMemoryError as error:
            raise CannotVerify(first_line(error)) from error
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return Result(reason=f"verification failed: the slim network raised {first_line(error)} ({mode})")
        allowed = allowed_difference(wanted.epsilon, found.epsilon) * (TRAIN_FACTOR if run.training else 1)
        difference = relative_error(wanted.outputs, found.outputs)
        gradient_diff = relative_error(wanted.gradients, found.gradients, together=True)
        gradient_allowed = allowed * TRAIN_FACTOR
        if wanted.is_empty or not (difference <= allowed and gradient_diff <= gradient_allowed):
            repeated = self._compare_values(masked, small, slices, run, factors)
            if repeated is not None:
                difference, gradient_diff, _ = repeated
                self.decides = difference <= allowed and gradient_diff <= gradient_allowed
        if not (difference <= allowed and gradient_diff <= gradient_allowed):
            amplified = self._amplification(run, repeating=repeated is not None)
            allowed, gradient_allowed = max(allowed, amplified[0]), max(gradient_allowed, amplified[1])
            if min(allowed, gradient_allowed if run.gradients else allowed) > MAX_AMPLIFIED:
                self.notes.append(
                    f"not verified in {mode}, because the network amplifies rounding errors too much there"
                )
                return Result()
        if not difference <= allowed:
            return Result(reason=_differs("outputs", difference, allowed, mode))
        if not gradient_diff <= gradient_allowed and (several := self._several_items(run)) is not None:
            return self._compare(masked, small, slices, several, factors)
        if not gradient_diff <= gradient_allowed:
            return Result(reason=_differs("gradients", gradient_diff, gradient_allowed, mode))
        return Result(0.0 if run.training else difference)

    def _compare_decided(
        self, masked: nn.Module, small: nn.Module, slices: Slices, run: Run, factors: Mapping[str, Tensor]
    ) -> Result | None:
        """The result if the networks agree with repeated decisions, None otherwise. It saves the runs without them."""
        try:
            repeated = self._compare_values(masked, small, slices, run, factors)
        except Exception:  # noqa: BLE001 - the comparison that follows finds out what is wrong
            return None
        if repeated is None:
            return None
        difference, gradient_diff, epsilon = repeated
        allowed = allowed_difference(epsilon) * (TRAIN_FACTOR if run.training else 1)
        if not (difference <= allowed and gradient_diff <= allowed * TRAIN_FACTOR):
            return None
        return Result(0.0 if run.training else difference)

    def _amplification(self, run: Run, *, repeating: bool) -> tuple[float, float]:
        """What rounding errors, by which two equal networks may differ, can change in outputs and in gradients.

        Args:
            run: The run that failed.
            repeating: Let the second network repeat the decisions of the first, as in `_compare_values`.
        """
        decisions = Decisions() if repeating else None
        one = run.of(with_widths(self.network, self.graph, {}), decisions=decisions)
        if decisions is not None:
            decisions.repeating = True
        other = run.perturbed().of(with_widths(self.network, self.graph, {}), decisions=decisions)
        before, after = ([], []) if decisions is None else decisions.compared
        outputs = relative_error([*one.outputs, *before], [*other.outputs, *after])
        return AMPLIFICATION * outputs, AMPLIFICATION * relative_error(one.gradients, other.gradients, together=True)

    def _compare_values(
        self, masked: nn.Module, small: nn.Module, slices: Slices, run: Run, factors: Mapping[str, Tensor]
    ) -> tuple[float, float, float] | None:
        """Differences of outputs and of gradients if the slim network decides as the masked one (see `Decisions`).

        The values from which decisions are computed count as outputs. If outputs are empty, those of all layers do. The
        third number is the epsilon of the coarsest type. None if the network decides nothing, or no output is finite.

        Raises:
            CannotVerify: If there is nothing to compare.
        """
        decisions = Decisions()
        with layer_outputs(masked) as ours:
            wanted = run.of(masked, slices, decisions=decisions)
        decisions.repeating = True
        try:
            with layer_outputs(small) as theirs:
                found = run.of(small, factors=factors, decisions=decisions)
        except Exception:  # noqa: BLE001 - positions that do not exist there
            decisions = Decisions()
        before, after = decisions.compared
        if not wanted.has_finite:
            return None
        if wanted.is_empty and before:  # all that can be compared, since outputs depend on little
            same = [key for key in ours if key in theirs and ours[key].shape == theirs[key].shape]
            before, after = [*before, *(ours[key] for key in same)], [*after, *(theirs[key] for key in same)]
        if not before and wanted.is_empty:
            raise CannotVerify(f"the outputs of the masked network are empty ({run.mode})")
        if not before:
            return None
        difference = relative_error([*wanted.outputs, *before], [*found.outputs, *after])
        gradient_diff = relative_error(wanted.gradients, found.gradients, together=True)
        return difference, gradient_diff, max(wanted.epsilon, found.epsilon)

    def _several_items(self, run: Run) -> Run | None:
        """The same run with several items instead of one; None if it has several, or the network does not take them.

        torch's batch norm computes wrong gradients on a CPU for one item if the gradient of its output has the strides
        of a transposed tensor, so that two equal networks may differ.
        """
        if {t.shape[0] for t in tensors_in(as_call(run.inputs)) if t.dim()} != {1}:
            return None
        inputs = next(other_inputs(run.inputs, repeated=True))
        return None if self._why_not(inputs, training=run.training) else replace(run, inputs=inputs)

    @cached_property
    def _eval_input(self) -> Inputs:
        """An input other than the example, on which the network runs."""
        if self._train_input is not None:
            return self._train_input
        runs = (inputs for inputs in other_inputs(self.example_input) if self._why_not(inputs, training=False) is None)
        return next(runs, self.example_input)

    @cached_property
    def _train_input(self) -> Inputs | None:
        """An input on which the network runs in train mode, if there is one."""
        reason = None
        for inputs in chain(other_inputs(self.example_input), other_inputs(self.example_input, repeated=True)):
            why = self._why_not(inputs, training=True)
            if why is None:
                return inputs
            reason = reason or why
        self.notes.append(f"not verified in train mode, because the network raised {reason}")
        return None

    def _why_not(self, inputs: Inputs, *, training: bool) -> str | None:
        """Why the network does not run on an input. The smallest network, which is fast, is asked first."""
        least = {group.name: group.min_width for group in self.graph.prunable}
        if self._error_at(least, inputs, training=training) is None:
            return None
        return self._error_at({}, inputs, training=training)

    def _error_at(self, widths: Mapping[str, int], inputs: Inputs, *, training: bool) -> str | None:
        try:
            ran = run_without_randomness(with_widths(self.network, self.graph, widths), inputs, training=training)
        except torch.OutOfMemoryError as error:
            raise CannotVerify(first_line(error)) from error
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return first_line(error)
        return "no error, but returned NaN" if ran.has_nan else None


@dataclass(frozen=True)
class Run:
    """One run of the masked and the slim network."""

    inputs: Inputs
    training: bool = False
    gradients: bool = False
    random_value: float = 0.25
    """Constant in place of random numbers. Two runs have different ones, so that random branches go both ways."""

    @property
    def mode(self) -> str:
        """The mode in words."""
        return "train mode" if self.training else "eval mode"

    def perturbed(self) -> Run:
        """The same run on inputs with rounding errors."""
        return replace(self, inputs=perturbed(self.inputs))

    def of(
        self,
        network: nn.Module,
        slices: Slices | None = None,
        factors: Mapping[str, Tensor] | None = None,
        decisions: Decisions | None = None,
    ) -> RunResult:
        """Outputs and gradients of a network."""
        return run_without_randomness(
            network,
            self.inputs,
            training=self.training,
            gradients=self.gradients,
            random_value=self.random_value,
            slices=slices,
            factors=factors,
            decisions=decisions,
        )


def _differs(what: str, difference: float, allowed: float, mode: str) -> str:
    return f"verification failed: {what} differ by {difference:.1e} after pruning (allowed {allowed:.0e}, {mode})"


def _first_check(model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int) -> tuple[Check, Result]:
    """The result for all groups and branches, in the first precision in which the masked network runs.

    Some networks cannot run in float64, because their code names types or memory runs out. Some cannot run with random
    values in place of constants, such as sizes kept in a buffer.
    """
    large = float(graph.macs()) > MAX_FLOAT64_MACS
    on_cpu = all(tensor.device.type == "cpu" for tensor in named_tensors(model).values())
    failure: tuple[Check, Result] | None = None
    why: CannotVerify | None = None
    for double in (False, True) if large and on_cpu else (True, False):
        if double and failure is None:
            _check_that_it_runs(model, graph, example_input)
        for randomized in (True, False):
            with exact_arithmetic():
                tried = _tried(model, graph, example_input, seed, double=double, randomized=randomized)
            if isinstance(tried, CannotVerify):
                why = why or tried
            elif tried[1].passed or double:
                return tried
            else:
                failure = tried
                break  # confirm the failure in float64
    if failure is not None:
        return failure
    assert why is not None, "every precision was tried"
    raise why


def _tried(
    model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int, *, double: bool, randomized: bool
) -> tuple[Check, Result] | CannotVerify:
    try:
        network = with_widths(model, graph, {})
        inputs = to_float64(network, example_input) if double else example_input
        if randomized:
            randomize_constants_(network, torch.Generator("cpu").manual_seed(seed))
        check = Check(network, graph, inputs, seed)
        return check, check(graph.prunable, graph.branches)
    except CannotVerify as error:
        return error
    except (torch.OutOfMemoryError, TypeError, RuntimeError) as error:  # out of memory, or no float64 on this device
        return CannotVerify(first_line(error))


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Item = TypeVar("Item", bound=_Named)


def _failed(
    compare: Callable[[Sequence[Item]], Result], items: Sequence[Item], result: Result, check: Check
) -> Iterator[tuple[str, str]]:
    """(name, reason) of the groups or branches that fail, found by bisection; of all if they fail only together."""
    reason = result.reason
    assert reason is not None, "called for items that failed"
    if len(items) == 1 or check.count > MAX_CHECKS:
        yield from ((item.name, reason) for item in items)
        return
    failed: dict[str, str] = {}
    for half in (items[: len(items) // 2], items[len(items) // 2 :]):
        part = compare(half)
        if not part.passed:
            failed.update(_failed(compare, half, part, check))
    rest = [item for item in items if item.name not in failed]
    again = compare(rest) if rest and failed else Result()
    if not failed or not again.passed:  # the others fail only together
        failed.update({item.name: again.reason or reason for item in rest})
    yield from failed.items()


def _check_that_it_runs(model: nn.Module, graph: ChannelGraph, example_input: Inputs) -> None:
    """Check that types and devices of network and input match, which a trace on meta tensors does not show.

    The network runs with the caller's settings, since autocast allows types to differ.

    Raises:
        UntraceableModel: If it cannot run.
        CannotVerify: If memory runs out.
    """
    try:
        outputs_of(with_widths(model, graph, {}), example_input)
    except torch.OutOfMemoryError as error:
        raise CannotVerify(first_line(error)) from error
    except Exception as error:
        raise UntraceableModel(f"the network cannot run on the example input: {first_line(error)}") from error


def _unverified(graph: ChannelGraph, note: str) -> ChannelGraph:
    warnings.warn(
        f"{note}. The channel groups come from the trace alone. Use verify=False to accept that without this warning.",
        EccWarning,
        stacklevel=6,
    )
    return replace(graph, notes=(*graph.notes, note))


def _warn_of_many(failed: Mapping[str, str], graph: ChannelGraph) -> None:
    """Warn if half of the groups failed, since the graph would look like a network with little to prune."""
    if len(failed) > 2 and 2 * len(failed) >= len(graph.prunable):
        name, reason = next(iter(failed.items()))
        warnings.warn(
            f"{len(failed)} of {len(graph.prunable)} prunable channel groups failed the verification and are left "
            f"unpruned. {name}: {reason}. Please report this network.",
            EccWarning,
            stacklevel=6,
        )


__all__ = ["CannotVerify", "Check", "Result", "Run", "max_relative_diff", "verify_graph"]
