"""The solver of the paper: an optimizer that prunes channels, or single weights, to a budget during training."""

from ecc.methods.ecc.solver import Duals, EccSolver
from ecc.methods.ecc.weight_solver import WeightSolver
from ecc.settings import PaperSettings

__all__ = ["Duals", "EccSolver", "PaperSettings", "WeightSolver"]
