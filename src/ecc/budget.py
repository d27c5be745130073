"""`Budget`: a limit on one resource, and the only parser of budgets. It does not import torch.

50%   24 mJ   0.4 mJ/image   latency=12ms   macs=50%   macs=300M   params=2M   weight_bytes=4MiB
decode=70%   0.8 mJ/token   prefill=60%   decode_latency=2ms/token         (language models)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ecc.errors import BadBudget

MEASURED_UNITS = {
    "energy": "J",
    "latency": "s",
    "decode": "J",
    "decode_latency": "s",
    "prefill": "J",
    "prefill_latency": "s",
}
"""Resources that need a meter or a platform, and a fitted model: of the forward pass, or of a workload of a language
model."""
COUNTED_UNITS = {"macs": "", "params": "", "weight_bytes": "B", "activation_bytes": "B", "peak_bytes": "B"}
"""Resources that are counted, and their units.

macs: multiply-accumulates of one inference of the whole batch. params: parameters. weight_bytes: bytes of parameters
and buffers. activation_bytes: bytes of activations read and written by all layers. peak_bytes: bytes of activations
read and written by the largest layer, the least memory to run the network in.
"""

_UNITS = MEASURED_UNITS | COUNTED_UNITS
_PREFIXES = {"n": 1e-9, "u": 1e-6, "µ": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30}
_NUMBER = re.compile(r"^\s*([+-]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*(.*?)\s*$")
_BATCH_INDEPENDENT = ("params", "weight_bytes")
_EXAMPLES = "50%, 24 mJ, 0.4 mJ/image, latency=12ms, macs=300M, params=2M or weight_bytes=4MiB"


@dataclass(frozen=True)
class Budget:
    """A limit on one resource: a fraction of the dense network, or an amount."""

    resource: str
    amount: float
    is_relative: bool
    """Whether the amount is a fraction of the dense network."""
    per_item: bool = False
    """Whether the amount is for one item of the batch; otherwise it is for the whole batch."""
    item: str = "item"
    """What an item is: `token` for language models, otherwise `item`."""

    def limit(self, cost: Any, batch: int = 1) -> float:
        """The limit for one inference of the whole batch, in the unit of a `Cost`."""
        if self.is_relative:
            return self.amount * dense_cost(cost)
        return self.amount * (batch if self.per_item else 1)

    def __str__(self) -> str:
        if self.is_relative:
            return f"{self.resource} {100 * self.amount:.4g}% of dense"
        amount = f"{self.resource} {self.amount:.4g} {_UNITS[self.resource]}".rstrip()
        return f"{amount} per {self.item}" if self.per_item else amount


def dense_cost(cost: Any) -> float:
    """Cost of the dense network: as profiled, or as computed by a cost without a profile.

    The prediction at full widths is not used. An optimised kernel may serve the dense shapes alone, and then no smooth
    model fits them and all others.
    """
    profiled = getattr(cost, "dense_profiled", None)
    if profiled is not None:
        return float(profiled)
    import torch

    return float(cost.to("cpu").value(torch.tensor(cost.full_widths, dtype=torch.float64)))


def parse_budget(text: str | Budget) -> Budget:
    """Parse `AMOUNT` (of energy) or `RESOURCE=AMOUNT`; an amount is a percentage of the dense network or has a unit."""
    if isinstance(text, Budget):
        return text
    text = str(text)
    name, equals, rest = text.partition("=")
    resource = name.strip() if equals else "energy"
    if resource not in _UNITS:
        raise BadBudget(f"budget {text!r}: unknown resource {resource!r}; choose one of {', '.join(_UNITS)}.")
    match = _NUMBER.match(rest if equals else text)
    if match is None:
        raise BadBudget(f"budget {text!r} has no number; write for example {_EXAMPLES}.")
    number, unit = float(match[1]), match[2]
    if not 0 < number < math.inf:
        raise BadBudget(f"budget {text!r} must be above 0 and finite; write for example {_EXAMPLES}.")
    if unit == "%":
        if number > 100:
            raise BadBudget(f"budget {text!r} is above 100%, the cost of the dense network; give at most 100%.")
        return Budget(resource, number / 100, is_relative=True)
    stem, slash, item = (part.strip() for part in unit.partition("/"))
    if slash and item not in ("image", "item", "sample", "token"):
        raise BadBudget(
            f"budget {text!r} is per {item!r}; write /image, or /token for a language model, or leave it out for the "
            "whole batch."
        )
    if slash and resource in _BATCH_INDEPENDENT:
        raise BadBudget(f"budget {text!r}: {resource} does not depend on the batch; leave out /{item}.")
    if not stem and _UNITS[resource]:
        percent = f"{match[1]}%" if number > 1 else f"{100 * number:g}%"
        amount = f"{match[1]} {_UNITS[resource]}"
        raise BadBudget(f"budget {text!r} has no unit; write {percent} for a share of dense, or {amount}.")
    if not unit and number < 1:  # below one MAC or parameter: a fraction is meant
        raise BadBudget(f"budget {text!r} is below 1; write {resource}={100 * number:g}% for a share of dense.")
    factor = _factor(stem, _UNITS[resource])
    if factor is None:
        wanted = _UNITS[resource] or "a plain number or one with k, M or G"
        several = " For several budgets, give a list or repeat --budget." if "=" in unit else ""
        raise BadBudget(f"budget {text!r} has the unit {unit!r}; {resource} takes {wanted}, or % of dense.{several}")
    return Budget(
        resource, number * factor, is_relative=False, per_item=bool(slash), item="token" if item == "token" else "item"
    )


def parse_several_budgets(texts: Sequence[str]) -> list[Budget]:
    """Budgets that each get a result of their own, from the mildest to the tightest."""
    listed = ", ".join(texts)
    budgets = [budget for text in texts for budget in parse_budgets([text])]
    kinds = {(budget.resource, budget.is_relative) for budget in budgets}
    if len(kinds) > 1:
        raise BadBudget(
            f"several budgets must be on one resource, all in percent or all in a unit, not {listed}. For "
            "several limits at once, use budget= (--budget)."
        )
    if len({budget.amount for budget in budgets}) < max(2, len(budgets)):
        raise BadBudget(f"several budgets must be at least two different ones, not {listed or 'none'}.")
    return sorted(budgets, key=lambda budget: -budget.amount)


def measured_resources(budgets: Iterable[Budget]) -> list[str]:
    """Those of the budgets' resources that have to be measured, not counted."""
    return [resource for resource in MEASURED_UNITS if any(budget.resource == resource for budget in budgets)]


