"""Numeric verification of branches: mask branches in one copy of a network, remove them in another, and compare.

The runs are those of `verification.py`: float64 if possible, constants in place of random numbers, eval and train mode,
gradients, and a second input.

    branches removed       channels removed   mode                    input
    all                    none               eval                    the example
    a random half          none               train, with gradients   other values
    the other half         a part             eval and train          other values

A branch that fails is not offered. If branches fail only together, none of them is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from ecc.errors import first_line
from ecc.graph.branches import find_branches, keep_branches
from ecc.graph.channel_graph import ChannelGraph
from ecc.graph.forward_pass import Inputs, as_call
from ecc.graph.hooks import without_observer_hooks
from ecc.graph.numerics import CannotVerify, materialize, plain_state, randomize_constants_, to_float64
from ecc.graph.slimming import mask_branches_, mask_channels_, slim_and_slices, with_widths
from ecc.graph.structure import Branch
from ecc.graph.verification import MAX_CHECKS, MAX_FLOAT64_MACS, Check, Result, Run
from ecc.torch_utils import exact_arithmetic


def verify_branches(model: nn.Module, graph: ChannelGraph, example_input: Inputs, *, seed: int = 0) -> ChannelGraph:
    """Compare networks with masked and with removed branches. Branches that fail cannot be removed.

    Args:
        model: The traced network.
        graph: Its channel graph, with branches from `find_branches`.
        example_input: The input to run it on.
        seed: Seed for the choice of branches and channels.

    Returns:
        The graph with the branches that passed, and the reasons of the others in `kept_branches`.
    """
    verified = _verified(model, graph, example_input, seed)
    names = {branch.name for branch in graph.branches}
    failed = names - {branch.name for branch in verified.branches}
    if not failed:
        return verified
    # The code may read the shape of a branch, which no operator shows. Try again with zeros of the right shape.
    again = find_branches(model, example_input, graph, with_shapes=failed)
    again = keep_branches(again, {b.name: "" for b in again.branches if b.name not in names})
    reasons = dict(verified.kept_branches)
    again = _verified(model, replace(again, kept_branches=graph.kept_branches), example_input, seed)
    kept = tuple((name, reasons.get(name, why)) for name, why in again.kept_branches)
    return replace(again, kept_branches=kept)


def _verified(model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int) -> ChannelGraph:
    if not graph.branches:
        return graph
    with without_observer_hooks(model, *as_call(example_input)) as followed:
        try:
            network, inputs = materialize(followed, example_input)
            with exact_arithmetic():
                check, result = _first_check(network, graph, inputs, seed)
                failed = {} if result.passed else dict(_failed(check, graph.branches, result))
        except CannotVerify as error:
            failed = {branch.name: f"verification could not run because {error}" for branch in graph.branches}
    return keep_branches(graph, failed)


class BranchCheck(Check):
    """Compares networks with masked and with removed branches, for any set of branches."""

    def check_branches(self, branches: Sequence[Branch]) -> Result:
        """The first failure, or the largest difference.

        Raises:
            CannotVerify: If the masked network cannot run, or memory runs out.
        """
        self.count += 1
        worst = 0.0
        for result in self._branch_results(branches):
            if not result.passed:
                return result
            worst = max(worst, result.difference)
        return Result(worst)

    def _branch_results(self, branches: Sequence[Branch]) -> Iterator[Result]:
        generator = torch.Generator("cpu").manual_seed(self.seed)
        names = [branch.name for branch in branches]
        chosen = (torch.rand(len(names), generator=generator, device="cpu") < 0.5).tolist()
        if len(set(chosen)) == 1:
            chosen[0] = not chosen[0]
        some = [name for name, is_chosen in zip(names, chosen, strict=True) if is_chosen]
        others = [name for name in names if name not in some]
        train = () if self._train_input is None else (self._train_input,)
        yield from self._removed(names, {}, [Run(self.example_input)])
        runs = [Run(inputs, training=True, gradients=True) for inputs in train] or [Run(self._eval_input)]
        yield from self._removed(some, {}, runs)
        removed = {group for branch in branches if branch.name in others for group in branch.groups}
        channels, *_ = self._patterns([group for group in self.graph.prunable if group.name not in removed])
        runs = [Run(self._eval_input), *(Run(inputs, training=True, random_value=0.75) for inputs in train)]
        yield from self._removed(others, channels, runs)

    def _removed(self, names: Sequence[str], dead: Mapping[str, Tensor], runs: Sequence[Run]) -> Iterator[Result]:
        if not names:
            return
        masked = with_widths(self.network, self.graph, {})  # without state of an earlier run
        mask_channels_(masked, self.graph, dead)
        mask_branches_(masked, self.graph, names)
        try:
            small, slices, factors = slim_and_slices(masked, self.graph)
        except torch.OutOfMemoryError as error:
            raise CannotVerify(first_line(error)) from error
        before = plain_state(masked)
        for run in runs:
            yield self._compare(masked, small, slices, run, factors)
        if plain_state(masked) != before:
            for _ in range(2):
                yield self._compare(masked, small, slices, runs[-1], factors)


def _first_check(model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int) -> tuple[BranchCheck, Result]:
    """The result for all branches, in the first precision in which the masked network runs."""
    large = float(graph.macs()) > MAX_FLOAT64_MACS
    failure: tuple[BranchCheck, Result] | None = None
    why: CannotVerify | None = None
    for double in (False, True) if large else (True, False):
        for randomized in (True, False):
            tried = _tried(model, graph, example_input, seed, double=double, randomized=randomized)
            if isinstance(tried, CannotVerify):
                why = why or tried
            elif tried[1].passed or double:
                return tried
            else:
                failure = failure or tried
                break  # confirm the failure in float64
    if failure is not None:
        return failure
    assert why is not None, "every precision was tried"
    raise why


def _tried(
    model: nn.Module, graph: ChannelGraph, example_input: Inputs, seed: int, *, double: bool, randomized: bool
) -> tuple[BranchCheck, Result] | CannotVerify:
    try:
        network = with_widths(model, graph, {})
        inputs = to_float64(network, example_input) if double else example_input
        if randomized:
            randomize_constants_(network, torch.Generator("cpu").manual_seed(seed))
        check = BranchCheck(network, graph, inputs, seed)
        return check, check.check_branches(graph.branches)
    except CannotVerify as error:
        return error
    except (torch.OutOfMemoryError, TypeError, RuntimeError) as error:  # out of memory, or no float64 on this device
        return CannotVerify(first_line(error))


def _failed(check: BranchCheck, branches: Sequence[Branch], result: Result) -> Iterator[tuple[str, str]]:
    """(name, reason) of the branches that fail, found by bisection; of all branches if they fail only together."""
    reason = result.reason
    assert reason is not None, "called for branches that failed"
    if len(branches) == 1 or check.count > MAX_CHECKS:
        yield from ((branch.name, reason) for branch in branches)
        return
    failed: dict[str, str] = {}
    for half in (branches[: len(branches) // 2], branches[len(branches) // 2 :]):
        part = check.check_branches(half)
        if not part.passed:
            failed.update(_failed(check, half, part))
    rest = [branch for branch in branches if branch.name not in failed]
    again = check.check_branches(rest) if rest and failed else Result()
    if not failed or not again.passed:  # the others fail only together
        failed.update({branch.name: again.reason or reason for branch in rest})
    yield from failed.items()
