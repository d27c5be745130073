from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from ecc.energy import Cost, counted_cost, parse_budgets
from ecc.methods import EccSolver
from ecc.methods.cost_evaluator import MeasuredCost
from ecc.methods.landing import BAND, Landing
from ecc.methods.summary import summary_of, told
from methods.jobs import true_model, wide, wrong_model
from methods.nets import train

STEPS = 16


def solved(*texts: str, label: str = "measured", steps: int = STEPS, factor: float = 0.8) -> tuple[Any, ...]:
    """What `summary_of` is given after a solve, and the solver."""
    net, example, graph = wide("residual")
    true, budgets = true_model(graph), parse_budgets(texts)
    costs: list[Cost] = [
        wrong_model(graph, factor) if budget.resource == "energy" else counted_cost(graph, budget.resource)
        for budget in budgets
    ]
    limits = [
        budget.amount * true.dense if budget.resource == "energy" else budget.limit(cost)
        for budget, cost in zip(budgets, costs, strict=True)
    ]

    def scales(widths: Mapping[str, int]) -> MeasuredCost:
        return MeasuredCost({"energy": true.at(widths), "latency": 0.5}, label, 0.004)

    solver = EccSolver(net, graph, costs, limits, STEPS, lr=1e-2)
    landing = Landing(solver, costs, limits, scales, STEPS)
    train(net, solver, example, range(steps), lambda step: void(landing.after_step(step + 1)))
    return graph, budgets, costs, limits, solver.widths, scales({}), landing


def void(value: object) -> None:
    """Nothing."""


def test_what_was_weighed_stands_before_what_was_predicted() -> None:
    given = solved("60%", "params=80%")
    graph, _, costs, limits, widths, dense, landing = given
    found = summary_of(*given)
    true = true_model(graph)
    energy, params = found["budgets"]["energy"], found["budgets"]["params"]
    assert energy == {
        "budget": "energy 0.6 of dense",
        "limit": limits[0],
        "unit": "J",
        "dense": true.dense,
        "result": true.at(widths),
        "label": "measured",
        "met": True,
    }
    assert energy["result"] != pytest.approx(costs[0].at(widths), rel=0.01)
    assert params["label"] == "counted"
    assert params["dense"] == float(graph.parameters())
    assert params["result"] == float(graph.parameters(widths))
    assert found["label"] == "measured"
    assert found["relative_ci"] == 0.004
    assert found["weighed"] == {"dense": dense.amounts, "result": landing.weighings[-1].weighed}
    assert found["weighings"] == len(landing.weighings)
    assert found["band"] == list(BAND)


def test_a_look_at_the_scales_labels_each_amount() -> None:
    graph, _, costs, limits, widths, _, landing = solved("60%", "params=80%", label="estimated")
    last = landing.weighings[-1]
    energy, params = last.weighed["energy"], graph.parameters(widths)
    assert told(last, limits, costs) == (
        f"step {last.step}: energy {energy:.4g} J (estimated), {energy / limits[0]:.1%} of the budget; "
        f"params {params:.4g} (counted), {params / limits[1]:.1%} of the budget"
    )


def test_it_is_met_only_if_all_budgets_are() -> None:
    graph, budgets, costs, limits, widths, dense, landing = solved("60%", "params=80%")
    assert summary_of(graph, budgets, costs, limits, widths, dense, landing)["met"]
    tight = [limits[0], float(graph.parameters(widths)) - 1]
    found = summary_of(graph, budgets, costs, tight, widths, dense, landing)
    assert (found["budgets"]["energy"]["met"], found["budgets"]["params"]["met"]) == (True, False)
    assert not found["met"]
    edge = [limits[0], float(graph.parameters(widths))]
    assert summary_of(graph, budgets, costs, edge, widths, dense, landing)["met"]


def test_before_anything_was_weighed_it_is_the_models_word() -> None:
    given = solved("60%", "params=80%", steps=1)
    _, _, costs, _, widths, _, landing = given
    assert landing.weighings == []
    found = summary_of(*given)
    assert found["label"] == "predicted"
    assert found["budgets"]["energy"]["label"] == "predicted"
    assert found["budgets"]["params"]["label"] == "counted"
    assert found["budgets"]["energy"]["result"] == pytest.approx(costs[0].at(widths))
    assert found["weighed"]["result"] == {}
    assert found["relative_ci"] is None
    assert not found["landed"]


def test_sizes_are_counted_and_all_is_plain() -> None:
    given = solved("50%")
    graph, widths = given[0], given[4]
    found = summary_of(*given)
    assert found["macs"] == {"dense": float(graph.macs()), "result": float(graph.macs(widths))}
    assert found["parameters"] == {"dense": float(graph.parameters()), "result": float(graph.parameters(widths))}
    assert found["widths"] == widths
    assert found["full_widths"] == graph.full_widths
    assert json.loads(json.dumps(found)) == found
