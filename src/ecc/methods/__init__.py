"""Room 5: methods that bring a network down to a budget; ECC first."""

from .amc import Amc, AmcSettings
from .base import Method, Work
from .compress import Compressed, Compression
from .eap import Eap, EapSettings
from .ecc import EccSolver, PaperSettings, WeightSolver
from .feasibility import Reach, reaches
from .fine import Thinned, WeightCompression
from .greedy import Greedy
from .lcp import Lcp, LcpSettings
from .netadapt import NetAdapt, NetAdaptSettings
from .scratch import Scratch
from .settings import CompressSettings
from .uniform import Uniform

__all__ = [
    "Amc",
    "AmcSettings",
    "CompressSettings",
    "Compressed",
    "Compression",
    "Eap",
    "EapSettings",
    "EccSolver",
    "Greedy",
    "Lcp",
    "LcpSettings",
    "Method",
    "NetAdapt",
    "NetAdaptSettings",
    "PaperSettings",
    "Reach",
    "Scratch",
    "Thinned",
    "Uniform",
    "WeightCompression",
    "WeightSolver",
    "Work",
    "reaches",
]
