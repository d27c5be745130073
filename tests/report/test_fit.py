from __future__ import annotations

import io
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from rich.console import Console

from ecc.constants import MIN_WIDTH_RATIO
from ecc.energy import EnergyModel, fit, parse_budget
from ecc.graph import trace_channels
from ecc.measure import Profile
from ecc.methods.ecc.constraints import group_min_widths
from ecc.report.fit import budget_warning, budget_within, fit_facts, fit_view, least_of, reach, si
from ecc.zoo import find_task

FIFTY = Path(__file__).resolve().parent.parent.parent / "results" / "evidence" / "e1.profile.gz"


@cache
def model() -> EnergyModel:
    return fit(Profile.load(FIFTY), curve=True)


def shown() -> str:
    file = io.StringIO()
    Console(width=120, file=file).print(fit_view(model(), "mobile: energy"))
    return file.getvalue()


def test_the_view_has_the_numbers_of_the_model() -> None:
    text = shown()
    for name, found in model().quality["families"].items():
        line = next(line for line in text.splitlines() if line.startswith(name))
        assert f"{found['mean']:.2%}" in line
        assert f"{found['bias']:+.2%}" in line
        assert f"{found['dense']:+.2%}" in line
        assert f"{found['dense_fitted']:+.2%}" in line
    assert text.count("<- chosen") == 1
    assert f"scatters by {model().quality['noise']:.2%}" in text
    assert "More rows w" in text
    assert "What costs most in the dense network, as this model divides it" in text


def test_the_view_names_widths_at_which_the_model_fails() -> None:
    assert "cost more than predicted" not in shown()
    odd = [{"group": "conv1", "width": 12, "networks": 14, "excess": 0.148}]
    file = io.StringIO()
    with_odd = replace(model(), quality=model().quality | {"outlier_widths": odd})
    Console(width=400, file=file).print(fit_view(with_odd, "mobile: energy"))
    assert (
        "Some networks cost more than predicted: with 12 channels in conv1 (14 networks) 14.8% more." in file.getvalue()
    )


def test_the_layers_of_the_view_add_up_to_the_dense_network() -> None:
    assert sum(model().per_layer().values()) == pytest.approx(model().dense)
    assert "others" in shown()


def test_what_the_view_calls_constant_is_what_no_width_changes() -> None:
    base, outside = model().fitted.base, model().per_layer()[""] - model().fitted.base
    (line,) = [line.split() for line in shown().splitlines() if line.startswith("(constant)")]
    assert f"{line[1]} {line[2]}" == si(base, "J")
    assert ("(outside any layer)" in shown()) == (outside > 0)


def test_the_range_that_can_be_met_is_told() -> None:
    text = reach(model())
    assert model().least < least_of(model()) < 0.3 * model().dense_profiled  # a tenth of each group is kept
    assert f"Budgets from {least_of(model()) / model().dense_profiled:.0%} to 100% can be met." in text
    assert "as measured on NVIDIA H200, batch 64" in text
    assert "by this model of what was measured on" in reach(replace(model(), quality={}))
    assert "an item)" in text


@pytest.mark.parametrize(
    ("budget", "words"),
    [("1%", "is below"), ("1 mJ", "is below"), ("100%", "met by the dense"), ("50%", ""), ("6 mJ/image", "")],
)
def test_a_budget_out_of_reach_gets_a_warning(budget: str, words: str) -> None:
    warning = budget_warning(model(), parse_budget(budget))
    assert words in warning
    assert bool(warning) == bool(words)


def test_facts_are_plain_values() -> None:
    facts = fit_facts(model())
    assert facts["label"] == "measured"
    assert facts["dense"] == model().dense
    assert facts["quality"]["mean"] == model().quality["mean"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(2.296, "2.3 J"), (0.0247, "24.7 mJ"), (1e-7, "100 nJ"), (3.2e4, "32 kJ"), (0.0, "0 J"), (-0.5, "-500 mJ")],
)
def test_numbers_are_readable(value: float, text: str) -> None:
    assert si(value, "J") == text


def test_that_a_budget_can_be_met_is_told() -> None:
    assert budget_within(model(), parse_budget("50%")).endswith("can be met: it is 50% of dense.")


def test_what_can_be_met_is_what_compress_can_reach() -> None:
    """As far as the multiples that were profiled go."""
    task = find_task("mobilenet_v1")
    graph = trace_channels(task.model, task.example_input, verify=False)
    floors = group_min_widths(graph, MIN_WIDTH_RATIO, model().origin.width_multiple or 1)
    widths = dict(zip(graph.full_widths, floors, strict=True))
    assert least_of(model()) == pytest.approx(model().at({group.name: widths[group.name] for group in graph.prunable}))
