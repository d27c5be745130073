from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ecc.graph.grouping import ChannelPartition
from ecc.graph.labels import (
    FROZEN,
    ChannelLabels,
    Misaligned,
    Role,
    channel_vector,
    compact,
    frozen_labels,
    unfrozen,
    collapse,
    varies,
    varying_axes,
)
from graph.following import cut_book

VECTOR = torch.arange(10, 14)


def channels(*shape: int, axis: int = 1) -> Tensor:
    """Labels 10, 11, ... along one axis, stride 0 along the others."""
    vector = torch.arange(10, 10 + shape[axis])
    return vector.view([-1 if a == axis else 1 for a in range(len(shape))]).expand(shape)


# ---------------------------------------------------------------- label tensors


def test_labels_vary_where_they_have_a_stride() -> None:
    labels = channels(2, 4, 5)
    assert [varies(labels, axis) for axis in range(3)] == [False, True, False]
    assert varying_axes(labels) == [1]
    assert varying_axes(torch.arange(24).view(2, 3, 4)) == [0, 1, 2]
    assert varying_axes(torch.arange(4).view(1, 4, 1)) == [1]  # an axis of one element cannot vary
    assert varying_axes(frozen_labels(torch.Size([2, 3]))) == []


def test_compact_keeps_one_element_of_every_still_axis() -> None:
    labels = channels(2, 4, 5)
    assert compact(labels).shape == (1, 4, 1)
    assert compact(labels).flatten().tolist() == [10, 11, 12, 13]
    assert compact(torch.arange(6).view(2, 3)).shape == (2, 3)
    assert compact(torch.tensor(7)).shape == ()


def test_settled_finds_again_the_axes_on_which_a_copy_does_not_change() -> None:
    copied = channels(2, 4, 5).clone(memory_format=torch.contiguous_format)
    assert varying_axes(copied) == [0, 1, 2]
    labels = collapse(copied)
    assert varying_axes(labels) == [1]
    assert torch.equal(labels, copied)


@pytest.mark.parametrize("shape", [(2, 3, 4), (1, 3, 1), (), (5,), (0, 3)])
def test_settled_never_changes_a_label(shape: tuple[int, ...]) -> None:
    labels = torch.randint(2, 4, shape)
    assert torch.equal(collapse(labels), labels)
    assert collapse(labels).shape == labels.shape


def test_a_channel_vector_is_one_line_of_a_label_tensor() -> None:
    assert channel_vector(channels(2, 4, 5), 1, 4).tolist() == [10, 11, 12, 13]
    assert channel_vector(channels(2, 4, 5, axis=2), -1, 5).tolist() == [10, 11, 12, 13, 14]
    assert channel_vector(None, 1, 3).tolist() == [FROZEN] * 3
    assert channel_vector(torch.tensor([[7]]), 1, 4).tolist() == [7] * 4


def test_loose_labels_are_those_that_may_still_be_cut() -> None:
    labels = channels(2, 4)
    assert unfrozen(labels) is labels
    assert unfrozen(None) is None
    assert unfrozen(frozen_labels(torch.Size([2, 4]))) is None
    assert unfrozen(torch.tensor([FROZEN, 5])) is not None


# ---------------------------------------------------------------- the book


def test_an_axis_is_numbered_once_and_collects_roles() -> None:
    book = ChannelLabels()
    first = book.axis("w", 0, 3, Role.PRODUCER)
    second = book.axis("w", 1, 2, Role.CONSUMER)
    assert torch.equal(book.axis("w", 0, 3, Role.PER_CHANNEL), first)
    assert sorted(first.tolist() + second.tolist()) == list(range(2, 7))  # 0 and 1 are no channels
    assert book.roles == {("w", 0): {Role.PRODUCER, Role.PER_CHANNEL}, ("w", 1): {Role.CONSUMER}}
    assert torch.equal(book.vector("w", 1), second)
    assert book.size == 7


def test_unions_are_pairs_at_equal_positions() -> None:
    book = ChannelLabels()
    a, b = book.axis("a", 0, 3, Role.PRODUCER), book.axis("b", 0, 3, Role.CONSUMER)
    book.unite(a, b, "add")
    left, right, _ = book.unions()
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == list(zip(a.tolist(), b.tolist(), strict=True))


def test_unions_broadcast() -> None:
    book = ChannelLabels()
    a, b = book.axis("a", 0, 1, Role.PRODUCER), book.axis("b", 0, 3, Role.CONSUMER)
    book.unite(a, b, "group")
    assert len(set(ChannelPartition(book).unit[2:].tolist())) == 1


def test_unions_of_different_sizes_are_misaligned() -> None:
    book = ChannelLabels()
    a, b = book.axis("a", 0, 2, Role.PRODUCER), book.axis("b", 0, 3, Role.CONSUMER)
    with pytest.raises(Misaligned, match="sizes differ in add") as caught:
        book.unite(a, b, "add")
    assert caught.value.labels.tolist() == a.tolist() + b.tolist()


def test_what_meets_a_frozen_position_is_frozen_and_no_union() -> None:
    book = ChannelLabels()
    a = book.axis("a", 0, 3, Role.PRODUCER)
    book.unite(a, torch.tensor([FROZEN, 3, FROZEN]), "add")
    assert [labels.tolist() for labels, _ in book.freezes()] == [[2, 4]]
    assert book.freezes()[0][1] == "it meets something that cannot be cut in add"


def test_the_order_of_sides_does_not_matter_to_a_freeze() -> None:
    book = ChannelLabels()
    a = book.axis("a", 0, 3, Role.PRODUCER)
    book.unite(torch.tensor(FROZEN), a, "mul")
    assert [labels.tolist() for labels, _ in book.freezes()] == [a.tolist()]


