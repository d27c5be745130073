from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.energy import Cost, EnergyModel, counted_cost
from ecc.errors import InfeasibleBudget
from ecc.graph import ChannelGraph, live_channels, slim
from ecc.methods import EccSolver
from ecc.methods.cost_evaluator import MeasuredCost
from ecc.methods.landing import BAND, MARKS, MAX_DESCENTS, CostCheck, Landing, shares_of
from methods.jobs import WIDE, same_result, true_model, wide, wide_job, wide_task, wrong_model
from methods.nets import train

STEPS = 40


class Solve:
    """A solver, its landing, and scales of which the test says what they show."""

    def __init__(
        self,
        name: str,
        costs: Sequence[Cost],
        limits: Sequence[float],
        scales: Any,
        steps: int = STEPS,
        **settings: Any,
    ) -> None:
        self.net, self.example, self.graph = wide(name)
        self.solver = EccSolver(self.net, self.graph, list(costs), list(limits), steps, lr=1e-2, **settings)
        self.landing = Landing(self.solver, costs, limits, scales, steps)
        self.steps = steps

    def go(self, steps: range | None = None) -> Landing:
        def after(step: int) -> None:
            self.landing.after_step(step + 1)

        train(self.net, self.solver, self.example, steps or range(self.steps), after)
        return self.landing


def scales_of(true: EnergyModel, *others: EnergyModel, **fields: Any) -> Any:
    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        return MeasuredCost({model.resource: model.at(widths) for model in (true, *others)}, "estimated", **fields)

    return scales


def graph_of(name: str) -> ChannelGraph:
    return wide(name)[2]


# ---------------------------------------------------------------- the matrix


@pytest.mark.parametrize(("share", "factor"), [(0.6, 1.25), (0.35, 0.8)])
@pytest.mark.parametrize("name", WIDE)
def test_a_wrong_model_lands_by_weighing_where_belief_would_have_missed(name: str, share: float, factor: float) -> None:
    true, wrong = true_model(graph_of(name)), wrong_model(graph_of(name), factor)
    limit = share * true.dense

    believing = Solve(name, [wrong], [limit], scales_of(wrong))
    assert believing.go().landed
    believed = true.at(believing.solver.widths) / limit
    assert not BAND[0] <= believed <= BAND[1]
    assert (believed > 1) == (factor < 1)

    weighing = Solve(name, [wrong], [limit], scales_of(true))
    landing = weighing.go()
    found = true.at(weighing.solver.widths) / limit
    assert landing.landed
    assert landing.note == ""
    assert BAND[0] <= found <= BAND[1]

    # What was weighed is what is left, and the cut network is the masked one.
    assert landing.weighings[-1].widths == weighing.solver.widths == live_channels(weighing.net, weighing.graph)
    small = slim(weighing.net.eval(), weighing.graph)
    torch.testing.assert_close(small(weighing.example), weighing.net(weighing.example), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- when, and what it targets at


def test_it_weighs_once_at_each_mark_and_not_after_it_has_landed() -> None:
    true = true_model(graph_of("chain"))
    solve = Solve("chain", [true], [0.5 * true.dense], scales_of(true))
    seen: list[tuple[int, float]] = []

    def after(step: int) -> None:
        before = solve.solver.descent
        if solve.landing.after_step(step + 1) is not None:
            seen.append((step + 1, before))

    train(solve.net, solve.solver, solve.example, range(STEPS), after)
    assert [weighing.step for weighing in solve.landing.weighings] == [step for step, _ in seen]
    assert len(seen) == len(MARKS)
    for (_, descent), mark in zip(seen, MARKS, strict=True):
        assert mark <= descent < mark + 1 / 24 + 1e-9  # 24 steps of the ramp
    assert [weighing.descent for weighing in solve.landing.weighings] == [descent for _, descent in seen]


@pytest.mark.parametrize(("relative_ci", "margin"), [(None, 0.002), (0.0001, 0.002), (0.008, 0.008), (0.2, 0.015)])
def test_aims_are_below_the_budget_by_as_much_as_the_scales_may_err(relative_ci: float | None, margin: float) -> None:
    graph = graph_of("residual")
    true, wrong, params = true_model(graph), wrong_model(graph, 0.8), counted_cost(graph, "params")
    limits = [0.6 * true.dense, 20_000.0]
    landing = Solve("residual", [wrong, params], limits, scales_of(true, relative_ci=relative_ci)).go()
    for weighing in landing.weighings:
        error = true.at(weighing.widths) / wrong.at(weighing.widths)
        assert weighing.relative_ci == relative_ci
        assert weighing.weighed["energy"] == pytest.approx(true.at(weighing.widths))
        assert weighing.predicted["energy"] == pytest.approx(wrong.at(weighing.widths))
        assert weighing.targets["energy"] == pytest.approx((1 - margin) * limits[0] / error)
        assert weighing.targets["params"] == limits[1]  # counted: nothing to correct
    assert landing.weighings[-1].weighed["energy"] <= (1 - margin) * limits[0] * 1.005


def test_noisy_scales_end_lower_than_exact_ones() -> None:
    true = true_model(graph_of("transformer MLP"))  # of fine steps
    ends = []
    for relative_ci in (None, 0.015):
        scales = scales_of(true, relative_ci=relative_ci)
        landing = Solve("transformer MLP", [true], [0.5 * true.dense], scales).go()
        ends.append(landing.weighings[-1].weighed["energy"])
    assert ends[1] < 0.99 * ends[0]


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 8])
def test_a_short_solve_is_judged_too(steps: int) -> None:
    graph = graph_of("chain")
    true, wrong = true_model(graph), wrong_model(graph, 0.8)
    limit = 0.5 * true.dense
    solve = Solve("chain", [wrong], [limit], scales_of(true), steps=steps)
    landing = solve.go()
    assert landing.weighings[-1].widths == solve.solver.widths
    share = true.at(solve.solver.widths) / limit
    assert landing.landed == (share <= 1)
    assert bool(landing.note) == (not BAND[0] <= share <= BAND[1])
    if steps >= 4:
        assert landing.landed


