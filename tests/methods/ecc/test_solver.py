"""`EccSolver`, and what it shares with `WeightSolver`: budgets, states, warnings, and the usual training loops."""

from __future__ import annotations

import copy
import gc
import pickle
import random
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from step_time import MlpStack
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, RMSprop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode

from ecc.energy import nonzero_cost
from ecc.errors import BadFile, EccError, EccWarning, InfeasibleBudget
from ecc.formatting import si
from ecc.graph import ChannelGraph, live_channels, slim, trace_channels
from ecc.measure.meters.platform import Platform
from ecc.methods import EccSolver, PaperSettings, WeightSolver
from ecc.methods.ecc.optimizer_wrapper import PruningOptimizer
from methods.nets import NETS, Kernels, assert_resumes_exactly, bytes_cost, macs_cost, traced, train

STEPS = 20
LR = 1e-2
Make = Callable[..., PruningOptimizer]


def channels(
    net: nn.Module, graph: ChannelGraph, budget: Any = "50%", steps: int = STEPS, **settings: Any
) -> EccSolver:
    return EccSolver(net, graph, macs_cost(graph), budget, steps, **{"lr": LR, **settings})


def weights(
    net: nn.Module, graph: ChannelGraph, budget: Any = "60%", steps: int = STEPS, **settings: Any
) -> WeightSolver:
    return WeightSolver(net, nonzero_cost(graph, Platform("eyeriss")), budget, steps, **{"lr": LR, **settings})


both = pytest.mark.parametrize("make", [channels, weights])


# ---------------------------------------------------------------- every network


@pytest.mark.parametrize(
    ("name", "budget", "kind"),
    [
        *((name, "50%", "scheduled") for name in NETS),
        *(
            pytest.param(name, "50%", "admm", marks=[pytest.mark.thorough] * (name not in ("residual", "grouped")))
            for name in NETS
        ),
        *(("residual", "35%", kind) for kind in ("scheduled", "admm")),
        ("digits", "80%", "scheduled"),
    ],
)
def test_the_budget_is_met_on_schedule_resume_is_exact_and_slim_is_equal(name: str, budget: str, kind: str) -> None:
    net, example, graph = traced(name)
    solver = channels(net, graph, budget, solver=kind)
    dense, fraction = float(macs_cost(graph).value(graph.widths())), float(budget[:-1]) / 100
    saved: dict[str, Any] = {}
    costs = [dense]
    stop = random.randrange(1, STEPS - 1)

    def after(step: int) -> None:
        costs.append(float(solver.energy))
        if kind == "scheduled":  # the channels of admm follow their bounds
            assert costs[-1] <= solver.target * (1 + 1e-9)
        if step == stop:
            saved.update(copy.deepcopy({"net": net.state_dict(), "solver": solver.state_dict()}))

    train(net, solver, example, range(STEPS), after)
    assert costs == sorted(costs, reverse=True)
    assert costs[1] == dense  # the warm-up
    assert costs[1 + solver._schedule.ramp_end] == costs[-1] <= fraction * dense * (1 + 1e-9)
    assert solver.is_met
    assert solver.progress == 1.0
    assert solver.limits == pytest.approx((fraction * dense,))
    assert solver.widths == live_channels(net, graph)

    other, _, _ = traced(name, seed=99)
    resumed = channels(other, graph, budget, solver=kind)
    assert_resumes_exactly(net, other, resumed, saved, example, range(stop + 1, STEPS))
    assert resumed.numbers == solver.numbers

    small = slim(net.eval(), graph)
    torch.testing.assert_close(small(example), net(example), rtol=1e-4, atol=1e-5)
    assert sum(p.numel() for p in small.parameters()) == int(graph.parameters(solver.widths))
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize(("importance", "kept", "last"), [("adam_norm", 2.5, 0.5), ("taylor", 2.5 * 0.5, 0.25 * 2.75)])
def test_two_steps_by_hand(importance: str, kept: float, last: float) -> None:
    """fc1 (1 -> 3), fc2 (3 -> 1), gradients given: SGD with lr 1, then the smallest w^2, or (w g)^2, is removed."""
    net = nn.Sequential(nn.Linear(1, 3, bias=False), nn.Linear(3, 1, bias=False))
    graph = trace_channels(net, torch.randn(1, 1), verify=False)
    with torch.no_grad():
        net[1].weight.copy_(torch.tensor([[1.0, -2.0, 3.0]]))
    settings: dict[str, Any] = {"warm_up": 0.0, "ramp": 1.0, "min_width_ratio": 0.0, "importance": importance}
    solver = channels(net, graph, "40%", 2, optimizer=SGD(net.parameters(), lr=1.0), **settings)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    assert net[1].weight.grad is not None
    # e_1 = 0.4 + 0.6 / 8 = 0.475 of 6 MACs. fc2 steps to (0.5, -2.5, 0.25): two are removed, 2 MACs are left.
    net[1].weight.grad.copy_(torch.tensor([[0.5, 0.5, 2.75]]))
    solver.step()
    assert net[1].weight.tolist() == [[0.0, -2.5, 0.0]]
    assert float(solver.energy) == pytest.approx(2e-9)
    assert solver.target == pytest.approx(0.475 * 6e-9)
    y, z = solver.duals
    assert y["0"] == pytest.approx(kept**2 / 2)
    assert z == pytest.approx(last**2 / 2 / 2e-9)  # each channel costs 2e-9 J
    # Dead channels get gradients and stay dead.
    net[1].weight.grad.copy_(torch.tensor([[7.0, 1.0, -7.0]]))
    solver.step()
    assert net[1].weight.tolist() == [[0.0, -3.5, 0.0]]
    assert solver.widths == {"0": 1, "1": 1}
    assert solver.is_met


