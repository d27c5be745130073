"""Room 5: a network, its costs and a budget become a network that fits."""

from ecc.methods.ecc import Duals, EccSolver, PaperSettings

__all__ = ["Duals", "EccSolver", "PaperSettings"]
