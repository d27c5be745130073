from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
import torch

from ecc.energy import EnergyModel
from ecc.errors import BadBudget, BadWidths, InfeasibleBudget
from ecc.graph import mask_channels_
from ecc.methods.ecc.constraints import ResourceConstraints, group_min_widths, initial_channels
from methods.jobs import true_model
from methods.nets import ProductCost, bare_graph, pair_cost, traced

CPU = torch.device("cpu")
GRAPH = bare_graph([4, 5])
ENERGY = pair_cost([4, 5], [(0, 1)], [0.001], linear=[0.005], base=0.01)  # 0.05 J when dense
BYTES = replace(pair_cost([4, 5], [], [], linear=[0.0, 8.0]), resource="weight_bytes", unit="B")
BOTH = ResourceConstraints([ENERGY, BYTES], GRAPH, "cpu")


def fraction(budget: object, cost: ProductCost = ENERGY) -> float:
    return ResourceConstraints([cost], GRAPH, "cpu").parse(budget)[0]  # type: ignore[arg-type]


def test_budgets_become_fractions_of_the_dense_cost() -> None:
    assert BOTH.dense == pytest.approx((0.05, 40.0))
    assert BOTH.parse(["60%", 10]) == pytest.approx((0.6, 0.25))
    for budget in (0.02, "20 mJ", "energy=0.02 J", "40%", " 40 %", numpy.float32(0.02)):
        assert fraction(budget) == pytest.approx(0.4)
    assert fraction("weight_bytes=20B", BYTES) == fraction("20B", BYTES) == 0.5


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ("sixty", "number"),
        ("150%", "100%"),
        ("latency=3ms", "is for latency, and the cost is energy"),
        ("5 mJ/image", "is per image"),
        (-1.0, "positive"),
        ("0%", "0"),
        (float("nan"), "positive"),
        ([1, 2], "2 budgets were given for 1 costs"),
    ],
)
def test_wrong_budgets_are_refused(budget: object, words: str) -> None:
    with pytest.raises(BadBudget, match=words):
        fraction(budget)


def test_percentages_refer_to_the_profiled_dense_cost_and_items_to_the_profiled_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, _, graph = traced("chain")
    model = true_model(graph)
    constraints = ResourceConstraints([model], graph, "cpu")
    monkeypatch.setattr(EnergyModel, "dense_profiled", property(lambda self: 1.25 * self.dense))
    assert constraints.parse("40%")[0] == pytest.approx(0.5)
    assert constraints.parse("1 mJ/image")[0] == pytest.approx(1e-3 * model.origin.batch / model.dense)


def test_costs_of_another_network_and_no_costs_are_refused() -> None:
    with pytest.raises(BadWidths, match="belongs to another network"):
        ResourceConstraints([ENERGY], bare_graph([4, 6]), "cpu")
    with pytest.raises(ValueError, match="no cost"):
        ResourceConstraints([], GRAPH, "cpu")


def test_an_infeasible_budget_states_the_smallest_cost() -> None:
    least = torch.tensor([1, 2])  # 0.01 + 0.002 + 0.005 J, and 16 B
    assert BOTH.parse_feasible([0.017, 16], least) == pytest.approx((0.34, 0.4))
    with pytest.raises(InfeasibleBudget) as caught:
        BOTH.parse_feasible([0.0102, 36], least)
    assert str(caught.value) == (
        "budget 0.0102 J is not reachable: with every group at its minimum width the network still uses 0.017 J "
        "(34% of dense). Raise the budget, or lower min_width_ratio."
    )
    with pytest.raises(InfeasibleBudget, match=r"budget 15\.2 B .* 16 B"):
        BOTH.parse_feasible(["90%", 15.2], least)