def test_a_solver_that_lags_behind_is_weighed_at_the_last_step() -> None:
    """As under a scaler that skips steps: the loop has made all of its, the solver has not."""
    true = true_model(graph_of("chain"))
    solve = Solve("chain", [true], [0.5 * true.dense], scales_of(true))
    train(solve.net, solve.solver, solve.example, range(14), lambda step: None)
    assert solve.solver.descent < 1
    weighing = solve.landing.after_step(STEPS)
    assert weighing is not None
    assert weighing.widths == solve.solver.widths
    assert not solve.landing.landed
    assert "no steps are left" in solve.landing.note


# ---------------------------------------------------------------- several descents, and none


def changing(true: EnergyModel, factor: Any) -> Any:
    """CostEvaluator that show `factor(number of the weighing)` times the truth."""
    calls: list[int] = []

    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        calls.append(len(calls))
        return MeasuredCost({"energy": factor(calls[-1]) * true.at(widths)}, "measured", 0.002)

    return scales


def test_above_the_budget_it_descends_again() -> None:
    true = true_model(graph_of("residual"))
    limit = 0.6 * true.dense
    solve = Solve("residual", [true], [limit], changing(true, lambda call: 1.0 if call < 3 else 1.06))
    landing = solve.go()
    shares = [weighing.weighed["energy"] / limit for weighing in landing.weighings]
    assert shares[3] > 1  # at the end of the first
    assert BAND[0] <= shares[-1] <= 1
    assert (landing.landed, landing.note, landing.state()["descents"]) == (True, "", 2)
    assert 1.06 * true.at(solve.solver.widths) <= limit


