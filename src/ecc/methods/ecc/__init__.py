"""The solver of the paper: an optimizer that prunes channels, or single weights, to a budget during training."""

from ecc.methods.ecc.admm import AdmmSettings
from ecc.methods.ecc.solver import Duals, EccSolver
from ecc.methods.ecc.weight_solver import WeightSolver

__all__ = ["AdmmSettings", "Duals", "EccSolver", "WeightSolver"]
