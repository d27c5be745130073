from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ecc.methods.ecc.admm import AdmmDynamics, AdmmSettings, AdmmState
from ecc.methods.ecc.channel_ranking import ChannelRanking
from ecc.methods.ecc.constraints import ResourceConstraints
from ecc.methods.ecc.scheduled import ScheduledPruner
from methods.nets import ProductCost, bare_graph, pair_cost

# ---------------------------------------------------------------- two iterations by hand


def test_two_iterations_by_hand() -> None:
    """Two groups of 3 and 2 channels, E = s_1 s_2 (dense 6), budget 3; alpha = 1/2, beta = 1/4, rho = 2, 1."""
    full = [3, 2]
    settings = AdmmSettings(width_lr=0.25, width_penalty=2.0, energy_penalty=1.0, min_energy_slope=0.5, max_norm=None)
    dynamics = AdmmDynamics(ChannelRanking(full), pair_cost(full, [(0, 1)], [1.0]), torch.tensor([1, 1]), settings)
    scores = torch.tensor([2.0, 5.0, 4.0, 9.0, 8.0])
    state = dynamics.start(torch.ones(5, dtype=torch.bool))
    assert state.widths.tolist() == [3, 2]
    assert state.width_dual.tolist() == [0, 0]

    # Prox: y = 0 and no rank above s, so all stay. phi = (3, 2), E = 6, dE = (2, 3).
    # g1 = rho_2 (6 - 3) dE = (6, 9). z >= min(0.5 / 2, 0.5 / 3) = 1/6, and g = (6 + 1/3, 9 + 1/2).
    # s = (3 - 19/12, max(2 - 19/8, 1)) = (17/12, 1). E(s) = 17/12 < 3.
    # y = 2 (phi - floor(s)) = (4, 2). z = [1/6 + 17/12 - 3]_+ = 0.
    state = dynamics.step(state, scores, weight_lr=0.5, budget=3.0)
    assert state.alive.all()
    assert state.widths.tolist() == pytest.approx([17 / 12, 1.0])
    assert state.width_dual.tolist() == pytest.approx([4.0, 2.0])
    assert state.energy_dual == 0

    # Prox of group 1, floor(s) = 1: the best has a = 5, so y is at most 5 / (2 alpha) = 5 and stays 4.
    # Ranks 1, 2, 3 ask for 4 more than 0, (7/12)^2 and (19/12)^2 - (7/12)^2: 5 stays, 4 and 2 go.
    # Group 2: y = 2 asks for 2 and 3; 9 and 8 stay. phi = (1, 2).
    # E(s) - 3 < 0. g1 = (-4, -2 - 2 (2 - 1)) = (-4, -4). Only group 1 is above its floor, dE = (1, 17/12):
    # z = (4 + 1/2) / 1, g = (1/2, .), s = (17/12 - 1/8, 1).
    # y = [4 + 2 (1 - 1)]_+ and 2 + 2 (2 - 1); z = 4.5 + 31/24 - 3.
    state = dynamics.step(state, scores, weight_lr=0.5, budget=3.0)
    assert state.alive.tolist() == [False, True, False, True, True]
    assert state.widths.tolist() == pytest.approx([31 / 24, 1.0])
    assert state.width_dual.tolist() == pytest.approx([4.0, 4.0])
    assert float(state.energy_dual) == pytest.approx(4.5 + 31 / 24 - 3)

    # E(phi) = 1 * 2 <= 3: done, nothing moves any more.
    again = dynamics.step(state, torch.rand(5), weight_lr=0.5, budget=3.0)
    assert all(torch.equal(new, old) for new, old in zip(again, state, strict=True))


def test_without_a_learning_rate_nothing_is_pruned() -> None:
    dynamics = AdmmDynamics(ChannelRanking([2]), pair_cost([2], [], [], [1.0]), torch.tensor([1]), AdmmSettings())
    state = dynamics.start(torch.ones(2, dtype=torch.bool))
    assert dynamics.step(state, torch.rand(2), weight_lr=0.0, budget=1.0) is state


def test_constants_must_be_above_zero() -> None:
    with pytest.raises(EccError, match="admm_width_lr is 0"):
        AdmmSettings(width_lr=0)


# ---------------------------------------------------------------- the authors' AlexNet on a Jetson TX2

INPUT, CLASSES = 3, 1000
ALEXNET = (64, 192, 384, 256, 256, 4096, 4096)
BASE_JOULES = 2.48e-3  # decoded from the authors' energymodel_alex_tx2.pkl, for widths as shares of full ones
LAYER_JOULES = (2.23e-3, 7.54e-3, 3.91e-3, 4.94e-3, 3.39e-3, 16.16e-3, 7.21e-3, 1.95e-3)
WEIGHT_LR = 1e-5
BUDGET = 0.7


