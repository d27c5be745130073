"""What each operator does to channel labels: one table for each effect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ecc.graph.calls import Call, quick_result
from ecc.graph.grouping import ChannelPartition
from ecc.graph.labels import FROZEN, Role
from ecc.graph.ops import registry
from graph.op_trace import OpTrace, merged

CONSUMER, PRODUCER, PER_CHANNEL = {Role.CONSUMER}, {Role.PRODUCER}, {Role.PER_CHANNEL}
SHAPE = (2, 12, 4, 6)
Function = Callable[..., Any]


def parts(value: Any) -> list[Tensor]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


# ---------------------------------------------------------------- data movement

MOVES: dict[str, Function] = {
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
    "select from the end": lambda x: x.select(1, -2),
    "slice": lambda x: x[:, 2:9],
    "slice with a step": lambda x: x[:, 1::3, ::2],
    "slice from the end": lambda x: x[:, -5:, :-1],
    "slice of an equal part": lambda x: x[:, 4:8],
    "unbind": lambda x: x.unbind(1),
    "split": lambda x: x.split([5, 4, 3], dim=1),
    "split in parts of one size": lambda x: x.split(5, dim=1),
    "chunk": lambda x: x.chunk(3, dim=1),
    "chunk of a spatial axis": lambda x: x.chunk(2, dim=2),
    "tensor_split": lambda x: x.tensor_split(4, dim=1),
    "flip": lambda x: x.flip(1),
    "flip of spatial axes": lambda x: x.flip(2, 3),
    "roll": lambda x: x.roll(5, dims=1),
    "roll of spatial axes": lambda x: x.roll((1, 2), dims=(2, 3)),
    "roll of everything": lambda x: x.roll(5),
    "unfold": lambda x: x.unfold(1, 4, 2),
    "diagonal": lambda x: x.diagonal(dim1=1, dim2=2),
    "flatten": lambda x: x.flatten(1),
    "flatten spatial axes": lambda x: x.flatten(2),
    "flatten all": lambda x: x.reshape(-1),
    "view that merges": lambda x: x.view(24, 24),
    "reshape after permute": lambda x: x.permute(0, 2, 3, 1).reshape(2, 24, 12),
    "index_select": lambda x: x.index_select(1, torch.tensor([7, 7, 0])),
    "index": lambda x: x[:, torch.tensor([3, 1, 2])],
    "index of two axes": lambda x: x[:, torch.tensor([3, 1]), torch.tensor([0, 2])],
    "cat of parts": lambda x: torch.cat([x[:, 6:], x[:, :6]], dim=1),
    "cat of a spatial axis": lambda x: torch.cat([x, x], dim=2),
    "contiguous": lambda x: x.transpose(1, 2).contiguous(),
    "to": lambda x: x.to(torch.float64),
}
TYING = {"slice of an equal part", "chunk", "tensor_split", "cat of parts"}


@pytest.mark.parametrize("kind", ["channels", "distinct", "input"])
@pytest.mark.parametrize("name", MOVES)
def test_labels_move_like_the_elements(name: str, kind: str) -> None:
    trace = OpTrace()
    x = getattr(trace, kind)(*SHAPE)
    expected = parts(MOVES[name](trace.labels(x).contiguous().double()))  # the same operator on ordinary numbers
    found = parts(trace.run(MOVES[name], x))
    assert [out.shape for out in found] == [out.shape for out in expected]
    for out, wanted in zip(found, expected, strict=True):
        assert torch.equal(trace.labels(out), wanted.long())
    assert trace.frozen() == {}
    if kind == "channels":
        assert bool(trace.tied()) is (name in TYING)


@pytest.mark.parametrize(
    ("name", "arguments"), [("transpose_", (1, 2)), ("unsqueeze_", (1,)), ("squeeze_", (0,)), ("swapaxes_", (1, 2))]
)
def test_moves_in_place_are_followed_or_freeze(name: str, arguments: tuple[int, ...]) -> None:
    trace = OpTrace()
    x = trace.channels(1, 6, 4)
    expected = getattr(trace.labels(x).clone(memory_format=torch.contiguous_format), name)(*arguments)
    out = trace.run(lambda t: getattr(t, name)(*arguments), x)
    assert out.shape == expected.shape
    assert torch.equal(trace.labels(out), expected) or sorted(trace.frozen()) == trace.axis("x", 0)


def units(trace: OpTrace, labels: Tensor) -> list[int]:
    return ChannelPartition(trace.channel_labels).unit[labels.flatten().numpy()].tolist()


@pytest.mark.parametrize(
    "split",
    [
        lambda x: x.view(2, 3, 4, 4, 6),
        lambda x: x.unflatten(1, (3, 4)),
        lambda x: x.reshape(2, 2, 3, 2, 4, 6),
        lambda x: x.view(2, 3, 4, 4, 6).transpose(1, 2).reshape(2, 12, 4, 6),
    ],
)
def test_a_reshape_that_splits_channels_keeps_each_element_in_its_unit(split: Function) -> None:
    trace = OpTrace()
    x = trace.channels(*SHAPE)
    expected = split(trace.labels(x).contiguous())
    out = trace.run(split, x)
    assert out.shape == expected.shape
    assert units(trace, trace.labels(out)) == units(trace, expected)


def split_six(t: Tensor) -> Tensor:
    return t.view(2, 3, 2, 4)


@pytest.mark.parametrize(
    ("choice", "tied", "is_frozen"),
    [
        (0, [[0, 2, 4], [1, 3, 5]], False),
        (1, [[0, 1], [2, 3], [4, 5]], False),
        (2, [[0, 2, 4], [1, 3, 5]], False),  # once more, for values in attention
        (3, [], True),
    ],
)
def test_a_reshape_has_several_interpretations(choice: int, tied: list[list[int]], is_frozen: bool) -> None:
    trace = OpTrace()
    x = trace.channels(2, 6, 4)
    first = trace.along(x)[0]
    line = f"view@test_operators.py:{split_six.__code__.co_firstlineno + 1}"
    trace.tracer.choices[line] = choice
    trace.run(split_six, x)
    assert trace.tied() == [[first + k for k in unit] for unit in tied]
    assert sorted(trace.frozen()) == (trace.axis("x", 0) if is_frozen else [])
    assert all("`view(2, 3, 2, 4)` has a hard-coded channel count" in why for why in trace.frozen().values())
    ((noted, options, labels),) = trace.tracer.guesses
    assert (noted, options, labels.tolist()) == (line, 4, trace.axis("x", 0))


def test_channels_that_enter_a_line_with_a_hard_coded_size_are_frozen() -> None:
    trace = OpTrace()
    trace.tracer.stops[f"view@test_operators.py:{split_six.__code__.co_firstlineno + 1}"] = "the reason"
    out = trace.run(split_six, trace.channels(2, 6, 4))
    assert (trace.labels(out) == FROZEN).all()
    assert trace.frozen() == dict.fromkeys(trace.axis("x", 0), "the reason")


@pytest.mark.parametrize(
    ("move", "are_tied"),
    [
        (lambda t: t.chunk(3, dim=1), True),
        (lambda t: t.split(2, dim=1), True),
        (lambda t: t[:, 2:4], True),
        (lambda t: t.split([4, 2], dim=1), False),
        (lambda t: t[:, :4], False),  # 4 of 6 are not equal parts
        (lambda t: t[:, 1:3], False),  # not the beginning of a part
        (lambda t: t[:, ::2], False),
        (lambda t: t[:, 3:4], False),
        (lambda t: t.view(2, 6, 2, 2), False),
    ],
)
def test_equal_parts_are_tied(move: Function, are_tied: bool) -> None:
    trace = OpTrace()
    x = trace.channels(2, 6, 4)
    trace.run(move, x)
    labels = trace.along(x)
    assert trace.tied() == (merged(labels[:2], labels[2:4], labels[4:]) if are_tied else [])


# ---------------------------------------------------------------- operators that pass channels on

PASSING: dict[str, tuple[Function, tuple[int, ...]]] = {
    **{f.__name__: (f, (2, 4, 5)) for f in (F.relu, F.gelu, F.silu, F.hardswish, F.elu, F.leaky_relu, F.softplus)},
    **{f.__name__: (f, (2, 4, 5)) for f in (F.mish, F.logsigmoid, F.dropout, F.softsign, torch.sigmoid, torch.exp)},
    **{f.__name__: (f, (2, 4, 5)) for f in (torch.clone, torch.detach, torch.zeros_like, torch.rand_like)},
    "times a number": (lambda x: x * 2, (2, 4, 5)),
    "times a tensor of one number": (lambda x: x * torch.ones(()) + torch.zeros(1), (2, 4, 5)),
    "power": (lambda x: x**2, (2, 4, 5)),
    "clamp": (lambda x: x.clamp(0, 6), (2, 4, 5)),
    "relu in place": (lambda x: x.relu_(), (2, 4, 5)),
    "where": (lambda x: torch.where(x > 0, x, 0.0), (2, 4, 5)),
    "masked_fill": (lambda x: x.masked_fill(x < 0, 0.0), (2, 4, 5)),
    "half": (lambda x: x.half(), (2, 4, 5)),
    "dropout1d": (lambda x: F.dropout1d(x, 0.5, training=True), (2, 4, 5)),
    "alpha_dropout": (lambda x: F.alpha_dropout(x, 0.5, training=True), (2, 4, 5)),
    **{
        f"{f.__name__} of spatial axes": (lambda x, f=f: f(x, dim=(2, 3)), (2, 4, 5, 6))
        for f in (torch.mean, torch.sum, torch.amax, torch.var, torch.std, torch.linalg.vector_norm, torch.logsumexp)
    },
    "mean that keeps axes": (lambda x: x.mean((2, 3), keepdim=True), (2, 4, 5, 6)),
    "max with indices": (lambda x: torch.max(x, 2), (2, 4, 5)),
    "median with indices": (lambda x: torch.median(x, 2), (2, 4, 5)),
    "topk": (lambda x: torch.topk(x, 3), (2, 4, 5)),
    "sort": (lambda x: torch.sort(x, dim=2), (2, 4, 5)),
    **{
        f"{f.__name__} of another axis": (lambda x, f=f: f(x, dim=-1), (2, 4, 5))
        for f in (torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod)
    },
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), (2, 4, 6)),
    "max_pool2d with indices": (lambda x: F.max_pool2d(x, 2, return_indices=True), (2, 4, 6, 6)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (2, 4, 6, 6, 6)),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), (2, 4, 6, 6)),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 2), (2, 4, 6)),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, (2, None)), (2, 4, 6, 6)),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 1), (2, 4, 6, 6)),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), (2, 4, 6, 6)),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), (2, 4, 6, 6)),
    "bilinear": (lambda x: F.interpolate(x, size=(9, 9), mode="bilinear"), (2, 4, 6, 6)),
    "bicubic": (lambda x: F.interpolate(x, size=(9, 9), mode="bicubic"), (2, 4, 6, 6)),
    "trilinear": (lambda x: F.interpolate(x, size=(9, 9, 9), mode="trilinear"), (2, 4, 6, 6, 6)),
    "reflection padding": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), (2, 4, 6, 6)),
    "replication padding": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), (2, 4, 6, 6)),
    "zero padding": (lambda x: F.pad(x, (1, 1, 1, 1)), (2, 4, 6, 6)),
    "normalize another axis": (lambda x: F.normalize(x, dim=2), (2, 4, 5)),
    "layer norm of another axis": (lambda x: F.layer_norm(x, (5,)), (2, 4, 5)),
    "prelu with one slope": (lambda x: F.prelu(x, torch.empty(1, device="meta")), (2, 4, 5)),
}


@pytest.mark.parametrize("name", PASSING)
def test_channels_pass(name: str) -> None:
    function, shape = PASSING[name]
    trace = OpTrace()
    for out in parts(trace.run(function, trace.channels(*shape))):
        assert trace.along(out) == trace.axis("x", 0)
    assert trace.frozen() == {}
    assert trace.tied() == []


# ---------------------------------------------------------------- operators that freeze channels


def written(x: Tensor) -> Tensor:
    out = torch.zeros(2, 8, 6, 6)
    out[:, :4] = x
    return out


def added(x: Tensor) -> Tensor:
    out = torch.zeros(2, 8, 6, 6)
    out[:, :4] += x
    return out


FREEZING: dict[str, tuple[Function, str]] = {
    **{
        f"{f.__name__} over {dim}": (lambda x, f=f, dim=dim: f(x, dim=dim), "reduces over the channel axis")
        for f in (torch.mean, torch.sum, torch.amax, torch.var, torch.linalg.vector_norm, torch.logsumexp)
        for dim in (1, -3, (1, 2), (0, 1, 2, 3))
    },
    **{
        f"{f.__name__} of everything": (f, "reduces over the channel axis")
        for f in (torch.mean, torch.max, torch.argmax, torch.norm, torch.prod)
    },
    **{
        f"{f.__name__} of channels": (lambda x, f=f: f(x, dim=1), "mixes channels")
        for f in (torch.softmax, torch.log_softmax, torch.cumsum, torch.sort)
    },
    "pooling": (lambda x: F.max_pool2d(x.transpose(1, 3), 2), "pools along the channel axis"),
    "bilinear": (
        lambda x: F.interpolate(x.transpose(1, 3), size=(9, 9), mode="bilinear"),
        "pools along the channel axis",
    ),
    "layer norm": (lambda x: F.layer_norm(x, (4, 6, 6)), "mixes channels, so removing one would change the output"),
    "rms norm": (lambda x: F.rms_norm(x.transpose(1, 3), (4,)), "mixes channels, so removing one would change"),
    "group norm": (lambda x: F.group_norm(x, 1), "mixes channels, so removing one would change the output"),
    "group norm without weight": (lambda x: F.group_norm(x, 2), "has no weight from which its number of groups"),
    "instance norm": (lambda x: F.instance_norm(x.transpose(1, 3)), "normalizes over the channel axis"),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x.transpose(1, 2)[:, :4], 2), "has channels on a spatial axis"),
    "pixel unshuffle": (lambda x: F.pixel_unshuffle(x.transpose(1, 3), 2), "has channels on a spatial axis"),
    "unequal tensor_split": (
        lambda x: x.tensor_split(3, dim=1),
        "`tensor_split(3, 1)` splits channels into unequal parts",
    ),
    "assignment to a part": (written, "writes it into part of another tensor"),
    "addition to a part": (added, "writes it into part of another tensor"),
    "copy into an empty tensor": (lambda x: torch.empty(x.shape).copy_(x), "writes it into part of another tensor"),
    "real numbers for each channel": (lambda x: x + torch.arange(4.0).view(4, 1, 1), "that is not prunable"),
    "qr": (torch.linalg.qr, "operator `linalg_qr` is not supported"),
    "svd": (torch.linalg.svd, "is not supported"),
    "fft": (lambda x: torch.fft.rfft(x, dim=1), "mixes channels"),
    "unfold": (lambda x: F.unfold(x.transpose(1, 3), 2), "has channels on a spatial axis"),
    "affine_grid": (
        lambda x: F.affine_grid(x[:, :, :3, 0].transpose(1, 2), [2, 1, 4, 4, 4], align_corners=False),
        "uses its values as positions",
    ),
    "index_add": (
        lambda x: torch.zeros(2, 4, 6, 6).index_add(1, torch.tensor([0, 1, 1, 2]), x),
        "selects channels by a computed index",
    ),
    "normalize": (lambda x: F.normalize(x, dim=1), "`linalg_vector_norm` reduces"),
    "local_response_norm": (lambda x: F.local_response_norm(x, 3), "avg_pool"),
    **{
        f"constants that differ: {name}": (lambda x, make=make: x * make(), "that is not prunable")
        for name, make in {
            "running sum": lambda: torch.ones(4, 1).cumsum(0)[..., None],
            "cat": lambda: torch.cat([torch.ones(1, 1, 1), torch.zeros(3, 1, 1)]),
            "stack": lambda: torch.stack([torch.ones(1, 1), *[torch.zeros(1, 1)] * 3]),
            "padding": lambda: F.pad(torch.ones(3, 1), (0, 0, 0, 1))[..., None],
            "diagonal": lambda: torch.zeros(4, 1).fill_diagonal_(1)[..., None],
            "index_fill": lambda: torch.zeros(4, 1, 1).index_fill(0, torch.tensor([2]), 1),
            "eye": lambda: torch.eye(4)[:, :1, None],
            "triangle": lambda: torch.ones(4, 4).tril()[:, 1:2, None],
        }.items()
    },
}


@pytest.mark.parametrize("name", FREEZING)
def test_channels_are_frozen_with_the_reason(name: str) -> None:
    function, words = FREEZING[name]
    trace = OpTrace()
    results = trace.run(function, trace.channels(2, 4, 6, 6))
    for result in results if isinstance(results, tuple) else (results,):
        trace.tracer.freeze_pending(result)  # as for outputs of a network
    assert sorted(trace.frozen()) == trace.axis("x", 0)
    assert all(words in why for why in trace.frozen().values()), trace.frozen()


@pytest.mark.parametrize(
    ("index", "passes"), [("channels", False), ("space", True), ("gather 1", False), ("gather 2", True)]
)
def test_a_computed_index_into_channels_freezes_them(index: str, passes: bool) -> None:
    trace = OpTrace()
    positions = trace.activation(torch.tensor(FROZEN).expand((2, 6, 4) if "gather" in index else (3,))).long()
    functions: dict[str, Function] = {
        "channels": lambda x, i: x[:, i],
        "space": lambda x, i: x[:, :, i],
        "gather 1": lambda x, i: torch.gather(x, 1, i),
        "gather 2": lambda x, i: torch.gather(x, 2, i),
    }
    out = trace.run(functions[index], trace.channels(2, 6, 4), positions)
    if passes:
        assert trace.along(out) == trace.axis("x", 0)
        assert trace.frozen() == {}
    else:
        assert sorted(trace.frozen()) == trace.axis("x", 0)
        assert all("selects channels by a computed index" in why for why in trace.frozen().values())


# ---------------------------------------------------------------- operators that combine channels

COMBINING: dict[str, Function] = {
    **{f.__name__: f for f in (torch.add, torch.sub, torch.mul, torch.div, torch.maximum, torch.max, torch.atan2)},
    "add in place": lambda a, b: a.add_(b),
    "where": lambda a, b: torch.where(a > 0, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.5),
    "addcmul": lambda a, b: torch.addcmul(a, a, b),
    "copy": lambda a, b: a.copy_(b),
    "gate": lambda a, b: a * b.mean(2, keepdim=True),
    "cat of another axis": lambda a, b: torch.cat([a, b], dim=2),
    "stack": lambda a, b: torch.stack([a, b], dim=1),
}


@pytest.mark.parametrize("name", COMBINING)
def test_channels_that_are_combined_are_pruned_together(name: str) -> None:
    trace = OpTrace()
    trace.run(COMBINING[name], trace.channels(2, 4, 5, name="a"), trace.channels(2, 4, 5, name="b"))
    assert trace.tied() == merged(trace.axis("a", 0), trace.axis("b", 0))
    assert trace.frozen() == {}


def test_combining_with_other_shapes() -> None:
    trace = OpTrace()
    trace.run(torch.add, trace.channels(2, 4, 5), trace.input(2, 4, 5))
    assert trace.frozen() == dict.fromkeys(trace.axis("x", 0), "`add` combines it with a tensor that is not prunable")

    trace = OpTrace()  # one value per pixel
    assert trace.along(trace.run(torch.mul, trace.channels(2, 4, 5), trace.input(2, 1, 5))) == trace.axis("x", 0)
    assert trace.frozen() == {}

    trace = OpTrace()  # a gate of width one
    out = trace.run(torch.mul, trace.channels(2, 4, 5), trace.channels(2, 1, 5, name="gate"))
    assert trace.along(out) == trace.axis("x", 0)
    assert trace.frozen() == dict.fromkeys(trace.axis("gate", 0), "`mul` broadcasts it over other channels")

    trace = OpTrace()  # channels on different axes: one of the two is frozen
    trace.run(torch.mul, trace.channels(2, 4, 1, name="rows"), trace.channels(2, 1, 5, axis=2, name="columns"))
    assert trace.tied() == []
    assert len(trace.frozen()) in (4, 5)


def test_concatenation_and_padding_place_positions_beside_channels() -> None:
    trace = OpTrace()
    a, b = trace.channels(2, 3, 4, name="a"), trace.channels(2, 5, 4, name="b")
    out = trace.run(lambda *t: torch.cat(t, dim=1), a, b, trace.input(2, 2, 4))
    assert trace.along(out) == [*trace.axis("a", 0), *trace.axis("b", 0), FROZEN, FROZEN]
    padded = trace.run(F.pad, a, (0, 0, 1, 2))
    assert trace.along(padded) == [FROZEN, *trace.axis("a", 0), FROZEN, FROZEN]
    assert trace.tied() == []
    assert trace.frozen() == {}


def test_padding_is_pruned_with_the_channels_that_it_is_added_to() -> None:
    trace = OpTrace()
    wide = trace.channels(2, 10, 4, name="wide")
    trace.run(lambda x, y: F.pad(x, (0, 0, 3, 3)) + y, trace.channels(2, 4, 4), wide)
    labels = trace.axis("wide", 0)
    ends = [[a, b] for a, b in zip(labels[:3], labels[-3:], strict=True)]  # equal on both sides
    tied = trace.tied()
    assert all(any(set(pair) <= set(unit) for unit in tied) for pair in ends)
    assert sorted(len(unit) for unit in tied) == [2] * 4 + [3] * 3
    assert trace.frozen() == {}


def test_halves_of_a_gated_unit_are_tied() -> None:
    trace = OpTrace()
    out = trace.run(F.glu, trace.channels(2, 6, 4), 1)
    labels = trace.axis("x", 0)
    assert trace.along(out) == labels[:3]
    assert trace.tied() == merged(labels[:3], labels[3:])


def test_patches_repeat_channels_and_folding_ties_them() -> None:
    trace = OpTrace()
    x = trace.channels(2, 3, 6, 6)
    patches = trace.run(F.unfold, x, 2)
    assert trace.along(patches) == [label for label in trace.axis("x", 0) for _ in range(4)]
    assert trace.along(trace.run(F.fold, patches, (6, 6), 2)) == trace.axis("x", 0)
    assert trace.tied() == []

    trace = OpTrace()
    out = trace.run(F.fold, trace.channels(2, 8, 25), (6, 6), 2)
    labels = trace.axis("x", 0)
    assert trace.along(out) == labels[::4]
    assert trace.tied() == [labels[:4], labels[4:]]


def test_shuffles() -> None:
    trace = OpTrace()
    out = trace.run(F.pixel_shuffle, trace.channels(2, 12, 3, 3), 2)
    labels = trace.axis("x", 0)
    assert trace.tied() == [labels[:4], labels[4:8], labels[8:]]
    assert trace.along(out) == labels[::4]

    trace = OpTrace()
    out = trace.run(F.pixel_unshuffle, trace.channels(2, 3, 4, 4), 2)
    assert trace.along(out) == [label for label in trace.axis("x", 0) for _ in range(4)]

    trace = OpTrace()
    out = trace.run(F.channel_shuffle, trace.channels(2, 6, 4, 4), 3)
    labels = trace.axis("x", 0)
    assert trace.along(out) == F.channel_shuffle(torch.tensor(labels).view(1, 6, 1, 1), 3).flatten().tolist()
    assert trace.tied() == merged(labels[:2], labels[2:4], labels[4:])


# ---------------------------------------------------------------- layers


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_convolution_consumes_and_produces_channels(dims: int, transposed: bool) -> None:
    trace = OpTrace()
    x = trace.channels(2, 4, *[7] * dims)
    shape = (4, 6) if transposed else (6, 4)
    weight, bias = trace.parameter("w", *shape, *[3] * dims), trace.parameter("b", 6)
    convolve = getattr(F, f"conv_transpose{dims}d" if transposed else f"conv{dims}d")
    out = trace.run(convolve, x, weight, bias)
    consumed, produced = (0, 1) if transposed else (1, 0)
    assert trace.roles("w") == {produced: PRODUCER, consumed: CONSUMER}
    assert trace.roles("b") == {0: PRODUCER}
    assert trace.along(out) == trace.axis("w", produced)
    pairs = merged(trace.axis("x", 0), trace.axis("w", consumed)) + merged(
        trace.axis("w", produced), trace.axis("b", 0)
    )
    assert trace.tied() == sorted(pairs)
    positions = 2 * (7 if transposed else 5) ** dims
    assert (trace.record.kind, trace.record.macs) == ("conv", positions * 3**dims)
    assert [factor.numel() for factor in trace.record.factors] == [4, 6]
    assert trace.record.tensors == ["w", "b"]


@pytest.mark.parametrize(("outputs", "per_group"), [(6, 1), (12, 2)])
def test_a_depthwise_convolution_keeps_each_channel(outputs: int, per_group: int) -> None:
    trace = OpTrace()
    weight = trace.parameter("w", outputs, 1, 3, 3)
    out = trace.run(F.conv2d, trace.channels(2, 6, 7, 7), weight, None, groups=6)
    assert trace.roles("w") == {0: PER_CHANNEL}
    assert trace.along(out) == trace.axis("w", 0)
    rows = torch.tensor(trace.axis("w", 0)).view(6, per_group).t().tolist()
    assert trace.tied() == merged(trace.axis("x", 0), *rows)
    assert (trace.record.kind, trace.record.macs) == ("grouped conv", 2 * 25 * 9)


def test_a_grouped_convolution_ties_the_channels_of_each_group() -> None:
    trace = OpTrace()
    x, weight = trace.channels(2, 4, 7, 7), trace.parameter("w", 6, 2, 3, 3)
    trace.run(F.conv2d, x, weight, trace.parameter("b", 6), groups=2)
    ins, rows, bias = trace.axis("x", 0), trace.axis("w", 0), trace.axis("b", 0)
    assert trace.tied() == [ins[:2] + rows[:3] + bias[:3], ins[2:] + rows[3:] + bias[3:]]
    assert trace.record.macs == 2 * 25 * 9 * 2

    trace = OpTrace()
    x, weight = trace.channels(2, 4, 5, 5), trace.parameter("w", 4, 3, 2, 2)
    out = trace.run(lambda *a: F.conv_transpose2d(*a, stride=2, groups=2), x, weight)
    ins, rows = trace.axis("x", 0), trace.axis("w", 0)
    assert trace.tied() == [ins[:2] + rows[:2], ins[2:] + rows[2:]]
    assert trace.along(out) == [rows[0]] * 3 + [rows[2]] * 3


@pytest.mark.parametrize("shape", [(2, 4), (2, 5, 4), (2, 3, 5, 4)])
@pytest.mark.parametrize(
    ("function", "weight"),
    [
        (F.linear, (6, 4)),
        (torch.matmul, (4, 6)),
        (lambda x, w: x @ w.t(), (6, 4)),
        (lambda x, w: x @ w.mT, (6, 4)),
        (lambda x, w: F.linear(x, w.transpose(0, 1)), (4, 6)),
    ],
)
def test_a_linear_layer_in_all_forms(function: Function, weight: tuple[int, ...], shape: tuple[int, ...]) -> None:
    trace = OpTrace()
    out = trace.run(function, trace.channels(*shape, axis=len(shape) - 1), trace.parameter("w", *weight))
    produced, consumed = (0, 1) if weight == (6, 4) else (1, 0)
    assert trace.roles("w") == {produced: PRODUCER, consumed: CONSUMER}
    assert trace.along(out, axis=-1) == trace.axis("w", produced)
    assert trace.tied() == merged(trace.axis("x", 0), trace.axis("w", consumed))
    (record,) = [r for r in trace.tracer.records if r.kind == "linear"]
    assert record.macs == torch.Size(shape[:-1]).numel()


def test_layers_that_cannot_be_pruned() -> None:
    trace = OpTrace()
    trace.run(F.conv2d, trace.input(2, 3, 7, 7), trace.parameter("w", 6, 3, 3, 3))
    assert trace.frozen() == dict.fromkeys(trace.axis("w", 1), "its input is not prunable")

    trace = OpTrace()  # token mixing: channels on axis 1 pass, the layer is frozen
    out = trace.run(F.linear, trace.channels(2, 6, 4), trace.parameter("w", 5, 4))
    assert trace.along(out) == trace.axis("x", 0)
    assert sorted(trace.frozen()) == sorted(trace.axis("w", 0) + trace.axis("w", 1))
    assert set(trace.frozen().values()) == {"`linear` runs along another axis than the channels"}

    trace = OpTrace()
    trace.run(F.linear, trace.distinct(2, 4), trace.parameter("w", 5, 4))
    assert trace.frozen()[trace.axis("x", 0)[0]] == "`linear` has channels on two axes of its input"

    trace = OpTrace()
    trace.run(F.conv2d, trace.channels(2, 3, 7, 7, axis=3), trace.parameter("w", 6, 3, 3, 3))
    assert trace.frozen()[trace.axis("x", 0)[0]] == "`conv2d` convolves along the channel axis"

    for function, shape in ((F.conv2d, (6, 4, 3, 3)), (F.linear, (6, 4))):
        trace = OpTrace()
        x, weight = trace.channels(2, 4, *[7] * (len(shape) - 2)), trace.channels(*shape, axis=0, name="made")
        out = trace.run(function, x, weight)
        assert sorted(trace.frozen()) == trace.axis("x", 0) + trace.axis("made", 0)
        assert set(trace.frozen().values()) == {f"the weight of `{function.__name__}` is computed, not a parameter"}
        assert (trace.labels(out) == FROZEN).all()


@pytest.mark.parametrize("product", [torch.matmul, torch.bmm])
@pytest.mark.parametrize(
    ("left_axis", "right_axis", "survivor"),
    [(2, 0, None), (1, 0, "a"), (0, 1, None), (0, 2, "b"), (0, 0, None), (1, 2, "b")],
)
def test_channels_pass_a_product_unless_it_sums_over_them(
    product: Any, left_axis: int, right_axis: int, survivor: str | None
) -> None:
    """(batch, m, k) @ (batch, k, n). Axis 0 means that this factor has no channels."""
    trace = OpTrace()
    a = trace.channels(2, 3, 4, axis=left_axis, name="a") if left_axis else trace.input(2, 3, 4)
    b = trace.channels(2, 4, 5, axis=right_axis, name="b") if right_axis else trace.input(2, 4, 5)
    out = trace.run(product, a, b)
    if survivor is None:
        assert (trace.labels(out) == FROZEN).all()
        assert len(trace.frozen()) == (4 if left_axis or right_axis else 0)
    else:
        assert trace.along(out, axis=1 if survivor == "a" else 2) == trace.axis(survivor, 0)
        assert sorted(trace.frozen()) == (trace.axis("a", 0) if left_axis and right_axis else [])
        assert [factor.tolist() for factor in trace.record.factors] == [trace.axis(survivor, 0)]
        assert trace.record.macs * len(trace.axis(survivor, 0)) == 2 * 3 * 4 * 5
    assert set(trace.frozen().values()) <= {f"`{product.__name__}` sums over it"}


def test_attention_passes_the_value_and_sums_over_query_and_key() -> None:
    trace = OpTrace()
    query, key, value = (trace.channels(2, 3, 5, 4, axis=3, name=name) for name in "qkv")
    out = trace.run(F.scaled_dot_product_attention, query, key, value)
    assert trace.along(out, axis=3) == trace.axis("v", 0)
    assert sorted(trace.frozen()) == trace.axis("q", 0) + trace.axis("k", 0)

    trace = OpTrace()
    inputs = trace.input(2, 3, 5, 4), trace.input(2, 3, 5, 4), trace.channels(2, 3, 5, 4, axis=1, name="v")
    trace.run(F.scaled_dot_product_attention, *inputs)
    assert all("heads that are not prunable" in why for why in trace.frozen().values())
    assert sorted(trace.frozen()) == trace.axis("v", 0)

    trace = OpTrace()
    query, key, value = (trace.channels(2, 3, 5, 4, axis=1, name=name) for name in "qkv")
    out = trace.run(F.scaled_dot_product_attention, query, key, value)
    assert trace.along(out, axis=1) == trace.axis("q", 0)
    assert trace.tied() == merged(*(trace.axis(name, 0) for name in "qkv"))
    assert trace.frozen() == {}

    trace = OpTrace()
    added, right = trace.channels(2, 3, 5, axis=2, name="c"), trace.channels(2, 4, 5, axis=2, name="b")
    trace.run(torch.baddbmm, added, trace.input(2, 3, 4), right)
    assert trace.tied() == merged(trace.axis("c", 0), trace.axis("b", 0))


@pytest.mark.parametrize("space", [(), (5,), (5, 5), (5, 5, 5)])
@pytest.mark.parametrize("training", [False, True])
def test_norms_and_slopes_have_one_value_per_channel(space: tuple[int, ...], training: bool) -> None:
    trace = OpTrace()
    mean, var, weight, bias = (trace.parameter(name, 4) for name in ("mean", "var", "weight", "bias"))
    out = trace.run(F.batch_norm, trace.channels(2, 4, *space), mean, var, weight, bias, training)
    assert trace.along(out) == trace.axis("x", 0)
    assert trace.tied() == merged(*(trace.axis(name, 0) for name in ("x", "weight", "bias", "mean", "var")))
    assert trace.roles("weight") == {0: PER_CHANNEL}
    out = trace.run(F.prelu, out, trace.parameter("slope", 4))
    assert trace.axis("slope", 0)[0] in trace.tied()[0]
    table = trace.parameter("table", 10, 4)
    out = trace.run(F.embedding, torch.zeros(2, 5, dtype=torch.long), table)
    assert (trace.along(out, axis=2), trace.roles("table")) == (trace.axis("table", 1), {1: PRODUCER})


# ---------------------------------------------------------------- parameters outside layers


@pytest.mark.parametrize(
    ("shape", "change", "axis"),
    [
        ((4, 1, 1), lambda p: p, 0),
        ((1, 4, 1, 1), lambda p: p, 1),
        ((4, 5, 5), lambda p: p, 0),
        ((1, 4, 5, 5), lambda p: 2 * p, 1),
        ((5, 5, 4), lambda p: p.permute(2, 0, 1), 2),
        ((5, 5, 4), lambda p: p.flip(0).movedim(2, 0), 2),
        ((25, 4), lambda p: p[torch.arange(24, -1, -1)].t().reshape(4, 5, 5), 1),
        ((1, 4, 8, 8), lambda p: p[:, :, :5, :5], 1),
    ],
)
def test_a_parameter_has_channels_on_the_axis_that_matches(shape: tuple[int, ...], change: Function, axis: int) -> None:
    trace = OpTrace()
    parameter = trace.parameter("p", *shape)
    out = trace.run(lambda x, p: x + change(p), trace.channels(2, 4, 5, 5), parameter)
    assert trace.along(out) == trace.axis("x", 0)
    assert trace.frozen() == {}
    assert trace.tied() == merged(trace.axis("x", 0), trace.axis("p", axis))


def test_other_parameters_outside_layers() -> None:
    trace = OpTrace()  # one value for all channels
    trace.run(torch.add, trace.channels(2, 4, 5, 5), trace.parameter("p", 5, 5))
    assert trace.tied() == []

    trace = OpTrace()  # no axis matches the channels
    trace.run(lambda x, p: x + p.flatten(), trace.channels(2, 4), trace.parameter("p", 2, 2))
    assert sorted(trace.frozen()) == trace.axis("x", 0)

    trace = OpTrace()  # all values are used
    trace.run(lambda p: p.mean(), trace.parameter("p", 4, 3))
    assert set(trace.frozen().values()) == {"`mean` uses all values of p"}

    trace = OpTrace()  # not a channel at all
    assert trace.labels(trace.run(lambda x: x.new_zeros(2, 3), trace.channels(2, 4, 5))) is None
    assert (trace.labels(torch.zeros(2, 3)) == FROZEN).all()


# ---------------------------------------------------------------- the registry


def test_the_registry_has_each_operator_once() -> None:
    names = [name for names in registry._FAMILIES.values() for name in names]
    known = {name.removeprefix("aten::") for name in torch._C._dispatch_get_all_op_names()}
    known = {name.partition(".")[0] for name in known}
    other_libraries = {name for name in names if "::" in name}
    assert {name for name in names if name not in known and f"{name}_" not in known} <= other_libraries
    assert [name for name, times in Counter(names).items() if times > 1] == []
    assert [name for name in names if name.endswith("_")] == []
    assert set(registry._FAMILIES) >= registry.FOLLOWING >= registry.MOVING
    assert registry.is_moving("view@net.py:12")
    assert not registry.is_moving("cat@net.py:1")


def test_a_rule_that_fails_freezes_its_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trace: Any, call: Any) -> Any:
        raise IndexError("not that axis")

    monkeypatch.setattr(registry, "rule_for", lambda func, name: broken)
    trace = OpTrace()
    out = trace.run(F.relu, trace.channels(2, 4, 5))
    assert (trace.labels(out) == FROZEN).all()
    assert set(trace.frozen().values()) == {
        "the rule for `relu` failed (IndexError: not that axis). Please report this"
    }


# ---------------------------------------------------------------- shapes of results


class Both(TorchDispatchMode):
    """Runs every operator, and computes the shape of its result by `quick_result` too."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[Tensor, Tensor | None]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        quick = quick_result(Call(func, name.rstrip("_"), args, kwargs or {}, None, "", name.endswith("_")))
        result = func(*args, **(kwargs or {}))
        self.pairs.append((result, quick))
        return result


