"""Helpers that several baselines use to find widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecc.errors import InfeasibleBudget
from ecc.methods.base import PruningContext

_BISECTIONS = 40


def largest_ratio(fits: Callable[[float], bool]) -> float:
    """Largest ratio in [0, 1) that fits, by bisection; 0 if none does. A ratio fits if a larger one does."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        ratio = 0.5 * (low + high)
        if fits(ratio):
            low = ratio
        else:
            high = ratio
    return low


def uniform_widths(context: PruningContext, names: Sequence[str]) -> dict[str, int]:
    """Widths by group where some groups keep the same fraction, the largest that meets the targets; others are full."""
    full = context.graph.full_widths

    def widths(ratio: float) -> dict[str, int]:
        wanted = [ratio * width if name in names else width for name, width in full.items()]
        return dict(zip(full, context.round_widths(wanted), strict=True))

    return widths(largest_ratio(lambda ratio: context.constraint_violation(list(widths(ratio).values())) <= 0))


def allowed_widths(context: PruningContext) -> list[list[int]]:
    """Widths that `PruningContext.round_widths` gives to each group, ascending from its minimum to its full width."""
    widths = [group.width for group in context.graph.groups]
    allowed = [[width] for width in widths]
    while (lower := context.round_widths([width - 1 for width in widths])) != widths:
        for found, width in zip(allowed, lower, strict=True):
            if width < found[0]:
                found.insert(0, width)
        widths = lower
    return allowed


def check_feasible(context: PruningContext) -> None:
    """Check that the targets can be met."""
    violation = context.constraint_violation(context.min_widths())
    if violation > 0:
        raise InfeasibleBudget(
            f"the target is not reachable: with every group at its minimum width the predicted cost is "
            f"{1 + violation:.1%} of it. Raise the budget, or lower min_width_ratio."
        )
