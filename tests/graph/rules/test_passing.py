from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ecc.graph.labels import FROZEN
from graph.following import Following

# ---------------------------------------------------------------- reductions

REDUCTIONS: dict[str, Any] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "amax": torch.amax,
    "var": torch.var,
    "std": torch.std,
    "norm": torch.linalg.vector_norm,
    "logsumexp": torch.logsumexp,
}


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_channels_pass_a_reduction_beside_them(name: str, keepdim: bool) -> None:
    following = Following()
    out = following.run(REDUCTIONS[name], following.channels(2, 4, 5, 6), dim=(2, 3), keepdim=keepdim)
    assert out.shape == ((2, 4, 1, 1) if keepdim else (2, 4))
    assert following.along(out) == following.axis("x", 0)
    assert following.frozen() == {}


@pytest.mark.parametrize("dim", [1, -3, (1, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_channels_that_are_summed_over_are_frozen(name: str, dim: Any) -> None:
    following = Following()
    following.run(REDUCTIONS[name], following.channels(2, 4, 5, 6), dim=dim)
    assert sorted(following.frozen()) == following.axis("x", 0)
    assert all("reduces over it" in why for why in following.frozen().values())


@pytest.mark.parametrize("reduce", [torch.mean, torch.sum, torch.max, torch.argmax, torch.norm, torch.prod])
def test_a_reduction_of_everything_freezes(reduce: Any) -> None:
    following = Following()
    following.run(reduce, following.channels(2, 4, 5))
    assert sorted(following.frozen()) == following.axis("x", 0)


@pytest.mark.parametrize("reduce", [torch.max, torch.min, torch.median])
def test_both_results_of_a_maximum_have_labels(reduce: Any) -> None:
    following = Following()
    values, indices = following.run(reduce, following.channels(2, 4, 5), 2)
    assert following.along(values) == following.along(indices) == following.axis("x", 0)


def test_the_maximum_of_two_tensors_is_no_reduction() -> None:
    following = Following()
    a, b = following.channels(2, 4, 5, name="a"), following.channels(2, 4, 5, name="b")
    following.run(torch.max, a, b)
    assert following.frozen() == {}
    assert len(following.tied()) == 4


# ---------------------------------------------------------------- along an axis


@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax, torch.cumsum, torch.cumprod])
@pytest.mark.parametrize(("dim", "frozen"), [(1, True), (-2, True), (2, False), (-1, False)])
def test_softmax_and_its_kin_freeze_the_channels_they_mix(function: Any, dim: int, frozen: bool) -> None:
    following = Following()
    out = following.run(function, following.channels(2, 4, 5), dim=dim)
    if frozen:
        assert sorted(following.frozen()) == following.axis("x", 0)
        assert all("mixes along it" in why for why in following.frozen().values())
    else:
        assert following.along(out) == following.axis("x", 0)
        assert following.frozen() == {}


@pytest.mark.parametrize("dim", [1, 2])
def test_sorting_gives_labels_to_values_and_places(dim: int) -> None:
    following = Following()
    values, places = following.run(torch.sort, following.channels(2, 4, 5), dim=dim)
    for out in (values, places):
        labels = following.labels(out)
        assert labels is not None
        if dim == 1:
            assert (labels == FROZEN).all()
        else:
            assert following.along(out) == following.axis("x", 0)


def test_the_largest_of_each_channel_belong_to_it() -> None:
    following = Following()
    values, _ = following.run(torch.topk, following.channels(2, 4, 5), 3)
    assert values.shape == (2, 4, 3)
    assert following.along(values) == following.axis("x", 0)


# ---------------------------------------------------------------- over space

SPATIAL: dict[str, tuple[Any, int]] = {
    "max_pool1d": (lambda x: F.max_pool1d(x, 2), 1),
    "max_pool2d": (lambda x: F.max_pool2d(x, 2), 2),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), 3),
    "avg_pool1d": (lambda x: F.avg_pool1d(x, 2), 1),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), 2),
    "avg_pool3d": (lambda x: F.avg_pool3d(x, 2), 3),
    "adaptive_avg_pool1d": (lambda x: F.adaptive_avg_pool1d(x, 2), 1),
    "adaptive_avg_pool2d": (lambda x: F.adaptive_avg_pool2d(x, 2), 2),
    "adaptive_avg_pool2d of one axis": (lambda x: F.adaptive_avg_pool2d(x, (2, None)), 2),
    "adaptive_max_pool2d": (lambda x: F.adaptive_max_pool2d(x, 1), 2),
    "nearest": (lambda x: F.interpolate(x, scale_factor=2), 2),
    "bilinear": (lambda x: F.interpolate(x, size=(9, 9), mode="bilinear"), 2),
    "bicubic": (lambda x: F.interpolate(x, size=(9, 9), mode="bicubic"), 2),
    "trilinear": (lambda x: F.interpolate(x, size=(9, 9, 9), mode="trilinear"), 3),
    "reflection padding": (lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), 2),
    "replication padding": (lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"), 2),
    "lp_pool2d": (lambda x: F.lp_pool2d(x, 2, 2), 2),
}


