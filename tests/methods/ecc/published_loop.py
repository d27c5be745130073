"""The published training loop, slow and obvious: Algorithms 1 and 2 of the paper for a chain of layers.

Written from the paper and from what is known of the authors' code, and not from `ecc`, of which it imports nothing, so
that the solver can be compared with it. Everything but the gradient of the loss is loops over plain numbers.

Layers u = 0 .. n - 1 are convolutions and one fully connected layer at the end. c[u] is the number of input channels of
layer u, and c[n] that of the outputs of the network. Channels are input channels, as in the paper: removing channel i
of layer u zeroes w[u][:, i]. The inputs and the outputs of the network are constants, so c[1] .. c[n - 1] can shrink.

Where paper and code differ, this is what the table in DESIGN.md has as ours: the quadratic penalty is a sum of squares,
ties are kept, the floor(s) best channels always stay, B has Adam's bias correction, s has a lower bound in each layer,
and the loop ends when the energy of the channels that are left is within the budget. The step on y may take floor(s),
as in the code, or s, as in the paper.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Constants:
    """Of Algorithm 1, as the paper and the options of the authors' program name them."""

    alpha: float
    beta: float
    rho_1: float
    rho_2: float
    epsilon: float = 1e-3
    clip: float | None = 1.0
    """Largest 2-norm of the gradient in s."""
    floor_in_y: bool = True
    """Whether the step on y takes floor(s)."""
    weight_decay: float = 0.0
    """Added to the gradient, as Adam does."""


@dataclass
class AdamOfOneTensor:
    """Kingma and Ba, Algorithm 1, with the state of one tensor."""

    size: int
    beta_1: float = 0.9
    beta_2: float = 0.999
    eps: float = 1e-8
    t: int = 0
    m: list[float] = field(default_factory=list)
    v: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.m, self.v = [0.0] * self.size, [0.0] * self.size

    def step(self, w: list[float], g: list[float], alpha: float) -> list[float]:
        """The weights after a step."""
        self.t += 1
        new = []
        for k in range(self.size):
            self.m[k] = self.beta_1 * self.m[k] + (1 - self.beta_1) * g[k]
            self.v[k] = self.beta_2 * self.v[k] + (1 - self.beta_2) * g[k] ** 2
            m_hat = self.m[k] / (1 - self.beta_1**self.t)
            new.append(w[k] - alpha * m_hat / self.metric(k))
        return new

    def metric(self, k: int) -> float:
        """B of one weight: what Adam divides by."""
        return math.sqrt(self.v[k] / (1 - self.beta_2**self.t)) + self.eps


