"""Every method, with as little search as it can have."""

from __future__ import annotations

from collections.abc import Callable

from ecc.methods import (
    Amc,
    AmcSettings,
    Eap,
    Ecc,
    Greedy,
    Lcp,
    LcpSettings,
    Method,
    NetAdapt,
    NetAdaptSettings,
    Uniform,
)
from ecc.methods.baselines.greedy import GreedyTaylor
from ecc.methods.baselines.halp import Halp, HalpSettings
from ecc.methods.baselines.isomorphic import Isomorphic

SMALL: dict[str, Callable[[], Method]] = {
    "ecc": Ecc,
    "netadapt": lambda: NetAdapt(NetAdaptSettings(rounds=4)),
    "amc": lambda: Amc(AmcSettings(episodes=6, episodes_per_step=3)),
    "eap": Eap,
    "lcp": lambda: Lcp(LcpSettings(candidates=6, population=4, tournament=2)),
    "legr": lambda: Lcp(LcpSettings(candidates=6, population=4, tournament=2, scale=True)),
    "uniform": Uniform,
    "greedy": Greedy,
    "greedy_taylor": GreedyTaylor,
    "isomorphic": Isomorphic,
    "halp": lambda: Halp(HalpSettings(iterations=3)),
}
"""A new method is a row here."""