def test_it_gives_up_after_so_many_descents_and_says_where_it_lies() -> None:
    true = true_model(graph_of("residual"))
    solve = Solve("residual", [true], [0.6 * true.dense], changing(true, lambda call: 1.03 ** max(0, call - 2)))
    landing = solve.go()
    assert not landing.landed
    assert landing.state()["descents"] == MAX_DESCENTS
    share = landing.weighings[-1].weighed["energy"] / (0.6 * true.dense)
    assert landing.note == f"the result lies at {share:.1%} of the budget of energy after {MAX_DESCENTS} descents."
    assert len(landing.weighings) == len(MARKS) - 1 + MAX_DESCENTS


def test_when_the_steps_run_out_it_says_so() -> None:
    true = true_model(graph_of("residual"))
    solve = Solve("residual", [true], [0.6 * true.dense], changing(true, lambda call: 1.05**call), steps=6)
    landing = solve.go()
    assert not landing.landed
    assert "and no steps are left" in landing.note
    assert landing.weighings[-1].step == 6


def test_what_cannot_be_reached_at_the_end_is_a_note_and_on_the_way_an_error() -> None:
    true = true_model(graph_of("chain"))
    late = Solve("chain", [true], [0.5 * true.dense], changing(true, lambda call: 1.0 if call < 3 else 9.0)).go()
    assert not late.landed
    assert "the least this network can use" in late.note
    early = Solve("chain", [true], [0.5 * true.dense], changing(true, lambda call: 9.0))
    with pytest.raises(InfeasibleBudget, match="the least this network can use"):
        early.go()


def test_a_budget_above_the_dense_network_removes_nothing() -> None:
    true = true_model(graph_of("chain"))
    solve = Solve("chain", [true], [1.5 * true.dense], scales_of(true))
    landing = solve.go()
    assert solve.solver.widths == solve.graph.full_widths
    assert landing.landed
    assert landing.note == "the dense network is at 66.7% of the budget of energy as it is."


# ---------------------------------------------------------------- two budgets


@pytest.mark.parametrize(("energy_share", "params_share"), [(0.7, 0.5), (0.35, 0.8)])
def test_energy_and_parameters_both_hold(energy_share: float, params_share: float) -> None:
    graph = graph_of("residual")
    true, wrong, params = true_model(graph), wrong_model(graph, 0.8), counted_cost(graph, "params")
    limits = [energy_share * true.dense, params_share * float(graph.parameters())]
    solve = Solve("residual", [wrong, params], limits, scales_of(true))
    landing = solve.go()
    widths = solve.solver.widths
    shares = {"energy": true.at(widths) / limits[0], "params": float(graph.parameters(widths)) / limits[1]}
    assert landing.landed
    assert landing.note == ""
    assert BAND[0] <= max(shares.values()) <= 1
    small = slim(solve.net, graph)
    assert sum(parameter.numel() for parameter in small.parameters()) <= limits[1]
    last = landing.weighings[-1]
    weighed = MeasuredCost(last.weighed, last.label)
    assert shares_of(weighed, last.predicted, [wrong, params], limits) == pytest.approx(shares)


def test_energy_and_latency_are_corrected_each_by_its_own_error() -> None:
    graph = graph_of("residual")
    true = [true_model(graph), true_model(graph, "latency")]
    wrong = [wrong_model(graph, 0.8), wrong_model(graph, 1.25, "latency")]
    limits = [0.6 * true[0].dense, 0.5 * true[1].dense]
    solve = Solve("residual", wrong, limits, scales_of(*true))
    landing = solve.go()
    shares = [model.at(solve.solver.widths) / limit for model, limit in zip(true, limits, strict=True)]
    assert landing.landed
    assert max(shares) <= 1
    assert max(shares) >= BAND[0]
    for weighing in landing.weighings:
        for model, other, limit in zip(true, wrong, limits, strict=True):
            error = model.at(weighing.widths) / other.at(weighing.widths)
            assert weighing.targets[model.resource] == pytest.approx(0.998 * limit / error)


# ---------------------------------------------------------------- to go on later


