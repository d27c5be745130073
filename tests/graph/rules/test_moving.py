from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.graph.grouping import ChannelPartition
from ecc.graph.labels import FROZEN
from ecc.graph.ops import shape
from ecc.graph.ops.shape import reshape_blocks
from graph.following import Following, merged

SHAPE = (2, 12, 4, 6)

# Operators that only move elements. Their twin is the operator itself, run on one label for each element.
MOVES: dict[str, Callable[[Tensor], Any]] = {
    "permute": lambda x: x.permute(0, 2, 3, 1),
    "transpose": lambda x: x.transpose(1, 3),
    "movedim": lambda x: x.movedim(1, -1),
    "mT": lambda x: x.mT,
    "unsqueeze": lambda x: x.unsqueeze(2),
    "squeeze": lambda x: x[:, :1].squeeze(1),
    "expand": lambda x: x.unsqueeze(0).expand(3, *x.shape),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "tile": lambda x: x.tile(2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=1),
    "narrow": lambda x: x.narrow(1, 3, 5),
    "select": lambda x: x[:, 3],
    "select from behind": lambda x: x.select(1, -2),
    "slice": lambda x: x[:, 2:9],
    "slice with a step": lambda x: x[:, 1::3, ::2],
    "slice from behind": lambda x: x[:, -5:, :-1],
    "slice of a regular part": lambda x: x[:, 4:8],
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: x.split([5, 4, 3], dim=1),
    "split in parts of one size": lambda x: x.split(5, dim=1),
    "chunk": lambda x: x.chunk(3, dim=1),
    "chunk beside the channels": lambda x: x.chunk(2, dim=2),
    "tensor_split": lambda x: x.tensor_split(4, dim=1),
    "flip": lambda x: x.flip(1),
    "flip beside the channels": lambda x: x.flip(2, 3),
    "roll": lambda x: x.roll(5, dims=1),
    "roll beside the channels": lambda x: x.roll((1, 2), dims=(2, 3)),
    "roll of everything": lambda x: x.roll(5),
    "unfold": lambda x: x.unfold(1, 4, 2),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "flatten": lambda x: x.flatten(1),
    "flatten space": lambda x: x.flatten(2),
    "flatten all": lambda x: x.reshape(-1),
    "view that merges": lambda x: x.view(24, 24),
    "reshape after permute": lambda x: x.permute(0, 2, 3, 1).reshape(2, 24, 12),
    "index_select": lambda x: x.index_select(1, torch.tensor([7, 7, 0])),
    "index": lambda x: x[:, torch.tensor([3, 1, 2])],
    "index of two axes": lambda x: x[:, torch.tensor([3, 1]), torch.tensor([0, 2])],
    "cat of parts": lambda x: torch.cat([x[:, 6:], x[:, :6]], dim=1),
    "cat along space": lambda x: torch.cat([x, x], dim=2),
    "clone": lambda x: x.clone(),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "to": lambda x: x.to(torch.float64),
}