@pytest.mark.parametrize("name", SPATIAL)
def test_what_works_on_space_passes_channels(name: str) -> None:
    function, dims = SPATIAL[name]
    following = Following()
    out = following.run(function, following.channels(2, 4, *[6] * dims))
    assert out.shape[:2] == (2, 4)
    assert following.along(out) == following.axis("x", 0)
    assert following.frozen() == {}


@pytest.mark.parametrize("name", ["max_pool2d", "adaptive_avg_pool2d", "bilinear", "reflection padding"])
def test_channels_along_space_are_frozen(name: str) -> None:
    following = Following()
    following.run(SPATIAL[name][0], following.channels(2, 4, 6, 6, axis=3))
    assert sorted(following.frozen()) == following.axis("x", 0)
    assert all("slides over its axis" in why for why in following.frozen().values())


def test_the_places_of_a_maximum_have_labels_too() -> None:
    following = Following()
    values, places = following.run(F.max_pool2d, following.channels(2, 4, 6, 6), 2, return_indices=True)
    assert following.along(values) == following.along(places) == following.axis("x", 0)


# ---------------------------------------------------------------- copies, constants and the unknown


@pytest.mark.parametrize(
    "function",
    [
        torch.clone,
        torch.detach,
        lambda x: x.half(),
        lambda x: x.to(torch.float64),
        lambda x: F.dropout(x, 0.5, training=True),
        lambda x: F.dropout1d(x, 0.5, training=True),
        lambda x: F.alpha_dropout(x, 0.5, training=True),
    ],
)
def test_copies_and_dropout_pass_channels(function: Any) -> None:
    following = Following()
    out = following.run(function, following.channels(2, 4, 5))
    assert following.along(out) == following.axis("x", 0)
    assert following.frozen() == {}


@pytest.mark.parametrize(
    "function",
    [lambda x: x.new_zeros(2, 3), lambda x: torch.zeros(4)],
)
def test_fresh_constants_belong_to_no_channel(function: Any) -> None:
    following = Following()
    assert following.labels(following.run(function, following.channels(2, 4, 5))) is None


@pytest.mark.parametrize("like", [torch.zeros_like, torch.ones_like, torch.rand_like], ids=lambda f: f.__name__)
def test_a_constant_like_a_tensor_has_its_channels(like: Any) -> None:
    following = Following()
    out = following.run(like, following.channels(2, 4, 5))
    labels = following.labels(out)
    assert labels is not None
    assert labels[0, :, 0].tolist() == following.axis("x", 0)


def test_a_constant_that_differs_from_place_to_place_cannot_be_cut() -> None:
    following = Following()
    out = following.run(lambda x: x + torch.arange(4.0).view(4, 1), following.channels(2, 4, 5))
    assert sorted(following.frozen()) == following.axis("x", 0)
    assert out.shape == (2, 4, 5)


UNEQUAL: dict[str, Any] = {
    "running sum": lambda: torch.ones(4, 1).cumsum(0),
    "cat": lambda: torch.cat([torch.ones(1, 1), torch.zeros(3, 1)]),
    "stack": lambda: torch.stack([torch.ones(1), torch.zeros(1), torch.zeros(1), torch.zeros(1)]),
    "padding": lambda: F.pad(torch.ones(3, 1), (0, 0, 0, 1)),
    "diagonal": lambda: torch.zeros(4, 1).fill_diagonal_(1),
    "index_fill": lambda: torch.zeros(4, 1).index_fill(0, torch.tensor([2]), 1),
    "eye": lambda: torch.eye(4)[:, :1],
    "triangle": lambda: torch.ones(4, 4).tril()[:, 1:2],
}


@pytest.mark.parametrize("name", UNEQUAL)
def test_a_constant_made_unequal_is_no_longer_the_same_at_every_position(name: str) -> None:
    following = Following()
    following.run(lambda x: x * UNEQUAL[name](), following.channels(2, 4, 5))
    assert sorted(following.frozen()) == following.axis("x", 0)


@pytest.mark.parametrize("function", [torch.linalg.qr, torch.linalg.svd, lambda x: torch.fft.rfft(x, dim=1)])
def test_an_unknown_operator_freezes_and_is_named(function: Any) -> None:
    following = Following()
    following.run(function, following.channels(2, 4, 5))
    assert sorted(following.frozen()) == following.axis("x", 0)
    assert all("has no rule" in why for why in following.frozen().values())
