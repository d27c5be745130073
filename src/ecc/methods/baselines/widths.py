"""Helpers that several baselines use to find widths."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ecc.errors import InfeasibleBudget, option_hint
from ecc.methods.base import PruningContext

_BISECTIONS = 40
_FEW = 12  # channels of a group, such as heads, of which one is a large part
_GOLDEN = 0.6180339887498949  # multiples of it modulo 1 are spread evenly


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


def uniform_widths(context: PruningContext, names: Sequence[str]) -> tuple[float, dict[str, int]]:
    """The largest fraction that some groups can keep to meet the targets, and widths by group; other groups are full.

    Of groups with few channels, such as heads, some are rounded up and the others down, spread over the network; if all
    were rounded down, every layer would lose one of three heads at once.
    """
    full = context.graph.full_widths
    few = [name for name in names if full[name] <= _FEW]
    raised = {name: (number + 0.5) * _GOLDEN % 1 for number, name in enumerate(few)}

    def widths(ratio: float) -> dict[str, int]:
        wanted = [ratio * width + raised.get(name, 0) if name in names else width for name, width in full.items()]
        return dict(zip(full, context.round_widths(wanted), strict=True))

    ratio = largest_ratio(lambda ratio: context.constraint_violation(list(widths(ratio).values())) <= 0)
    return ratio, widths(ratio)


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
            f"{1 + violation:.1%} of it. Raise the budget, or lower {option_hint('min_width_ratio')}."
        )
