from __future__ import annotations

import numpy as np
import pytest

from ecc.energy.features import AMOUNTS, ONE, Term, bilinear_terms, extent_at, physical_terms
from ecc.graph import AffineSize, Layer, StructureSpec
from ecc.graph.structure import TensorShape
from energy.cases import NETWORKS, graph_of, random_widths, skeleton_of, slow_amounts, slow_extent


def width_of(group: int, multiple: int = 1, fixed: int = 0) -> AffineSize:
    return AffineSize(fixed, ((group, multiple),))


def structure(*layers: Layer, tensors: tuple[TensorShape, ...] = (), least: tuple[int, ...] = (1, 1)) -> StructureSpec:
    """Two groups of 8 and 6 channels."""
    return StructureSpec("f" * 16, ("a", "b"), (8, 6), least, layers, tensors)


def layer(macs: int, incoming: AffineSize, outgoing: AffineSize, *tensors: str, kind: str = "conv") -> Layer:
    return Layer("layer", kind, macs, incoming, outgoing, AffineSize(0), AffineSize(0), 4, tensors)


# ---------------------------------------------------------------- against the counts of the graph


@pytest.mark.parametrize("name", NETWORKS)
def test_physical_terms_stand_for_all_that_the_graph_counts(name: str) -> None:
    graph = graph_of(name)
    terms = physical_terms(graph.structure)
    for widths in random_widths(graph.structure, 5):
        vector = graph.widths() * 0 + graph.widths().new_tensor(widths)
        per_layer = graph.costs.macs_per_layer(vector).tolist()
        grouped = sum(m for m, layer in zip(per_layer, graph.layers, strict=True) if layer.kind == "grouped conv")
        expected = [
            sum(per_layer) - grouped,
            grouped,
            float(graph.activation_bytes(vector)),
            float(graph.costs.weight_bytes_per_layer(vector).sum()),
        ]
        assert slow_amounts(terms, widths) == pytest.approx(expected, rel=1e-12)
        assert expected[0] > 0


@pytest.mark.parametrize("name", NETWORKS)
def test_bilinear_terms_are_the_layers_with_macs(name: str) -> None:
    graph = graph_of(name)
    terms = bilinear_terms(graph.structure)
    assert [term.name for term in terms] == [layer.path for layer in graph.layers if layer.macs]
    for widths in random_widths(graph.structure, 5):
        macs, grouped, *bytes_ = slow_amounts(terms, widths)
        assert macs + grouped == float(graph.macs(graph.widths().new_tensor(widths)))
        assert bytes_ == [0, 0]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("terms_of", [bilinear_terms, physical_terms])
def test_the_amounts_of_a_term_are_those_of_its_layers(name: str, terms_of: type[tuple[Term, ...]]) -> None:
    for term in terms_of(skeleton_of(name)):
        parts = np.array([amounts for _, amounts in term.layers])
        assert parts.sum(axis=0).tolist() == pytest.approx(list(term.amounts), rel=1e-12)
        assert len(term.amounts) == len(AMOUNTS)


@pytest.mark.parametrize("name", NETWORKS)
def test_terms_are_evaluated_as_their_extents_say(name: str) -> None:
    widths = random_widths(skeleton_of(name), 4)
    for term in physical_terms(skeleton_of(name)):
        expected = [slow_extent(term.left, row) * slow_extent(term.right, row) for row in widths]
        assert term.at(widths).tolist() == expected
        assert extent_at(term.left, widths).tolist() == [slow_extent(term.left, row) for row in widths]


@pytest.mark.parametrize("name", NETWORKS)
def test_the_constant_stands_first_then_groups_then_layers(name: str) -> None:
    one = skeleton_of(name)
    constant, *others = physical_terms(one)
    assert (constant.name, constant.left, constant.right) == ("constant", ONE, ONE)
    linear = [term for term in others if term.right == ONE]
    assert others[: len(linear)] == linear
    assert [term.name for term in linear] == [one.groups[position] for position in one.prunable]  # frozen ones are not
    assert all(term.left.multiples and term.right.multiples for term in others[len(linear) :])


# ---------------------------------------------------------------- by hand


def test_one_convolution_by_hand() -> None:
    """Weights (b, a, 3, 3) of 4 bytes; what is read and written is linear in one group each."""
    conv = Layer("c", "conv", 9 * 25, width_of(0), width_of(1), width_of(0, 25), width_of(1, 25), 4, ("w", "bias"))
    weight = TensorShape("w", (width_of(1), width_of(0), AffineSize(3), AffineSize(3)), 4, True)
    bias = TensorShape("bias", (width_of(1),), 4, True)
    constant, a, b, product = physical_terms(structure(conv, tensors=(weight, bias)))
    assert constant.amounts == (0, 0, 0, 0)
    assert a.amounts == (0, 0, 4 * 25, 0)
    assert b.amounts == (0, 0, 4 * 25, 4)
    assert product.amounts == (225, 0, 0, 4 * 9)
    assert (product.left, product.right) == (width_of(0), width_of(1))


def test_a_layer_with_one_fixed_side_is_linear() -> None:
    terms = physical_terms(structure(layer(7, AffineSize(3), width_of(1))))
    assert [(term.name, term.amounts) for term in terms] == [("constant", (0,) * 4), ("b", (21, 0, 0, 0))]


def test_frozen_groups_count_as_fixed() -> None:
    terms = physical_terms(structure(layer(7, width_of(0), width_of(1, 2, 5)), least=(8, 1)))
    assert [(term.name, term.amounts[0]) for term in terms] == [("constant", 7 * 8 * 5), ("b", 7 * 8 * 2)]


def test_common_factors_are_taken_out_of_products() -> None:
    """A flattened channel is 36 columns: 36 a * b is 36 times a * b."""
    wide, narrow = layer(1, width_of(0, 36), width_of(1)), layer(36, width_of(1), width_of(0))
    (_, one), (_, other) = (physical_terms(structure(item)) for item in (wide, narrow))
    assert one == other
    assert one.amounts[0] == 36


def test_the_macs_of_grouped_convolutions_are_told_apart() -> None:
    (term,) = bilinear_terms(structure(layer(9, AffineSize(1), width_of(0), kind="grouped conv")))
    assert term.amounts == (0, 9, 0, 0)
    (term,) = bilinear_terms(structure(layer(9, AffineSize(1), width_of(0))))
    assert term.amounts == (9, 0, 0, 0)
    assert bilinear_terms(structure(layer(0, AffineSize(1), width_of(0)))) == ()
