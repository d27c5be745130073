from __future__ import annotations

import pytest
import torch

from ecc.methods.ecc.admm import AdmmSettings
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.constraints import ResourceConstraints
from ecc.methods.ecc.dynamics import AdmmSolver, Dynamics, ScheduledSolver
from ecc.methods.ecc.schedule import Schedule
from methods.nets import bare_graph, pair_cost

FULL = [6, 8]
LADDER, FLOORS, ALIVE = ChannelRanking(FULL), torch.tensor([1, 1]), torch.ones(14, dtype=torch.bool)
COST = pair_cost(FULL, [(0, 1)], [0.5], linear=[1.0, 1.0])
LIMITS = ResourceConstraints([COST], bare_graph(FULL), "cpu")
SCHEDULE = Schedule((1.0,), (0.5,), 10, warm_up=0.2, ramp=0.5)
SCORES = torch.rand(14, generator=torch.Generator().manual_seed(0))


def made(name: str) -> Dynamics:
    if name == "scheduled":
        return ScheduledSolver(LADDER, LIMITS, FLOORS, 1, ALIVE)
    return AdmmSolver(AdmmSettings(width_lr=50.0), LADDER, LIMITS, FLOORS, 1, ALIVE)


@pytest.mark.parametrize("name", ["scheduled", "admm"])
def test_a_state_put_back_goes_on_the_same(name: str) -> None:
    first, second = made(name), made(name)
    assert isinstance(first, ScheduledSolver | AdmmSolver)
    for step in range(1, 6):
        first.advance(SCORES, SCHEDULE, step, 1e-2)
    second.load([tensor.clone() for tensor in first.state])
    for step in range(6, 8):
        for dynamics in (first, second):
            dynamics.advance(SCORES, SCHEDULE, step, 1e-2)
    assert not first.alive.all()
    assert all(torch.equal(a, b) for a, b in zip(first.state, second.state, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.duals(1e-2), second.duals(1e-2), strict=True))


def test_pace_moves_at_updates_and_the_paper_always() -> None:
    assert [made("scheduled").is_due(SCHEDULE, step) for step in (1, 2, 3, 7, 8)] == [False, False, True, True, False]
    assert all(made("admm").is_due(SCHEDULE, step) for step in range(10))


def test_duals_of_pace_are_in_units_of_the_loss_and_of_the_cost() -> None:
    """y_u >= z dE/ds_u with dE/ds in joules per channel, and y_u = a_next / (2 alpha)."""
    dynamics, alpha = made("scheduled"), 0.1
    before = COST.gradient(torch.tensor(FULL, dtype=torch.float64))
    dynamics.advance(SCORES, SCHEDULE, 7, alpha)
    width_dual, energy_dual = (dual.tolist() for dual in dynamics.duals(alpha))
    parts = zip(SCORES.split(FULL), dynamics.alive.split(FULL), strict=True)
    assert width_dual == pytest.approx([float(scores[alive].min()) / (2 * alpha) for scores, alive in parts])
    assert energy_dual > 0
    assert all(y >= energy_dual * float(slope) for y, slope in zip(width_dual, before, strict=True))
    assert dynamics.duals(0.0)[1] == float("inf")


def test_what_the_paper_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="solver='greedy' is unknown"):
        AdmmSolver("greedy", LADDER, LIMITS, FLOORS, 1, ALIVE)
    with pytest.raises(ValueError, match="one cost and no rounding"):
        AdmmSolver("admm", LADDER, LIMITS, FLOORS, 8, ALIVE)
    with pytest.raises(ValueError, match="one cost and no rounding"):
        AdmmSolver("admm", LADDER, ResourceConstraints([COST, COST], bare_graph(FULL), "cpu"), FLOORS, 1, ALIVE)


def test_what_is_allowed_may_be_numbers_or_tensors() -> None:
    """On a GPU an update is a function of tensors alone, so that a CUDA graph can hold it."""
    numbers, tensors = made("scheduled"), made("scheduled")
    assert isinstance(tensors, ScheduledSolver)
    for step in (3, 5, 7):
        before = tensors.state
        allowed = torch.tensor([SCHEDULE.shares(step), SCHEDULE.end], dtype=torch.float64)
        alive, energies, margin = tensors._updated(*before[:3], SCORES, allowed, before.least)
        tensors.load([alive, energies, margin, before.least])
        numbers.advance(SCORES, SCHEDULE, step, 1e-2)
        assert all(torch.equal(a, b) for a, b in zip(numbers.state, tensors.state, strict=True))
    assert not numbers.alive.all()


@pytest.mark.gpu
def test_on_a_gpu_the_same_channels_are_removed() -> None:
    schedule, draw = Schedule((1.0,), (0.3,), 40, warm_up=0.1, ramp=0.8), torch.Generator().manual_seed(1)
    cpu = ScheduledSolver(LADDER, LIMITS, FLOORS, 1, ALIVE, plans=True)
    gpu = ScheduledSolver(
        ChannelRanking(FULL, "cuda"),
        ResourceConstraints([COST], bare_graph(FULL), "cuda"),
        FLOORS.cuda(),
        1,
        ALIVE.cuda(),
        plans=True,
    )
    assert gpu._graphed is not None
    for step in range(1, 41):
        scores = torch.rand(14, generator=draw)
        if schedule.updates_at(step):
            cpu.advance(scores, schedule, step, 1e-2)
            gpu.advance(scores.cuda(), schedule, step, 1e-2)
            assert torch.equal(cpu.alive, gpu.alive.cpu()), step
    assert gpu._graphed._graph is not None
    assert not cpu.alive.all()
