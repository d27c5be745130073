"""The part of the callbacks that needs no other library."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from ecc.errors import EccError
from ecc.graph import live_channels
from ecc.integrations.watching import Watch
from ecc.methods import EccSolver
from methods.nets import macs_cost, traced, train

STEPS = 20


def test_the_solver_is_found_within_what_wraps_it_and_the_network_is_cut() -> None:
    net, example, graph = traced("digits")
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS, lr=1e-2)
    watch = Watch(net, graph)
    assert watch.facts() == {}
    watch.begin([SimpleNamespace(optimizer=solver)], STEPS)
    before = watch.facts()
    train(net, solver, example, range(STEPS))
    after = watch.facts()
    assert after["ecc/energy"] <= after["ecc/target"] * (1 + 1e-6)
    assert after["ecc/energy"] < before["ecc/energy"]
    assert {name: after[f"ecc/width/{name}"] for name in solver.widths} == solver.widths
    forward = net.forward
    net.forward = forward  # type: ignore[method-assign] # as accelerate does it for mixed precision
    watch.end()
    assert net.forward is forward
    assert watch.slim is not None
    assert "forward" not in vars(watch.slim)
    net.eval()
    torch.testing.assert_close(watch.slim.eval()(example), net(example), rtol=1e-4, atol=1e-5)
    sizes = [sum(p.numel() for p in model.parameters()) for model in (watch.slim, net)]
    assert sizes[0] < sizes[1]
    assert live_channels(net, graph) == solver.widths


def test_a_missing_or_a_second_solver_and_a_short_training_are_refused() -> None:
    net, _, graph = traced("chain")
    watch = Watch(net, graph)
    with pytest.raises(EccError, match="has 0 EccSolvers among its optimizers; give it one"):
        watch.begin([torch.optim.SGD(net.parameters(), lr=0.1), None], STEPS)
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS)
    with pytest.raises(EccError, match="has 2 EccSolvers"):
        watch.begin([solver, solver], STEPS)
    with pytest.raises(EccError, match=r"made for 20 steps, and the trainer makes 19: .* Make it with steps=19"):
        watch.begin([solver], STEPS - 1)
    watch.begin([solver], float("inf"))


def test_a_training_that_was_stopped_warns_and_cuts_what_is_dead() -> None:
    net, example, graph = traced("chain")
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS, lr=1e-2)
    watch = Watch(net, graph)
    watch.end()
    assert watch.slim is None
    watch.begin([solver], STEPS)
    train(net, solver, example, range(2))
    with pytest.warns(UserWarning, match="the budget is not met: .* after 10% of the 20 steps"):
        watch.end()
    assert watch.slim is not None


def test_channels_that_a_trainer_brings_back_are_silenced_and_told() -> None:
    """As Hugging Face's Trainer does with load_best_model_at_end, and Lightning with an average of weights."""
    net, example, graph = traced("digits")
    solver = EccSolver(net, graph, macs_cost(graph), "50%", STEPS, lr=1e-2)
    watch = Watch(net, graph)
    watch.begin([solver], STEPS)
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    train(net, solver, example, range(STEPS))
    widths = solver.widths
    net.load_state_dict(before)
    assert live_channels(net, graph) != widths
    with pytest.warns(UserWarning, match=r"\d+ channels that the solver had removed were alive again"):
        watch.end()
    assert watch.slim is not None
    assert live_channels(net, graph) == widths
    assert graph.macs(widths) <= 0.5 * graph.macs()
