"""The part of the callbacks that needs no other library."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ecc.energy import counted_cost
from ecc.errors import EccError, EccWarning
from ecc.graph import live_channels
from ecc.integrations.monitor import SolverMonitor
from ecc.methods import EccSolver
from methods.nets import macs_cost, traced, train

STEPS = 20


def test_a_wrapped_solver_is_found_and_the_network_is_slimmed() -> None:
    net, example, graph = traced("digits")
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS, lr=1e-2)
    monitor = SolverMonitor(net, graph)
    assert monitor.metrics() == {}
    monitor.begin([SimpleNamespace(optimizer=solver)], STEPS)
    before = monitor.metrics()
    train(net, solver, example, range(STEPS))
    after = monitor.metrics()
    assert after["ecc/energy"] <= after["ecc/target"] * (1 + 1e-6)
    assert after["ecc/energy"] < before["ecc/energy"]
    assert {name: after[f"ecc/width/{name}"] for name in solver.widths} == solver.widths
    counted = SolverMonitor(net, graph)
    costs = [counted_cost(graph, name) for name in ("macs", "params")]
    counted.begin([EccSolver(net, graph, costs, ["90%", "90%"], STEPS, lr=1e-2)], STEPS)
    assert {"ecc/macs", "ecc/params", "ecc/target"} <= counted.metrics().keys()  # no MACs under the name of joules
    assert "ecc/energy" not in counted.metrics()
    forward = net.forward
    net.forward = forward  # type: ignore[method-assign] # as accelerate does it for mixed precision
    monitor.end()
    assert net.forward is forward
    assert monitor.slim is not None
    assert "forward" not in vars(monitor.slim)
    net.eval()
    torch.testing.assert_close(monitor.slim.eval()(example), net(example), rtol=1e-4, atol=1e-5)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (monitor.slim, net)]
    assert sizes[0] < sizes[1]
    assert live_channels(net, graph) == solver.widths


def test_missing_and_second_solvers_and_short_trainings_are_refused() -> None:
    net, _, graph = traced("chain")
    monitor = SolverMonitor(net, graph)
    with pytest.raises(EccError, match="has 0 optimizers of type EccSolver; give exactly one"):
        monitor.begin([torch.optim.SGD(net.parameters(), lr=0.1), None], STEPS)
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS)
    with pytest.raises(EccError, match="has 2 optimizers of type EccSolver"):
        monitor.begin([solver, solver], STEPS)
    with pytest.raises(EccError, match=r"needs 20 steps, but the trainer makes 19, .* Create it with steps=19"):
        monitor.begin([solver], STEPS - 1)
    monitor.begin([solver], float("inf"))


def test_a_stopped_training_warns_and_slims_what_is_pruned() -> None:
    net, example, graph = traced("chain")
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS, lr=1e-2)
    monitor = SolverMonitor(net, graph)
    monitor.end()
    assert monitor.slim is None
    monitor.begin([solver], STEPS)
    train(net, solver, example, range(2))
    with pytest.warns(UserWarning, match="the budget is not met: .* after 10% of the 20 steps"):
        monitor.end()
    assert monitor.slim is not None


def test_channels_that_a_trainer_restores_are_masked_with_a_warning() -> None:
    """As Hugging Face's Trainer does with load_best_model_at_end, and Lightning with an average of weights."""
    net, example, graph = traced("digits")
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS, lr=1e-2)
    monitor = SolverMonitor(net, graph)
    monitor.begin([solver], STEPS)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    train(net, solver, example, range(STEPS))
    widths = solver.widths
    net.load_state_dict(before)
    assert live_channels(net, graph) != widths
    with pytest.warns(EccWarning, match=r"\d+ pruned channels were nonzero again"):
        monitor.end()
    assert monitor.slim is not None
    assert live_channels(net, graph) == widths
    assert graph.macs(widths) <= 0.5 * graph.macs()
