"""Budgets: what is parsed, what is refused with help, and the limits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.energy import Budget, counted_cost, dense_cost, parse_budget, parse_budgets
from ecc.errors import BadBudget
from energy.cases import graph_of, random_model

# text, resource, amount, and `r` for a relative budget or `i` for one per item
GOOD = [
    ("60%", "energy", 0.6, "r"),
    (" 60 % ", "energy", 0.6, "r"),
    ("energy=12.5%", "energy", 0.125, "r"),
    ("macs=50%", "macs", 0.5, "r"),
    ("24 mJ", "energy", 0.024, ""),
    ("24mJ", "energy", 0.024, ""),
    (".5 J", "energy", 0.5, ""),
    ("+2e-3 J", "energy", 2e-3, ""),
    ("7 µJ", "energy", 7e-6, ""),
    ("0.4 mJ/image", "energy", 4e-4, "i"),
    ("energy=0.4mJ/sample", "energy", 4e-4, "i"),
    ("latency=12ms", "latency", 0.012, ""),
    ("macs=300M", "macs", 3e8, ""),
    ("macs=0.3G/image", "macs", 3e8, "i"),
    ("params=2M", "params", 2e6, ""),
    ("weight_bytes=4MiB", "weight_bytes", 4 * 2.0**20, ""),
    ("weight_bytes=4MB", "weight_bytes", 4e6, ""),
    ("peak_bytes=512 KiB", "peak_bytes", 2.0**19, ""),
]

BAD = [
    ("0.5", "budget '0.5' has no unit; write 50% for a share of dense, or 0.5 J"),
    (0.5, "budget '0.5' has no unit; write 50%"),
    ("", "has no number; write for example 50%, 24 mJ, "),
    ("half", "budget 'half' has no number"),
    ("nan", "has no number"),
    ("0%", "budget '0%' must be above 0"),
    ("1e999 J", "must be above 0 and finite"),
    ("150%", "budget '150%' is above 100%, the cost of the dense network; give at most 100%"),
    ("power=5W", "unknown resource 'power'; choose one of energy, latency, decode, decode_latency"),
    ("5 W", "budget '5 W' has the unit 'W'; energy takes J, or % of dense"),
    ("5 MiJ", "has the unit 'MiJ'; energy takes J"),
    ("latency=5 min", "has the unit 'min'; latency takes s"),
    ("params=2B", "has the unit 'B'; params takes a plain number or one with k, M or G"),
    ("params=2m", "has the unit 'm'; params takes a plain number"),
    ("weight_bytes=4M", "has the unit 'M'; weight_bytes takes B"),
    ("60%/image", "has the unit '%/image'"),
    ("5 mJ/second", "is per 'second'; write /image, or /token for a language model, or leave it out"),
    ("params=2M/image", "params does not depend on the batch; leave out /image"),
    ("macs=0.5", "is below 1; write macs=50% for a share of dense"),
    ("macs=50%,params=50%", "For several budgets, give a list or repeat --budget"),
    (None, "no budget is given"),
    ([], "no budget is given; write for example 50%"),
    (["60%", "energy=5 J"], "there are 2 budgets for energy; give the smallest one"),
    (["60%", "5 W"], "has the unit 'W'"),
]


@pytest.mark.parametrize(("text", "resource", "amount", "flags"), GOOD)
def test_a_budget_is_parsed(text: str, resource: str, amount: float, flags: str) -> None:
    budget = parse_budget(text)
    assert (budget.resource, budget.is_relative, budget.per_item) == (resource, flags == "r", flags == "i")
    assert budget.amount == pytest.approx(amount, rel=1e-15)
    assert parse_budgets(text) == parse_budgets([text]) == parse_budgets(budget) == (budget,)


@pytest.mark.parametrize(("text", "message"), BAD)
def test_a_wrong_budget_is_refused_with_help(text: Any, message: str) -> None:
    with pytest.raises(BadBudget, match=message):
        parse_budgets(text)


@given(st.text(st.sampled_from("0123456789.e+-% mkMGJsB/=energymacs\0\n\xb5\xbd\u0663\u221e"), max_size=12))
def test_any_text_is_a_budget_or_refused(text: str) -> None:
    message = ""
    try:
        amount = parse_budget(text).amount
    except BadBudget as error:
        amount, message = 0.0, str(error)
    assert (repr(text) in message) != (amount > 0)


def test_several_budgets_and_their_text() -> None:
    budgets = parse_budgets(["60%", "latency=12ms", "params=2M", "macs=3M/image"])
    assert budgets[:2] == (Budget("energy", 0.6, is_relative=True), Budget("latency", 0.012, is_relative=False))
    assert [str(budget) for budget in budgets] == [
        "energy 60% of dense", "latency 0.012 s", "params 2e+06", "macs 3e+06 per item",
    ]  # fmt: skip


def test_limits() -> None:
    model, macs = random_model("bilinear", "chain"), counted_cost(graph_of("chain"), "macs")
    assert parse_budget("60%").limit(model, batch=64) == pytest.approx(0.6 * model.dense)
    profiled = replace(model, dense_sample=model.dense / 1.25)  # the model misses the dense network
    assert dense_cost(profiled) == profiled.dense_sample
    assert parse_budget("60%").limit(profiled) == pytest.approx(0.6 * model.dense / 1.25)
    assert parse_budget("macs=25%").limit(macs) == 0.25 * float(graph_of("chain").macs(torch.tensor([8.0, 6.0, 4.0])))
    assert macs.dense == dense_cost(macs) == parse_budget("macs=100%").limit(macs)
    assert parse_budget("4 J").limit(model, batch=64) == 4
    assert parse_budget("0.4 mJ/image").limit(model, batch=64) == pytest.approx(64 * 4e-4)