QUICK: list[tuple[Function, list[tuple[int, ...]]]] = [
    (F.relu, [(2, 4, 5)]),
    (lambda x: x.relu_(), [(2, 4, 5)]),
    (F.batch_norm, [(2, 4, 5, 5), (4,), (4,)]),
    (lambda x: F.layer_norm(x, (5,)), [(2, 4, 5)]),
    (torch.add, [(2, 4, 5), (4, 1)]),
    (torch.mul, [(2, 1, 5), (4, 1)]),
    (lambda x, y: x.add_(y), [(2, 4), (4,)]),
    (F.conv2d, [(2, 3, 9, 8), (6, 3, 3, 3)]),
    (lambda x, w: F.conv2d(x, w, stride=2, padding=1), [(2, 3, 9, 8), (6, 3, 3, 3)]),
    (lambda x, w: F.conv2d(x, w, dilation=(2, 1)), [(2, 3, 9, 8), (6, 3, 3, 2)]),
    (lambda x, w: F.conv2d(x, w, groups=3), [(2, 6, 5, 5), (9, 2, 1, 1)]),
    (lambda x, w: F.conv2d(x, w, padding=(0, 2), stride=(3, 1)), [(1, 3, 9, 8), (6, 3, 2, 5)]),
    (F.linear, [(2, 5, 4), (6, 4)]),
    (F.linear, [(4,), (6, 4)]),
    (lambda x: F.adaptive_avg_pool2d(x, (3, 2)), [(2, 4, 8, 8)]),
    (lambda x: F.adaptive_avg_pool1d(x, 3), [(2, 4, 8)]),
    (lambda x: x.mean((2, 3)), [(2, 4, 5, 6)]),
    (lambda x: x.mean((-1, 1), keepdim=True), [(2, 4, 5, 6)]),
    (lambda x: x + 1, [(2, 4)]),
    (lambda x: x / 2.5, [(2, 4)]),
    (torch.div, [(2, 4), (4,)]),
    (lambda x: x.exp(), [(2, 4)]),
    (torch.rsqrt, [(2, 4)]),
    (lambda x, y: torch.cat([x, y], -1), [(2, 4), (2, 3)]),
    (lambda x, y: torch.cat([x, y]), [(2, 4), (1, 4)]),
    (lambda x: F.interpolate(x, size=(7, 3), mode="bilinear"), [(2, 4, 5, 6)]),
    (lambda x: F.interpolate(x, scale_factor=1.7, mode="bicubic"), [(2, 4, 5, 6)]),
    (lambda x: F.interpolate(x, scale_factor=(0.37, 2)), [(2, 4, 5, 6)]),
    (lambda x: F.interpolate(x, scale_factor=3, mode="linear"), [(2, 4, 5)]),
    (lambda x: x.roll((1, -2), (0, 2)), [(2, 4, 5)]),
    (lambda x, m: x.masked_fill(m > 0, 0.0), [(2, 4, 5), (2, 4, 5)]),
    (F.scaled_dot_product_attention, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 6)]),
    (F.scaled_dot_product_attention, [(3, 5, 8), (3, 7, 8), (3, 7, 8)]),
    (F.scaled_dot_product_attention, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (1, 5, 7)]),
]
LEFT_TO_TORCH: list[tuple[Function, list[tuple[int, ...]]]] = [
    (lambda x, y: torch.cat([x, y.double()]), [(2, 4), (2, 4)]),
    (lambda x, y: torch.cat([x, y]), [(2, 4), (0,)]),
    (lambda x: x.mean(), [(2, 4)]),
    (lambda x: x.mean((1,), dtype=torch.float64), [(2, 4)]),
    (lambda x, w: F.conv2d(x, w, padding="same"), [(2, 3, 9, 8), (6, 3, 3, 3)]),
    (lambda x: x + torch.zeros(4, device="meta", dtype=torch.float64), [(2, 4)]),
    (lambda x, m: x.masked_fill(m > 0, 0.0), [(2, 4, 5), (4, 1)]),
    (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        [(2, 6, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8)],
    ),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("function", "shapes"), QUICK + LEFT_TO_TORCH)
