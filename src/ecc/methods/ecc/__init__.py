"""The solver of the paper: an optimizer that prunes channels to a budget while it trains."""

from ecc.methods.ecc.paper import PaperSettings
from ecc.methods.ecc.solver import Duals, EccSolver

__all__ = ["Duals", "EccSolver", "PaperSettings"]
