"""What every cost promises, whatever it is made from."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ecc.energy import Cost, counted_cost
from ecc.energy.counted import UNITS
from energy.cases import (
    NETWORKS,
    TERMS,
    autograd,
    finite_differences,
    graph_of,
    pairs_of,
    random_model,
    skeleton_of,
    widths_of,
)

COSTS = (*TERMS, *UNITS)
SMOOTH = tuple(name for name in COSTS if name != "peak_bytes")


@cache
def cost_of(name: str, network: str, seed: int = 0) -> Any:
    return counted_cost(graph_of(network), name) if name in UNITS else random_model(name, network, seed)


def drawn(data: st.DataObject, name: str) -> tuple[Any, Any]:
    """A cost of some network, and the structure of the network."""
    network = data.draw(st.sampled_from(NETWORKS))
    return cost_of(name, network, data.draw(st.integers(0, 3))), skeleton_of(network)


@pytest.mark.parametrize("name", COSTS)
def test_it_is_a_cost(name: str) -> None:
    cost = cost_of(name, "chain")
    assert isinstance(cost, Cost)
    assert cost.groups == ("conv1", "conv2", "conv3")
    assert cost.full_widths == (8, 6, 4)
    assert cost.resource == ("energy" if name in TERMS else name)
    assert cost.unit == {"energy": "J", "macs": "", "params": ""}.get(cost.resource, "B")
    assert cost.label == ("estimated" if name in TERMS else "counted")


@pytest.mark.parametrize("name", COSTS)
@given(data=st.data())
@settings(max_examples=40)
def test_removing_channels_never_costs_more(name: str, data: st.DataObject) -> None:
    cost, structure = drawn(data, name)
    fewer, more = data.draw(pairs_of(structure))
    small, large = float(cost.value(fewer)), float(cost.value(more))
    assert 0 <= small <= large * (1 + 1e-12)
    assert (cost.gradient(more) >= 0).all()


@pytest.mark.parametrize("name", COSTS)
@given(data=st.data())
@settings(max_examples=40)
def test_a_matrix_is_priced_row_by_row(name: str, data: st.DataObject) -> None:
    cost, structure = drawn(data, name)
    rows = torch.stack(data.draw(st.lists(widths_of(structure), min_size=1, max_size=5)))
    assert cost.value(rows).tolist() == pytest.approx([float(cost.value(row)) for row in rows], rel=1e-14)
    assert cost.value(rows).shape == (len(rows),)
    assert cost.value(rows[0]).shape == ()


@pytest.mark.parametrize("name", SMOOTH)
@given(data=st.data())
@settings(max_examples=40)
def test_the_gradient_is_that_of_the_value(name: str, data: st.DataObject) -> None:
    cost, structure = drawn(data, name)
    widths = data.draw(widths_of(structure))
    gradient = cost.gradient(widths)
    rounding = 1e-13 * float(cost.value(widths)) / 0.25
    torch.testing.assert_close(gradient, finite_differences(cost, widths), rtol=1e-9, atol=20 * rounding)
    torch.testing.assert_close(gradient, autograd(cost, widths), rtol=1e-12, atol=1e-12 * float(gradient.max()))
    assert not gradient.requires_grad


@pytest.mark.parametrize("name", COSTS)
def test_a_copy_on_a_device_computes_the_same(name: str) -> None:
    cost = cost_of(name, "digits")
    widths = torch.tensor(cost.full_widths, dtype=torch.float64) / 2
    copy = cost.to(torch.device("cpu"))
    assert isinstance(copy, Cost)
    assert copy.value(widths) == cost.value(widths)
    assert torch.device(copy.device) == torch.device("cpu")


@pytest.mark.parametrize("name", COSTS)
def test_widths_of_any_type_are_taken(name: str) -> None:
    cost = cost_of(name, "residual")
    whole = torch.tensor([5, 4, 5])
    for widths in (whole, whole.float(), whole.double()):
        assert float(cost.value(widths)) == float(cost.value(whole.double()))
        assert cost.gradient(widths).tolist() == cost.gradient(whole.double()).tolist()