class PublishedLoop:
    """One object is one run.

    Args:
        weights: Of each layer, (out, in, kh, kw) or (out, in).
        biases: Of each layer.
        coefficients: a_0, a_1 .. a_n of the bilinear energy model.
        budget: E_budget.
        lower: Lower bounds of s[1] .. s[n - 1].
        constants: The others.
    """

    def __init__(
        self,
        weights: list[Tensor],
        biases: list[Tensor],
        coefficients: list[float],
        budget: float,
        lower: list[int],
        constants: Constants,
    ) -> None:
        self.w = [w.detach().clone().double() for w in weights]
        self.b = [b.detach().clone().double() for b in biases]
        self.a, self.budget, self.constants = coefficients, budget, constants
        self.adam_w = [AdamOfOneTensor(w.numel()) for w in self.w]
        self.adam_b = [AdamOfOneTensor(b.numel()) for b in self.b]
        self.c = [w.shape[1] for w in self.w] + [self.w[-1].shape[0]]
        self.n = len(self.w)
        self.lower = [self.c[0], *lower, self.c[self.n]]
        self.alive = [[True] * c for c in self.c]
        # Initialize s = phi(W), y = 0, z = 0.
        self.s = [float(c) for c in self.c]
        self.y = [0.0] * (self.n + 1)
        self.z = 0.0

    # ------------------------------------------------------------ the network and its energy

    def forward(self, x: Tensor, w: list[Tensor], b: list[Tensor]) -> Tensor:
        """Convolutions with ReLU, the mean over the image, one fully connected layer."""
        for u in range(self.n - 1):
            x = torch.relu(F.conv2d(x, w[u], b[u], padding=w[u].shape[-1] // 2))
        return x.mean((2, 3)) @ w[-1].T + b[-1]

    def energy(self, s: list[float]) -> float:
        """a_0 + sum of a_j s_j s_{j+1}."""
        total = self.a[0]
        for j in range(self.n):
            total += self.a[j + 1] * s[j] * s[j + 1]
        return total

    def energy_slope(self, u: int) -> float:
        """dE / ds_u; the layer that reads channel u, and the one that makes it."""
        slope = 0.0
        if u < self.n:
            slope += self.a[u + 1] * self.s[u + 1]
        if u > 0:
            slope += self.a[u] * self.s[u - 1]
        return slope

    def phi(self) -> list[float]:
        """Live channels."""
        return [float(sum(alive)) for alive in self.alive]

    # ------------------------------------------------------------ one iteration of Algorithm 1

    def iterate(self, x: Tensor, target: Tensor) -> None:
        """One batch. Once the budget is met, the weights train on and the channels stay as they are."""
        met = self.energy(self.phi()) <= self.budget
        self.adam_step(x, target)
        if not met:
            for u in range(1, self.n):
                self.proximal_step(u)
            self.width_step()
            self.dual_step()
        for u in range(1, self.n):
            for i in range(self.c[u]):
                if not self.alive[u][i]:
                    self.w[u][:, i] = 0.0

    def adam_step(self, x: Tensor, target: Tensor) -> None:
        """Mean squared error, its gradient, and a step of Adam on every tensor."""
        w = [one.clone().requires_grad_() for one in self.w]
        b = [one.clone().requires_grad_() for one in self.b]
        loss = (self.forward(x, w, b) - target).square().mean()
        gradients = torch.autograd.grad(loss, [*w, *b])
        tensors, adams = [*self.w, *self.b], [*self.adam_w, *self.adam_b]
        for tensor, adam, gradient in zip(tensors, adams, gradients, strict=True):
            old = tensor.flatten().tolist()
            g = gradient.flatten().tolist()
            g = [g[k] + self.constants.weight_decay * old[k] for k in range(len(old))]
            new = torch.tensor(adam.step(old, g, self.constants.alpha), dtype=torch.float64)
            tensor.copy_(new.view_as(tensor))

    def proximal_step(self, u: int) -> None:
        """Algorithm 2 for one layer, all of its channels ranked anew, with the trim of y."""
        alpha, rho_1 = self.constants.alpha, self.constants.rho_1
        metric = torch.tensor([self.adam_w[u].metric(k) for k in range(self.w[u].numel())], dtype=torch.float64)
        squares = self.w[u].square() * metric.view_as(self.w[u])
        a = [float(squares[:, i].sum()) for i in range(self.c[u])]
        order = sorted(range(self.c[u]), key=lambda i: -a[i])
        rank = {i: r for r, i in enumerate(order, start=1)}
        whole = math.floor(self.s[u])
        # At least floor(s) channels survive, so y is at most what the last of them is worth.
        self.y[u] = min(self.y[u], a[order[whole - 1]] / (2 * alpha))
        for i in range(self.c[u]):
            penalty = max(rank[i] - self.s[u], 0.0) ** 2 - max(rank[i] - 1 - self.s[u], 0.0) ** 2
            threshold = rho_1 * alpha * penalty + 2 * alpha * self.y[u]
            self.alive[u][i] = a[i] >= threshold or rank[i] <= whole

    def width_step(self) -> None:
        """Eq. (10): the projection of z, then gradient descent on s, clamped so that widths never grow."""
        rho_1, rho_2 = self.constants.rho_1, self.constants.rho_2
        phi, inner = self.phi(), range(1, self.n)
        slope = {u: self.energy_slope(u) for u in inner}
        excess = max(self.energy(self.s) - self.budget, 0.0)
        rest = {u: rho_2 * excess * slope[u] - self.y[u] - rho_1 * max(phi[u] - self.s[u], 0.0) for u in inner}
        movable = [u for u in inner if self.s[u] > self.lower[u]]
        needed = [(max(-rest[u], 0.0) + self.constants.epsilon) / slope[u] for u in movable if slope[u] > 0]
        if needed:
            self.z = max(self.z, min(needed))
        gradient = {u: max(rest[u] + self.z * slope[u], 0.0) for u in movable}
        norm = math.sqrt(sum(g**2 for g in gradient.values()))
        if self.constants.clip is not None and norm > self.constants.clip:
            gradient = {u: g * self.constants.clip / norm for u, g in gradient.items()}
        for u, g in gradient.items():
            self.s[u] = max(self.s[u] - self.constants.beta * g, float(self.lower[u]))

    def dual_step(self) -> None:
        """Eq. (11) and (12): projected gradient ascent."""
        phi = self.phi()
        for u in range(1, self.n):
            bound = math.floor(self.s[u]) if self.constants.floor_in_y else self.s[u]
            self.y[u] = max(self.y[u] + self.constants.rho_1 * (phi[u] - bound), 0.0)
        self.z = max(self.z + self.constants.rho_2 * (self.energy(self.s) - self.budget), 0.0)
