"""Room 5: methods that bring a network down to a budget; ECC first."""

from .base import Method, Work
from .compress import Compressed, Compression
from .ecc import EccSolver, PaperSettings, WeightSolver
from .feasibility import Reach, reaches
from .fine import Thinned, WeightCompression
from .greedy import Greedy
from .settings import CompressSettings
from .uniform import Uniform

__all__ = [
    "CompressSettings",
    "Compressed",
    "Compression",
    "EccSolver",
    "Greedy",
    "Method",
    "PaperSettings",
    "Reach",
    "Thinned",
    "Uniform",
    "WeightCompression",
    "WeightSolver",
    "Work",
    "reaches",
]