def test_costs_fractions_and_gradients() -> None:
    assert [float(value) for value in BOTH.cost(torch.tensor([2, 3]))] == pytest.approx([0.026, 24.0])
    assert BOTH.fractions(torch.tensor([2, 3])) == pytest.approx((0.52, 0.6))
    rows = torch.tensor([[4.0, 5.0], [1.0, 5.0], [4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    assert BOTH.exceeded(rows, (0.5, 0.5)).tolist() == [True, True, True, False]
    assert BOTH.exceeded(rows, (1.0, 1.0)).tolist() == [False] * 4  # exactly met is not exceeded
    widths = rows[0]
    energy = (ENERGY.gradient(widths) / 0.05).tolist()
    one = ResourceConstraints([ENERGY], GRAPH, "cpu")
    assert one.gradient(widths, (0.5,)).tolist() == pytest.approx(energy)
    # 20 % and 60 % to go: weights 1/4 and 3/4.
    assert BOTH.gradient(widths, (0.8, 0.4)).tolist() == pytest.approx([energy[0] / 4, energy[1] / 4 + 3 / 4 * 0.2])
    assert BOTH.gradient(widths, (0.8, 1.2)).tolist() == pytest.approx(energy)  # a budget that is met has no weight
    assert BOTH.gradient(widths, (1.0, 1.0)).tolist() == [0.0, 0.0]  # all met, no division by zero


# ---------------------------------------------------------------- minimum widths


@pytest.mark.parametrize(
    ("min_width_ratio", "width_multiple", "expected"),
    [
        (0.1, 1, [2, 3, 4]),  # of 16, 24 and the frozen 4
        (0.0, 1, [1, 1, 4]),
        (1.0, 1, [16, 24, 4]),
        (1 / 3, 1, [6, 8, 4]),  # 8 is not rounded up by float noise
        (0.1, 8, [8, 8, 4]),
        (0.5, 5, [10, 15, 4]),
        (0.1, 20, [16, 20, 4]),  # a group no wider than the multiple keeps its width
        (0.1, 99, [16, 24, 4]),
    ],
)
def test_min_widths_are_rounded_up(min_width_ratio: float, width_multiple: int, expected: list[int]) -> None:
    net, _, graph = traced("chain")
    alive, min_widths = initial_channels(net, graph, min_width_ratio, width_multiple, CPU)
    assert min_widths.tolist() == group_min_widths(graph, min_width_ratio, width_multiple) == expected
    assert alive.all()


def test_dead_channels_stay_dead_fill_up_a_multiple_and_an_untrained_group_is_whole() -> None:
    net, _, graph = traced("chain")
    mask_channels_(net, graph, {"conv1": torch.tensor([3, 5]), "conv2": torch.arange(22)})
    alive, min_widths = initial_channels(net, graph, 0.1, 1, CPU)
    assert (~alive).nonzero().flatten().tolist() == [3, 5]  # conv2 has 2 of 24 left, fewer than its minimum of 3
    assert min_widths.tolist() == [2, 3, 4]
    net, _, graph = traced("chain")
    mask_channels_(net, graph, {"conv1": torch.tensor([3, 5]), "conv2": torch.arange(3, 8)})
    alive, min_widths = initial_channels(net, graph, 0.1, 5, CPU)
    assert (~alive).nonzero().flatten().tolist() == [5, *range(16 + 4, 16 + 8)]  # 15 of 16, and 20 of 24
    assert min_widths.tolist() == [5, 5, 4]
    alive, min_widths = initial_channels(net, graph, 0.1, 15, CPU)
    assert (~alive).nonzero().flatten().tolist() == [5]  # 30 is more than 24
    assert min_widths.tolist() == [15, 15, 4]


@pytest.mark.parametrize(("min_width_ratio", "width_multiple"), [(-0.1, 1), (1.1, 1), (0.1, 0)])
def test_settings_out_of_range_are_refused(min_width_ratio: float, width_multiple: int) -> None:
    net, _, graph = traced("chain")
    with pytest.raises(ValueError, match=r"min_width_ratio|width_multiple"):
        initial_channels(net, graph, min_width_ratio, width_multiple, CPU)