def parts(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


@pytest.mark.parametrize("kind", ["channels", "distinct"])
@pytest.mark.parametrize("name", MOVES)
def test_labels_move_as_the_elements_do(name: str, kind: str) -> None:
    move, following = MOVES[name], Following()
    x = getattr(following, kind)(*SHAPE)
    expected = parts(move(following.labels(x).contiguous().double()))  # an ordinary tensor of numbers
    found = parts(following.run(move, x))
    assert len(found) == len(expected)
    for out, twin in zip(found, expected, strict=True):
        assert out.shape == twin.shape
        assert torch.equal(following.labels(out), twin.long())
    assert following.frozen() == {}


@pytest.mark.parametrize("name", MOVES)
def test_positions_without_a_channel_stay_without(name: str) -> None:
    following = Following()
    for out in parts(following.run(MOVES[name], following.input(*SHAPE))):
        assert (following.labels(out) == FROZEN).all()
    assert following.channel_labels.pairs == []


TYING = {"slice of a regular part", "chunk", "tensor_split", "cat of parts"}


@pytest.mark.parametrize("name", [n for n in MOVES if n not in TYING])
def test_moving_alone_ties_nothing(name: str) -> None:
    following = Following()
    following.run(MOVES[name], following.channels(*SHAPE))
    assert following.tied() == []


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "transpose_": lambda x: x.transpose_(1, 2),
    "unsqueeze_": lambda x: x.unsqueeze_(1),
    "squeeze_": lambda x: x.squeeze_(0),
    "swapaxes_": lambda x: x.swapaxes_(1, 2),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_moves_in_place_are_followed_or_freeze(name: str) -> None:
    move, following = IN_PLACE[name], Following()
    x = following.channels(1, 6, 4)
    twin = move(following.labels(x).clone(memory_format=torch.contiguous_format))
    out = following.run(move, x)
    assert out.shape == twin.shape
    followed = torch.equal(following.labels(out), twin)
    assert followed or sorted(following.frozen()) == following.axis("x", 0)


# ---------------------------------------------------------------- reshapes that split channels


def units(following: Following, labels: Tensor) -> list[int]:
    unit = ChannelPartition(following.channel_labels).unit
    return unit[labels.flatten().numpy()].tolist()


SPLITS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads": lambda x: x.view(2, 3, 4, 4, 6),
    "unflatten": lambda x: x.unflatten(1, (3, 4)),
    "three factors": lambda x: x.reshape(2, 2, 3, 2, 4, 6),
    "channel shuffle": lambda x: x.view(2, 3, 4, 4, 6).transpose(1, 2).reshape(2, 12, 4, 6),
}


@pytest.mark.parametrize("name", SPLITS)
def test_a_split_keeps_every_element_in_its_unit(name: str) -> None:
    following = Following()
    x = following.channels(*SHAPE)
    twin = SPLITS[name](following.labels(x).contiguous())
    out = following.run(SPLITS[name], x)
    assert out.shape == twin.shape
    assert units(following, following.labels(out)) == units(following, twin)


def test_a_split_ties_the_parts_so_that_the_last_factor_can_shrink() -> None:
    following = Following()
    x = following.channels(2, 6, 4)
    first = following.along(x)[0]
    following.run(lambda t: t.view(2, 3, 2, 4), x)
    even, odd = [first, first + 2, first + 4], [first + 1, first + 3, first + 5]
    assert following.tied() == [even, odd]


def test_the_other_readings_of_a_split_come_when_the_first_failed() -> None:
    for refuted, expected in ((1, [[0, 1], [2, 3], [4, 5]]), (2, [])):
        following = Following()
        x = following.channels(2, 6, 4)
        first = following.along(x)[0]

        def split(t: Tensor) -> Tensor:
            return t.view(2, 3, 2, 4)

        line = f"view@test_moving.py:{split.__code__.co_firstlineno + 1}"
        following.tracer.choices[line] = refuted
        following.run(split, x)
        assert following.tied() == [[first + k for k in unit] for unit in expected]
        reasons = following.frozen()
        assert sorted(reasons) == (list(range(first, first + 6)) if refuted == 2 else [])
        assert all("reshapes it to a fixed size" in why for why in reasons.values())


def test_a_split_of_an_axis_without_channels_ties_nothing() -> None:
    following = Following()
    out = following.run(lambda t: t.view(2, 6, 2, 2), following.channels(2, 6, 4))
    assert following.along(out) == following.axis("x", 0)
    assert following.tied() == []


# ---------------------------------------------------------------- splits into parts


@pytest.mark.parametrize("move", [lambda t: t.chunk(3, dim=1), lambda t: t.split(2, dim=1), lambda t: t[:, 2:4]])
def test_equal_parts_are_tied(move: Callable[[Tensor], Any]) -> None:
    following = Following()
    x = following.channels(2, 6, 4)
    following.run(move, x)
    labels = following.along(x)
    assert following.tied() == merged(labels[:2], labels[2:4], labels[4:])


@pytest.mark.parametrize(
    "move",
    [
        lambda t: t.split([4, 2], dim=1),
        lambda t: t[:, :4],  # 4 of 6 are no equal parts
        lambda t: t[:, 1:3],  # not where a part begins
        lambda t: t[:, ::2],
        lambda t: t[:, 3:4],
    ],
)
def test_unequal_parts_are_not(move: Callable[[Tensor], Any]) -> None:
    following = Following()
    following.run(move, following.channels(2, 6, 4))
    assert following.tied() == []


