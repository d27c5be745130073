"""Room 5: methods that bring a network down to a budget; ECC first."""

from .compress import Compressed, Compression
from .ecc import EccSolver, PaperSettings, WeightSolver
from .feasibility import Reach, reaches
from .fine import Thinned, WeightCompression
from .settings import CompressSettings

__all__ = [
    "CompressSettings",
    "Compressed",
    "Compression",
    "EccSolver",
    "PaperSettings",
    "Reach",
    "Thinned",
    "WeightCompression",
    "WeightSolver",
    "reaches",
]
