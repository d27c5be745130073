from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.energy import Budget, counted_cost, dense_cost, parse_budget, parse_budgets
from ecc.errors import BadBudget
from energy.cases import graph_of, random_model

GOOD = [
    ("60%", "energy", 0.6, True, False),
    (" 60 % ", "energy", 0.6, True, False),
    ("energy=12.5%", "energy", 0.125, True, False),
    ("latency=50%", "latency", 0.5, True, False),
    ("0.0247 J", "energy", 0.0247, False, False),
    ("24.7 mJ", "energy", 0.0247, False, False),
    ("24.7mJ", "energy", 0.0247, False, False),
    ("3 J", "energy", 3.0, False, False),
    (".5 J", "energy", 0.5, False, False),
    ("5. J", "energy", 5.0, False, False),
    ("+2e-3 J", "energy", 2e-3, False, False),
    ("2 kJ", "energy", 2e3, False, False),
    ("7 uJ", "energy", 7e-6, False, False),
    ("7 µJ", "energy", 7e-6, False, False),
    ("9 nJ", "energy", 9e-9, False, False),
    ("0.4 mJ/image", "energy", 4e-4, False, True),
    ("0.4 mJ / item", "energy", 4e-4, False, True),
    ("energy=0.4mJ/sample", "energy", 4e-4, False, True),
    ("latency=12ms", "latency", 0.012, False, False),
    ("latency = 12 ms", "latency", 0.012, False, False),
    ("latency=0.5 s", "latency", 0.5, False, False),
    ("macs=300M", "macs", 3e8, False, False),
    ("macs=0.3G", "macs", 3e8, False, False),
    ("params=2M", "params", 2e6, False, False),
    ("params=1234567", "params", 1234567.0, False, False),
    ("params=40%", "params", 0.4, True, False),
    ("weight_bytes=4MiB", "weight_bytes", 4 * 2.0**20, False, False),
    ("weight_bytes=4MB", "weight_bytes", 4e6, False, False),
    ("weight_bytes=512 KiB", "weight_bytes", 2.0**19, False, False),
    ("activation_bytes=1GiB", "activation_bytes", 2.0**30, False, False),
    ("peak_bytes=100kB", "peak_bytes", 1e5, False, False),
]

BAD = [
    ("0.5", "budget '0.5' has no unit; write 0.5 J, or 50% for a share of dense"),
    ("60", "budget '60' has no unit; write 60 J, or 60% for a share"),
    ("latency=12", "budget 'latency=12' has no unit; write 12 s, or 12%"),
    ("", r"starts with no number; write it as 60%, 0\.0247 J, "),
    ("half", "budget 'half' starts with no number"),
    ("J 5", "starts with no number"),
    ("energy=", "starts with no number"),
    ("nan", "starts with no number"),
    ("0%", "budget '0%' is not above 0, and no network costs nothing"),
    ("-5 mJ", "is not above 0"),
    ("150%", "budget '150%' is above 100%, what the dense network takes; give a share up to 100%"),
    ("params=100.5%", "is above 100%"),
    ("1e999 J", "is larger than any number here"),
    ("power=5W", "is about 'power'; there are energy, latency, macs, params, weight_bytes, activation_bytes"),
    ("=5", "is about ''; there are energy"),
    ("5 W", "budget '5 W' has the unit 'W'; energy is in J, or % of dense"),
    ("5 s", "has the unit 's'; energy is in J"),
    ("5 mj", "has the unit 'mj'; energy is in J"),
    ("5 xJ", "has the unit 'xJ'; energy is in J"),
    ("5 MiJ", "has the unit 'MiJ'; energy is in J"),
    ("latency=5 J", "has the unit 'J'; latency is in s"),
    ("latency=5 min", "has the unit 'min'; latency is in s"),
    ("params=2B", "has the unit 'B'; params is in a plain number, or one with k, M or G"),
    ("params=2m", "has the unit 'm'; params is in a plain number"),
    ("weight_bytes=4 mB", "has the unit 'mB'; weight_bytes is in B"),
    ("weight_bytes=4M", "has the unit 'M'; weight_bytes is in B"),
    ("60 % of dense", "has the unit '% of dense'"),
    ("60%/image", "has the unit '%/image'"),
    ("5 mJ/second", "is per 'second'; write /image, or leave it out for the whole batch"),
    ("5 mJ/", "is per ''; write /image"),
    ("1,5 mJ", "has the unit ',5 mJ'"),
]