@pytest.mark.parametrize(
    "make",
    [
        lambda p: AdamW(p, lr=1e-3, weight_decay=0.1),
        lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=1e-3),
        lambda p: RMSprop(p, lr=1e-3),
        lambda p: Adam(p, lr=1e-3, foreach=False),
    ],
    ids=["AdamW", "SGD", "RMSprop", "Adam"],
)
def test_any_optimizer_can_step_the_weights(make: Any) -> None:
    net, example, graph = traced("residual")
    net.conv1.weight.requires_grad_(False)  # type: ignore[union-attr]  # is ranked and masked too
    solver = channels(net, graph, optimizer=make([p for p in net.parameters() if p.requires_grad]))
    before = net.head.weight.clone()  # type: ignore[union-attr, operator]
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert live_channels(net, graph) == solver.widths
    assert not torch.equal(before, net.head.weight)  # type: ignore[arg-type]


@both
def test_without_pruning_it_is_the_inner_optimizer(make: Make) -> None:
    net, example, graph = traced("residual")
    twin = copy.deepcopy(net)
    solver, plain = make(net, graph, "100%"), Adam(twin.parameters(), lr=LR)
    train(net, solver, example, range(5))
    train(twin, plain, example, range(5))
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), twin.parameters(), strict=True))
    assert solver.is_met


def test_the_published_algorithm_prunes_and_resumes() -> None:
    net, example, graph = traced("chain")
    solver = channels(net, graph, "60%", 150, solver=PaperSettings(width_lr=100.0), lr=1e-3)
    costs: list[float] = []
    train(net, solver, example, range(150), lambda _: costs.append(float(solver.energy)))
    assert solver.is_met
    assert costs == sorted(costs, reverse=True)
    assert len(set(costs)) > 5
    assert live_channels(net, graph) == solver.widths
    again = channels(net, graph, "60%", 150, solver="paper")
    again.load_state_dict(copy.deepcopy(solver.state_dict()))
    assert again.numbers == solver.numbers == (tuple(map(float, solver.cost)), solver.duals, solver.widths)


def test_alpha_is_the_largest_learning_rate() -> None:
    net, example, graph = traced("residual")
    first, *rest = net.parameters()
    adam = Adam([{"params": [first], "lr": 0.0}, {"params": rest, "lr": 1e-2}])
    constants = PaperSettings(width_lr=30.0, width_penalty=5000.0, energy_penalty=5000.0)
    solver = channels(net, graph, "60%", 60, optimizer=adam, solver=constants)
    train(net, solver, example, range(60))
    assert solver.widths != graph.full_widths


