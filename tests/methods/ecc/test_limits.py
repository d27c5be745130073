from __future__ import annotations

import numpy
import pytest
import torch

from ecc.errors import BadWidths, InfeasibleBudget
from ecc.methods.ecc.constraints import ResourceConstraints
from methods.nets import ProductCost, bare_graph, pair_cost

GRAPH = bare_graph([4, 5])
ENERGY = pair_cost([4, 5], [(0, 1)], [0.001], linear=[0.005], base=0.01)  # 0.05 J when dense
BYTES = ProductCost(pair_cost([4, 5], [], [], linear=[0.0, 8.0]).products, ("g0", "g1"), (4, 5), "bytes", "B")


def test_budgets_are_shares_of_the_dense_network_or_numbers_in_the_unit() -> None:
    limits = ResourceConstraints([ENERGY, BYTES], GRAPH, "cpu")
    assert limits.dense == pytest.approx((0.05, 40.0))
    assert limits.parse(["60%", 10]) == pytest.approx((0.6, 0.25))
    assert ResourceConstraints([ENERGY], GRAPH, "cpu").parse(0.02) == pytest.approx((0.4,))
    assert ResourceConstraints([ENERGY], GRAPH, "cpu").parse(" 12.5 %") == (0.125,)
    assert ResourceConstraints([ENERGY], GRAPH, "cpu").parse(numpy.float32(0.025)) == pytest.approx((0.5,))


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("sixty", "neither a share"),
        (-1.0, "above 0"),
        ("0%", "above 0"),
        (float("nan"), "above 0"),
        ([1, 2], "2 budgets"),
    ],
)
def test_other_budgets_are_refused(budget: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ResourceConstraints([ENERGY], GRAPH, "cpu").parse(budget)  # type: ignore[arg-type]


def test_a_cost_of_another_network_is_refused() -> None:
    with pytest.raises(BadWidths, match="belongs to another network"):
        ResourceConstraints([ENERGY], bare_graph([4, 6]), "cpu")
    with pytest.raises(ValueError, match="no cost"):
        ResourceConstraints([], GRAPH, "cpu")


def test_an_unreachable_budget_names_the_least_and_the_ways_out() -> None:
    limits, floors = ResourceConstraints([ENERGY, BYTES], GRAPH, "cpu"), torch.tensor([1, 2])
    limits.check((0.017 / 0.05, 0.4), floors, "min_width_ratio")  # 0.01 + 0.002 + 0.005, and 16 B
    with pytest.raises(InfeasibleBudget) as caught:
        limits.check((0.0102 / 0.05, 0.9), floors, "min_width_ratio")
    assert str(caught.value) == (
        "budget 0.0102 J is below 0.017 J, the least this network can use with every group at its floor. "
        "Raise the budget, lower min_width_ratio, or shrink the input."
    )
    with pytest.raises(InfeasibleBudget, match=r"budget 15\.2 B is below 16 B"):
        limits.check((0.9, 0.38), floors, "min_width_ratio")


def test_a_row_exceeds_if_any_cost_does() -> None:
    limits = ResourceConstraints([ENERGY, BYTES], GRAPH, "cpu")
    rows = torch.tensor([[4.0, 5.0], [1.0, 5.0], [4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert limits.exceeded(rows, (0.5, 0.5)).tolist() == [True, True, True, False]
    assert limits.exceeded(rows, (1.0, 1.0)).tolist() == [False] * 4


def test_one_cost_slopes_as_it_is_several_as_far_as_they_must_fall() -> None:
    widths = torch.tensor([4.0, 5.0], dtype=torch.float64)
    energy = (ENERGY.gradient(widths) / 0.05).tolist()
    both = ResourceConstraints([ENERGY, BYTES], GRAPH, "cpu")
    assert ResourceConstraints([ENERGY], GRAPH, "cpu").slope(widths, (0.5,)).tolist() == pytest.approx(energy)
    # 20 % and 60 % to go: weights 1/4 and 3/4.
    assert both.slope(widths, (0.8, 0.4)).tolist() == pytest.approx([energy[0] / 4, energy[1] / 4 + 3 / 4 * 0.2])
    assert both.slope(widths, (0.8, 1.0)).tolist() == pytest.approx(energy)
    assert both.slope(widths, (1.0, 1.0)).tolist() == [0.0, 0.0]  # all met, and no division by nothing


def test_spending_is_in_units() -> None:
    spent = ResourceConstraints([ENERGY, BYTES], GRAPH, "cpu").cost(torch.tensor([2, 3]))
    assert [float(value) for value in spent] == pytest.approx([0.01 + 0.006 + 0.01, 24.0])