def test_freezes_name_every_reason_and_leave_the_frozen_label_out() -> None:
    book = ChannelLabels()
    a = book.axis("a", 0, 3, Role.PRODUCER)
    book.freeze(a[:1], "softmax mixes along it")
    book.freeze(torch.tensor([FROZEN, 4]), "it is an output of the network")
    assert [(labels.tolist(), why) for labels, why in book.freezes()] == [
        ([2], "softmax mixes along it"),
        ([4], "it is an output of the network"),
    ]


def test_unions_made_later_are_seen() -> None:
    book = ChannelLabels()
    a, b = book.axis("a", 0, 2, Role.PRODUCER), book.axis("b", 0, 2, Role.CONSUMER)
    assert book.unions()[0].tolist() == []
    book.unite(a[:1], b[:1], "one")
    assert len(book.unions()[0]) == 1
    book.unite(a[1:], b[1:], "two")
    assert len(book.unions()[0]) == 2


# ---------------------------------------------------------------- the book of a cut network


def dense_book() -> tuple[ChannelLabels, Tensor, Tensor]:
    """Four channels written by `a` and read by `b`."""
    book = ChannelLabels()
    a, b = book.axis("a", 0, 4, Role.PRODUCER), book.axis("b", 1, 4, Role.CONSUMER)
    book.unite(a, b, "b (linear)")
    return book, a, b


def test_a_cut_that_lines_up_is_accepted() -> None:
    book, a, b = dense_book()
    cut = cut_book(book, a[[0, 2]], b[[0, 2]])
    assert cut.axis("a", 0, 2, Role.PRODUCER).tolist() == a[[0, 2]].tolist()
    cut.unite(cut.axis("a", 0, 2, Role.PRODUCER), cut.axis("b", 1, 2, Role.CONSUMER), "b (linear)")
    cut.check()
    assert len(cut.pairs) == 1


def test_channels_that_slide_past_each_other_are_caught() -> None:
    book, a, b = dense_book()
    cut = cut_book(book, a[[0, 2]], b[[1, 2]])
    cut.unite(cut.axis("a", 0, 2, Role.PRODUCER), cut.axis("b", 1, 2, Role.CONSUMER), "b (linear)")
    with pytest.raises(Misaligned, match=r"channels slide past each other in b \(linear\)") as caught:
        cut.check()
    assert caught.value.labels.tolist() == [int(a[0]), int(b[1])]


def test_columns_of_one_channel_in_another_order_are_caught() -> None:
    """Two channels of two positions, flattened: column 2k + p belongs to channel k, position p."""
    book = ChannelLabels()
    a, b = book.axis("a", 0, 2, Role.PRODUCER), book.axis("b", 1, 4, Role.CONSUMER)
    c = book.axis("c", 0, 4, Role.PER_CHANNEL)
    book.unite(a.repeat_interleave(2), b, "fc (linear)")
    book.unite(b, c, "scale (mul)")
    good, bad = (cut_book(book, a[1:], b[2:], c[2:]) for _ in range(2))
    good.unite(b[2:], c[2:], "scale (mul)")
    good.check()
    bad.unite(b[2:], c[2:].flip(0), "scale (mul)")
    with pytest.raises(Misaligned, match="slide past each other"):
        bad.check()


def test_a_freeze_that_the_dense_network_does_not_have_is_caught() -> None:
    book, a, b = dense_book()
    cut = cut_book(book, a[:2], b[:2])
    cut.unite(a[:2], torch.tensor(FROZEN), "pad (add)")
    with pytest.raises(Misaligned, match="meets something that cannot be cut") as caught:
        cut.check()
    assert caught.value.labels.tolist() == a[:2].tolist()


def test_a_freeze_that_the_dense_network_has_too_is_accepted() -> None:
    book, a, b = dense_book()
    book.freeze(a[3:], "it is an output of the network")
    cut = cut_book(book, a[[0, 3]], b[[0, 3]])
    cut.freeze(a[3:], "it is an output of the network")
    cut.check()
    cut.freeze(b[3:], "it shares the unit")
    cut.check()
    cut.freeze(b[:1], "it does not")
    with pytest.raises(Misaligned, match="it does not"):
        cut.check()


def test_an_axis_of_the_wrong_size_is_caught() -> None:
    book, a, b = dense_book()
    cut = cut_book(book, a[:2], b[:2])
    with pytest.raises(Misaligned, match="axis 1 of b has 3 entries, not 2"):
        cut.axis("b", 1, 3, Role.CONSUMER)


@pytest.mark.parametrize(("tensor", "axis", "role"), [("c", 0, Role.CONSUMER), ("a", 1, Role.CONSUMER), ("a", 0, Role.CONSUMER)])
def test_a_parameter_used_in_another_way_is_caught(tensor: str, axis: int, role: Role) -> None:
    book, a, b = dense_book()
    cut = cut_book(book, a[:2], b[:2])
    with pytest.raises(Misaligned, match=f"{tensor} is used in another way"):
        cut.axis(tensor, axis, 2, role)


def test_a_weight_of_a_grouped_convolution_is_known_when_one_group_is_left() -> None:
    book = ChannelLabels()
    book.axis("dw", 0, 4, Role.PER_CHANNEL)
    book.axis("conv", 0, 4, Role.PRODUCER)
    cut = cut_book(book)
    assert cut.is_grouped("dw")
    assert not cut.is_grouped("conv")
    assert not book.is_grouped("dw")
