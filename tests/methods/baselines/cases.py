"""Quick instances of every baseline, and helpers to run them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from ecc.methods import PruningContext
from ecc.methods.base import Method
from ecc.methods.baselines.amc import Amc, AmcSettings
from ecc.methods.baselines.ddpg import DdpgSettings
from ecc.methods.baselines.eap import Eap, EapSettings
from ecc.methods.baselines.greedy import Greedy, GreedyTaylor
from ecc.methods.baselines.halp import Halp, HalpSettings
from ecc.methods.baselines.lcp import Lcp, LcpSettings
from ecc.methods.baselines.netadapt import NetAdapt, NetAdaptSettings
from ecc.methods.baselines.uniform import Uniform


def amc(episodes: int = 6, **settings: Any) -> Amc:
    agent = DdpgSettings(hidden=16, batch=8)
    return Amc(AmcSettings(episodes=episodes, agent=agent, **{"episodes_per_step": 2, **settings}))


def eap(**settings: Any) -> Eap:
    return Eap(EapSettings(**{"batches": 2, "rows": 256, "prune_ratio": None, "finetune_steps": 0, **settings}))


def halp(**settings: Any) -> Halp:
    return Halp(HalpSettings(**{"iterations": 4, "batches": 2, **settings}))


def lcp(**settings: Any) -> Lcp:
    return Lcp(LcpSettings(**{"candidates": 7, "population": 4, "tournament": 2, **settings}))


def netadapt(**settings: Any) -> NetAdapt:
    return NetAdapt(NetAdaptSettings(**{"short_steps": 1, "initial_reduction": 0.2, **settings}))


BASELINES: dict[str, Callable[[], Method]] = {
    "uniform": Uniform,
    "greedy": Greedy,
    "greedy_taylor": GreedyTaylor,
    "netadapt": netadapt,
    "amc": amc,
    "eap": eap,
    "eap in passes": lambda: eap(prune_ratio=0.25, finetune_steps=None),
    "halp": halp,
    "lcp": lcp,
    "legr": lambda: lcp(scale=True, short_steps=1),
}


def finish(method: Any, context: PruningContext, most: int = 200) -> Any:
    """Start the method, unless it was started, and run it to its end."""
    if getattr(method, "_context", getattr(method, "context", None)) is not context:
        method.start(context)
    for _ in range(most + 1):
        if method.is_done:
            return method
        method.step()
    raise AssertionError("the method does not end")


def lines_of(context: PruningContext, key: str = "phase") -> list[Mapping[str, Any]]:
    """Logged lines that have a key."""
    return [line for line in context.lines if key in line]  # type: ignore[attr-defined]


def magnitude_score(model: nn.Module) -> float:
    """A score that prefers wide networks, as accuracy does."""
    return float(sum(parameter.detach().abs().sum() for parameter in model.parameters()))