@pytest.mark.parametrize("stop", [3, 14, 26, 30])
def test_a_restored_landing_goes_on_as_the_first_would_have(stop: int) -> None:
    graph = graph_of("residual")
    true, wrong = true_model(graph), wrong_model(graph, 0.7)

    def made() -> Solve:
        return Solve("residual", [wrong], [0.5 * true.dense], scales_of(true))

    whole = made()
    whole.go()
    first, second = made(), made()
    first.go(range(stop))
    state = json.loads(json.dumps(first.landing.state()))  # plain values only
    second.net.load_state_dict(copy.deepcopy(first.net.state_dict()))
    second.solver.load_state_dict(copy.deepcopy(first.solver.state_dict()))
    second.landing.restore(state)
    assert second.landing.state() == first.landing.state()
    second.go(range(stop, STEPS))
    assert second.landing.state() == whole.landing.state()
    assert second.landing.weighings == whole.landing.weighings
    assert weights(second.net) == weights(whole.net)


def weights(net: nn.Module) -> list[Any]:
    tensors: list[Tensor] = list(net.state_dict().values())
    return [tensor.tolist() for tensor in tensors]


def test_the_band_is_a_setting() -> None:
    true = true_model(graph_of("chain"))
    solve = Solve("chain", [true], [0.5 * true.dense], scales_of(true))
    solve.landing = Landing(solve.solver, [true], [0.5 * true.dense], scales_of(true), STEPS, band=(0.9, 0.95))
    landing = solve.go()
    share = landing.weighings[-1].weighed["energy"] / (0.5 * true.dense)
    assert landing.landed
    assert 0.9 <= share <= 0.95


# ---------------------------------------------------------------- channels that are silent from the start


def nearly_silent() -> Any:
    """A task whose network was pruned and not cut: of 96 channels 5 are read, which is less than the floor."""
    task = wide_task()
    model: Any = task.model
    with torch.no_grad():
        for tensor in (model.conv1.weight, model.conv1.bias, model.bn1.weight, model.bn1.bias):
            tensor[5:] = 0
        model.conv2.weight[:, 5:] = 0
    return task


def test_what_is_told_is_what_is_there_where_most_of_a_group_is_silent(tmp_path: Path) -> None:
    result = wide_job("70%", task=nearly_silent(), finetune_steps=4).run(tmp_path / "run")
    shapes = {name: int(getattr(result.model, name).weight.shape[0]) for name in ("conv1", "conv2", "head")}
    assert result.widths == shapes
    assert shapes["conv1"] == 5
    told = result.summary["budgets"]["energy"]
    assert told["result"] == pytest.approx(true_model(result.graph).at(result.widths))
    again = wide_job("70%", task=nearly_silent(), finetune_steps=4).run(tmp_path / "run")
    assert same_result(result, again)


def test_a_channel_that_is_read_again_after_the_landing_is_weighed() -> None:
    net, example, graph = wide("chain")
    module: Any = net
    with torch.no_grad():
        module.conv2.weight[:, 5:] = 0  # as before a head of zeros: it will be trained
    cost, weighed = true_model(graph), []

    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        weighed.append(dict(widths))
        return MeasuredCost({"energy": cost.at(widths)}, "measured")

    solver = EccSolver(net, graph, cost, "90%", 8, lr=1e-3)
    landing = Landing(solver, [cost], [0.9 * cost.dense], scales, 8)
    landing.after_step(1)
    assert solver.widths["conv1"] == 5
    landing.landed = True
    landing.weighings.append(CostCheck(0, 1.0, solver.widths, {}, {}, "measured", None, {}))
    assert landing.after_step(7) is None
    train(net, solver, example, range(8))
    assert solver.widths["conv1"] > 5
    found = landing.after_step(8)
    assert found is not None
    assert found.widths == solver.widths == weighed[-1]


@pytest.mark.parametrize("relative_ci", [None, 0.01])
def test_a_network_that_is_within_its_budget_is_left_whole(relative_ci: float | None) -> None:
    graph = graph_of("chain")
    true = true_model(graph)
    solve = Solve("chain", [true], [true.dense], scales_of(true, relative_ci=relative_ci))
    landing = solve.go()
    assert solve.solver.widths == graph.full_widths
    assert landing.landed
    assert landing.note == "the dense network is at 100.0% of the budget of energy as it is."
