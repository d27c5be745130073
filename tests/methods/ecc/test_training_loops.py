"""The solver in the loops that people have: schedulers, scalers, clipping, accumulation, averages."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from ecc.graph import live_channels, slim
from ecc.methods import EccSolver
from methods.nets import macs_cost, traced, train

STEPS = 20


def made(name: str = "digits", **settings: Any) -> tuple[nn.Module, Any, Any, EccSolver]:
    net, example, graph = traced(name)
    return net, example, graph, EccSolver(net, graph, macs_cost(graph), "50%", STEPS, **{"lr": 1e-2, **settings})


def test_a_learning_rate_scheduler_sets_the_rate_of_the_optimizer_within() -> None:
    net, example, _, solver = made()
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(solver, T_max=STEPS)
    rates = []

    def after(_: int) -> None:
        scheduler.step()
        rates.append(solver.inner.param_groups[0]["lr"])

    train(net, solver, example, range(STEPS), after)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert solver.is_met


def test_a_step_that_the_scaler_skips_does_not_count() -> None:
    net, example, _, solver = made()
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(net.state_dict())
    scaler.scale(net(example).square().mean()).backward()
    next(net.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
    scaler.step(solver)
    scaler.update()
    solver.zero_grad()
    assert solver.progress == 0.0
    assert scaler.get_scale() == 4.0
    assert all(torch.equal(parameter, before[name]) for name, parameter in net.named_parameters())
    for _ in range(STEPS):
        scaler.scale(net(example).square().mean()).backward()
        scaler.step(solver)
        scaler.update()
        solver.zero_grad()
    assert solver.progress == 1.0
    assert solver.is_met


def test_scaled_gradients_give_the_same_network() -> None:
    """Powers of two scale and unscale without rounding."""
    results = []
    for scale in (1.0, 1024.0):
        net, example, _, solver = made("chain")
        scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=10_000)
        for _ in range(STEPS):
            scaler.scale(net(example).square().mean()).backward()
            scaler.step(solver)
            scaler.update()
            solver.zero_grad()
        results.append((solver.widths, [p.clone() for p in net.parameters()]))
    assert results[0][0] == results[1][0]
    for first, second in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_accumulated_gradients_count_as_one_step() -> None:
    net, example, _, solver = made()
    for batch in range(2 * STEPS):
        net(example).square().mean().div(2).backward()
        if batch % 2:
            solver.step()
            solver.zero_grad()
    assert solver.progress == 1.0
    assert solver.is_met
    assert all(parameter.grad is None for parameter in net.parameters())


def test_gradients_can_be_clipped() -> None:
    net, example, graph, solver = made()
    for _ in range(STEPS):
        (1e3 * net(example).square().mean()).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
        assert sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None) <= 1.01e-6
        solver.step()
        solver.zero_grad()
    assert live_channels(net, graph) == solver.widths
    assert solver.is_met


def test_an_average_of_weights_is_cut_like_the_network() -> None:
    net, example, graph, solver = made()
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    train(net, solver, example, range(STEPS), lambda _: average.update_parameters(net))
    assert live_channels(average.module, graph) != solver.widths  # it remembers what is dead
    solver.mask_(average.module)
    assert live_channels(average.module, graph) == solver.widths
    average.eval()
    small = slim(average.module, graph)
    torch.testing.assert_close(small(example), average.module(example), rtol=1e-4, atol=1e-5)


def test_a_closure_is_called_and_its_loss_comes_back() -> None:
    net, example, _, solver = made("chain")

    def closure() -> Any:
        solver.zero_grad()
        loss = net(example).square().mean()
        loss.backward()
        return loss.detach()

    losses = [float(solver.step(closure) or 0) for _ in range(STEPS)]
    assert 0 < losses[-1] < losses[0]
    assert solver.is_met


def test_hooks_run_before_and_after_the_whole_step() -> None:
    net, example, graph, solver = made("chain", warm_up=0.0)
    seen = []
    solver.register_step_post_hook(lambda *_: seen.append(live_channels(net, graph) == solver.widths))
    train(net, solver, example, range(STEPS))
    assert seen == [True] * STEPS


def test_two_runs_with_the_same_gradients_decide_alike() -> None:
    runs = []
    for seed in (0, 0):
        net, example, graph = traced("digits", seed)
        solver = EccSolver(net, graph, macs_cost(graph), "40%", STEPS, lr=1e-2)
        train(net, solver, example, range(STEPS))
        runs.append(solver.state_dict()["ecc"]["tensors"])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
