"""Pruning methods: ECC and baselines, and the compression that runs them."""

from ecc.run_records import Feasibility
from ecc.settings import CompressSettings

from .base import Method, PruningContext
from .baselines.amc import Amc, AmcSettings
from .baselines.eap import Eap, EapSettings
from .baselines.greedy import Greedy
from .baselines.lcp import Lcp, LcpSettings
from .baselines.netadapt import NetAdapt, NetAdaptSettings
from .baselines.scratch import Scratch
from .baselines.uniform import Uniform
from .budget_controller import BudgetController
from .compression import Compression
from .cost_evaluator import CostEvaluator, MeasuredCost
from .ecc import EccSolver, PaperSettings, WeightSolver
from .ecc.method import Ecc
from .feasibility import check_feasibility
from .runner import CompressedModel
from .unstructured import WeightCompression

__all__ = [
    "Amc",
    "AmcSettings",
    "BudgetController",
    "CompressSettings",
    "CompressedModel",
    "Compression",
    "CostEvaluator",
    "Eap",
    "EapSettings",
    "Ecc",
    "EccSolver",
    "Feasibility",
    "Greedy",
    "Lcp",
    "LcpSettings",
    "MeasuredCost",
    "Method",
    "NetAdapt",
    "NetAdaptSettings",
    "PaperSettings",
    "PruningContext",
    "Scratch",
    "Uniform",
    "WeightCompression",
    "WeightSolver",
    "check_feasibility",
]