@pytest.mark.parametrize("kind", ["scheduled", "admm"])
def test_several_budgets_are_met_at_once(kind: str) -> None:
    net, example, graph = traced("digits")
    costs = [macs_cost(graph), bytes_cost(graph)]
    solver = EccSolver(net, graph, costs, ["60%", "70%"], STEPS, lr=LR, solver=kind)
    train(net, solver, example, range(STEPS))
    assert solver.is_met
    assert all(float(value) <= limit * (1 + 1e-9) for value, limit in zip(solver.cost, solver.limits, strict=True))
    net, _, _ = traced("digits")
    alone = channels(net, graph, "60%", solver=kind)
    train(net, alone, example, range(STEPS))
    assert float(costs[1].value(graph.widths(alone.widths))) > solver.limits[1]  # the second budget matters


# ---------------------------------------------------------------- arguments and budgets


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"uniform_floor": -0.1}, "uniform_floor=-0.1 must be at least 0 and below 1"),
        ({"uniform_floor": 1.0}, "uniform_floor=1.0 must be"),
        ({"uniform_floor": float("nan")}, "uniform_floor=nan must be"),
        ({"uniform_floor": 0.5, "solver": "admm"}, "needs solver='scheduled'"),
        ({"solver": "greedy"}, "solver='greedy' is unknown"),
        ({"importance": "norm"}, "importance='norm' is unknown"),
    ],
)
def test_wrong_arguments_are_refused(settings: dict[str, Any], words: str) -> None:
    net, _, graph = traced("residual")
    with pytest.raises(ValueError, match=words):
        channels(net, graph, **settings)


def test_infeasible_budgets_are_refused_before_any_step() -> None:
    net, x, _ = traced("transformer MLP")
    graph = trace_channels(net, x, freeze="embed", verify=False)
    with pytest.raises(InfeasibleBudget, match=r"J is not reachable.*lower min_width_ratio\."):
        channels(net, graph, "10%")
    with pytest.raises(InfeasibleBudget, match="lower min_width_ratio or width_multiple"):
        channels(net, graph, "30%", width_multiple=32)
    with pytest.raises(EccError, match='write "50%"'):
        EccSolver(net, graph, macs_cost(graph), 0.5, STEPS)
    with pytest.raises(EccError, match="budget is None; give a text such as '50%'"):
        EccSolver(net, graph, macs_cost(graph), None, STEPS)  # type: ignore[arg-type]
    solver = channels(net, graph, "60%")
    limits = solver.limits
    with pytest.raises(InfeasibleBudget):
        solver.set_limit(1e-12)
    assert solver.limits == limits


@both
def test_a_ramp_can_be_retargeted_and_another_one_started(make: Make) -> None:
    net, example, graph = traced("residual")
    solver = make(net, graph, "60%")
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
    with pytest.raises(EccError, match=r"the ramp has ended.* set_limit\(\) starts another"):
        solver.retarget("60%")
    limit = solver.limits[0]
    solver.set_limit("55%", 5, ramp=1.0)
    assert not solver.is_met
    assert solver.target == pytest.approx(limit)  # starts at the present cost, not at the dense one
    train(net, solver, example, range(5))
    assert solver.is_met
    cost = float(solver.energy)
    solver.set_limit("90%")
    train(net, solver, example, range(5))
    assert float(solver.energy) == cost  # nothing comes back
    assert solver.is_met


# ---------------------------------------------------------------- states


@both
def test_states_of_others_are_refused(make: Make) -> None:
    net, example, graph = traced("residual")
    solver = make(net, graph, "70%")
    limits, name = solver.limits, type(solver).__name__
    two_costs = EccSolver(net, graph, [macs_cost(graph)] * 2, ["70%", "60%"], STEPS)
    cases: list[tuple[dict[str, Any], str]] = [
        (solver.inner.state_dict(), f"not a state of {name}"),
        (make(*traced("chain")[::2], "70%").state_dict(), "saved with graph"),
        ((weights if make is channels else channels)(net, graph, "70%").state_dict(), "saved with graph"),
        (
            make(net, graph, "70%", optimizer=SGD(net.parameters(), lr=0.1)).state_dict(),
            "optimizer 'SGD', but this solver",
        ),
        (make(net, graph, "60%").state_dict(), r"budget 60% of dense, but this solver has 70% of dense\..*set_limit"),
    ]
    if make is channels:
        cases.append((channels(net, graph, "70%", solver="admm").state_dict(), "solver 'admm', but"))
        cases.append((channels(net, graph, "70%", importance="adam_norm").state_dict(), "importance 'adam_norm', but"))
        cases.append((two_costs.state_dict(), "budget 70% of dense and 60% of dense, but this solver has 70% of dense"))
    for state, words in cases:
        with pytest.raises(BadFile, match=words):
            solver.load_state_dict(state)
    assert solver.limits == limits
    train(net, solver, example, range(1))  # no part of a refused state was loaded
    make(net, graph, "70%").load_state_dict(solver.state_dict())


