"""`EccSolver` with the paper's dynamics follows an independent implementation of the published loop."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from ecc.energy.cost import BilinearForm
from ecc.graph import AffineSize, ChannelGraph, trace_channels
from ecc.methods import EccSolver, PaperSettings
from methods.ecc.published_loop import Constants, PublishedLoop
from methods.nets import ProductCost

INPUTS, CLASSES, SIZE, BATCH, ITERATIONS = 3, 4, 5, 4, 60
SLOW, FAST = 9, 5  # problems of each kind


class Chain(nn.Module):
    """The network of `PublishedLoop`, as a user would write it."""

    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        pairs = zip([INPUTS, *widths], widths, strict=False)
        self.convs = nn.ModuleList(nn.Conv2d(i, o, 3, padding=1) for i, o in pairs)
        self.head = nn.Linear(widths[-1], CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.relu(conv(x))
        return self.head(x.mean((2, 3)))


@dataclass
class Problem:
    """A network, an energy model and constants, all drawn from a seed."""

    seed: int

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        torch.manual_seed(self.seed)
        self.widths = [draw.randint(4, 9) for _ in range(draw.randint(2, 3))]
        self.net = Chain(self.widths).double()
        full = [INPUTS, *self.widths, CLASSES]
        # Some 0.05 J, as AlexNet takes on the authors' device, unevenly spread over the layers.
        shares = [draw.uniform(0.2, 2.0) for _ in full]
        joules = [0.05 * share / sum(shares) for share in shares]
        self.coefficients = [joules[0]] + [j / (full[k] * full[k + 1]) for k, j in enumerate(joules[1:])]
        self.min_width_ratio = draw.choice([0.0, 0.3])
        self.lower = [max(1, math.ceil(self.min_width_ratio * width)) for width in self.widths]
        least, share = self.energy([INPUTS, *self.lower, CLASSES]), draw.uniform(0.1, 0.7)
        self.budget = least + share * (self.energy(full) - least)
        # What the published code and the paper do differently, and each kind of clipping, has some of the seeds. Fast
        # problems have s some channels below phi, where the quadratic penalty decides.
        is_fast = self.seed >= SLOW
        self.constants = Constants(
            alpha=1e-3 if is_fast else draw.choice([1e-3, 1e-2]),
            beta=draw.uniform(60.0, 120.0) if is_fast else draw.uniform(10.0, 30.0),
            rho_1=draw.uniform(0.1, 0.3) if is_fast else draw.choice([0.02, 0.2, 2.0]),
            rho_2=draw.choice([1.0, 10.0, 50.0]),
            epsilon=draw.choice([5e-3, 1e-2]),
            clip=None if is_fast else (None, 6e-3, 1.0)[self.seed % 3],
            floor_in_y=self.seed % 4 != 0,
            weight_decay=draw.choice([0.0, 1e-2]),
        )

    def energy(self, widths: list[int]) -> float:
        base, *coefficients = self.coefficients
        return base + sum(
            a * one * next_one for a, one, next_one in zip(coefficients, widths, widths[1:], strict=False)
        )

    def loop(self) -> PublishedLoop:
        layers = [*self.net.convs, self.net.head]
        return PublishedLoop(
            [layer.weight for layer in layers],
            [layer.bias for layer in layers],
            self.coefficients,
            self.budget,
            self.lower,
            self.constants,
        )

    def solver(self, graph: ChannelGraph) -> EccSolver:
        constants = self.constants
        optimizer = torch.optim.Adam(self.net.parameters(), lr=constants.alpha, weight_decay=constants.weight_decay)
        settings = PaperSettings(
            width_lr=constants.beta,
            width_penalty=constants.rho_1,
            energy_penalty=constants.rho_2,
            min_energy_slope=constants.epsilon,
            max_norm=constants.clip,
            floor_width_dual=constants.floor_in_y,
        )
        return EccSolver(
            self.net,
            graph,
            self.cost(graph),
            self.budget,
            ITERATIONS,
            optimizer=optimizer,
            solver=settings,
            min_width_ratio=self.min_width_ratio,
        )

    def cost(self, graph: ChannelGraph) -> ProductCost:
        sizes = [AffineSize(INPUTS), *(AffineSize(0, ((position, 1),)) for position in range(len(graph.groups)))]
        base, *coefficients = self.coefficients
        products = BilinearForm(base, tuple(coefficients), tuple(sizes[:-1]), tuple(sizes[1:]), len(graph.groups))
        return ProductCost(products, tuple(graph.full_widths), tuple(graph.full_widths.values()))

    def batch(self, iteration: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.seed + iteration)
        x = torch.randn(BATCH, INPUTS, SIZE, SIZE, generator=generator, dtype=torch.float64)
        return x, torch.randn(BATCH, CLASSES, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(SLOW + FAST))
def test_every_iteration_is_that_of_the_published_loop(seed: int) -> None:
    problem = Problem(seed)
    net, loop = problem.net, problem.loop()
    graph = trace_channels(net.eval(), problem.batch(0)[0], verify=False)
    assert list(graph.full_widths.values()) == loop.c[1:]
    solver = problem.solver(graph)
    net.train()
    removals = 0
    for iteration in range(ITERATIONS):
        x, target = problem.batch(iteration)
        before = loop.phi()
        loop.iterate(x, target)
        (net(x) - target).square().mean().backward()
        solver.step()
        solver.zero_grad()

        alive, widths, width_dual, energy_dual = solver._solver.state
        where = f"seed {seed}, iteration {iteration}"
        assert alive.tolist() == [one for layer in loop.alive[1:] for one in layer], where
        # The solver has scores in float32, and beta y times their relative error is what s is off by at each step.
        assert widths.tolist() == pytest.approx(loop.s[1:], abs=1e-3), where
        assert width_dual.tolist() == pytest.approx(loop.y[1:], rel=1e-3, abs=1e-5), where
        assert float(energy_dual) == pytest.approx(loop.z, rel=1e-3, abs=1e-5), where
        for layer, weight, bias in zip([*net.convs, net.head], loop.w, loop.b, strict=True):
            torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-9, atol=1e-11, msg=where)
            torch.testing.assert_close(layer.bias.detach(), bias, rtol=1e-9, atol=1e-11, msg=where)
        removals += loop.phi() != before
    assert removals >= 2  # channels left at several iterations, so that there was something to follow
