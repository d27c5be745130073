from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ecc.energy import counted_cost, parse_budgets
from ecc.errors import BadBudget, InfeasibleBudget
from ecc.methods import Feasibility, check_feasibility
from ecc.methods.ecc.constraints import group_min_widths
from ecc.methods.feasibility import raise_infeasible, refuse_infeasible, resolve_budgets
from methods.jobs import WIDE, true_model, wide


def test_each_budget_gets_its_cost_and_its_limit_in_that_unit() -> None:
    graph = wide("residual")[2].without_branches()
    models = {name: true_model(graph, name) for name in ("energy", "latency")}
    texts = ["60%", "latency=2 us/image", "params=2k", "macs=50%"]
    costs, limits = resolve_budgets(graph, parse_budgets(texts), models, 4)
    assert [cost.resource for cost in costs] == ["energy", "latency", "params", "macs"]
    assert limits == pytest.approx([0.6 * models["energy"].dense, 8e-6, 2000.0, 0.5 * float(graph.macs())])
    assert resolve_budgets(graph, parse_budgets(texts[2:]), {}, 1)[1] == pytest.approx(limits[2:])
    with pytest.raises(BadBudget, match=r"needs a latency model.*ecc fit PROFILE --resource latency"):
        resolve_budgets(graph, parse_budgets(["latency=12ms"]), {"energy": models["energy"]}, 1)


@pytest.mark.parametrize(("min_width_ratio", "width_multiple"), [(0.1, 1), (0.3, 8), (0.0, 1)])
@pytest.mark.parametrize("name", ["residual", "grouped", "transformer MLP"])
def test_the_numbers_are_those_of_the_networks_themselves(
    name: str, min_width_ratio: float, width_multiple: int
) -> None:
    graph = wide(name)[2].without_branches()
    energy, params = true_model(graph), counted_cost(graph, "params")
    limits = [0.5 * energy.dense, 0.7 * float(graph.parameters())]
    found = check_feasibility(
        graph, [energy, params], limits, min_width_ratio=min_width_ratio, width_multiple=width_multiple
    )
    least = dict(zip(graph.full_widths, group_min_widths(graph, min_width_ratio, width_multiple), strict=True))
    assert [(one.resource, one.unit, one.label) for one in found] == [
        ("energy", "J", "estimated"),
        ("params", "", "counted"),
    ]
    assert [one.dense for one in found] == pytest.approx([energy.at(), float(graph.parameters())])
    assert [one.min_cost for one in found] == pytest.approx([energy.at(least), float(graph.parameters(least))])


@pytest.mark.parametrize("name", WIDE)
def test_the_uniform_ratio_is_the_largest_that_meets_the_budget(name: str) -> None:
    graph = wide(name)[2].without_branches()
    energy = true_model(graph)
    full, least = graph.widths(), torch.tensor(group_min_widths(graph, 0.1, 1), dtype=torch.float64)

    def cost(ratio: float) -> float:
        return float(energy.value(torch.maximum(ratio * full, least)))

    def found(limit: float) -> Feasibility:
        return check_feasibility(graph, [energy], [limit], min_width_ratio=0.1, width_multiple=1)[0]

    limit = 0.5 * (cost(0.0) + cost(1.0))
    ratio = found(limit).uniform_ratio
    assert ratio is not None
    assert cost(ratio) <= limit < cost(ratio + 1e-6)
    assert ratio == pytest.approx(max(k / 2000 for k in range(2001) if cost(k / 2000) <= limit), abs=1 / 2000)
    assert found(energy.dense).uniform_ratio == found(2 * energy.dense).uniform_ratio == 1.0
    assert found(0.999 * cost(0.0)).uniform_ratio is None
    assert not found(0.999 * cost(0.0)).is_feasible
    assert found(1.001 * cost(0.0)).is_feasible


def test_an_infeasible_budget_lists_what_would_help_with_numbers() -> None:
    graph = wide("residual")[2].without_branches()
    energy, params = true_model(graph), counted_cost(graph, "params")

    def check(limits: list[float], ratio: float, multiple: int) -> None:
        costs = [energy, params]
        found = check_feasibility(graph, costs, limits, min_width_ratio=ratio, width_multiple=multiple)
        refuse_infeasible(graph, costs, found, ratio, multiple)

    check([energy.dense, 1e6], 0.1, 1)
    with pytest.raises(InfeasibleBudget) as error:
        check([energy.dense, 100.0], 0.5, 32)
    text = str(error.value)

    def percent(ratio: float, multiple: int) -> int:
        least = dict(zip(graph.full_widths, group_min_widths(graph, ratio, multiple), strict=True))
        return -int(-100 * float(graph.parameters(least)) // float(graph.parameters()))

    assert text.startswith("params budget 100 is not reachable: with 50 % of the channels in every group")
    assert f"({percent(0.5, 32)} % of dense). Options: a budget of at least {percent(0.5, 32)} %;" in text
    assert f"min_width_ratio=0.25 (reaches {percent(0.25, 32)} %)" in text
    assert "batch" not in text  # parameters do not depend on it
    found = check_feasibility(graph, [params], [100.0], min_width_ratio=0.1, width_multiple=1)[0]
    frozen = replace(found, min_cost=found.dense)
    with pytest.raises(InfeasibleBudget, match=r"no part of this network that costs params can be pruned"):
        raise_infeasible(frozen, 0.1, {})
    small = replace(frozen, min_cost=0.00344 * frozen.dense, limit=1.0)
    with pytest.raises(InfeasibleBudget, match=r"\(0\.4 % of dense\). Options: a budget of at least 0\.4 %"):
        raise_infeasible(small, 0.1, {})
    with pytest.raises(InfeasibleBudget, match=r"width_multiple=1 \(reaches"):
        check([energy.dense, 100.0], 0.1, 24)
    terms = replace(energy.fitted, base=2 * energy.dense)
    costly = replace(energy, fitted=terms)
    found = check_feasibility(graph, [costly], [1e-9], min_width_ratio=0.1, width_multiple=1)
    with pytest.raises(InfeasibleBudget, match=r"energy budget 1.00 nJ .* a larger batch \(6\d % of the dense cost"):
        refuse_infeasible(graph, [costly], found, 0.1, 1)
