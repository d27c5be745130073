"""Methods by the names that users type."""

from __future__ import annotations

from collections.abc import Callable

from ecc.errors import EccError

from .amc import Amc
from .base import Method
from .eap import Eap
from .greedy import Greedy
from .lcp import Lcp
from .netadapt import NetAdapt
from .uniform import Uniform

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


def find_method(name: str) -> Method | None:
    """A new instance of a method; None for ECC.

    Raises:
        EccError: If there is no such method.
    """
    if name not in METHODS:
        raise EccError(f"there is no method {name!r}; there are {', '.join(METHODS)}.")
    make = METHODS[name]
    return None if make is None else make()