@pytest.mark.parametrize("budget", ["80%", "70%"])
def test_a_state_with_a_changed_limit_can_be_loaded(budget: str) -> None:
    net, example, graph = traced("residual")
    first = channels(net, graph, "80%")
    train(net, first, example, range(2))
    first.set_limit("70%")
    again = channels(net, graph, budget)  # the budget of the constructor, or the present one
    again.load_state_dict(first.state_dict())
    assert again.limits == first.limits
    channels(net, graph, "80%").load_state_dict(again.state_dict())


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_copies_are_refused(copied: Any) -> None:
    net, _, graph = traced("residual")
    with pytest.raises(EccError, match=r"cannot be copied or pickled; save its state_dict\(\)"):
        copied(channels(net, graph))


# ---------------------------------------------------------------- mistakes in a training loop


@both
def test_an_optimizer_must_hold_the_parameters(make: Make) -> None:
    net, _, graph = traced("residual")
    named = dict(net.named_parameters())
    first, count = next(iter(named)), len(named)
    words = rf"\(AdamW\) holds none of the model's {count} parameters, such as '{first}'.*AdamW\(model.parameters\(\)"
    with pytest.raises(EccError, match=words):
        make(net, graph, optimizer=AdamW(copy.deepcopy(net).parameters()))
    with pytest.raises(EccError, match=r"optimizer is <class .*SGD'>; give an optimizer of the model's parameters"):
        make(net, graph, optimizer=SGD)
    most = SGD(list(named.values())[1:], lr=0.1)
    with pytest.warns(EccWarning, match=rf"\(SGD\) does not hold 1 of the model's {count} .* such as '{first}'"):
        make(net, graph, optimizer=most)
    named[first].requires_grad_(False)  # on purpose: no warning
    make(net, graph, optimizer=most)
    solver = make(net, graph, optimizer=SGD([*net.parameters(), extra := nn.Parameter(torch.zeros(3))], lr=0.1))
    assert any(one is extra for one in solver.param_groups[0]["params"])  # more parameters than the model has


@both
def test_a_step_without_gradients_warns_once(make: Make) -> None:
    net, example, graph = traced("residual")
    solver = make(net, graph)
    train(net, solver, example, range(2))
    count = len(list(net.parameters()))
    with pytest.warns(EccWarning, match=rf"none of the optimizer's {count} parameters has a grad.*backward") as caught:
        solver.step()
    assert caught[0].filename == __file__
    solver.step()  # a second warning would be an error


def test_a_closure_may_compute_the_gradients() -> None:
    net, example, graph = traced("chain")
    solver = channels(net, graph)

    def closure() -> Any:
        solver.zero_grad()
        loss = net(example).square().mean()
        loss.backward()
        return loss.detach()

    losses = [float(solver.step(closure) or 0) for _ in range(STEPS)]
    assert 0 < losses[-1] < losses[0]
    assert solver.is_met
    solver.zero_grad()
    with pytest.warns(EccWarning, match="has a gradient"):
        solver.step(lambda: 0.0)


def test_slim_warns_before_the_budget_is_met() -> None:
    net, example, graph = traced("residual")
    solver = channels(net, graph)
    train(net, solver, example, range(2))
    cost, limit = float(solver.energy), solver.limits[0]
    words = f"energy {si(cost, 'J')}, limit {si(limit, 'J')}, after 10% of the 20 steps. Call step() 18 more times"
    with pytest.warns(EccWarning, match=re.escape(words)) as caught:
        slim(net, graph)
    assert caught[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        slim(copy.deepcopy(net), graph)  # no solver prunes the copy
        train(net, solver, example, range(2, STEPS))
        slim(net, graph)
        net, _, graph = traced("residual")
        solver = channels(net, graph)
        del solver
        gc.collect()
        assert len(list(slim(net, graph).parameters())) == len(list(net.parameters()))  # no solver any more
    solver = channels(net, graph, solver="paper", lr=1e-6)
    train(net, solver, example, range(STEPS))
    with pytest.warns(EccWarning, match=r"after 100% of the 20 steps. Call set_limit\(\) with more steps"):
        slim(net, graph)


# ---------------------------------------------------------------- usual training loops


def test_a_learning_rate_scheduler_sets_the_rate_of_the_inner_optimizer() -> None:
    net, example, graph = traced("digits")
    solver = channels(net, graph)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(solver, T_max=STEPS)
    rates = []

    def after(_: int) -> None:
        scheduler.step()
        rates.append(solver.inner.param_groups[0]["lr"])

    train(net, solver, example, range(STEPS), after)
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0, abs=1e-9)
    assert solver.is_met


