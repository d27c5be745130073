"""Costs of a network at any widths: energy models fitted to profiles, exact counts, and budgets."""

from ecc.budget import Budget, budgets_of_workloads, dense_cost, parse_budget, parse_budgets

from .cost import Cost
from .counted import CountedCost, NonzeroCost, counted_cost, nonzero_cost
from .model import EnergyModel, fit
from .quality import FitErrors, FitQuality

__all__ = [
    "Budget",
    "Cost",
    "CountedCost",
    "EnergyModel",
    "FitErrors",
    "FitQuality",
    "NonzeroCost",
    "budgets_of_workloads",
    "counted_cost",
    "dense_cost",
    "fit",
    "nonzero_cost",
    "parse_budget",
    "parse_budgets",
]
