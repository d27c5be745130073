"""`Budget`: what a user may ask for, such as `60%`, `24.7 mJ`, `0.4 mJ/image`, `latency=12ms` or `params=2M`."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ecc.errors import BadBudget

from .cost import Cost
from .counted import UNITS as COUNTED
from .model import EnergyModel
from .samples import RESOURCES

_PREFIXES = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_NUMBER = re.compile(r"^\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")
_WHOLE = ("params", "weight_bytes")  # the same for any batch
_EXAMPLES = "60%, 0.0247 J, 0.4 mJ/image, latency=12ms, macs=300M, params=2M or weight_bytes=4MiB"


@dataclass(frozen=True)
class Budget:
    """A limit on one resource: a share of the dense network, or an amount."""

    resource: str
    amount: float
    is_relative: bool
    per_item: bool = False
    """Whether the amount is for one item of the batch; otherwise it is for the whole batch."""

    def limit(self, cost: Cost, batch: int = 1) -> float:
        """The most that may be spent, in the unit of the cost."""
        if self.is_relative:
            return self.amount * dense_cost(cost)
        return self.amount * (batch if self.per_item else 1)

    def __str__(self) -> str:
        if self.is_relative:
            return f"{self.resource} {self.amount:.4g} of dense"
        unit = _unit(self.resource)
        return f"{self.resource} {self.amount:.4g} {unit}".rstrip() + (" an item" if self.per_item else "")


def dense_cost(cost: Cost) -> float:
    """What the dense network costs: as the profile has it, for a model may miss it; or as the cost says.

    An optimised kernel may serve the dense shapes alone, and then no smooth model fits them and all others.
    """
    if isinstance(cost, EnergyModel):
        return cost.dense_profiled
    return float(cost.to("cpu").value(torch.tensor(cost.full_widths, dtype=torch.float64)))


def parse_budget(text: str) -> Budget:
    """The budget that a text names; energy if it names no resource.

    Raises:
        BadBudget: If the text is no budget, or is not above 0.
    """
    name, equals, rest = text.partition("=")
    resource = name.strip() if equals else "energy"
    known = (*RESOURCES, *COUNTED)
    if resource not in known:
        raise BadBudget(f"budget {text!r} is about {resource!r}; there are {', '.join(known)}.")
    match = _NUMBER.match(rest if equals else text)
    if match is None:
        raise BadBudget(f"budget {text!r} starts with no number; write it as {_EXAMPLES}.")
    number, unit = float(match[1]), match[2]
    if not number > 0:
        raise BadBudget(f"budget {text!r} is not above 0, and no network costs nothing.")
    if not math.isfinite(number):
        raise BadBudget(f"budget {text!r} is larger than any number here; write it as {_EXAMPLES}.")
    if unit == "%":
        if number > 100:
            raise BadBudget(f"budget {text!r} is above 100%, what the dense network takes; give a share up to 100%.")
        return Budget(resource, number / 100, is_relative=True)
    stem, slash, item = unit.partition("/")
    if slash and item.strip() not in ("image", "item", "sample"):
        raise BadBudget(f"budget {text!r} is per {item.strip()!r}; write /image, or leave it out for the whole batch.")
    if slash and resource in _WHOLE:
        raise BadBudget(f"budget {text!r} is per item, but {resource} does not grow with the batch; leave out /{item}.")
    if not stem.strip() and _unit(resource):
        share = f"{match[1]}%" if number > 1 else f"{100 * number:g}%"
        one = _unit(resource)
        raise BadBudget(f"budget {text!r} has no unit; write {match[1]} {one}, or {share} for a share of dense.")
    factor = _factor(stem.strip(), _unit(resource))
    if factor is None:
        wanted = _unit(resource) or "a plain number, or one with k, M or G"
        raise BadBudget(f"budget {text!r} has the unit {unit!r}; {resource} is in {wanted}, or % of dense.")
    return Budget(resource, number * factor, is_relative=False, per_item=bool(slash))


def parse_budgets(texts: str | Sequence[str]) -> tuple[Budget, ...]:
    """One budget or several, each for another resource; all must hold.

    Raises:
        BadBudget: If there is none, one is wrong, or two are about the same resource.
    """
    budgets = tuple(parse_budget(text) for text in ([texts] if isinstance(texts, str) else texts))
    if not budgets:
        raise BadBudget(f"no budget was given; write one as {_EXAMPLES}.")
    seen: set[str] = set()
    for budget in budgets:
        if budget.resource in seen:
            raise BadBudget(f"there are two budgets of {budget.resource}; give the smaller one.")
        seen.add(budget.resource)
    return budgets


def _unit(resource: str) -> str:
    return RESOURCES[resource][1] if resource in RESOURCES else COUNTED[resource]


def _factor(text: str, unit: str) -> float | None:
    """What a unit with a prefix amounts to; None if it is another unit. A bare number needs no unit."""
    if not text:
        return 1.0
    if unit and text.endswith(unit):
        text = text[: -len(unit)]
    elif unit:
        return None
    if unit == "B" and text in _BINARY:
        return _BINARY[text]
    factor = _PREFIXES.get(text)
    is_counted = unit in ("", "B")
    return None if is_counted and factor is not None and factor < 1 else factor  # 2m parameters are a slip for 2M