@pytest.mark.parametrize("move", [lambda t: t.chunk(4, dim=1), lambda t: t.tensor_split(4, dim=1)])
def test_a_number_of_unequal_parts_freezes(move: Callable[[Tensor], Any]) -> None:
    following = Following()
    following.run(move, following.channels(2, 7, 4))  # where it splits depends on what is left
    assert sorted(following.frozen()) == following.axis("x", 0)


# ---------------------------------------------------------------- concatenation, stacks and padding


def test_cat_lines_up_channels() -> None:
    following = Following()
    a, b = following.channels(2, 3, 4, name="a"), following.channels(2, 5, 4, name="b")
    out = following.run(lambda *t: torch.cat(t, dim=1), a, b)
    assert following.along(out) == [*following.axis("a", 0), *following.axis("b", 0)]
    assert following.tied() == []


def test_cat_beside_the_network_input_leaves_it_uncut() -> None:
    following = Following()
    a, image = following.channels(2, 3, 4, name="a"), following.input(2, 2, 4)
    out = following.run(lambda *t: torch.cat(t, dim=1), a, image)
    assert following.along(out) == [*following.axis("a", 0), FROZEN, FROZEN]
    assert following.frozen() == {}


def test_cat_along_another_axis_ties_the_pieces() -> None:
    following = Following()
    a, b = following.channels(2, 3, 4, name="a"), following.channels(2, 3, 5, name="b")
    out = following.run(lambda *t: torch.cat(t, dim=2), a, b)
    assert out.shape == (2, 3, 9)
    assert following.tied() == merged(following.axis("a", 0), following.axis("b", 0))


def test_stack_ties_the_pieces() -> None:
    following = Following()
    a, b = following.channels(2, 3, 4, name="a"), following.channels(2, 3, 4, name="b")
    out = following.run(lambda *t: torch.stack(t, dim=1), a, b)
    assert out.shape == (2, 2, 3, 4)
    assert units(following, torch.tensor(following.along(out, axis=2))) == units(
        following, torch.tensor(following.axis("a", 0))
    )
    assert following.tied() == merged(following.axis("a", 0), following.axis("b", 0))


def test_padding_of_channels_cannot_be_cut() -> None:
    following = Following()
    out = following.run(F.pad, following.channels(2, 3, 4), (0, 0, 1, 2))
    assert following.along(out) == [FROZEN, *following.axis("x", 0), FROZEN, FROZEN]


def test_padding_of_space_follows_the_channel() -> None:
    following = Following()
    out = following.run(F.pad, following.channels(2, 3, 4, 4), (1, 1, 1, 1))
    assert out.shape == (2, 3, 6, 6)
    assert following.along(out) == following.axis("x", 0)


# ---------------------------------------------------------------- shuffles


def test_pixel_shuffle_makes_units_of_four() -> None:
    following = Following()
    out = following.run(F.pixel_shuffle, following.channels(2, 12, 3, 3), 2)
    assert out.shape == (2, 3, 6, 6)
    labels = following.axis("x", 0)
    assert following.tied() == [labels[:4], labels[4:8], labels[8:]]
    assert following.along(out) == labels[::4]


def test_pixel_unshuffle_repeats_each_channel() -> None:
    following = Following()
    out = following.run(F.pixel_unshuffle, following.channels(2, 3, 4, 4), 2)
    assert following.along(out) == [label for label in following.axis("x", 0) for _ in range(4)]


def test_pixel_unshuffle_is_the_inverse_of_pixel_shuffle() -> None:
    following = Following()
    x = following.channels(2, 12, 3, 3)
    out = following.run(lambda t: F.pixel_unshuffle(F.pixel_shuffle(t, 2), 2), x)
    assert units(following, following.labels(out)) == units(following, following.labels(x))


