"""Room 3: a profile becomes a model of what any widths cost."""

from .budget import Budget, dense_cost, parse_budget, parse_budgets
from .cost import Cost
from .counted import CountedCost, counted_cost
from .fitting import fit
from .model import EnergyModel
from .nonzeros import NonzeroCost, nonzero_cost

__all__ = [
    "Budget",
    "Cost",
    "CountedCost",
    "EnergyModel",
    "NonzeroCost",
    "counted_cost",
    "dense_cost",
    "fit",
    "nonzero_cost",
    "parse_budget",
    "parse_budgets",
]