def test_quick_results_are_those_of_torch(function: Function, shapes: Any, dtype: torch.dtype) -> None:
    tensors = [torch.empty(shape, device="meta", dtype=dtype) for shape in shapes]
    with torch.inference_mode(), Both() as both:
        function(*tensors)
    for result, quick in both.pairs:
        if quick is not None:
            assert (quick.shape, quick.dtype, quick.device) == (result.shape, result.dtype, result.device)
    assert (both.pairs[-1][1] is not None) is ((function, shapes) in QUICK)


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (F.conv2d, [(2, 5, 9, 8), (6, 3, 3, 3)]),
        (F.conv2d, [(2, 3, 2, 2), (6, 3, 3, 3)]),
        (F.linear, [(2, 5), (6, 4)]),
        (torch.add, [(2, 4), (3,)]),
        (lambda x, y: torch.cat([x, y]), [(2, 4), (2, 3)]),
        (F.scaled_dot_product_attention, [(2, 3, 5, 8), (2, 3, 7, 6), (2, 3, 7, 6)]),
        (F.scaled_dot_product_attention, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 6, 8)]),
        (F.scaled_dot_product_attention, [(2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), (2, 1, 5, 6)]),
    ],
)
def test_shapes_that_do_not_match_raise_as_in_torch(function: Function, shapes: Any) -> None:
    with pytest.raises(RuntimeError), torch.inference_mode(), Both():
        function(*[torch.empty(shape, device="meta") for shape in shapes])
