"""Mistakes of a training loop are told: another network's optimizer, no gradients, a budget that is not met."""

from __future__ import annotations

import copy
import gc
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from ecc.energy import nonzero_cost
from ecc.errors import BadFile, EccError, EccWarning
from ecc.graph import ChannelGraph, slim
from ecc.measure.meters.platform import Platform
from ecc.methods.ecc.optimizer_wrapper import BudgetedOptimizer
from ecc.methods.ecc.solver import EccSolver
from ecc.methods.ecc.weights import WeightSolver
from methods.nets import macs_cost, traced, train

STEPS = 12
Make = Callable[..., BudgetedOptimizer]


def of_channels(net: nn.Module, graph: ChannelGraph, budget: str = "60%", **settings: Any) -> BudgetedOptimizer:
    return EccSolver(net, graph, macs_cost(graph), budget, STEPS, **settings)


def of_weights(net: nn.Module, graph: ChannelGraph, budget: str | None = "60%", **settings: Any) -> BudgetedOptimizer:
    return WeightSolver(net, nonzero_cost(graph, Platform("eyeriss")), budget, STEPS, **settings)


both = pytest.mark.parametrize("make", [of_channels, of_weights])


# ---------------------------------------------------------------- the optimizer


@both
def test_an_optimizer_of_another_network_is_refused(make: Make) -> None:
    net, _, graph = traced("residual")
    other = AdamW(copy.deepcopy(net).parameters())
    first, count = next(iter(net.named_parameters()))[0], len(list(net.parameters()))
    words = rf"\(AdamW\) holds none of the model's {count} parameters, such as '{first}'.*AdamW\(model.parameters\(\)"
    with pytest.raises(EccError, match=words):
        make(net, graph, optimizer=other)


@both
def test_parameters_that_are_not_trained_are_counted(make: Make) -> None:
    net, _, graph = traced("residual")
    named = dict(net.named_parameters())
    first = next(iter(named))
    head = SGD(list(named.values())[1:], lr=0.1)
    with pytest.warns(EccWarning, match=rf"\(SGD\) does not hold 1 of the model's {len(named)} .* such as '{first}'"):
        make(net, graph, optimizer=head)
    named[first].requires_grad_(False)  # on purpose
    make(net, graph, optimizer=head)


def test_an_optimizer_may_hold_more_than_the_network() -> None:
    net, _, graph = traced("residual")
    solver = of_channels(net, graph, optimizer=SGD([*net.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1))
    assert len(solver.param_groups[0]["params"]) == len([*net.parameters()]) + 1


# ---------------------------------------------------------------- gradients


@both
def test_steps_without_gradients_warn_once(make: Make) -> None:
    net, example, graph = traced("residual")
    solver = make(net, graph)
    train(net, solver, example, range(2))
    count = len(list(net.parameters()))
    with pytest.warns(
        EccWarning, match=rf"none of the optimizer's {count} parameters has a gradient.*backward"
    ) as told:
        solver.step()
    assert told[0].filename == __file__
    solver.step()  # a second warning would be an error here


def test_a_closure_that_makes_gradients_is_no_mistake() -> None:
    net, example, graph = traced("residual")
    solver = of_channels(net, graph)

    def closure() -> float:
        loss = net(example).square().mean()
        loss.backward()
        return float(loss.detach())

    assert solver.step(closure) is not None
    solver.zero_grad()
    with pytest.warns(EccWarning, match="has a gradient"):
        solver.step(lambda: 0.0)


def test_a_step_that_a_gradient_scaler_skips_is_no_mistake() -> None:
    net, example, graph = traced("residual")
    solver = of_channels(net, graph, optimizer=SGD(net.parameters(), lr=0.1))
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for factor in (float("inf"), 1.0):
        scaler.scale(net(example).square().mean() * factor).backward()
        scaler.step(solver)
        scaler.update()
        solver.zero_grad()
    assert solver.progress == 1 / STEPS


# ---------------------------------------------------------------- slimming


def test_slimming_too_early_warns() -> None:
    net, example, graph = traced("residual")
    solver = of_channels(net, graph, lr=1e-2)
    train(net, solver, example, range(2))
    cost, limit = float(solver.energy), solver.limits[0]
    words = f"energy {cost:.4g} J, and the limit is {limit:.4g}, after 17% of the 12 steps. Call step() 10 more times"
    with pytest.warns(EccWarning, match=re.escape(words)) as told:
        slim(net, graph)
    assert told[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slim(copy.deepcopy(net), graph)  # no solver prunes the copy
        train(net, solver, example, range(2, STEPS))
        slim(net, graph)


def test_a_budget_that_all_steps_did_not_meet_has_another_way_out() -> None:
    net, example, graph = traced("residual")
    solver = of_channels(net, graph, solver="admm", lr=1e-6)
    train(net, solver, example, range(STEPS))
    assert not solver.is_met
    with pytest.warns(EccWarning, match=r"after 100% of the 12 steps. Call set_limit\(\) with more steps"):
        slim(net, graph)


def test_a_solver_that_is_gone_says_nothing() -> None:
    net, _, graph = traced("residual")
    solver = of_channels(net, graph)
    del solver
    gc.collect()
    small = slim(net, graph)  # a warning would be an error
    assert [p.shape for p in small.parameters()] == [p.shape for p in net.parameters()]


# ---------------------------------------------------------------- states


@both
def test_a_state_of_another_optimizer_is_refused(make: Make) -> None:
    net, example, graph = traced("residual")
    saved = make(net, graph, optimizer=SGD(net.parameters(), lr=0.1)).state_dict()
    solver = make(net, graph, optimizer=AdamW(net.parameters(), lr=0.1))
    with pytest.raises(BadFile, match="saved with the optimizer SGD, and the solver has AdamW"):
        solver.load_state_dict(saved)
    train(net, solver, example, range(1))  # nothing of the state was taken


@both
def test_a_state_of_another_budget_is_refused(make: Make) -> None:
    net, _, graph = traced("residual")
    saved = make(net, graph, "60%").state_dict()
    solver = make(net, graph, "70%")
    limits = solver.limits
    with pytest.raises(BadFile, match=r"budget 60% of dense, and this solver has 70% of dense. .*set_limit"):
        solver.load_state_dict(saved)
    assert solver.limits == limits
    make(net, graph, "60%").load_state_dict(saved)


@pytest.mark.parametrize("budget", ["80%", "70%"])
def test_a_budget_that_was_changed_on_the_way_can_be_taken_up(budget: str) -> None:
    net, example, graph = traced("residual")
    first = of_channels(net, graph, "80%", lr=1e-2)
    train(net, first, example, range(2))
    first.set_limit("70%")
    again = of_channels(net, graph, budget, lr=1e-2)  # as it was made, or as it was then
    again.load_state_dict(first.state_dict())
    assert again.limits == first.limits
    of_channels(net, graph, "80%").load_state_dict(again.state_dict())


def test_a_state_of_two_budgets_is_not_of_one() -> None:
    net, _, graph = traced("residual")
    cost = macs_cost(graph)
    two = EccSolver(net, graph, [cost, cost], ["60%", "70%"], STEPS)
    with pytest.raises(BadFile, match="budget 60% of dense and 70% of dense, and this solver has 60% of dense"):
        of_channels(net, graph, "60%").load_state_dict(two.state_dict())
