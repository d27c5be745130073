"""Room 5: methods that bring a network down to a budget; ECC first."""

from .base import Method, PruningContext
from .baselines.amc import Amc, AmcSettings
from .baselines.eap import Eap, EapSettings
from .baselines.greedy import Greedy
from .baselines.lcp import Lcp, LcpSettings
from .baselines.netadapt import NetAdapt, NetAdaptSettings
from .baselines.scratch import Scratch
from .baselines.uniform import Uniform
from .compression import CompressedModel, Compression
from .ecc import AdmmSettings, EccSolver, WeightSolver
from .feasibility import Feasibility, check_feasibility
from .settings import CompressSettings
from .unstructured import SparseResult, WeightCompression

__all__ = [
    "AdmmSettings",
    "Amc",
    "AmcSettings",
    "CompressSettings",
    "CompressedModel",
    "Compression",
    "Eap",
    "EapSettings",
    "EccSolver",
    "Feasibility",
    "Greedy",
    "Lcp",
    "LcpSettings",
    "Method",
    "NetAdapt",
    "NetAdaptSettings",
    "PruningContext",
    "Scratch",
    "SparseResult",
    "Uniform",
    "WeightCompression",
    "WeightSolver",
    "check_feasibility",
]
