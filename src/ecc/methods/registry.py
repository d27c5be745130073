"""Methods by name."""

from __future__ import annotations

from collections.abc import Callable

from ecc.errors import EccError

from .base import Method
from .baselines.amc import Amc, AmcSettings
from .baselines.eap import Eap, EapSettings
from .baselines.flap import Flap
from .baselines.greedy import Greedy, GreedyTaylor
from .baselines.halp import Halp, HalpSettings
from .baselines.isomorphic import Isomorphic
from .baselines.lcp import Lcp, LcpSettings
from .baselines.llm_pruner import LlmPruner
from .baselines.netadapt import NetAdapt, NetAdaptSettings
from .baselines.shortgpt import ShortGpt
from .baselines.torch_pruning import GroupNorm, GroupNormSettings, TorchPruning, TorchPruningSettings
from .baselines.two_ssp import TwoSsp
from .baselines.uniform import Uniform
from .baselines.wanda_sp import WandaSp
from .ecc.method import Ecc
from .one_shot import OneShot

SEARCH_STEPS = 100
"""Steps of one training during a published search; the papers have 10,000 and more on ImageNet."""

METHODS: dict[str, Callable[[], Method]] = {
    "ecc": Ecc,
    "netadapt": NetAdapt,
    "amc": Amc,
    "eap": Eap,
    "lcp": Lcp,
    "legr": lambda: Lcp(LcpSettings(scale=True)),
    "uniform": Uniform,
    "greedy": Greedy,
    "greedy_taylor": GreedyTaylor,
    "isomorphic": Isomorphic,
    "halp": Halp,
    "tp_magnitude": TorchPruning,
    "tp_taylor": lambda: TorchPruning(TorchPruningSettings(importance="taylor")),
    "tp_group_norm": GroupNorm,
    "one_shot": OneShot,
    "wanda_sp": WandaSp,
    "flap": Flap,
    "llm_pruner": LlmPruner,
    "shortgpt": ShortGpt,
    "2ssp": TwoSsp,
}
"""With the settings of their papers."""

_QUICK: dict[str, Callable[[], Method]] = {
    "amc": lambda: Amc(AmcSettings(episodes=40)),
    "lcp": lambda: Lcp(LcpSettings(candidates=40, population=16, tournament=4)),
    "legr": lambda: Lcp(LcpSettings(scale=True, candidates=40, population=16, tournament=4)),
}
"""Methods that evaluate hundreds of networks, with a tenth of them."""


_PUBLISHED: dict[str, Callable[[], Method]] = {
    "netadapt": lambda: NetAdapt(NetAdaptSettings(short_steps=SEARCH_STEPS, within_prune_steps=False)),
    "eap": lambda: Eap(EapSettings(finetune_steps=SEARCH_STEPS)),
    "halp": lambda: Halp(HalpSettings(finetune_steps=SEARCH_STEPS)),
    "tp_group_norm": lambda: GroupNorm(GroupNormSettings(within_prune_steps=False)),
}
"""Methods that train while they search, without a limit on the batches of the search."""


def find_method(name: str, *, quick: bool = False, published: bool = False) -> Method:
    """A new instance of a method.

    Args:
        name: One of `METHODS`.
        quick: Search for a tenth of the time: for a demonstration, not for a comparison.
        published: Search as its paper does, as long as that takes: NetAdapt trains every candidate of every round, and
            energy-aware pruning and HALP train after every pass, and the sparse training of Torch-Pruning is as long as
            fine-tuning.

    Raises:
        EccError: If there is no such method.
    """
    if name not in METHODS:
        raise EccError(f"unknown method {name!r}; choose one of {', '.join(METHODS)}.")
    made = METHODS[name]
    if quick or published:
        made = (_QUICK if quick else _PUBLISHED).get(name, made)
    return made()
