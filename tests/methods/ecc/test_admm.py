"""The published algorithm: its steps against definitions, two iterations by hand, and the authors' AlexNet."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ecc.errors import EccError
from ecc.methods.ecc.admm import (
    AdmmState,
    PaperSettings,
    PaperSolver,
    penalty_of_rank,
    project_energy_dual,
    proximal_keep,
    proximal_rule,
    step_widths,
    trim_width_dual,
    update_energy_dual,
    update_width_dual,
    width_gradient,
)
from ecc.methods.ecc.constraints import PruningProblem, ResourceConstraints
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.scheduled import Schedule, ScheduledPruner
from methods.nets import ProductCost, bare_graph, pair_cost

# ---------------------------------------------------------------- Algorithm 2

QUARTERS = st.integers(0, 32).map(lambda n: n / 4)  # with powers of two all sums are exact, so ties are ties
PROBLEMS: dict[str, Any] = {
    "values": st.lists(QUARTERS, min_size=1, max_size=7),
    "bound": QUARTERS,
    "dual": QUARTERS,
    "alpha": st.sampled_from([0.25, 0.5, 1.0]),
    "rho": st.sampled_from([0.0, 0.5, 1.0, 4.0]),
}


@given(**PROBLEMS)
def test_no_subset_of_channels_is_better(
    values: list[float], bound: float, dual: float, alpha: float, rho: float
) -> None:
    def objective(kept: tuple[bool, ...]) -> float:
        removed = sum(a for a, stays in zip(values, kept, strict=True) if not stays)
        return removed / 2 + alpha * (rho / 2 * max(sum(kept) - bound, 0.0) ** 2 + dual * (sum(kept) - bound))

    importance = torch.tensor(values, dtype=torch.float64)
    kept = proximal_keep(importance, bound, dual, trim=False, weight_lr=alpha, width_penalty=rho)
    best = min(objective(subset) for subset in product([False, True], repeat=len(values)))
    assert objective(tuple(kept.tolist())) == best


@given(**PROBLEMS)
def test_the_trim_keeps_floor_s_channels(
    values: list[float], bound: float, dual: float, alpha: float, rho: float
) -> None:
    """The authors lower y until floor(s) channels survive. This is equal, unless two channels tie at the margin."""
    importance, step = torch.tensor(values, dtype=torch.float64), {"weight_lr": alpha, "width_penalty": rho}
    kept = proximal_keep(importance, bound, dual, **step)
    plain = proximal_keep(importance, bound, dual, trim=False, **step)
    assert int(kept.sum()) == max(int(plain.sum()), min(int(bound), len(values)))
    assert kept.all() or not kept.any() or importance[kept].min() >= importance[~kept].max()
    distinct = torch.tensor(sorted(set(values), reverse=True), dtype=torch.float64)
    if 1 <= int(bound) <= len(distinct):
        lowered = trim_width_dual(torch.tensor(dual), distinct[int(bound) - 1], weight_lr=alpha)
        assert lowered <= dual
        by_dual = proximal_keep(distinct, bound, lowered, trim=False, **step)
        assert torch.equal(proximal_keep(distinct, bound, dual, **step), by_dual)


def test_the_proximal_step_by_hand() -> None:
    """alpha = 0.5, rho = 4, s = 1.5: the ranks cost 0, 0.5 and 4 more, and y = 0.5 adds 0.5 to each."""
    step = {"weight_lr": 0.5, "width_penalty": 4.0}
    assert penalty_of_rank(torch.tensor([1.0, 2.0, 3.0]), 1.5, **step).tolist() == [0.0, 0.5, 4.0]
    importance = torch.tensor([0.9, 1.0, 4.4])
    assert proximal_keep(importance, 1.5, 0.5, **step).tolist() == [False, True, True]  # 1.0 ties, and stays
    assert proximal_keep(importance, 1.5, 0.6, **step).tolist() == [False, False, True]
    assert proximal_keep(importance, 1.5, 99.0, **step).tolist() == [False, False, True]  # floor(s) = 1
    assert not proximal_keep(importance, 1.5, 99.0, trim=False, **step).any()
    both = proximal_rule(  # two groups at once, the second with s = 2 and y = 0.5
        torch.tensor([4.4, 1.0, 0.9, 9.0, 0.1]),
        torch.tensor([1, 2, 3, 1, 2]),
        torch.tensor([1.5, 1.5, 1.5, 2.0, 2.0]),
        torch.tensor([0.6, 0.6, 0.6, 0.5, 0.5]),
        **step,
    )
    assert both.tolist() == [True, False, False, True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_exact_tie_at_the_trim_survives_in_any_precision(dtype: torch.dtype) -> None:
    importance = torch.tensor([0.3, 0.1, 0.2], dtype=dtype)
    dual = trim_width_dual(torch.tensor(1e6, dtype=torch.float64), importance[2], weight_lr=1e-5)
    kept = proximal_keep(importance, 2.3, dual, weight_lr=1e-5, width_penalty=10.0)
    assert kept.tolist() == [True, False, True]


# ---------------------------------------------------------------- Eq. (10) to (12)


def energy(widths: Tensor) -> Tensor:
    return 0.5 + (widths[:-1] * widths[1:]).sum()


@given(st.integers(0, 10_000), st.sampled_from([0.1, 3.0, 50.0]))
def test_updates_follow_the_gradients_of_the_augmented_lagrangian(seed: int, budget: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    s, y, phi = (4 * torch.rand(5, generator=draw, dtype=torch.float64) for _ in range(3))
    z = torch.rand((), generator=draw, dtype=torch.float64)
    for variable in (s, y, z):
        variable.requires_grad_()
    over, excess = phi - s, energy(s) - budget
    first = 1.5 / 2 * over.clamp(min=0).square().sum() + (y * over).sum()
    second = 0.7 / 2 * excess.clamp(min=0).square() + z * excess
    by_s, by_y, by_z = torch.autograd.grad(first + second, (s, y, z))
    (slope,) = torch.autograd.grad(energy(s), s)
    s, y, z, excess = s.detach(), y.detach(), z.detach(), excess.detach()
    gradient = width_gradient(y, phi - s, excess, slope, width_penalty=1.5, energy_penalty=0.7)
    torch.testing.assert_close(gradient + z * slope, by_s)
    new_y = update_width_dual(y, phi, s, width_penalty=1.5, whole=False)
    torch.testing.assert_close(new_y, (y + 1.5 * by_y).clamp(min=0))
    torch.testing.assert_close(update_energy_dual(z, excess, energy_penalty=0.7), (z + 0.7 * by_z).clamp(min=0))


@given(st.integers(0, 10_000))
def test_the_projected_z_moves_one_width_by_epsilon_and_no_less(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    g1 = torch.randn(4, generator=draw, dtype=torch.float64)
    slope = torch.rand(4, generator=draw, dtype=torch.float64) + 0.1
    movable = torch.rand(4, generator=draw) > 0.3
    z = project_energy_dual(torch.zeros((), dtype=torch.float64), g1, slope, movable, min_energy_slope=1e-3)
    if not movable.any():
        assert z == 0
        return
    gradient = (g1 + z * slope)[movable]
    assert gradient.max() >= 1e-3 - 1e-12
    if (g1[movable] < 0).all():  # the smallest such z
        assert float(gradient.max()) == pytest.approx(1e-3)


def test_the_projection_by_hand() -> None:
    g1, slope, z = torch.tensor([-4.0, -1.0, -9.0]), torch.tensor([2.0, 1.0, 0.0]), torch.tensor(0.5)

    def projected(movable: list[bool], start: Tensor = z) -> float:
        return float(project_energy_dual(start, g1, slope, torch.tensor(movable), min_energy_slope=0.5))

    assert projected([True, True, True]) == 1.5
    assert projected([True, True, True], torch.tensor(7.0)) == 7.0  # never lowered
    assert projected([True, False, True]) == 2.25  # the third saves nothing: dE = 0
    assert projected([False, False, True]) == projected([False, False, False]) == 0.5


def test_width_and_dual_steps_by_hand() -> None:
    s, least = torch.tensor([5.0, 5.0, 2.0, 1.5]), torch.tensor([1.0, 4.5, 2.0, 2.0])
    gradient = torch.tensor([-3.0, 4.0, 1.0, 1.0])
    assert step_widths(s, gradient, least, width_lr=0.5).tolist() == [5.0, 4.5, 2.0, 1.5]  # no growth, and minimum
    assert step_widths(s, -gradient, least, width_lr=0.5).tolist() == [3.5, 5.0, 2.0, 1.5]
    ten, ones = torch.tensor([10.0, 10.0, 1.0]), torch.ones(3)
    gradient = torch.tensor([3.0, 4.0, 100.0])  # the third is at its minimum and not part of the norm
    for max_norm, expected in (
        (None, [7.0, 6.0, 1.0]),
        (5.0, [7.0, 6.0, 1.0]),
        (50.0, [7.0, 6.0, 1.0]),
        (1.0, [9.4, 9.2, 1.0]),
    ):
        assert step_widths(ten, gradient, ones, width_lr=1.0, max_norm=max_norm).tolist() == pytest.approx(expected)
    assert step_widths(ten, torch.zeros(3), ones, width_lr=9.0, max_norm=1.0).tolist() == [10.0, 10.0, 1.0]
    y, phi, s = torch.ones(3), torch.tensor([5.0, 4.0, 2.0]), torch.tensor([4.5, 4.5, 4.0])
    assert update_width_dual(y, phi, s, width_penalty=2.0).tolist() == [3.0, 1.0, 0.0]
    assert update_width_dual(y, phi, s, width_penalty=2.0, whole=False).tolist() == [2.0, 0.0, 0.0]
    assert update_energy_dual(torch.tensor(1.0), torch.tensor(0.5), energy_penalty=2.0) == 2.0
    assert update_energy_dual(torch.tensor(1.0), torch.tensor(-3.0), energy_penalty=2.0) == 0.0


# ---------------------------------------------------------------- Algorithm 1


def solver_of(
    full: Sequence[int],
    cost: ProductCost,
    settings: PaperSettings | None = None,
    least: Tensor | None = None,
    *,
    costs: int = 1,
    width_multiple: int = 1,
) -> PaperSolver:
    constraints = ResourceConstraints([cost] * costs, bare_graph(full), "cpu")
    alive, least = torch.ones(sum(full), dtype=torch.bool), torch.ones(len(full)) if least is None else least
    problem = PruningProblem(ChannelRanking(full), constraints, least, width_multiple)
    return PaperSolver(settings or PaperSettings(), problem, alive)


def test_two_iterations_by_hand() -> None:
    """Two groups of 3 and 2 channels, E = s_1 s_2 (dense 6), budget 3; alpha = 1/2, beta = 1/4, rho = 2, 1."""
    full = [3, 2]
    constants = PaperSettings(width_lr=0.25, width_penalty=2.0, energy_penalty=1.0, min_energy_slope=0.5, max_norm=None)
    solver = solver_of(full, pair_cost(full, [(0, 1)], [1.0]), constants)
    importance, state = torch.tensor([2.0, 5.0, 4.0, 9.0, 8.0]), solver.state
    assert state.widths.tolist() == [3, 2]
    assert state.width_dual.tolist() == [0, 0]

    # Prox: y = 0 and no rank above s, so all stay. phi = (3, 2), E = 6, dE = (2, 3).
    # g1 = rho_2 (6 - 3) dE = (6, 9). z >= min(0.5 / 2, 0.5 / 3) = 1/6, and g = (6 + 1/3, 9 + 1/2).
    # s = (3 - 19/12, max(2 - 19/8, 1)) = (17/12, 1). E(s) = 17/12 < 3.
    # y = 2 (phi - floor(s)) = (4, 2). z = [1/6 + 17/12 - 3]_+ = 0.
    state = solver.iterate(state, importance, weight_lr=0.5, budget=3.0)
    assert state.alive.all()
    assert state.widths.tolist() == pytest.approx([17 / 12, 1.0])
    assert state.width_dual.tolist() == pytest.approx([4.0, 2.0])
    assert state.energy_dual == 0

    # Prox of group 1, floor(s) = 1: the best has a = 5, so y is at most 5 / (2 alpha) = 5 and stays 4.
    # Ranks 1, 2, 3 need 4 more than 0, (7/12)^2 and (19/12)^2 - (7/12)^2: 5 stays, 4 and 2 go.
    # Group 2: y = 2 needs 2 and 3; 9 and 8 stay. phi = (1, 2).
    # E(s) - 3 < 0. g1 = (-4, -2 - 2 (2 - 1)) = (-4, -4). Only group 1 is above its minimum, dE = (1, 17/12):
    # z = (4 + 1/2) / 1, g = (1/2, .), s = (17/12 - 1/8, 1).
    # y = [4 + 2 (1 - 1)]_+ and 2 + 2 (2 - 1); z = 4.5 + 31/24 - 3.
    state = solver.iterate(state, importance, weight_lr=0.5, budget=3.0)
    assert state.alive.tolist() == [False, True, False, True, True]
    assert state.widths.tolist() == pytest.approx([31 / 24, 1.0])
    assert state.width_dual.tolist() == pytest.approx([4.0, 4.0])
    assert float(state.energy_dual) == pytest.approx(4.5 + 31 / 24 - 3)

    # E(phi) = 1 * 2 <= 3: nothing changes any more.
    again = solver.iterate(state, torch.rand(5), weight_lr=0.5, budget=3.0)
    assert all(torch.equal(new, old) for new, old in zip(again, state, strict=True))
    before = solver.state
    solver.update(torch.rand(5), Schedule((1.0,), (0.2,), 5), 1, weight_lr=0.0)
    assert solver.state is before  # no learning rate, no pruning


FULL = [6, 8]
COST = pair_cost(FULL, [(0, 1)], [0.5], linear=[1.0, 1.0])


def test_the_solver_updates_at_every_step_and_resumes() -> None:
    schedule, importance = Schedule((1.0,), (0.5,), 10), torch.rand(14, generator=torch.Generator().manual_seed(0))
    first, second = (solver_of(FULL, COST, PaperSettings(width_lr=50.0)) for _ in range(2))
    assert all(first.is_due(schedule, step) for step in range(10))
    for step in range(1, 8):
        second.load([tensor.clone() for tensor in first.state])
        for solver in (first, second):
            solver.update(importance, schedule, step, 1e-2)
        assert all(torch.equal(a, b) for a, b in zip(first.state, second.state, strict=True))
    assert not first.alive.all()
    assert [tensor.tolist() for tensor in first.duals(1e-2)] == [tensor.tolist() for tensor in first.state[2:]]


def test_what_the_paper_does_not_have_is_refused() -> None:
    with pytest.raises(
        ValueError, match="supports one cost and width_multiple=1, but got 1 costs and width_multiple=8"
    ):
        solver_of(FULL, COST, width_multiple=8)
    with pytest.raises(ValueError, match="2 costs"):
        solver_of(FULL, COST, costs=2)
    with pytest.raises(EccError, match="width_lr is 0"):
        PaperSettings(width_lr=0)


# ---------------------------------------------------------------- the authors' AlexNet on a Jetson TX2

INPUT, CLASSES = 3, 1000
ALEXNET = (64, 192, 384, 256, 256, 4096, 4096)
BASE_JOULES = 2.48e-3  # from the authors' energymodel_alex_tx2.pkl, for widths as fractions of full ones
LAYER_JOULES = (2.23e-3, 7.54e-3, 3.91e-3, 4.94e-3, 3.39e-3, 16.16e-3, 7.21e-3, 1.95e-3)
WEIGHT_LR = 1e-5
BUDGET = 0.7


class Alexnet:
    """The published coefficients and a constant lognormal importance."""

    def __init__(self, thinner: int = 1) -> None:
        self.full = (INPUT, *(width // thinner for width in ALEXNET), CLASSES)
        pairs = [(k, k + 1) for k in range(len(LAYER_JOULES))]
        coefficients = [j / (self.full[a] * self.full[b]) for j, (a, b) in zip(LAYER_JOULES, pairs, strict=True)]
        self.cost: ProductCost = pair_cost(self.full, pairs, coefficients, base=BASE_JOULES)
        self.ranking = ChannelRanking(self.full)
        self.min_widths = torch.tensor([INPUT, *(1 for _ in ALEXNET), CLASSES])
        generator = torch.Generator().manual_seed(0)
        self.importance = 1e-3 * torch.exp(torch.randn(sum(self.full), generator=generator))
        self.alive = torch.ones(sum(self.full), dtype=torch.bool)
        self.dense = self.energy(torch.tensor(self.full))

    def energy(self, widths: Tensor) -> float:
        return float(self.cost.value(widths.to(torch.float64)))

    def run(self, iterations: int, width_lr: float, *, project: bool = True) -> AdmmState:
        constants = PaperSettings(width_lr=width_lr, project_energy_dual=project)
        solver = solver_of(self.full, self.cost, constants, self.min_widths)
        state = solver.state
        for iteration in range(iterations):
            state = solver.iterate(state, self.importance, weight_lr=WEIGHT_LR, budget=BUDGET * self.dense)
            if iteration % 100 == 0 and self.energy(self.ranking.widths(state.alive)) <= BUDGET * self.dense:
                break
        return state

    def greedy(self) -> Tensor:
        """Remove one channel after another, the one of least importance per joule."""
        widths = torch.tensor(self.full, dtype=torch.float64)
        ordered = [group.sort().values.double() for group in self.importance.split(self.full)]
        while self.energy(widths) > BUDGET * self.dense:
            slope = self.cost.gradient(widths)
            ratios = [
                float(ordered[k][full - int(widths[k])] / slope[k]) if widths[k] > self.min_widths[k] else torch.inf
                for k, full in enumerate(self.full)
            ]
            widths[ratios.index(min(ratios))] -= 1
        return widths

    def assert_near_greedy(self, alive: Tensor) -> None:
        widths, expected = self.ranking.widths(alive), self.greedy()
        apart = (widths - expected).abs() / torch.tensor(self.full)
        assert apart.max() <= 0.02, (widths.tolist(), expected.tolist())
        assert self.energy(widths) <= BUDGET * self.dense


@pytest.mark.parametrize(
    ("thinner", "width_lr"),
    [(4, 30.0), *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((4, 10.0), (1, 30.0)))],
)
def test_the_published_algorithm_ends_at_the_greedy_widths(thinner: int, width_lr: float) -> None:
    net = Alexnet(thinner)
    state = net.run(10_000 if thinner == 1 else round(50_000 / width_lr), width_lr)
    net.assert_near_greedy(state.alive)
    # y of a group is the importance of its next channel; only the group that moved last has not reached it.
    groups = zip(net.importance.split(net.full), state.alive.split(net.full), strict=True)
    margins = torch.stack([importance[alive].min() for importance, alive in groups]).double()
    shortfall = 1 - (state.width_dual * 2 * WEIGHT_LR / margins)[1:-1]
    assert shortfall.min() > -1e-6
    assert (shortfall > 1e-6).sum() <= 1


def test_the_scheduled_solver_ends_at_the_greedy_widths_too() -> None:
    net = Alexnet()
    constraints = ResourceConstraints([net.cost], bare_graph(net.full), "cpu")
    pruner = ScheduledPruner(PruningProblem(net.ranking, constraints, net.min_widths))
    decision = pruner.start(net.alive)
    for step in range(1, 101):
        allowed = BUDGET + (1 - BUDGET) * (1 - step / 100) ** 3
        decision = pruner.update(decision, net.importance, [allowed], [BUDGET])
    net.assert_near_greedy(decision.alive)


def test_without_the_projection_of_z_it_stalls() -> None:
    net = Alexnet(4)
    used = [net.energy(net.ranking.widths(net.run(800, 30.0, project=one).alive)) for one in (False, True)]
    assert used[0] > 0.96 * net.dense
    assert used[1] < 0.9 * net.dense