def parse_budgets(budgets: str | Budget | Iterable[str | Budget]) -> tuple[Budget, ...]:
    """Parse one budget or several on different resources; all must be met.

    Raises:
        BadBudget: If there is none, one is wrong, or two are for the same resource.
    """
    given = [budgets] if isinstance(budgets, str | Budget | float | int) else (budgets or ())
    found = tuple(parse_budget(budget) for budget in given)
    if not found:
        raise BadBudget(f"no budget is given; write for example {_EXAMPLES}.")
    resources = [budget.resource for budget in found]
    for resource in resources:
        if resources.count(resource) > 1:
            raise BadBudget(f"there are {resources.count(resource)} budgets for {resource}; give the smallest one.")
    return found


def budgets_of_workloads(budgets: Iterable[Budget], workloads: Sequence[str]) -> tuple[Budget, ...]:
    """Budgets as they apply to a network with these workloads, the most important one first; none for other networks.

    A budget on energy or latency is one of the first workload, so that `70%` of a language model means `decode=70%`.
    """
    found = []
    for budget in budgets:
        workload = budget.resource.partition("_")[0]
        if workload in ("decode", "prefill") and workload not in workloads:
            has = f"its workloads are {' and '.join(workloads)}" if workloads else "this network is no language model"
            raise BadBudget(f"the budget {budget} is for {workload}, but {has}; write for example 70%.")
        if budget.per_item and workloads and budget.resource in COUNTED_UNITS:
            raise BadBudget(
                f"the budget {budget} is counted for the example input of a language model, not per token; write for "
                f"example {budget.resource}=50%."
            )
        if budget.per_item and (budget.item == "token") != bool(workloads):
            unit = "/token" if workloads else "/item or /image"
            raise BadBudget(
                f"the budget {budget} does not fit this network, whose costs are per "
                f"{'token' if workloads else 'item of the batch'}; use {unit}."
            )
        if workloads and budget.resource in ("energy", "latency"):
            name = workloads[0] if budget.resource == "energy" else f"{workloads[0]}_latency"
            budget = replace(budget, resource=name)
        found.append(budget)
    return parse_budgets(found)


def _factor(text: str, unit: str) -> float | None:
    """Factor of a unit with a prefix; None if it is another unit."""
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
    return None if is_counted and factor is not None and factor < 1 else factor  # 2m parameters: probably 2M