def test_a_grad_scaler_skips_steps_and_gives_the_same_network() -> None:
    """Powers of two scale and unscale without rounding."""
    results = []
    for scale in (1.0, 1024.0):
        net, example, graph = traced("chain")
        solver = channels(net, graph)
        scaler = torch.amp.GradScaler("cpu", init_scale=2 * scale, growth_interval=10_000)
        before = copy.deepcopy(net.state_dict())
        for step in range(STEPS + 1):
            scaler.scale(net(example).square().mean()).backward()
            if step == 0:
                next(net.parameters()).grad.fill_(torch.inf)  # type: ignore[union-attr]
            scaler.step(solver)
            scaler.update()
            solver.zero_grad()
            if step == 0:  # skipped
                assert solver.progress == 0.0
                assert scaler.get_scale() == scale
                assert all(torch.equal(parameter, before[name]) for name, parameter in net.named_parameters())
                net.load_state_dict(before)  # batch statistics
        assert solver.progress == 1.0
        assert solver.is_met
        results.append((solver.widths, [p.clone() for p in net.parameters()]))
    assert results[0][0] == results[1][0]
    for first, second in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-6)


def test_gradients_can_be_accumulated_and_clipped_and_parameters_added() -> None:
    net, example, graph = traced("digits")
    solver = channels(net, graph)
    solver.add_param_group({"params": [extra := nn.Parameter(torch.ones(3))], "lr": 0.5})
    assert len(solver.param_groups) == len(solver.inner.param_groups) == 2
    for batch in range(2 * STEPS):
        (1e3 * net(example).square().mean() + extra.sum()).backward()
        if batch % 2:
            nn.utils.clip_grad_norm_(net.parameters(), 1e-3)
            assert sum(float(p.grad.square().sum()) for p in net.parameters() if p.grad is not None) <= 1.01e-6
            solver.step()
            solver.zero_grad()
    assert (extra < 1).all()
    assert solver.progress == 1.0
    assert live_channels(net, graph) == solver.widths
    assert solver.is_met


