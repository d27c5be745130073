from __future__ import annotations

import pytest
import torch

from ecc.energy import counted_cost, parse_budgets
from ecc.errors import BadBudget, InfeasibleBudget
from ecc.graph import ChannelGraph
from ecc.methods.ecc.constraints import group_min_widths
from ecc.methods.feasibility import Feasibility, check_feasibility, costs_of, refuse_infeasible
from methods.jobs import WIDE, digits_model, true_model, wide


def graph_of(name: str = "residual") -> ChannelGraph:
    return wide(name)[2]


# ---------------------------------------------------------------- costs of budgets


def test_each_budget_gets_its_cost_and_its_limit_in_that_unit() -> None:
    graph = graph_of()
    energies = {name: true_model(graph, name) for name in ("energy", "latency")}
    texts = ["60%", "latency=2 us/image", "params=2k", "macs=50%"]
    costs, limits = costs_of(graph, parse_budgets(texts), energies)
    assert [cost.resource for cost in costs] == ["energy", "latency", "params", "macs"]
    assert costs[:2] == [energies["energy"], energies["latency"]]
    batch = energies["energy"].origin.batch
    expected = [0.6 * energies["energy"].dense, 2e-6 * batch, 2000.0, 0.5 * float(graph.macs())]
    assert limits == pytest.approx(expected)


@pytest.mark.parametrize(("text", "resource"), [("latency=12ms", "latency"), ("60%", "energy")])
def test_a_budget_of_what_must_be_measured_needs_a_model(text: str, resource: str) -> None:
    graph = graph_of()
    other = "energy" if resource == "latency" else "latency"
    advice = f"budget of {resource} but no model of it.*ecc fit PROFILE --resource {resource}"
    with pytest.raises(BadBudget, match=advice):
        costs_of(graph, parse_budgets([text]), {other: true_model(graph, other)})


# ---------------------------------------------------------------- what can be reached


@pytest.mark.parametrize(("min_width_ratio", "width_multiple"), [(0.1, 1), (0.3, 8), (0.0, 1)])
@pytest.mark.parametrize("name", ["residual", "grouped", "transformer MLP"])
def test_the_numbers_are_those_of_the_networks_themselves(
    name: str, min_width_ratio: float, width_multiple: int
) -> None:
    graph = graph_of(name)
    energy, params = true_model(graph), counted_cost(graph, "params")
    limits = [0.5 * energy.dense, 0.7 * float(graph.parameters())]
    found = check_feasibility(
        graph, [energy, params], limits, min_width_ratio=min_width_ratio, width_multiple=width_multiple
    )
    floors = dict(zip(graph.full_widths, group_min_widths(graph, min_width_ratio, width_multiple), strict=True))
    assert [(one.resource, one.unit, one.label) for one in found] == [
        ("energy", "J", "estimated"),
        ("params", "", "counted"),
    ]
    assert [one.dense for one in found] == pytest.approx([energy.at(), float(graph.parameters())])
    assert [one.min_cost for one in found] == pytest.approx([energy.at(floors), float(graph.parameters(floors))])
    assert [one.limit for one in found] == limits


@pytest.mark.parametrize("name", WIDE)
def test_the_even_share_is_the_largest_that_meets_the_limit(name: str) -> None:
    graph = graph_of(name)
    energy = true_model(graph)
    full, floors = graph.widths(), torch.tensor(group_min_widths(graph, 0.1, 1), dtype=torch.float64)

    def cost(share: float) -> float:
        return float(energy.value(torch.maximum(share * full, floors)))

    limit = 0.5 * (cost(0.0) + cost(1.0))
    (found,) = check_feasibility(graph, [energy], [limit], min_width_ratio=0.1, width_multiple=1)
    assert found.uniform_ratio is not None
    assert cost(found.uniform_ratio) <= limit < cost(found.uniform_ratio + 1e-6)
    shares = [step / 2000 for step in range(2001)]  # the slow way
    assert found.uniform_ratio == pytest.approx(max(share for share in shares if cost(share) <= limit), abs=1 / 2000)


def test_the_even_share_ends_at_both_ends() -> None:
    graph = graph_of()
    energy = true_model(graph)

    def reach(limit: float) -> Feasibility:
        return check_feasibility(graph, [energy], [limit], min_width_ratio=0.1, width_multiple=1)[0]

    least = reach(1.0).min_cost
    assert reach(energy.dense).uniform_ratio == 1.0
    assert reach(2 * energy.dense).uniform_ratio == 1.0
    assert reach(0.999 * least).uniform_ratio is None
    assert not reach(0.999 * least).is_feasible
    assert reach(1.001 * least).is_feasible
    at_floor = reach(1.001 * least).uniform_ratio
    assert at_floor is not None
    assert at_floor < 0.12


def test_digits_on_a_tx2_can_fall_to_a_sixth() -> None:
    model = digits_model()
    least = model.at({name: max(1, width // 10) for name, width in zip(model.groups, model.full_widths, strict=True)})
    assert 0.08 < least / model.dense < 0.25


def test_the_first_budget_out_of_reach_is_refused_with_the_least_that_can_be() -> None:
    graph = graph_of()
    energy, params = true_model(graph), counted_cost(graph, "params")
    good = check_feasibility(graph, [energy, params], [energy.dense, 1e6], min_width_ratio=0.1, width_multiple=1)
    refuse_infeasible(good)
    bad = check_feasibility(graph, [energy, params], [energy.dense, 100.0], min_width_ratio=0.1, width_multiple=1)
    least = f"{bad[1].min_cost:.4g}"
    with pytest.raises(
        InfeasibleBudget, match=rf"budget 100 of params is below {least}, the least .*--min-width-ratio"
    ):
        refuse_infeasible(bad)
    worse = check_feasibility(graph, [energy, params], [1e-9, 100.0], min_width_ratio=0.1, width_multiple=1)
    with pytest.raises(InfeasibleBudget, match=rf"budget 1e-09 J of energy is below {bad[0].min_cost:.4g} J"):
        refuse_infeasible(worse)