class Alexnet:
    """Published coefficients, frozen lognormal channel energies."""

    def __init__(self, thinner: int = 1) -> None:
        self.full = (INPUT, *(width // thinner for width in ALEXNET), CLASSES)
        pairs = [(k, k + 1) for k in range(len(LAYER_JOULES))]
        coefficients = [
            joules / (self.full[i] * self.full[j]) for joules, (i, j) in zip(LAYER_JOULES, pairs, strict=True)
        ]
        self.cost: ProductCost = pair_cost(self.full, pairs, coefficients, base=BASE_JOULES)
        self.ladder = ChannelRanking(self.full)
        self.floors = torch.tensor([INPUT, *(1 for _ in ALEXNET), CLASSES])
        generator = torch.Generator().manual_seed(0)
        self.scores = 1e-3 * torch.exp(torch.randn(sum(self.full), generator=generator))
        self.dense = self.energy(torch.tensor(self.full))

    def energy(self, widths: Tensor) -> float:
        return float(self.cost.value(widths.to(torch.float64)))

    def run(self, iterations: int, width_lr: float, *, projects: bool = True) -> AdmmState:
        settings = AdmmSettings(width_lr=width_lr, projects=projects)
        dynamics = AdmmDynamics(self.ladder, self.cost, self.floors, settings)
        state = dynamics.start(torch.ones(sum(self.full), dtype=torch.bool))
        for iteration in range(iterations):
            state = dynamics.step(state, self.scores, weight_lr=WEIGHT_LR, budget=BUDGET * self.dense)
            if iteration % 100 == 0 and self.energy(self.ladder.widths(state.alive)) <= BUDGET * self.dense:
                break
        return state

    def greedy(self) -> Tensor:
        """One channel after another, the one of least energy per joule."""
        widths = torch.tensor(self.full, dtype=torch.float64)
        ordered = [scores.sort().values.double() for scores in self.scores.split(self.full)]
        while self.energy(widths) > BUDGET * self.dense:
            slope = self.cost.gradient(widths)
            nexts = [
                float(ordered[k][full - int(widths[k])] / slope[k]) if widths[k] > self.floors[k] else torch.inf
                for k, full in enumerate(self.full)
            ]
            widths[nexts.index(min(nexts))] -= 1
        return widths


def assert_within_two_percent(net: Alexnet, widths: Tensor, expected: Tensor) -> None:
    apart = (widths - expected).abs() / torch.tensor(net.full)
    assert apart.max() <= 0.02, (widths.tolist(), expected.tolist())
    assert net.energy(widths) <= BUDGET * net.dense


def test_the_published_model_gives_the_papers_dense_energy() -> None:
    assert Alexnet().dense == pytest.approx(0.0498, abs=5e-5)


@pytest.mark.parametrize("width_lr", [pytest.param(10.0, marks=pytest.mark.thorough), 30.0])
def test_the_papers_walk_ends_where_greedy_removal_does(width_lr: float) -> None:
    net = Alexnet(thinner=4)
    state = net.run(round(50_000 / width_lr), width_lr)
    assert_within_two_percent(net, net.ladder.widths(state.alive), net.greedy())
    # y of a group is what its next channel is worth; only the group that moved last is still on its way there.
    live = state.alive.split(net.full)
    margins = [scores[alive].min() for scores, alive in zip(net.scores.split(net.full), live, strict=True)]
    shortfall = 1 - (state.width_dual * 2 * WEIGHT_LR / torch.stack(margins).double())[1:-1]
    assert shortfall.min() > -1e-6
    assert (shortfall > 1e-6).sum() <= 1


@pytest.mark.thorough  # the quarter of it above takes the same way
def test_on_the_whole_of_alexnet() -> None:
    net = Alexnet()
    assert_within_two_percent(net, net.ladder.widths(net.run(10_000, 30.0).alive), net.greedy())


def test_the_default_dynamics_end_there_too() -> None:
    net = Alexnet()
    pace = ScheduledPruner(net.ladder, ResourceConstraints([net.cost], bare_graph(net.full), "cpu"), net.floors)
    cut = pace.start(torch.ones(sum(net.full), dtype=torch.bool))
    for step in range(1, 101):
        share = BUDGET + (1 - BUDGET) * (1 - step / 100) ** 3
        cut = pace.update(cut, net.scores, [share], [BUDGET])
    assert_within_two_percent(net, net.ladder.widths(cut.alive), net.greedy())


def test_without_the_projection_of_z_it_stalls() -> None:
    net = Alexnet()
    state = net.run(800, 30.0, projects=False)
    assert net.energy(net.ladder.widths(state.alive)) > 0.98 * net.dense
    projected = net.run(800, 30.0)
    assert net.energy(net.ladder.widths(projected.alive)) < 0.95 * net.dense
