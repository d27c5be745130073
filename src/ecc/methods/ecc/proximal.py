"""Algorithm 2: the proximal step, which decides the channels that a group keeps.

A channel's energy in the metric of the optimizer is a_i = ||w_i||_B^2, the sum over its reading slices of w^2 B. The
step minimises over all sets of kept channels, with k the number kept,

    1/2 (sum of a_i over the removed) + alpha ( rho_1 / 2 [k - s]_+^2 + y k )

Both parts are monotone along the channels in descending order of a (what the r-th one is worth falls, what it costs
rises), so the best set is a prefix, and each channel can be judged by its rank alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


def coefficients(ranks: Tensor, bounds: Tensor | float, *, weight_lr: float, width_penalty: float) -> Tensor:
    """What the r-th channel of a group costs by the quadratic penalty, Algorithm 2: rho_1 alpha (...).

    Args:
        ranks: Rank by descending energy, from 1.
        bounds: s, the group's width bound.
        weight_lr: alpha.
        width_penalty: rho_1.
    """
    above, before = (ranks - bounds).clamp(min=0), (ranks - 1 - bounds).clamp(min=0)
    return width_penalty * weight_lr * (above.square() - before.square())


def trimmed_dual(width_dual: Tensor, margin: Tensor, *, weight_lr: float) -> Tensor:
    """y, cut so that floor(s) channels survive, Sec. 3.3.3.

    Args:
        width_dual: y of each group.
        margin: Energy of the floor(s)-th largest channel of each group.
        weight_lr: alpha.
    """
    return torch.minimum(width_dual, margin.to(width_dual.dtype) / (2 * weight_lr))


def keeps(
    energies: Tensor,
    ranks: Tensor,
    bounds: Tensor | float,
    width_dual: Tensor | float,
    *,
    weight_lr: float,
    width_penalty: float,
) -> Tensor:
    """Algorithm 2's rule for each channel, and the trim: the floor(s) best stay whatever y is.

    Paper: kept if greater. We: greater or equal, since the trim makes exact ties. Arguments as in `proximal_keep`,
    with the rank of each channel in its group, and s and y of that group.
    """
    threshold = (
        coefficients(ranks, bounds, weight_lr=weight_lr, width_penalty=width_penalty) + 2 * weight_lr * width_dual
    )
    whole = torch.floor(torch.as_tensor(bounds, dtype=torch.float64, device=ranks.device))
    return (energies >= threshold) | (ranks <= whole)


def proximal_keep(
    energies: Tensor,
    bound: float | Tensor,
    width_dual: float | Tensor,
    *,
    weight_lr: float,
    width_penalty: float,
    trim: bool = True,
) -> Tensor:
    """Which channels of one group survive, Algorithm 2 in closed form.

    Args:
        energies: a, one number a channel, at least 0.
        bound: s.
        width_dual: y.
        weight_lr: alpha.
        width_penalty: rho_1.
        trim: Keep at least floor(s); False gives the plain argmin.
    """
    order = energies.argsort(descending=True, stable=True)
    ranks = torch.empty_like(order)
    ranks[order] = torch.arange(1, len(order) + 1, device=order.device)
    step = {"weight_lr": weight_lr, "width_penalty": width_penalty}
    if trim:
        return keeps(energies, ranks, bound, width_dual, **step)
    return energies >= coefficients(ranks, bound, **step) + 2 * weight_lr * width_dual
