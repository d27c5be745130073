"""Labels, their unions, and the partition into units and groups."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ecc.graph import AffineSize, ChannelGraph, Role
from ecc.graph.calls import OpRecord
from ecc.graph.grouping import ChannelPartition, build_graph, build_layers
from ecc.graph.labels import (
    FROZEN,
    ChannelLabels,
    Deferred,
    Misaligned,
    channel_vector,
    collapse,
    compact,
    first_on,
    frozen_labels,
    unfrozen,
    varying_axes,
)
from graph.op_trace import pruned_labels

CONSUMER, PRODUCER, PER_CHANNEL = Role.CONSUMER, Role.PRODUCER, Role.PER_CHANNEL


def test_labels_take_memory_only_along_axes_on_which_they_change() -> None:
    labels = torch.arange(10, 14).view(1, 4, 1).expand(2, 4, 5)
    assert varying_axes(labels) == [1]
    assert compact(labels).shape == (1, 4, 1)
    copied = labels.contiguous()
    assert varying_axes(copied) == [0, 1, 2]
    assert varying_axes(collapse(copied)) == [1]
    assert torch.equal(collapse(copied), copied)
    assert channel_vector(labels, -2, 4).tolist() == [10, 11, 12, 13]
    assert channel_vector(None, 1, 3).tolist() == [FROZEN] * 3
    assert unfrozen(labels) is labels
    assert unfrozen(frozen_labels(torch.Size([2, 4]))) is None
    assert unfrozen(torch.tensor([FROZEN, 5])) is not None


def test_labels_of_an_empty_batch_are_those_of_its_channels() -> None:
    labels = torch.arange(10, 14).view(1, 4).expand(0, 4)
    assert first_on(labels, 0).tolist() == [[10, 11, 12, 13]]
    assert first_on(labels.expand(0, 4), 1).shape == (0, 1)
    assert channel_vector(labels, 1, 4).tolist() == [10, 11, 12, 13]
    copied = torch.empty(0, 4, dtype=torch.long)  # nothing is known
    assert first_on(copied, 0).tolist() == [[FROZEN] * 4]
    assert channel_vector(copied, 1, 4).tolist() == [FROZEN] * 4


@pytest.mark.parametrize("axis", [0, 1])
def test_a_large_table_is_bound_on_the_axis_that_has_the_channels(axis: int) -> None:
    known = ChannelLabels()
    channels = known.axis("w", 0, 6, PRODUCER)
    shape = torch.Size([6, 3000] if axis == 0 else [3000, 6])
    table = Deferred("table", shape, (0, 1))
    labels = channels.view([6, 1] if axis == 0 else [1, 6]).expand(shape)
    assert table.bind(known, labels, "`add`")
    assert [key for key in known.axes if key[0] == "table"] == [("table", axis)]
    mixed = labels.clone()
    mixed[tuple(size // 2 + 1 for size in shape)] = channels[0]  # one element that a sample may miss
    other = ChannelLabels()
    other.axis("w", 0, 6, PRODUCER)
    assert not table.bind(other, mixed, "`add`")
    assert "no single axis matches" in other.frozen[-1][1]


def test_an_axis_is_numbered_once_and_collects_roles() -> None:
    labels = ChannelLabels()
    first, second = labels.axis("w", 0, 3, PRODUCER), labels.axis("w", 1, 2, CONSUMER)
    assert torch.equal(labels.axis("w", 0, 3, PER_CHANNEL), first)
    assert sorted(first.tolist() + second.tolist()) == list(range(2, 7))  # 0 and 1 are no channels
    assert labels.roles == {("w", 0): {PRODUCER, PER_CHANNEL}, ("w", 1): {CONSUMER}}


def test_unions_and_freezes() -> None:
    labels = ChannelLabels()
    a, b = labels.axis("a", 0, 3, PRODUCER), labels.axis("b", 0, 3, CONSUMER)
    labels.unite(a, b, "`add`")
    left, right, _ = labels.unions()
    assert list(zip(left.tolist(), right.tolist(), strict=True)) == list(zip(a.tolist(), b.tolist(), strict=True))
    labels.unite(a[:1], b, "`mul`")  # broadcasts
    assert len(set(ChannelPartition(labels).unit[2:].tolist())) == 1
    with pytest.raises(Misaligned, match="sizes do not match in `add`") as caught:
        labels.unite(a[:2], b, "`add`")
    assert caught.value.labels.tolist() == a[:2].tolist() + b.tolist()
    labels.unite(torch.tensor([FROZEN, 3, FROZEN]), a, "`sub`")
    labels.freeze(torch.tensor([FROZEN, 4]), "it is an output of the network")
    assert [(found.tolist(), why) for found, why in labels.freezes()] == [
        ([4], "it is an output of the network"),
        ([2, 4], "`sub` combines it with a tensor that is not prunable"),
    ]


# ---------------------------------------------------------------- labels of a pruned network


def dense_labels() -> tuple[ChannelLabels, Tensor, Tensor]:
    """Four channels produced by `a` and consumed by `b`."""
    labels = ChannelLabels()
    a, b = labels.axis("a", 0, 4, PRODUCER), labels.axis("b", 1, 4, CONSUMER)
    labels.unite(a, b, "`linear` in b")
    return labels, a, b


@pytest.mark.parametrize(("kept_by_a", "kept_by_b", "lines_up"), [([0, 2], [0, 2], True), ([0, 2], [1, 2], False)])
def test_channels_of_a_pruned_network_must_line_up(kept_by_a: list[int], kept_by_b: list[int], lines_up: bool) -> None:
    labels, a, b = dense_labels()
    pruned = pruned_labels(labels, a[kept_by_a], b[kept_by_b])
    pruned.unite(pruned.axis("a", 0, 2, PRODUCER), pruned.axis("b", 1, 2, CONSUMER), "`linear` in b")
    if lines_up:
        pruned.check()
        assert len(pruned.pairs) == 1
    else:
        with pytest.raises(Misaligned, match="`linear` in b combines other channels after pruning") as caught:
            pruned.check()
        assert caught.value.labels.tolist() == [int(a[0]), int(b[1])]


def test_the_columns_of_one_channel_must_keep_their_order() -> None:
    """Two channels of two positions, flattened: column 2k + p belongs to channel k and position p."""
    labels = ChannelLabels()
    a, b = labels.axis("a", 0, 2, PRODUCER), labels.axis("b", 1, 4, CONSUMER)
    c = labels.axis("c", 0, 4, PER_CHANNEL)
    labels.unite(a.repeat_interleave(2), b, "`linear` in fc")
    labels.unite(b, c, "`mul`")
    good, bad = (pruned_labels(labels, a[1:], b[2:], c[2:]) for _ in range(2))
    good.unite(b[2:], c[2:], "`mul`")
    good.check()
    bad.unite(b[2:], c[2:].flip(0), "`mul`")
    with pytest.raises(Misaligned, match="combines other channels after pruning"):
        bad.check()


def test_only_a_freeze_of_the_dense_network_is_accepted() -> None:
    labels, a, b = dense_labels()
    labels.freeze(a[3:], "it is an output of the network")
    pruned = pruned_labels(labels, a[[0, 3]], b[[0, 3]])
    pruned.freeze(a[3:], "it is an output of the network")
    pruned.freeze(b[3:], "the same unit")
    pruned.check()
    pruned.unite(b[:1], torch.tensor(FROZEN), "`add`")
    with pytest.raises(Misaligned, match="`add` combines it with a tensor that is not prunable"):
        pruned.check()


def test_a_parameter_that_is_used_differently_after_pruning_is_noticed() -> None:
    labels, a, b = dense_labels()
    labels.axis("dw", 0, 4, PER_CHANNEL)
    pruned = pruned_labels(labels, a[:2], b[:2])
    with pytest.raises(Misaligned, match="axis 1 of b has 3 entries, not 2"):
        pruned.axis("b", 1, 3, CONSUMER)
    for tensor, axis in (("c", 0), ("a", 1), ("a", 0)):
        with pytest.raises(Misaligned, match=f"{tensor} is used differently after pruning"):
            pruned.axis(tensor, axis, 2, CONSUMER)
    assert pruned.is_grouped("dw")  # also if one group is left
    assert not pruned.is_grouped("a")


# ---------------------------------------------------------------- units and groups

TENSORS = {"a.weight": torch.nn.Parameter(torch.zeros(4, 3)), "b.weight": torch.nn.Parameter(torch.zeros(2, 4))}


def two_layers() -> ChannelLabels:
    """a (4 x 3) produces four channels, b (2 x 4) consumes them and produces the output."""
    labels = ChannelLabels()
    a, b = labels.axis("a.weight", 0, 4, PRODUCER), labels.axis("b.weight", 1, 4, CONSUMER)
    labels.unite(a, b, "`linear` in b")
    labels.freeze(labels.axis("b.weight", 0, 2, PRODUCER), "it is an output of the network")
    labels.freeze(labels.axis("a.weight", 1, 3, CONSUMER), "its input is not prunable")
    return labels


def graph_of(labels: ChannelLabels, **more: Tensor) -> ChannelGraph:
    tensors = {**TENSORS, **{f"{name}.weight": tensor for name, tensor in more.items()}}
    return build_graph(ChannelPartition(labels), tensors)


def test_interchangeable_units_form_a_group() -> None:
    graph = graph_of(two_layers())
    assert [(g.name, g.width, g.frozen) for g in graph.groups] == [
        ("a", 4, None),
        ("b", 2, "it is an output of the network"),
    ]
    found = [(one.tensor, one.axis, one.roles) for one in graph["a"].slices]
    assert found == [("a.weight", 0, (PRODUCER,)), ("b.weight", 1, (CONSUMER,))]
    assert [t.axes for t in graph.tensors] == [
        (AffineSize(0, ((0, 1),)), AffineSize(3)),
        (AffineSize(0, ((1, 1),)), AffineSize(0, ((0, 1),))),
    ]


def test_a_frozen_unit_and_a_unit_with_another_consumer_are_other_groups() -> None:
    labels = two_layers()
    labels.freeze(labels.vector("b.weight", 1)[:1], "the first reason")
    labels.freeze(labels.vector("a.weight", 0)[:1], "a later reason")
    labels.unite(labels.vector("a.weight", 0)[1:3], labels.axis("c.weight", 1, 2, CONSUMER), "`linear` in c")
    graph = graph_of(labels, c=torch.zeros(5, 2))
    assert [(g.name, g.width, g.frozen, g.layers(CONSUMER)) for g in graph.groups][:3] == [
        ("a", 1, "the first reason", ("b",)),
        ("a#2", 2, None, ("b", "c")),
        ("a#3", 1, "it already has its minimum width", ("b",)),
    ]
    assert graph["a#2"].slices[0].index.flatten().tolist() == [1, 2]


def test_groups_that_cannot_be_pruned() -> None:
    labels = ChannelLabels()
    labels.axis("a.weight", 0, 4, PRODUCER)
    (group,) = build_graph(ChannelPartition(labels), {"a.weight": TENSORS["a.weight"]}).groups
    assert (group.width, group.frozen) == (4, "no layer consumes it")
    for width, needs_two, frozen in ((1, False, True), (2, False, False), (2, True, True), (3, True, False)):
        labels = ChannelLabels()
        labels.unite(labels.axis("a.weight", 0, width, PRODUCER), labels.axis("b.weight", 1, width, CONSUMER), "b")
        if needs_two:
            labels.needs_two.append(labels.vector("a.weight", 0))
        tensors = {"a.weight": torch.zeros(width, 3), "b.weight": torch.zeros(2, width)}
        group = build_graph(ChannelPartition(labels), tensors)["a"]
        assert (group.frozen == "it already has its minimum width") is frozen
        assert group.min_width == (2 if needs_two else 1)


@pytest.mark.parametrize(("pattern", "frozen"), [("a", True), ("a.weight", True), ("?", True), ("b", False)])
def test_a_user_freezes_by_module_or_by_tensor(pattern: str, frozen: bool) -> None:
    graph = build_graph(ChannelPartition(two_layers(), freeze=[pattern]), TENSORS)
    assert (graph["a"].frozen == "frozen by the argument `freeze`") is frozen


def test_a_parameter_that_is_an_activation_is_a_group() -> None:
    """A class token, for example."""
    labels = ChannelLabels()
    labels.unite(labels.axis("token", 0, 4, PER_CHANNEL), labels.axis("b.weight", 1, 4, CONSUMER), "`linear` in b")
    graph = build_graph(ChannelPartition(labels), {"token": torch.zeros(4), "b.weight": torch.zeros(2, 4)})
    assert [(g.name, g.width, g.frozen) for g in graph.groups] == [("token", 4, None)]


def test_sizes_and_layers_are_functions_of_the_widths() -> None:
    labels = two_layers()
    partition = ChannelPartition(labels)
    channels, outputs = labels.vector("a.weight", 0), labels.vector("b.weight", 0)
    fixed = torch.tensor([FROZEN])
    assert partition.size_of(channels, 25) == AffineSize(0, ((0, 25),))
    assert partition.size_of(channels.repeat_interleave(9)) == AffineSize(0, ((0, 9),))
    assert partition.size_of(torch.cat([channels, outputs, fixed])) == AffineSize(1, ((0, 1), (1, 1)))
    assert partition.size_of(labels.vector("a.weight", 1), 10) == AffineSize(30)  # the network's input is no group
    inputs = labels.vector("a.weight", 1)
    records = [
        OpRecord("a", "conv", 9, [inputs, channels], [(fixed, 75)], [(channels, 25)], ["a.weight"], 4),
        OpRecord("dw", "grouped conv", 9, [channels], [(channels, 25)], [(channels, 25)], [], 4),
        OpRecord("", "elementwise", 0, [], [(channels, 25), (fixed, 5)], [(channels, 25)], [], 2),
    ]
    first, second, third = build_layers(partition, records)
    width = AffineSize(0, ((0, 1),))
    assert (first.incoming, first.outgoing, first.tensors) == (AffineSize(3), width, ("a.weight",))
    assert (first.reads, first.writes) == (AffineSize(75), AffineSize(0, ((0, 25),)))
    assert (second.incoming, second.outgoing) == (AffineSize(1), width)
    assert (third.macs, third.incoming, third.reads) == (0, AffineSize(1), AffineSize(5, ((0, 25),)))
