from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.energy.bilinear_form import BilinearForm
from ecc.graph import AffineSize
from energy.cases import autograd, finite_differences, slow_extent

GROUPS = 4
SIZES = st.integers(0, 50)
EXTENTS = st.builds(
    AffineSize, SIZES, st.lists(st.tuples(st.integers(0, GROUPS - 1), SIZES), max_size=5).map(tuple)
)  # a group may stand in an extent twice
TERMS = st.lists(st.tuples(st.floats(0, 1e3), EXTENTS, EXTENTS), max_size=6)
WIDTHS = st.lists(st.floats(0, 100), min_size=GROUPS, max_size=GROUPS)


def products_of(base: float, terms: list[tuple[float, AffineSize, AffineSize]]) -> BilinearForm:
    coefficients, lefts, rights = ([term[k] for term in terms] for k in range(3))
    return BilinearForm(base, tuple(coefficients), tuple(lefts), tuple(rights), GROUPS)


@given(st.floats(0, 1e3), TERMS, WIDTHS)
def test_it_is_the_sum_term_by_term(
    base: float, terms: list[tuple[float, AffineSize, AffineSize]], widths: list[float]
) -> None:
    products, vector = products_of(base, terms), torch.tensor(widths, dtype=torch.float64)
    expected = [
        coefficient * slow_extent(left, widths) * slow_extent(right, widths) for coefficient, left, right in terms
    ]
    assert products.terms(vector).tolist() == pytest.approx(expected, rel=1e-12)
    assert float(products.value(vector)) == pytest.approx(base + sum(expected), rel=1e-12)


@given(st.floats(0, 1e3), TERMS, WIDTHS)
def test_the_gradient_is_that_of_the_value(
    base: float, terms: list[tuple[float, AffineSize, AffineSize]], widths: list[float]
) -> None:
    products, vector = products_of(base, terms), torch.tensor(widths, dtype=torch.float64) + 1
    gradient, value = products.gradient(vector), float(products.value(vector))
    torch.testing.assert_close(gradient, finite_differences(products, vector), rtol=1e-9, atol=1e-11 * (1 + value))
    if terms:
        torch.testing.assert_close(gradient, autograd(products, vector), rtol=1e-12, atol=1e-12)


def test_two_terms_by_hand() -> None:
    """0.5 + 2 * (1 + 3 a) * b + 5 * a * a, at a = 2 and b = 10."""
    terms = [
        (2.0, AffineSize(1, ((0, 3),)), AffineSize(0, ((1, 1),))),
        (5.0, AffineSize(0, ((0, 1),)), AffineSize(0, ((0, 1),))),
    ]
    products = products_of(0.5, terms)
    widths = torch.tensor([2.0, 10.0, 7.0, 7.0], dtype=torch.float64)
    assert float(products.value(widths)) == 0.5 + 2 * 7 * 10 + 5 * 4
    assert products.gradient(widths).tolist() == [2 * 3 * 10 + 5 * 2 * 2, 2 * 7, 0, 0]
    assert products.terms(widths.expand(3, 4)).tolist() == [[140, 20]] * 3


def test_nothing_costs_its_base() -> None:
    products = products_of(0.25, [])
    assert products.value(torch.ones(3, GROUPS)).tolist() == [0.25] * 3
    assert products.gradient(torch.ones(GROUPS)).tolist() == [0.0] * GROUPS
    assert products.to("cpu") == products


def test_many_groups_take_no_matrix_of_terms_until_terms_are_asked_for() -> None:
    """Of a thousand groups the square is 8 MB; two thousand terms would be four times that."""
    count = 300
    one = [AffineSize(1, ((group, 2),)) for group in range(count)]
    other = [AffineSize(0, (((group + 1) % count, 3),)) for group in range(count)]
    products = BilinearForm(1.0, (0.5,) * count, tuple(one), tuple(other), count)
    widths = torch.arange(1.0, count + 1, dtype=torch.float64)
    expected = 0.5 * (2 * widths + 1) * 3 * widths.roll(-1)
    assert float(products.value(widths)) == pytest.approx(1.0 + float(expected.sum()))
    slope = 3 * widths.roll(-1) + 1.5 * (2 * widths.roll(1) + 1)
    torch.testing.assert_close(products.gradient(widths), slope)
    assert "parts" not in vars(products)
    torch.testing.assert_close(products.terms(widths), expected)
    assert "parts" in vars(products)
