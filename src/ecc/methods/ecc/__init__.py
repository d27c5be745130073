"""The solver of the paper: an optimizer that prunes channels, or weights, to a budget while it trains."""

from ecc.methods.ecc.admm import AdmmSettings
from ecc.methods.ecc.solver import Duals, EccSolver
from ecc.methods.ecc.weights import WeightSolver

__all__ = ["AdmmSettings", "Duals", "EccSolver", "WeightSolver"]
