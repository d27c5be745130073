from __future__ import annotations

import torch

from ecc.graph import AffineSize, Role
from ecc.graph.calls import OpRecord
from ecc.graph.grouping import ChannelPartition, build_graph, build_layers
from ecc.graph.labels import FROZEN, ChannelLabels

READ, WRITE, CARRY = Role.CONSUMER, Role.PRODUCER, Role.PER_CHANNEL


def two_layers() -> ChannelLabels:
    """a (4 x 3) writes four channels, b (2 x 4) reads them and writes the output."""
    book = ChannelLabels()
    a, b = book.axis("a.weight", 0, 4, WRITE), book.axis("b.weight", 1, 4, READ)
    book.unite(a, b, "b (linear)")
    book.freeze(book.axis("b.weight", 0, 2, WRITE), "it is an output of the network")
    book.freeze(book.axis("a.weight", 1, 3, READ), "its input is not prunable")
    return book


TENSORS = {"a.weight": torch.nn.Parameter(torch.zeros(4, 3)), "b.weight": torch.nn.Parameter(torch.zeros(2, 4))}


def test_units_are_connected_labels() -> None:
    book = two_layers()
    resolved = ChannelPartition(book)
    assert resolved.units_on(("a.weight", 0)).tolist() == resolved.units_on(("b.weight", 1)).tolist()
    assert len(set(resolved.units_on(("a.weight", 0)).tolist())) == 4
    assert [len(group) for group in resolved.groups] == [4, 2]


def test_unions_are_transitive() -> None:
    book = ChannelLabels()
    a, b, c = (book.axis(name, 0, 2, WRITE) for name in "abc")
    book.unite(a, b, "add")
    book.unite(b, c, "add")
    resolved = ChannelPartition(book)
    assert resolved.units_on(("a", 0)).tolist() == resolved.units_on(("c", 0)).tolist()


def test_a_reason_spreads_over_its_unit_and_the_first_one_stays() -> None:
    book = two_layers()
    book.freeze(book.vector("b.weight", 1)[:1], "softmax mixes along it")
    book.freeze(book.vector("a.weight", 0)[:1], "a later reason")
    resolved = ChannelPartition(book)
    units = resolved.units_on(("a.weight", 0))
    assert [resolved.why(int(u)) for u in units] == ["softmax mixes along it", None, None, None]
    assert resolved.frozen_mask()[book.vector("a.weight", 0)].tolist() == [True, False, False, False]
    assert bool(resolved.frozen_mask()[FROZEN])


def test_a_frozen_unit_leaves_the_group_of_its_neighbours() -> None:
    book = two_layers()
    book.freeze(book.vector("a.weight", 0)[1:2], "softmax mixes along it")
    graph = build_graph(ChannelPartition(book), TENSORS)
    assert [(g.name, g.width, g.frozen) for g in graph.groups] == [
        ("a", 3, None),
        ("a#2", 1, "softmax mixes along it"),
        ("b", 2, "it is an output of the network"),
    ]
    assert graph["a"].slices[0].index.flatten().tolist() == [0, 2, 3]
    assert graph["a#2"].slices[0].index.flatten().tolist() == [1]


def test_the_graph_has_places_with_writers_first() -> None:
    graph = build_graph(ChannelPartition(two_layers()), TENSORS)
    assert [(p.tensor, p.axis, p.roles) for p in graph["a"].slices] == [
        ("a.weight", 0, (WRITE,)),
        ("b.weight", 1, (READ,)),
    ]
    assert graph.full_shapes == {"a.weight": (4, 3), "b.weight": (2, 4)}
    assert [t.axes for t in graph.tensors] == [
        (AffineSize(0, ((0, 1),)), AffineSize(3)),
        (AffineSize(0, ((1, 1),)), AffineSize(0, ((0, 1),))),
    ]


def test_what_nothing_reads_is_frozen() -> None:
    book = ChannelLabels()
    book.axis("a.weight", 0, 4, WRITE)
    (group,) = build_graph(ChannelPartition(book), {"a.weight": TENSORS["a.weight"]}).groups
    assert (group.width, group.frozen) == (4, "no layer consumes it")


def pair_of_layers(width: int) -> tuple[ChannelLabels, dict[str, torch.Tensor]]:
    book = ChannelLabels()
    book.unite(book.axis("a.weight", 0, width, WRITE), book.axis("b.weight", 1, width, READ), "b")
    return book, {"a.weight": torch.zeros(width, 3), "b.weight": torch.zeros(2, width)}