def test_channel_shuffle_moves_labels_as_it_moves_elements() -> None:
    following = Following()
    x = following.channels(2, 6, 4, 4)
    out = following.run(F.channel_shuffle, x, 3)
    labels = following.axis("x", 0)
    assert following.along(out) == F.channel_shuffle(torch.tensor(labels).view(1, 6, 1, 1), 3).flatten().tolist()
    assert following.tied() == merged(labels[:2], labels[2:4], labels[4:])


@pytest.mark.parametrize("shuffle", [F.pixel_shuffle, F.pixel_unshuffle])
def test_channels_along_space_are_frozen(shuffle: Callable[..., Tensor]) -> None:
    following = Following()
    following.run(shuffle, following.channels(2, 4, 4, 4, axis=3), 2)
    assert sorted(following.frozen()) == following.axis("x", 0)


# ---------------------------------------------------------------- indices from elsewhere


def test_an_index_that_is_computed_freezes_channels() -> None:
    following = Following()
    index = following.activation(torch.tensor(FROZEN).expand(3)).long()
    following.run(lambda x, i: x[:, i], following.channels(2, 6, 4), index)
    assert all("picks channels by a computed index" in why for why in following.frozen().values())
    assert sorted(following.frozen()) == following.axis("x", 0)


def test_an_index_beside_the_channels_lets_them_pass() -> None:
    following = Following()
    index = following.activation(torch.tensor(FROZEN).expand(3)).long()
    out = following.run(lambda x, i: x[:, :, i], following.channels(2, 6, 4), index)
    assert out.shape == (2, 6, 3)
    assert following.along(out) == following.axis("x", 0)


@pytest.mark.parametrize(("dim", "passes"), [(1, False), (2, True)])
def test_gather_passes_channels_beside_its_axis(dim: int, passes: bool) -> None:
    following = Following()
    index = following.activation(torch.tensor(FROZEN).expand(2, 6, 4)).long()
    out = following.run(torch.gather, following.channels(2, 6, 4), dim, index)
    assert (sorted(following.frozen()) == []) is passes
    if passes:
        assert following.along(out) == following.axis("x", 0)


# ---------------------------------------------------------------- runs of axes of equal size


@pytest.mark.parametrize(
    ("old", "new", "blocks"),
    [
        ([2, 12, 5], [2, 3, 4, 5], [([0], [0]), ([1], [1, 2]), ([2], [3])]),
        ([2, 3, 4, 5], [2, 12, 5], [([0], [0]), ([1, 2], [1]), ([3], [2])]),
        ([2, 3, 4], [24], [([0, 1, 2], [0])]),
        ([24], [2, 3, 4], [([0], [0, 1, 2])]),
        ([6, 4], [4, 6], [([0, 1], [0, 1])]),
        ([2, 6], [2, 6], [([0], [0]), ([1], [1])]),
        ([2, 1, 6], [2, 6], [([0], [0]), ([1, 2], [1])]),
        ([2, 6], [2, 1, 6], [([0], [0]), ([1], [1, 2])]),
        ([6], [6, 1, 1], [([0], [0]), ([], [1]), ([], [2])]),
        ([], [1], [([], [0])]),
        ([], [], []),
        ([2, 0], [0, 5], None),
    ],
)
def test_blocks_of_a_reshape(old: list[int], new: list[int], blocks: Any) -> None:
    assert reshape_blocks(torch.Size(old), torch.Size(new)) == blocks


def test_blocks_always_hold_equally_many_elements() -> None:
    shapes = [(4, 6, 5), (24, 5), (2, 2, 30), (120,), (4, 30), (2, 12, 5), (1, 120, 1), (8, 3, 5)]
    for old in shapes:
        for new in shapes:
            blocks = reshape_blocks(torch.Size(old), torch.Size(new))
            assert blocks is not None
            for left, right in blocks:
                assert torch.Size([old[a] for a in left]).numel() == torch.Size([new[a] for a in right]).numel()
            assert [a for left, _ in blocks for a in left] == list(range(len(old)))
            assert [a for _, right in blocks for a in right] == list(range(len(new)))


def test_the_examples_in_the_docstrings_hold() -> None:
    failed, tried = doctest.testmod(moving)
    assert (failed, tried > 0) == (0, True)
