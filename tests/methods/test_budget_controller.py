"""The closed loop against oracles: a known true cost, a model with a known error, and scripted measurements."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from ecc.energy import Cost, EnergyModel, counted_cost
from ecc.errors import InfeasibleBudget
from ecc.graph import live_channels, slim
from ecc.methods import BudgetController, Ecc, Greedy, MeasuredCost, Method, PruningContext, Uniform
from ecc.methods.base import magnitudes
from ecc.methods.budget_controller import CHECKPOINTS, MAX_CORRECTIONS, TOLERANCE_BAND, initial_targets
from ecc.methods.model_error import estimate_errors
from ecc.records import to_builtins
from ecc.run_records import CostCheck
from methods.jobs import WIDE, example_of, true_model, wide, wrong_model
from methods.works import work_of

STEPS = 40
Measure = Callable[[Mapping[str, int]], MeasuredCost]


class WithoutProposals(Ecc):
    """ECC that says nothing about its plans, as with `solver="admm"`."""

    def propose(self, targets: Sequence[float]) -> None:
        return None


class Control:
    """A method under control."""

    def __init__(
        self,
        method: Method,
        costs: Sequence[Cost],
        limits: Sequence[float],
        measure: Measure,
        name: str = "chain",
        **settings: Any,
    ) -> None:
        self.context = work_of(name, **{"prune_steps": STEPS, "lr": 1e-2, **settings})
        self.context.costs, self.context.targets, self.limits = tuple(costs), list(limits), list(limits)
        self.method, self.measure = method, measure
        method.start(self.context)
        self.controller = BudgetController(method, self.context, limits, measure)

    def run(self) -> BudgetController:
        self.controller.run(lambda check: None)
        return self.controller

    @property
    def widths(self) -> dict[str, int]:
        return self.context.named_widths()


def measure_by(*models: EnergyModel, **fields: Any) -> Measure:
    return lambda widths: MeasuredCost({m.resource: m.at(widths) for m in models}, "measured", **fields)


def scripted(true: EnergyModel, factor: Callable[[int], float]) -> Measure:
    """The n-th measurement is off by `factor(n)`."""
    calls: list[int] = []

    def measure(widths: Mapping[str, int]) -> MeasuredCost:
        calls.append(len(calls))
        return MeasuredCost({"energy": factor(calls[-1]) * true.at(widths)}, "measured", 0.002)

    return measure


def models(name: str = "chain", factor: float = 1.0) -> tuple[EnergyModel, EnergyModel]:
    """The true model and one that is off by a factor on two of three layers."""
    graph = wide(name)[2]
    return true_model(graph), wrong_model(graph, factor)


# ---------------------------------------------------------------- a method with a schedule


@pytest.mark.parametrize(
    ("name", "share", "factor"),
    [
        pytest.param(name, *((0.6, 1.25), (0.35, 0.8))[n % 2], marks=[pytest.mark.thorough] * (n > 1))
        for n, name in enumerate(WIDE)
    ],
)
def test_measuring_corrects_a_wrong_model(name: str, share: float, factor: float) -> None:
    true, wrong = models(name, factor)
    limit = share * true.dense

    trusting = Control(Ecc(), [wrong], [limit], measure_by(wrong), name)
    assert trusting.run().is_met
    ratio = true.at(trusting.widths) / limit
    assert not TOLERANCE_BAND[0] <= ratio <= TOLERANCE_BAND[1]
    assert (ratio > 1) == (factor < 1)

    control = Control(Ecc(), [wrong], [limit], measure_by(true), name)
    controller = control.run()
    assert (controller.is_met, controller.note) == (True, "")
    assert TOLERANCE_BAND[0] <= true.at(control.widths) / limit <= TOLERANCE_BAND[1]
    model, graph, example = control.context.model, control.context.graph, example_of(name)
    assert controller.checks[-1].widths == control.widths == live_channels(model, graph)
    torch.testing.assert_close(slim(model.eval(), graph)(example), model(example), rtol=1e-4, atol=1e-5)


def test_a_right_model_takes_few_readings_at_the_checkpoints_and_none_after_the_budget_is_met() -> None:
    true, _ = models()
    readings: list[Mapping[str, int]] = []

    def measure(widths: Mapping[str, int]) -> MeasuredCost:
        readings.append(widths)
        return measure_by(true)(widths)

    control = Control(Ecc(), [true], [0.5 * true.dense], measure)
    checks = control.run().checks
    assert control.controller.steps == STEPS
    assert len(readings) <= 3  # the last check is the reading at which the widths were chosen
    assert len(checks) == len(readings) + 1
    for check, checkpoint in zip(checks, [CHECKPOINTS[0], *[CHECKPOINTS[1]] * (len(readings) - 1), 1.0], strict=True):
        assert checkpoint <= check.progress < checkpoint + 1 / 24 + 1e-9  # 24 steps of the ramp


MARGINS = ((0.0001, 0.002), (None, 0.002), (0.2, 0.015))


@pytest.mark.parametrize(
    ("relative_ci", "margin"), [(0.008, 0.008), *(pytest.param(*one, marks=pytest.mark.thorough) for one in MARGINS)]
)
def test_targets_are_corrected_by_the_measured_error_less_a_margin(relative_ci: float | None, margin: float) -> None:
    true, wrong = models("residual", 0.8)
    params = counted_cost(wide("residual")[2], "params")
    limits = [0.6 * true.dense, 20_000.0]
    control = Control(Ecc(), [wrong, params], limits, measure_by(true, relative_ci=relative_ci), "residual")
    for check in control.run().checks:
        assert check.measured["energy"] == pytest.approx(true.at(check.widths))
        assert check.predicted["energy"] == pytest.approx(wrong.at(check.widths))
        assert check.targets["energy"] == pytest.approx(
            (1 - margin) * limits[0] * wrong.at(check.widths) / true.at(check.widths)
        )
        assert check.targets["params"] == limits[1]  # exact
    assert check.measured["energy"] <= (1 - margin) * limits[0] * 1.005


class OneProposal(Ecc):
    """ECC that proposes nothing for other targets than those it has."""

    def propose(self, targets: Sequence[float]) -> dict[str, int] | None:
        return super().propose(targets) if list(targets) == self._context.targets else None


def test_without_proposals_for_corrected_targets_the_present_ones_are_measured() -> None:
    true, wrong = models("residual", 1.25)
    controller = Control(OneProposal(), [wrong], [0.5 * true.dense], measure_by(true), "residual").run()
    assert controller.is_met
    assert TOLERANCE_BAND[0] <= controller.checks[-1].measured["energy"] / (0.5 * true.dense) <= TOLERANCE_BAND[1]


def test_noisy_readings_near_the_band_are_repeated_and_averaged() -> None:
    graph, noise = work_of("residual").graph, 0.01
    true = true_model(graph)

    def result(seed: int, relative_ci: float) -> tuple[float, list[CostCheck]]:
        random = torch.Generator().manual_seed(seed)

        def measure(widths: Mapping[str, int]) -> MeasuredCost:
            factor = 1 + noise * float(torch.randn((), generator=random))
            return MeasuredCost({"energy": factor * true.at(widths)}, "measured", relative_ci)

        control = Control(Ecc(), [wrong_model(graph, 0.9)], [0.45 * true.dense_profiled], measure, "residual")
        checks = control.run().checks
        return true.at(checks[-1].widths) / control.limits[0], checks

    once, often = ([result(seed, ci) for seed in range(2)] for ci in (0.007, 2 * noise))
    last = [found[-1] for _, found in often]
    assert all(check.relative_ci is not None and check.relative_ci < 0.0083 for check in last)  # means of six readings
    miss = {name: [abs(share - 0.99) for share, _ in some] for name, some in (("once", once), ("often", often))}
    assert sum(miss["often"]) < sum(miss["once"])
    assert all(len(found) <= 12 for _, found in once)


def reading(widths: dict[str, int], error: float) -> CostCheck:
    """A measurement that differs from the prediction of 1 J by exp(error)."""
    measured = {"energy": float(np.exp(error))}
    return CostCheck(
        step=0, progress=0.5, widths=widths, predicted={"energy": 1.0}, measured=measured, label="measured",
        relative_ci=0.001, targets={"energy": 1.0},
    )  # fmt: skip


def test_errors_of_the_model_are_estimated_from_networks_with_similar_widths() -> None:
    checks = [reading({"a": 60, "b": 40}, 0.10), reading({"a": 48, "b": 40}, 0.0)]
    widths = (60, 62, 63, 70, 48)  # measured; same block and even; same block; even; measured
    (same, block_and_even, block, even, other), deviations = estimate_errors(
        checks, "energy", [{"a": width, "b": 40} for width in widths]
    )
    assert (same, other) == (pytest.approx(0.10, abs=1e-3), pytest.approx(0.0, abs=1e-3))
    assert same > block_and_even > block > other
    assert block_and_even > even > other
    assert max(deviations[[0, 4]]) < 2e-3 < 10 * min(deviations[1:4])


def test_estimated_errors_and_their_deviations_are_right_on_average() -> None:
    rng, names = np.random.default_rng(0), ("a", "b", "c")

    def features(width: int) -> tuple[int, int, int]:
        return width, -(-width // 8), 2 if width % 8 == 0 else width % 2

    scores = []
    for _ in range(150):
        tables = [[rng.normal(0, 0.04 / np.sqrt(3), 65) for _ in range(3)] for _ in names]
        common = rng.normal(0, 0.1)

        def error(row: list[int], tables: Any = tables, common: float = common) -> float:
            parts = [
                table[one]
                for width, group in zip(row, tables, strict=True)
                for table, one in zip(group, features(width), strict=True)
            ]
            return common + sum(parts)

        rows = rng.integers(24, 65, (14, 3)).tolist()
        checks = [reading(dict(zip(names, row, strict=True)), error(row)) for row in rows[:8]]
        means, deviations = estimate_errors(checks, "energy", [dict(zip(names, row, strict=True)) for row in rows[8:]])
        scores += [(error(row) - mean) / one for row, mean, one in zip(rows[8:], means, deviations, strict=True)]
    assert abs(np.mean(scores)) < 0.1
    assert 0.9 < np.std(scores) < 1.1


def test_energy_and_latency_are_corrected_separately() -> None:
    graph = wide("residual")[2]
    true = [true_model(graph), true_model(graph, "latency")]
    wrong = [wrong_model(graph, 0.8), wrong_model(graph, 1.25, "latency")]
    limits = [0.6 * true[0].dense, 0.5 * true[1].dense]
    control = Control(Ecc(), wrong, limits, measure_by(*true), "residual")
    assert control.run().is_met
    ratios = [model.at(control.widths) / limit for model, limit in zip(true, limits, strict=True)]
    assert TOLERANCE_BAND[0] <= max(ratios) <= 1
    for check in control.controller.checks:
        for model, other, limit in zip(true, wrong, limits, strict=True):
            ratio = other.at(check.widths) / model.at(check.widths)
            assert check.targets[model.resource] == pytest.approx(0.998 * limit * ratio)


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_a_short_schedule_is_measured_at_its_end(steps: int) -> None:
    true, wrong = models(factor=0.8)
    limit = 0.5 * true.dense
    control = Control(Ecc(), [wrong], [limit], measure_by(true), prune_steps=steps)
    controller = control.run()
    ratio = true.at(control.widths) / limit
    assert controller.checks[-1].widths == control.widths
    assert controller.is_met == (ratio <= 1)
    assert bool(controller.note) == (not TOLERANCE_BAND[0] <= ratio <= TOLERANCE_BAND[1])
    assert controller.is_met or steps < 4


def test_a_result_above_the_budget_is_pruned_once_more() -> None:
    true, _ = models("residual")
    limit = 0.6 * true.dense
    factor = scripted(true, lambda call: 1.0 if call < 3 else 1.06)
    control = Control(WithoutProposals(), [true], [limit], factor, "residual")
    controller = control.run()
    ratios = [check.measured["energy"] / limit for check in controller.checks]
    assert ratios[3] > 1
    assert TOLERANCE_BAND[0] <= ratios[-1] <= 1
    assert (controller.is_met, controller.note, controller.state_dict()["corrections"]) == (True, "", 1)


@pytest.mark.parametrize(
    ("factor", "steps", "note"),
    [
        (lambda call: 1.03 ** max(0, call - 2), 120, f"of its budget after {MAX_CORRECTIONS} corrections."),
        (lambda call: 1.05**call, 6, "and no pruning steps are left"),
        (lambda call: 1.0 if call < 3 else 90.0, 40, "the minimum widths do not allow less"),
    ],
)
def test_giving_up_leaves_a_note(factor: Callable[[int], float], steps: int, note: str) -> None:
    true, _ = models("residual")
    limit = 0.6 * true.dense
    control = Control(WithoutProposals(), [true], [limit], scripted(true, factor), "residual", prune_steps=steps)
    controller = control.run()
    assert not controller.is_met
    assert note in controller.note
    assert f"the energy is {controller.checks[-1].measured['energy'] / limit:.1%}" in controller.note
    assert controller.steps == steps  # the result is trained to the end
    assert len(controller.checks) <= len(CHECKPOINTS) + MAX_CORRECTIONS


def test_a_budget_that_turns_out_infeasible_during_pruning_is_an_error() -> None:
    true, _ = models()
    with pytest.raises(InfeasibleBudget):
        Control(Ecc(), [true], [0.5 * true.dense], scripted(true, lambda _: 9.0)).run()


@pytest.mark.parametrize(("share", "shown"), [(1.5, "66.7%"), (1.0, "100.0%")])
@pytest.mark.parametrize("method", [Ecc, Uniform])
def test_nothing_is_pruned_within_the_budget(method: Callable[[], Method], share: float, shown: str) -> None:
    true, _ = models()
    control = Control(method(), [true], [share * true.dense], measure_by(true, relative_ci=0.01))
    controller = control.run()
    assert control.widths == control.context.graph.full_widths
    assert controller.is_met
    assert controller.note == f"the energy is {shown} of its budget without pruning."


def test_channels_that_training_revives_are_measured_at_the_end() -> None:
    """Most of conv1 is unread at first, as before a head of zeros; then it is trained."""
    true, _ = models()
    control = Control(Ecc(), [true], [0.9 * true.dense], measure_by(true), prune_steps=8, lr=1e-3)
    module: Any = control.context.model
    with torch.no_grad():
        module.conv2.weight[:, 5:] = 0
    assert control.widths["conv1"] == 5
    controller = control.controller
    controller.is_met, controller.checks = True, [controller._check(control.widths, 1.0)]
    controller.run(lambda check: None)
    assert len(controller.checks) == 2
    assert controller.checks[-1].widths == control.widths
    assert control.widths["conv1"] > 5


# ---------------------------------------------------------------- methods without a schedule


@pytest.mark.parametrize("factor", [0.8, 1.0, 1.3])
def test_a_method_is_repeated_until_the_measured_cost_meets_the_budget(factor: float) -> None:
    true, _ = models()
    limit, seen = 0.5 * true.dense, []
    control = Control(Uniform(), [true], [limit], scripted(true, lambda _: factor))
    control.controller.run(seen.append)
    checks = control.controller.checks
    assert control.controller.is_met
    assert checks[-1].measured["energy"] <= limit
    assert bool(control.controller.note) == (checks[-1].measured["energy"] < TOLERANCE_BAND[0] * limit)
    assert [check for checks_of_a_step in seen for check in checks_of_a_step] == checks


@pytest.mark.parametrize("fixed", [0.02, *(pytest.param(one, marks=pytest.mark.thorough) for one in (0.15, 0.3))])
@pytest.mark.parametrize("method", [Uniform, Greedy])
def test_a_result_far_below_the_budget_is_enlarged_and_can_be_resumed_anywhere(method: Any, fixed: float) -> None:
    """The model takes a part of the cost for fixed that in truth falls with the widths."""
    true, _ = models()
    limit = 0.5 * true.dense

    def measure(widths: Mapping[str, int]) -> MeasuredCost:
        return MeasuredCost({"energy": (true.at(widths) - fixed * true.dense) / (1 - fixed)}, "measured")

    control, states = Control(method(), [true], [limit], measure), []
    controller = control.controller
    controller.run(
        lambda _: states.append(copy.deepcopy((controller.state_dict(), control.context.model.state_dict())))
    )
    ratios = [check.measured["energy"] / limit for check in controller.checks]
    assert controller.is_met
    assert ratios[0] < 0.99
    assert 0.95 <= ratios[-1] <= 1
    assert len(ratios) <= MAX_CORRECTIONS + 1
    assert controller.checks[-1].widths == control.widths
    for state, weights in states:
        other = Control(method(), [true], [limit], measure)
        other.context.model.load_state_dict(weights)
        other.controller.load_state_dict(json.loads(json.dumps(state)))
        assert other.run().checks == controller.checks
        assert other.widths == control.widths


def test_where_a_larger_network_is_above_the_budget_the_smaller_one_is_the_result() -> None:
    true, _ = models()
    limit, first = 0.5 * true.dense, list[Mapping[str, int]]()

    def measure(widths: Mapping[str, int]) -> MeasuredCost:
        first.append(widths)
        return MeasuredCost({"energy": (0.9 if widths == first[0] else 1.1) * limit}, "measured")

    control = Control(Uniform(), [true], [limit], measure)
    controller = control.run()
    assert controller.is_met
    assert controller.note.startswith("the cost is 90.0% of the budget")
    assert controller.checks[-1].widths == first[0] == control.widths


class Stubborn(Uniform):
    """Done after one step, whatever the targets are."""

    steps = 0

    @property
    def is_done(self) -> bool:
        return self.steps > 0

    def step(self) -> None:
        self.steps += 1
        super().step()


@pytest.mark.parametrize(
    ("method", "readings", "settings", "note"),
    [
        (Stubborn, [1.02, 0.99], {}, "the cost is 102.0% of the budget, and uniform does not prune further."),
        (Uniform, [1.01] * 99, {}, f"the energy is 101.0% of its budget after {MAX_CORRECTIONS} corrections."),
        (Uniform, [1.5] * 99, {"min_width_ratio": 0.65}, "the minimum widths do not allow less"),
    ],
    ids=["measured once", "never agrees", "minimum widths"],
)
def test_a_method_that_misses_its_budget_says_why(
    method: Callable[[], Method], readings: list[float], settings: dict[str, Any], note: str
) -> None:
    """A network that does not change is measured once: measured often enough, it would pass by chance."""
    true, _ = models()
    limit, left = 0.9 * true.dense if "min" not in note else 0.5 * true.dense, iter(readings)
    measure: Measure = lambda _: MeasuredCost({"energy": next(left) * limit}, "measured")  # noqa: E731
    controller = Control(method(), [true], [limit], measure, **settings).run()
    assert not controller.is_met
    assert note in controller.note
    assert to_builtins(controller.checks)


# ---------------------------------------------------------------- tools


def test_initial_targets_follow_the_change_of_the_dense_network_since_the_profile() -> None:
    true, _ = models()
    dense = true.dense_profiled
    for now, expected in (({"energy": dense}, 0.3), ({"energy": 2 * dense}, 0.15), ({}, 0.3)):
        assert initial_targets([true], [0.3], MeasuredCost(now, "measured")) == pytest.approx([expected])
    profiled = replace(true, dense_sample=2 * true.dense)  # the model misses the dense network
    assert initial_targets([profiled], [0.3], MeasuredCost({"energy": dense}, "measured")) == pytest.approx([0.6])


@pytest.mark.parametrize("name", WIDE)
def test_masked_channels_stay_masked_while_others_are_trained(name: str) -> None:
    context: PruningContext = work_of(name)
    widths = context.round_widths([0.5 * group.width for group in context.graph.groups])
    context.keep_channels_(context.model, magnitudes(context), widths)
    before = copy.deepcopy(context.model.state_dict())
    context.train(context.model, 3, 1e-2, context.stream)
    assert context.widths() == widths
    assert any(not torch.equal(before[key], value) for key, value in context.model.state_dict().items())
    assert context.stream.total == 3