def test_averaged_weights_are_masked_and_slimmed_like_the_network() -> None:
    net, example, graph = traced("digits")
    solver = channels(net, graph)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    seen: list[bool] = []
    solver.register_step_post_hook(lambda *_: seen.append(live_channels(net, graph) == solver.widths))
    train(net, solver, example, range(STEPS), lambda _: average.update_parameters(net))
    assert seen == [True] * STEPS  # hooks see the network after pruning
    assert live_channels(average.module, graph) != solver.widths
    solver.mask_(average.module)
    assert live_channels(average.module, graph) == solver.widths
    average.eval()
    small = slim(average.module, graph)
    torch.testing.assert_close(small(example), average.module(example), rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- no synchronisation


class Syncs(TorchDispatchMode):
    """Records operations that would synchronise host and device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in {"_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "_to_copy"}:
            moves = name != "_to_copy" or (kwargs or {}).get("device") is not None
            self.seen += [name] if moves else []
        if name in {"index", "index_put_", "index_put"}:  # indexing with a mask calls nonzero
            self.seen += ["mask" for index in args[1] if isinstance(index, Tensor) and index.dtype == torch.bool]
        return func(*args, **(kwargs or {}))


NO_SYNC: list[tuple[Make, dict[str, Any]]] = [
    (channels, {}),
    (channels, {"width_multiple": 4}),
    (channels, {"solver": "admm"}),
    (channels, {"solver": "paper"}),
    (weights, {}),
]


@pytest.mark.parametrize(("make", "settings"), NO_SYNC)
def test_a_step_does_not_synchronise(make: Make, settings: dict[str, Any]) -> None:
    """SGD, since Adam itself reads its step from a tensor on the CPU; see the next test."""
    net, example, graph = traced("digits")
    solver = make(net, graph, optimizer=SGD(net.parameters(), lr=LR), **settings)
    alive = solver._solver.alive
    for step in range(8):
        net(example).square().mean().backward()
        with Syncs() as syncs:
            solver.step()
        assert syncs.seen == [], step
    assert not torch.equal(alive, solver._solver.alive) or "solver" in settings


def test_adam_synchronises_no_more_often_than_alone() -> None:
    counts = []
    for wrapped in (False, True):
        net, example, graph = traced("digits")
        plain = Adam(net.parameters(), lr=LR, foreach=False)
        optimizer: Any = channels(net, graph, optimizer=plain) if wrapped else plain
        net(example).square().mean().backward()
        with Syncs() as syncs:
            for _ in range(6):
                optimizer.step()
        counts.append(len(syncs.seen))
    assert counts[0] == counts[1] > 0


def test_a_step_of_a_long_run_needs_few_operations() -> None:
    """Beside Adam's own, one for each masked tensor, and few for samples and updates, which are rare."""
    depth, long, counts = 8, 20_000, []
    for wrapped in (False, True):
        net, example = MlpStack(16, 32, depth), torch.randn(4, 16)
        graph = trace_channels(net, example[:1], verify=False)
        optimizer: Any = Adam(net.parameters(), lr=LR, foreach=False, fused=True)
        if wrapped:
            optimizer = channels(net, graph, steps=long, optimizer=optimizer, warm_up=0.0, budget="60%")
        found = []
        for _ in range(90):
            net(example).square().mean().backward()
            with Kernels() as kernels:
                optimizer.step()
                optimizer.zero_grad()
            found.append(len(kernels.seen))
        counts.append(found)
    extra = [ecc - adam for adam, ecc in zip(*counts, strict=True)]
    assert extra[1] == 0  # nothing is masked before the first update
    assert extra[31] == depth
    assert max(extra[40], extra[60], extra[80]) <= depth + 60  # samples
    assert extra[59] <= depth + 180  # an update without a plan
    assert sum(extra[30:]) / 60 <= depth + 10


@pytest.mark.gpu
@pytest.mark.parametrize(("make", "settings"), NO_SYNC)
@pytest.mark.parametrize("kind", [Adam, AdamW, SGD])
def test_on_a_gpu_torch_sees_no_synchronisation(kind: Any, make: Make, settings: dict[str, Any]) -> None:
    """Planning the widths waits for the device, a few times in a run."""
    net, example, graph = traced("digits")
    net, example = net.cuda(), example.cuda()
    solver = make(net, graph, optimizer=kind(net.parameters(), lr=LR), **settings)
    for _ in range(STEPS):
        net(example).square().mean().backward()
        torch.cuda.synchronize()
        plans = solver._schedule.plans_at(solver._steps + 1)
        torch.cuda.set_sync_debug_mode("default" if plans else "error")
        try:
            solver.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        solver.zero_grad()
    assert solver.is_met or "solver" in settings
    assert make is weights or live_channels(net, graph) == solver.widths  # type: ignore[attr-defined]


def test_resume_is_exact_with_a_frozen_layer() -> None:
    """Consumers without a gradient get a product of alternating sign, which is part of the state."""

    def net_and_solver() -> tuple[nn.Module, EccSolver]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4))
        net[2].weight.requires_grad_(False)
        graph = trace_channels(net, torch.randn(2, 8), verify=False)
        return net, EccSolver(net, graph, macs_cost(graph), "50%", 30, lr=1e-3)

    def train_from(net: nn.Module, solver: EccSolver, first: int, last: int) -> None:
        for step in range(first, last):
            draw = torch.Generator().manual_seed(step)
            solver.zero_grad()
            net(torch.randn(16, 8, generator=draw)).square().mean().backward()
            solver.step()

    whole = net_and_solver()
    train_from(*whole, 0, 12)
    net, solver = net_and_solver()
    train_from(net, solver, 0, 5)
    state = copy.deepcopy({"net": net.state_dict(), "solver": solver.state_dict()})
    net, solver = net_and_solver()
    net.load_state_dict(state["net"])
    solver.load_state_dict(state["solver"])
    train_from(net, solver, 5, 12)
    assert torch.equal(solver._taylor.values, whole[1]._taylor.values)
    assert solver.widths == whole[1].widths