@pytest.mark.parametrize(("text", "resource", "amount", "is_relative", "per_item"), GOOD)
def test_a_good_budget_is_read(text: str, resource: str, amount: float, is_relative: bool, per_item: bool) -> None:
    budget = parse_budget(text)
    assert (budget.resource, budget.is_relative, budget.per_item) == (resource, is_relative, per_item)
    assert budget.amount == pytest.approx(amount, rel=1e-15)


@pytest.mark.parametrize(("text", "said"), BAD)
def test_a_bad_budget_is_refused_with_the_way_to_write_it(text: str, said: str) -> None:
    with pytest.raises(BadBudget, match=said):
        parse_budget(text)


@given(st.text(st.sampled_from("0123456789.e+-% mkMGJsB/=energymacs"), max_size=12) | st.text(max_size=12))
def test_any_text_is_a_budget_or_refused(text: str) -> None:
    said = ""
    try:
        amount = parse_budget(text).amount
    except BadBudget as error:
        amount, said = 0.0, str(error)
    assert (repr(text) in said) != (amount > 0)


@given(st.floats(1e-6, 1e6), st.sampled_from(["%", " J", " mJ", " mJ/image"]))
def test_numbers_are_read_as_python_reads_them(number: float, unit: str) -> None:
    number = min(number, 100.0) if unit == "%" else number
    factor = {"%": 0.01, " J": 1, " mJ": 1e-3, " mJ/image": 1e-3}[unit]
    assert parse_budget(f"{number!r}{unit}").amount == pytest.approx(number * factor, rel=1e-14)


# ---------------------------------------------------------------- several


def test_budgets_of_several_resources_stand_side_by_side() -> None:
    assert parse_budgets(["60%", "latency=12ms", "params=2M"]) == (
        Budget("energy", 0.6, is_relative=True),
        Budget("latency", 0.012, is_relative=False),
        Budget("params", 2e6, is_relative=False),
    )


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "no budget was given; write one as 60%"),
        (["60%", "energy=5 J"], "there are two budgets of energy; give the smaller one"),
        (["params=2M", "60%", "params=1M"], "there are two budgets of params"),
        (["60%", "5 W"], "has the unit 'W'"),
    ],
)
def test_budgets_that_cannot_hold_together_are_refused(texts: list[str], said: str) -> None:
    with pytest.raises(BadBudget, match=said):
        parse_budgets(texts)


# ---------------------------------------------------------------- limits


def test_a_share_is_of_the_dense_network() -> None:
    model, params = random_model("bilinear", "chain"), counted_cost(graph_of("chain"), "params")
    assert parse_budget("60%").limit(model) == pytest.approx(0.6 * model.dense)
    assert parse_budget("60%").limit(model, batch=64) == parse_budget("60%").limit(model)
    assert parse_budget("params=25%").limit(params) == 0.25 * float(graph_of("chain").parameters())


def test_a_share_is_of_what_was_profiled_where_the_model_misses_the_dense_network() -> None:
    model = replace(random_model("bilinear", "chain"), quality={"dense_fitted": 0.25})
    assert model.dense_profiled == pytest.approx(model.dense / 1.25)
    assert parse_budget("60%").limit(model) == pytest.approx(0.6 * model.dense / 1.25)
    assert dense_cost(model) == model.dense_profiled


def test_an_amount_is_for_the_batch_unless_it_says_for_an_item() -> None:
    model = random_model("bilinear", "chain")
    assert parse_budget("4 J").limit(model, batch=64) == 4
    assert parse_budget("0.4 mJ/image").limit(model, batch=64) == pytest.approx(64 * 4e-4)
    assert parse_budget("0.4 mJ/image").limit(model) == pytest.approx(4e-4)


def test_limits_are_plain_numbers_whatever_is_the_default_dtype() -> None:
    limit = parse_budget("50%").limit(counted_cost(graph_of("chain"), "macs"))
    assert type(limit) is float
    assert limit == 0.5 * float(graph_of("chain").macs(torch.tensor([8.0, 6.0, 4.0])))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("60%", "energy 0.6 of dense"),
        ("24.7 mJ", "energy 0.0247 J"),
        ("0.4 mJ/image", "energy 0.0004 J an item"),
        ("latency=12ms", "latency 0.012 s"),
        ("params=2M", "params 2e+06"),
    ],
)
def test_a_budget_says_what_it_is(text: str, said: str) -> None:
    assert str(parse_budget(text)) == said


def test_what_does_not_grow_with_the_batch_is_not_per_item() -> None:
    with pytest.raises(BadBudget, match="params does not grow with the batch"):
        parse_budget("params=2M/image")
    assert parse_budget("macs=2M/image").per_item


def test_one_budget_needs_no_list() -> None:
    assert parse_budgets("60%") == parse_budgets(["60%"])
