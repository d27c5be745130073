"""What both solvers have in common; each is tested at length in its own file."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

from ecc.energy import nonzero_cost
from ecc.errors import BadFile, EccError, InfeasibleBudget
from ecc.measure.meters.platform import Platform
from ecc.methods.ecc.admm import AdmmSettings
from ecc.methods.ecc.constraints import ResourceConstraints
from ecc.methods.ecc.optimizer_wrapper import BudgetedOptimizer, adam_of, checked_ends, device_of, shares_of
from ecc.methods.ecc.solver import EccSolver
from ecc.methods.ecc.weights import WeightSolver
from methods.nets import bare_graph, macs_cost, pair_cost, traced, train

STEPS = 12


def both() -> list[tuple[Any, Any, Any]]:
    """Each solver on a network of its own."""
    found = []
    for kind in (EccSolver, WeightSolver):
        net, example, graph = traced("residual")
        if kind is EccSolver:
            solver: BudgetedOptimizer = EccSolver(net, graph, macs_cost(graph), "60%", STEPS, lr=1e-2)
        else:
            solver = WeightSolver(net, nonzero_cost(graph, Platform("eyeriss")), "60%", STEPS, lr=1e-2)
        found.append((net, example, solver))
    return found


@pytest.mark.parametrize("number", [0, 1])
def test_a_descent_is_told_corrected_and_begun_again(number: int) -> None:
    net, example, solver = both()[number]
    dense = float(solver.energy)
    assert (solver.progress, solver.descent, solver.is_met) == (0.0, 0.0, False)
    train(net, solver, example, range(4))
    assert 0 < solver.descent < 1
    assert solver.target < dense
    with pytest.raises(InfeasibleBudget):
        solver.retarget("1%")
    solver.retarget("70%")
    assert solver.limits == pytest.approx((0.7 * dense,))
    train(net, solver, example, range(4, STEPS))
    assert (solver.progress, solver.descent, solver.is_met) == (1.0, 1.0, True)
    assert solver.target == solver.limits[0]
    assert solver.cost[0] == solver.energy <= 0.7 * dense * (1 + 1e-9)
    assert solver.duals.energy > 0
    with pytest.raises(EccError, match=r"the descent has ended.* set_limit begins another"):
        solver.retarget("60%")
    solver.set_limit("50%", 5, ramp=1.0)
    assert not solver.is_met
    train(net, solver, example, range(5))
    assert solver.is_met


@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_that_would_be_hollow_are_refused(number: int, copied: Any) -> None:
    with pytest.raises(EccError, match="cannot be copied or pickled; keep its state_dict"):
        copied(both()[number][2])


def test_the_papers_pace_is_that_of_the_fastest_group() -> None:
    net, example, graph = traced("residual")
    parameters = list(net.parameters())
    adam = torch.optim.Adam([{"params": parameters[:1], "lr": 0.0}, {"params": parameters[1:], "lr": 1e-2}])
    constants = AdmmSettings(width_lr=30.0, width_penalty=5000.0, energy_penalty=5000.0)
    solver = EccSolver(net, graph, macs_cost(graph), "60%", 60, optimizer=adam, solver=constants)
    train(net, solver, example, range(60))
    assert solver.widths != graph.full_widths


def test_a_state_of_one_is_none_of_the_other() -> None:
    (_, _, channels), (_, _, weights) = both()
    with pytest.raises(BadFile, match="belongs to network weights of"):
        channels.load_state_dict(weights.state_dict())
    with pytest.raises(BadFile, match="the solver to weights of"):
        weights.load_state_dict(channels.state_dict())
    for solver in (channels, weights):
        with pytest.raises(BadFile, match=f"not a state of {type(solver).__name__}"):
            solver.load_state_dict(solver.inner.state_dict())


def test_what_constructors_share() -> None:
    net, _, _ = traced("chain")
    net.head.weight.requires_grad_(False)  # type: ignore[union-attr]
    adam = adam_of(net, 0.25)
    assert adam.defaults["lr"] == 0.25
    assert len(adam.param_groups[0]["params"]) == len(list(net.parameters())) - 1
    assert device_of(net) == torch.device("cpu") == device_of(torch.nn.ReLU())
    limits = ResourceConstraints([pair_cost([4, 5], [(0, 1)], [1.0])], bare_graph([4, 5]), "cpu")
    assert checked_ends(limits, "50%", torch.tensor([2, 2]), "min_width_ratio") == (0.5,)
    with pytest.raises(InfeasibleBudget, match="lower min_width_ratio"):
        checked_ends(limits, "10%", torch.tensor([2, 2]), "min_width_ratio")
    assert shares_of(limits, torch.tensor([2, 5])) == (0.5,)
