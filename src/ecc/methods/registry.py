"""Methods by the names that users type."""

from __future__ import annotations

from collections.abc import Callable

from ecc.errors import EccError

from .base import Method
from .baselines.amc import Amc, AmcSettings
from .baselines.eap import Eap
from .baselines.greedy import Greedy
from .baselines.lcp import Lcp, LcpSettings
from .baselines.netadapt import NetAdapt
from .baselines.uniform import Uniform

METHODS: dict[str, Callable[[], Method] | None] = {
    "ecc": None,
    "netadapt": NetAdapt,
    "amc": Amc,
    "eap": Eap,
    "lcp": Lcp,
    "uniform": Uniform,
    "greedy": Greedy,
}
"""With the settings of their papers. ECC itself is what `Compression` does when it is given no method."""

_QUICK: dict[str, Callable[[], Method]] = {
    "amc": lambda: Amc(AmcSettings(episodes=40)),
    "lcp": lambda: Lcp(LcpSettings(candidates=40, population=16, tournament=4)),
}
"""Those that judge hundreds of networks, with a tenth of them."""


def find_method(name: str, *, quick: bool = False) -> Method | None:
    """A new instance of a method; None for ECC.

    Args:
        name: As users type it.
        quick: Whether it is to search for a tenth of its time: to see it work, not to compare.

    Raises:
        EccError: If there is no such method.
    """
    if name not in METHODS:
        raise EccError(f"there is no method {name!r}; there are {', '.join(METHODS)}.")
    make = _QUICK.get(name, METHODS[name]) if quick else METHODS[name]
    return None if make is None else make()
