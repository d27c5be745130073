"""Numeric verification of a trace: mask units in one copy of a network, remove them in another, compare.

The answer does not depend on the caller's settings. Both copies compute in float64 where the network allows it, without
TF32, autocast or autotuning, and with constants in place of random draws. What is allowed follows from the coarsest
type that any operator of the two copies used: a network that casts to float32 inside is judged as float32 arithmetic.

    units removed      mode                    input
    a random part      eval                    the example
    all the others     train, with gradients   another one, with other numbers
    as many as can be  eval and train          another one, with other numbers

A network that counts its calls runs several times more. Tensors that are constant (zero-initialised scales, fresh
batch norm) get random values first, since a branch that is multiplied by zero would agree with anything.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ecc.errors import EccWarning, UntraceableModel, first_line
from ecc.graph.channel_graph import ChannelGraph, ChannelGroup
from ecc.graph.forward_pass import Inputs, as_call
from ecc.graph.hooks import hook_names, without_observers
from ecc.graph.model_copy import named_tensors
from ecc.graph.numerics import (
    CannotVerify,
    Ran,
    allowed_difference,
    as_double,
    materialized,
    nudged,
    other_inputs,
    outputs_of,
    plain_state,
    relative_error,
    run_steadily,
    with_random_constants_,
)
from ecc.graph.slimming import mask_channels_, slim_and_slices, with_widths
from ecc.graph.torch_settings import exact_arithmetic

MOST_MACS_IN_FLOAT64 = 1 << 31
"""Multiply-accumulates of one forward pass up to which a CPU starts with float64. Beyond, it takes float32, for which
it has much faster kernels, and float64 only to confirm a failure."""
MORE_CALLS = 8
"""Further calls of a network that counts them: code that changes after some calls may be seen."""
MOST_CHECKS = 100
"""Comparisons made to find the groups that fail; then all groups that failed together are frozen."""
ENLARGED = 100.0
"""Allowed difference where a network enlarges rounding errors: so many times what a few of them in its input change."""
MOST_ENLARGED = 0.1
"""Beyond this, a difference says nothing, and the mode counts as not verified."""
TRAIN_FACTOR = 1e3
"""How much larger a difference may be in train mode. Batch norm divides by the deviation of few items there, which
enlarges rounding errors layer by layer."""


def verify_graph(model: nn.Module, graph: ChannelGraph, example_input: Inputs, *, seed: int = 0) -> ChannelGraph:
    """Compare the masked with the slim network; groups that fail are frozen with the reason.

    Args:
        model: the traced network.
        graph: its channel graph.
        example_input: what to run it on.
        seed: which units are removed.

    Returns:
        The graph with `max_relative_diff` filled in: the largest relative difference of the outputs of the groups that passed.
        Where verification could not run, it stays None, a warning says why, and so does a note of the graph.

    Raises:
        UntraceableModel: the network cannot run on the example input.
    """
    if not graph.prunable:
        return replace(graph, max_relative_diff=0.0)
    with without_observers(model, *as_call(example_input)) as followed:
        return _verified(followed, graph, example_input, seed)


def _verified(model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int) -> ChannelGraph:
    try:
        network, inputs = materialized(model, example_input)
        _refuse_what_cannot_run(network, graph, inputs)
        with exact_arithmetic():
            check, result = _first_check(network, graph, inputs, seed)
            failed = {} if result.passed else dict(_failed(check, graph.prunable, result))
            rest = [group for group in graph.prunable if group.name not in failed]
            difference = result.difference if not failed else check(rest).difference if rest else 0.0
    except CannotVerify as error:
        return _unverified(graph, str(error))
    if failed and (hooks := hook_names(model)):
        some = ", ".join(hooks[:3]) + (", ..." if len(hooks) > 3 else "")
        failed = {name: f"{why}; hooks change tensors: {some}" for name, why in failed.items()}
    _warn_of_many(failed, graph)
    groups = tuple(replace(g, frozen=failed[g.name]) if g.name in failed else g for g in graph.groups)
    return replace(graph, groups=groups, max_relative_diff=difference, notes=(*graph.notes, *dict.fromkeys(check.notes)))


def max_relative_diff(one: nn.Module, other: nn.Module, example_input: Inputs) -> float:
    """Largest difference between the outputs of two networks, relative to the largest output of the first.

    Both run in their own precision, without TF32, and are in evaluation mode afterwards.
    """
    with exact_arithmetic():
        return relative_error(outputs_of(one, example_input), outputs_of(other, example_input))


@dataclass(frozen=True)
class Result:
    """The outcome of comparing the masked with the slim network."""

    difference: float = 0.0
    """The largest difference of the outputs that was within what is allowed."""
    reason: str | None = None
    """Why the networks are not equal; None if they are."""

    @property
    def passed(self) -> bool:
        """Whether they are equal."""
        return self.reason is None


@dataclass
class Check:
    """Compares masked with slim networks, for any set of groups.

    Args:
        network: a copy of the user's network with random values in place of constants.
        graph: its channel graph.
        example_input: in the types of `network`.
        seed: which units are removed.
    """

    network: nn.Module
    graph: ChannelGraph
    example_input: Inputs
    seed: int
    notes: list[str] = field(default_factory=list)
    count: int = 0
    """Comparisons made so far."""

    def __call__(self, groups: Sequence[ChannelGroup]) -> Result:
        """The first failure, or the largest difference.

        Raises:
            CannotVerify: the masked network cannot run, or memory is not enough.
        """
        self.count += 1
        worst = 0.0
        for result in self._results(groups):
            if not result.passed:
                return result
            worst = max(worst, result.difference)
        return Result(worst)

    def _results(self, groups: Sequence[ChannelGroup]) -> Iterator[Result]:
        some, others, most = self._patterns(groups)
        train = () if self._train_input is None else (self._train_input,)
        yield from self._compared(some, [_Run(self.example_input)])
        yield from self._compared(others, [_Run(inputs, training=True, gradients=True) for inputs in train])
        runs = [_Run(self._eval_input), *(_Run(inputs, training=True, drawn=0.75) for inputs in train)]
        yield from self._compared(most, runs)

    def _patterns(self, groups: Sequence[ChannelGroup]) -> tuple[dict[str, Tensor], ...]:
        """Three sets of units to remove: a random part of each group, the others, and all but the fewest.

        The first and the last together have every unit.
        """
        generator = torch.Generator("cpu").manual_seed(self.seed)
        some, others, most = {}, {}, {}
        for group in groups:
            order = torch.randperm(group.width, generator=generator, device="cpu")
            count = int(group.width * (0.3 + 0.3 * torch.rand((), generator=generator, device="cpu").item()))
            count = min(max(count, 1), group.width - group.min_width)
            some[group.name] = order[:count]
            others[group.name] = order[count:][: group.width - group.min_width]
            most[group.name] = order[group.min_width :]
        return some, others, most

    def _compared(self, dead: Mapping[str, Tensor], runs: Sequence[_Run]) -> Iterator[Result]:
        if not runs:
            return
        masked = with_widths(self.network, self.graph, {})  # with no state of an earlier run
        mask_channels_(masked, self.graph, dead)
        try:
            small, slices = slim_and_slices(masked, self.graph)
        except torch.OutOfMemoryError as error:
            raise CannotVerify(first_line(error)) from error
        before = plain_state(masked)
        for run in runs:
            yield self._compare(masked, small, slices, run)
        if plain_state(masked) != before:
            for _ in range(MORE_CALLS):
                yield self._compare(masked, small, slices, runs[-1])

    def _compare(
        self, masked: nn.Module, small: nn.Module, slices: Mapping[str, Mapping[int, Tensor]], run: _Run
    ) -> Result:
        mode = "train mode" if run.training else "eval mode"
        try:
            wanted = run.of(masked, slices)
        except Exception as error:
            raise CannotVerify(f"the masked network raised {first_line(error)} ({mode})") from error
        if not wanted.has_numbers:
            raise CannotVerify(f"the outputs of the masked network are not finite ({mode})")
        try:
            found = run.of(small)
        except torch.OutOfMemoryError as error:
            raise CannotVerify(first_line(error)) from error
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return Result(reason=f"verification failed: the slim network raised {first_line(error)} ({mode})")
        allowed = allowed_difference(wanted.coarsest, found.coarsest) * (TRAIN_FACTOR if run.training else 1)
        difference = relative_error(wanted.outputs, found.outputs)
        slopes = relative_error(wanted.gradients, found.gradients, together=True)
        steep = allowed * TRAIN_FACTOR
        if not (difference <= allowed and slopes <= steep):
            # How much the network itself enlarges rounding errors, with which two right networks may differ.
            one, other = (each.of(with_widths(self.network, self.graph, {})) for each in (run, run.nudged()))
            allowed = max(allowed, ENLARGED * relative_error(one.outputs, other.outputs))
            steep = max(steep, ENLARGED * relative_error(one.gradients, other.gradients, together=True))
            if min(allowed, steep if run.gradients else allowed) > MOST_ENLARGED:
                self.notes.append(f"not verified in {mode}, in which the network enlarges rounding errors too much")
                return Result()
        if not difference <= allowed:
            return Result(reason=_differs("outputs", difference, allowed, mode))
        if not slopes <= steep:
            return Result(reason=_differs("gradients", slopes, steep, mode))
        return Result(0.0 if run.training else difference)

    @cached_property
    def _eval_input(self) -> Inputs:
        """Another input than the example, on which the network runs."""
        if self._train_input is not None:
            return self._train_input
        runs = (inputs for inputs in other_inputs(self.example_input) if self._why_not(inputs, training=False) is None)
        return next(runs, self.example_input)

    @cached_property
    def _train_input(self) -> Inputs | None:
        """An input on which the network runs in train mode, where there is one."""
        reason = None
        for inputs in (*other_inputs(self.example_input), *other_inputs(self.example_input, doubled=True)):
            why = self._why_not(inputs, training=True)
            if why is None:
                return inputs
            reason = reason or why
        self.notes.append(f"not verified in train mode, in which the network raised {reason}")
        return None

    def _why_not(self, inputs: Inputs, *, training: bool) -> str | None:
        try:
            ran = run_steadily(with_widths(self.network, self.graph, {}), inputs, training=training)
        except torch.OutOfMemoryError as error:
            raise CannotVerify(first_line(error)) from error
        except Exception as error:  # noqa: BLE001 - whatever a network's code raises
            return first_line(error)
        return "no error, but gave outputs that are NaN" if ran.has_nan else None


@dataclass(frozen=True)
class _Run:
    inputs: Inputs
    training: bool = False
    gradients: bool = False
    drawn: float = 0.25
    """In place of random numbers: two runs have two, so that code which decides by chance goes both ways."""

    def nudged(self) -> _Run:
        """The same run on inputs that differ by rounding errors."""
        return replace(self, inputs=nudged(self.inputs))

    def of(self, network: nn.Module, slices: Mapping[str, Mapping[int, Tensor]] | None = None) -> Ran:
        return run_steadily(
            network,
            self.inputs,
            training=self.training,
            gradients=self.gradients,
            drawn=self.drawn,
            slices=slices,
        )


def _differs(what: str, difference: float, allowed: float, mode: str) -> str:
    return f"verification failed: {what} differ by {difference:.1e} after pruning (allowed {allowed:.0e}, {mode})"


def _first_check(model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int) -> tuple[Check, Result]:
    """The result for all groups, in the first kind of arithmetic in which the masked network runs.

    Some networks cannot run in float64, because their code names types, or because of memory; some cannot run with
    other values in place of constants (sizes that are kept in a buffer).
    """
    large = float(graph.macs()) > MOST_MACS_IN_FLOAT64
    on_cpu = all(tensor.device.type == "cpu" for tensor in named_tensors(model).values())
    failure: tuple[Check, Result] | None = None
    why: CannotVerify | None = None
    for double in (False, True) if large and on_cpu else (True, False):
        for changed in (True, False):
            tried = _tried(model, graph, example_input, seed, double=double, changed=changed)
            if isinstance(tried, CannotVerify):
                why = why or tried
            elif tried[1].passed or double:
                return tried
            else:
                failure = failure or tried
                break  # to float64, in which there is hardly any rounding
    if failure is not None:
        return failure
    assert why is not None, "every kind of arithmetic was tried"
    raise why


def _tried(
    model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int, *, double: bool, changed: bool
) -> tuple[Check, Result] | CannotVerify:
    try:
        network = with_widths(model, graph, {})
        inputs = as_double(network, example_input) if double else example_input
        if changed:
            with_random_constants_(network, torch.Generator("cpu").manual_seed(seed))
        check = Check(network, graph, inputs, seed)
        return check, check(graph.prunable)
    except CannotVerify as error:
        return error
    except (torch.OutOfMemoryError, TypeError, RuntimeError) as error:  # no memory, no float64 on this device
        return CannotVerify(first_line(error))


def _failed(check: Check, groups: Sequence[ChannelGroup], result: Result) -> Iterator[tuple[str, str]]:
    """(name, reason) of the groups that fail alone; of all, where they fail only together. Found by halving."""
    reason = result.reason
    assert reason is not None, "called for groups that failed"
    if len(groups) == 1 or check.count > MOST_CHECKS:
        yield from ((group.name, reason) for group in groups)
        return
    halves = (groups[: len(groups) // 2], groups[len(groups) // 2 :])
    wrong: dict[str, str] = {}
    for half in halves:
        part = check(half)
        if not part.passed:
            wrong.update(_failed(check, half, part))
    if wrong:
        rest = [group for group in groups if group.name not in wrong]
        again = check(rest) if rest else Result()
        if not again.passed:  # what is left fails only together
            assert again.reason is not None, "it did not pass"
            wrong.update({group.name: again.reason for group in rest})
        yield from wrong.items()
    else:
        yield from ((group.name, reason) for group in groups)


def _refuse_what_cannot_run(model: nn.Module, graph: ChannelGraph, example_input: Inputs) -> None:
    """Refuses a network whose types or devices do not fit its input, which a trace on meta tensors does not see.

    It runs under the caller's settings: under autocast, types may differ.

    Raises:
        UntraceableModel: If it cannot run.
        CannotVerify: If there is not enough memory for it.
    """
    try:
        outputs_of(with_widths(model, graph, {}), example_input)
    except torch.OutOfMemoryError as error:
        raise CannotVerify(first_line(error)) from error
    except Exception as error:
        raise UntraceableModel(f"the network cannot run on the example input: {first_line(error)}") from error


def _unverified(graph: ChannelGraph, why: str) -> ChannelGraph:
    note = f"verification could not run because {why}"
    warnings.warn(
        f"{note}. The channel groups are those of the trace alone; verify=False accepts that without this warning.",
        EccWarning,
        stacklevel=6,
    )
    return replace(graph, notes=(*graph.notes, note))


def _warn_of_many(failed: Mapping[str, str], graph: ChannelGraph) -> None:
    """A graph in which little can be pruned because verification failed looks like a network that has little."""
    if len(failed) > 2 and 2 * len(failed) >= len(graph.prunable):
        name, reason = next(iter(failed.items()))
        warnings.warn(
            f"{len(failed)} of {len(graph.prunable)} prunable channel groups failed the verification and are left "
            f"unpruned. {name}: {reason}. Please report this network.",
            EccWarning,
            stacklevel=6,
        )


__all__ = ["CannotVerify", "Check", "Result", "max_relative_diff", "verify"]