def test_a_single_unit_is_not_offered() -> None:
    book, tensors = pair_of_layers(1)
    assert build_graph(ChannelPartition(book), tensors)["a"].frozen == "it already has its minimum width"


def test_two_units_stay_where_code_drops_axes_of_size_one() -> None:
    for width, frozen in ((3, None), (2, "it already has its minimum width")):
        book, tensors = pair_of_layers(width)
        book.paired.append(book.vector("a.weight", 0))
        group = build_graph(ChannelPartition(book), tensors)["a"]
        assert (group.min_width, group.frozen) == (2, frozen)


def test_a_user_can_freeze_by_module_or_by_tensor() -> None:
    for pattern, frozen in (("a", True), ("a.weight", True), ("?", True), ("b", False), ("a.*", True), ("c*", False)):
        graph = build_graph(ChannelPartition(two_layers(), freeze=[pattern]), TENSORS)
        assert (graph["a"].frozen == "frozen by the argument `freeze`") is frozen, pattern


def test_units_that_stand_on_other_axes_are_another_group() -> None:
    """Of four channels, a second layer reads the first two only."""
    book = two_layers()
    book.unite(book.vector("a.weight", 0)[:2], book.axis("c.weight", 1, 2, READ), "c (linear)")
    graph = build_graph(ChannelPartition(book), {**TENSORS, "c.weight": torch.zeros(5, 2)})
    assert [(g.name, g.width) for g in graph.groups] == [("a", 2), ("a#2", 2), ("b", 2)]
    assert graph["a"].layers(READ) == ("b", "c")
    assert graph["a#2"].layers(READ) == ("b",)


def test_extents_count_indices_and_fixed_positions() -> None:
    book = two_layers()
    resolved = ChannelPartition(book)
    channels, outputs = book.vector("a.weight", 0), book.vector("b.weight", 0)
    assert resolved.size_of(channels) == AffineSize(0, ((0, 1),))
    assert resolved.size_of(channels, 25) == AffineSize(0, ((0, 25),))
    assert resolved.size_of(channels.repeat_interleave(9)) == AffineSize(0, ((0, 9),))
    assert resolved.size_of(torch.cat([channels, outputs, torch.tensor([FROZEN] * 3)])) == AffineSize(
        3, ((0, 1), (1, 1))
    )
    assert resolved.size_of(book.vector("a.weight", 1), 10) == AffineSize(30)  # the network's input is no group
    assert resolved.size_of(torch.tensor([FROZEN]), 7) == AffineSize(7)


def test_layers_are_records_in_widths() -> None:
    book = two_layers()
    channels, outputs = book.vector("a.weight", 0), book.vector("b.weight", 0)
    image = torch.tensor([FROZEN])
    records = [
        OpRecord(
            "a", "conv", 9, [book.vector("a.weight", 1), channels], [(image, 75)], [(channels, 25)], ["a.weight"], 4
        ),
        OpRecord("dw", "grouped conv", 9, [channels], [(channels, 25)], [(channels, 25)], [], 4),
        OpRecord("", "elementwise", 0, [], [(channels, 25), (image, 5)], [(channels, 25)], [], 2),
        OpRecord("b", "linear", 1, [channels, outputs], [(channels, 1)], [(outputs, 1)], ["b.weight"], 4),
    ]
    first, second, third, last = build_layers(ChannelPartition(book), records)
    s, t = ((0, 1),), ((1, 1),)
    assert (first.incoming, first.outgoing) == (AffineSize(3), AffineSize(0, s))
    assert (first.reads, first.writes) == (AffineSize(75), AffineSize(0, ((0, 25),)))
    assert (second.incoming, second.outgoing) == (AffineSize(1), AffineSize(0, s))
    assert (third.macs, third.incoming, third.outgoing) == (0, AffineSize(1), AffineSize(1))
    assert third.reads == AffineSize(5, ((0, 25),))
    assert (last.incoming, last.outgoing, last.tensors) == (AffineSize(0, s), AffineSize(0, t), ("b.weight",))


def test_a_carried_parameter_that_something_reads_is_a_group() -> None:
    """A parameter that is an activation itself, such as a class token, makes channels without a layer."""
    book = ChannelLabels()
    book.unite(book.axis("token", 0, 4, CARRY), book.axis("b.weight", 1, 4, READ), "b (linear)")
    graph = build_graph(ChannelPartition(book), {"token": torch.zeros(4), "b.weight": torch.zeros(2, 4)})
    assert [(g.name, g.width, g.frozen) for g in graph.groups] == [("token", 4, None)]
