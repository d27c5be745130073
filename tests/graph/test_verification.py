from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import EccWarning, UntraceableModel
from ecc.graph import ChannelGraph, ParamSlice, trace_channels
from ecc.graph.numerics import ALLOWED_FLOAT64, relative_error
from ecc.graph.verification import Check, Result, verify_graph
from graph.cases import conv, image, traced

DIFFERS = "verification failed: outputs differ by "


def result_of(net: nn.Module, graph: ChannelGraph, inputs: Any, *, seed: int = 0) -> Result:
    """Of all prunable groups at once, in the network's own arithmetic."""
    return Check(net, graph, inputs, seed)(graph.prunable)


def why(graph: ChannelGraph, name: str) -> str:
    """Why a group is not prunable; empty if it is."""
    return graph[name].frozen or ""


def planted(graph: ChannelGraph, group: str, tensor: str, index: Any) -> ChannelGraph:
    """The graph with another index in one place of one group; None takes the place away."""

    def change(place: ParamSlice) -> ParamSlice | None:
        if place.tensor != tensor:
            return place
        return None if index is None else replace(place, index=index(place.index))

    changed = tuple(place for p in graph[group].slices if (place := change(p)) is not None)
    groups = tuple(replace(g, slices=changed) if g.name == group else g for g in graph.groups)
    return replace(graph, groups=groups)


def rolled(index: Tensor) -> Tensor:
    return index.roll(1, 0)


# ---------------------------------------------------------------- right graphs


def test_a_right_graph_is_verified_as_it_is() -> None:
    net, inputs, graph = traced("residual")
    verified = verify_graph(net, graph, inputs)
    assert verified.groups == graph.groups
    assert verified.max_relative_diff is not None
    assert verified.max_relative_diff <= ALLOWED_FLOAT64


def test_other_seeds_cut_other_units_and_agree() -> None:
    net, inputs, graph = traced("unet")
    for seed in range(5):
        assert result_of(net, graph, inputs, seed=seed).passed


def test_a_graph_with_nothing_to_prune_is_verified() -> None:
    net, inputs, graph = traced("chain", freeze=["*"])
    assert verify_graph(net, graph, inputs).max_relative_diff == 0


def test_the_network_is_left_alone() -> None:
    net, inputs, graph = traced("residual")
    net.train()
    before, state = {k: v.clone() for k, v in net.state_dict().items()}, torch.get_rng_state()
    verify_graph(net, graph, inputs)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())
    assert net.training
    assert torch.equal(torch.get_rng_state(), state)


def test_outputs_of_every_nesting_are_compared() -> None:
    net, inputs, graph = traced("dict output")
    assert result_of(net, graph, inputs).passed
    wrong = planted(graph, "stem", "features.weight", rolled)
    assert not result_of(net, wrong, inputs).passed


# ---------------------------------------------------------------- wrong graphs


@pytest.mark.parametrize("tensor", ["conv1.weight", "conv1.bias", "conv2.weight"])
def test_a_permuted_place_is_caught_and_only_its_group_frozen(tensor: str) -> None:
    net, inputs, graph = traced("chain")
    wrong = planted(graph, "conv1", tensor, rolled)
    fixed = verify_graph(net, wrong, inputs)
    assert [g.name for g in fixed.prunable] == ["conv2"]
    assert why(fixed, "conv1").startswith(DIFFERS)
    assert why(fixed, "conv3") == "it is an output of the network"
    assert fixed.max_relative_diff is not None
    assert fixed.max_relative_diff <= ALLOWED_FLOAT64


@pytest.mark.parametrize("tensor", ["bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"])
def test_a_permuted_batch_norm_is_caught_although_fresh_ones_are_all_alike(tensor: str) -> None:
    net, inputs, graph = traced("chain")
    assert len(net.bn1.weight.unique()) == 1
    assert why(verify_graph(net, planted(graph, "conv1", tensor, rolled), inputs), "conv1").startswith(DIFFERS)


class Raises(nn.Module):
    """One channel, meant by its number, is another one after a cut."""

    def __init__(self, unit: int) -> None:
        super().__init__()
        self.stem, self.head, self.unit = conv(3, 8), conv(8, 4, 1), unit

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        offset = torch.zeros_like(x)
        offset[:, min(self.unit, x.shape[1] - 1)] = 5.0
        return self.head(x + offset)


@pytest.mark.parametrize("unit", range(8))
def test_an_error_at_a_single_unit_is_caught_whichever_it_is(unit: int) -> None:
    net, images = Raises(unit), image()()
    graph = trace_channels(net, images, verify=False)
    assert verify_graph(net, graph, images)["stem"].frozen is not None


def test_an_error_behind_a_scale_of_zero_is_caught() -> None:
    net, inputs, graph = traced("layer scale")
    nn.init.zeros_(net.scale)
    assert verify_graph(net, planted(graph, "stem", "conv.weight", lambda i: i), inputs)["stem"].frozen is None
    conv_bias = planted(graph, "stem", "conv.bias", rolled)
    assert why(verify_graph(net, conv_bias, inputs), "stem").startswith(DIFFERS)


def test_a_forgotten_place_is_caught() -> None:
    net, inputs, graph = traced("chain")
    fixed = verify_graph(net, planted(graph, "conv1", "bn1.bias", None), inputs)
    assert "the slim network raised RuntimeError: bias should contain 4 elements not 8" in why(fixed, "conv1")


def thawed(graph: ChannelGraph, *names: str) -> ChannelGraph:
    """A graph whose structural check missed something: the named groups count as safe."""
    groups = tuple(replace(group, frozen=None) if group.name in names else group for group in graph.groups)
    return replace(graph, groups=groups)


def test_two_groups_that_are_wrong_only_together_are_both_frozen() -> None:
    """Each group alone keeps the code's equation; both cut at once break it."""
    net, images = Together(), torch.randn(2, 3, 8, 8)
    graph = verify_graph(net, thawed(trace_channels(net, images, verify=False), "left", "right"), images)
    assert why(graph, "left") == why(graph, "right")
    assert why(graph, "left").startswith(DIFFERS)
    assert graph.max_relative_diff == 0


def test_many_failures_at_once_are_a_warning_with_their_cause() -> None:
    net = nn.Sequential(*(conv(8 if n else 3, 8) for n in range(5)))
    images = torch.randn(2, 3, 8, 8)
    graph = trace_channels(net, images, verify=False)
    for name in "012":
        graph = planted(graph, name, f"{name}.bias", rolled)
    with pytest.warns(
        EccWarning, match=r"3 of 4 prunable channel groups failed.* 0: verification failed: outputs diff"
    ):
        fixed = verify_graph(net, graph, images)
    assert [group.name for group in fixed.prunable] == ["3"]


class Together(nn.Module):
    """Arithmetic with the numbers of channels that shows only when both branches shrink."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = conv(3, 6), conv(3, 6)
        self.first, self.second = conv(6, 4, 1), conv(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        both = torch.tensor(float((6 - left.shape[1]) * (6 - right.shape[1])))
        return self.first(left) + self.second(right) + both


class Shrinks(nn.Module):
    """Its output has another shape when a channel is missing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = conv(3, 8), conv(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x)[:, :, : x.shape[1]]


def test_outputs_of_another_shape_differ_without_bound() -> None:
    net, images = Shrinks(), image()()
    graph = thawed(trace_channels(net, images, verify=False), "stem")
    assert result_of(net, graph, images).reason == f"{DIFFERS}inf after pruning (allowed 1e-04, eval mode)"
    assert why(verify_graph(net, graph, images), "stem").startswith(DIFFERS)


class Breaks(Shrinks):
    """The cut network gives no numbers where the dense one does."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        return self.head(x) * torch.tensor(x.shape[1] - 7.0).log()


def test_outputs_that_are_no_numbers_any_more_differ() -> None:
    net, images = Breaks(), image()()
    graph = thawed(trace_channels(net, images, verify=False), "stem")
    assert why(verify_graph(net, graph, images), "stem").startswith(DIFFERS)


class Refuses(Shrinks):
    """The cut network raises, in a way that no pass over shapes can see."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        if x.shape[1] < 8 and x.device.type != "meta":
            raise ValueError("8 channels, please")
        return self.head(x)


def test_what_a_slim_network_raises_is_the_reason() -> None:
    net, images = Refuses(), image()()
    graph = verify_graph(net, trace_channels(net, images, verify=False), images)
    assert why(graph, "stem") == (
        "verification failed: the slim network raised ValueError: 8 channels, please (eval mode)"
    )


class Nothing(Shrinks):
    """Its outputs are no numbers, dense or cut."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stem(x)) * float("nan")


def test_outputs_that_are_not_finite_cannot_be_verified_and_nothing_is_blamed_on_pruning() -> None:
    net, images = Nothing(), image()()
    graph = trace_channels(net, images, verify=False)
    with pytest.warns(EccWarning, match="could not run because the outputs of the masked network are not finite"):
        verified = verify_graph(net, graph, images)
    assert verified.max_relative_diff is None
    assert verified.groups == graph.groups
    assert verified.notes[-1].startswith("verification could not run because the outputs")


# ---------------------------------------------------------------- what arithmetic explains


class Scenes(nn.Module):
    """Many outputs, so that some round differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = conv(3, 16), conv(16, 32), nn.Conv2d(32, 8, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(images)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_verified_as_sharply_as_any(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, images = Scenes().to(dtype), torch.randn(2, 3, 48, 48).to(dtype)
    graph = trace_channels(net, images)
    assert [group.name for group in graph.prunable] == ["first", "second"]
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff <= ALLOWED_FLOAT64  # it was computed in float64
    wrong = planted(graph, "first", "second.weight", rolled)
    assert why(verify_graph(net, wrong, images), "first").startswith(DIFFERS)


def test_classes_that_are_masked_with_infinity_stay_so() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = conv(3, 8), nn.Linear(8, 4)
            self.register_buffer("absent", torch.tensor([False, True, False, False]))

        def forward(self, images: Tensor) -> Tensor:
            scores = self.head(torch.relu(self.body(images)).mean((2, 3)))
            return scores.masked_fill(self.absent, float("-inf"))  # type: ignore[no-any-return]

    graph = trace_channels(Masked(), torch.randn(2, 3, 8, 8))
    assert [group.name for group in graph.prunable] == ["body"]
    inf = float("inf")
    assert relative_error([torch.tensor([1.0, -inf])], [torch.tensor([1.5, -inf])]) == 0.5
    for other in ([1.0, inf], [1.0, 0.0], [inf, -inf], [float("nan"), -inf]):
        assert relative_error([torch.tensor([1.0, -inf])], [torch.tensor(other)]) == inf


def test_a_network_that_cannot_run_is_told_and_not_frozen() -> None:
    net, images, _ = traced("chain")
    with pytest.raises(UntraceableModel, match="the network cannot run on the example input: RuntimeError: Input type"):
        trace_channels(net.double(), images)


def test_a_network_that_runs_with_its_own_weights_alone_is_verified_with_them() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = conv(3, 8), nn.Conv2d(8, 4, 1)
            self.register_buffer("sizes", torch.full((2,), 4.0))  # which would get other values

        def forward(self, images: Tensor) -> Tensor:
            found = torch.relu(self.body(images))
            return self.head(found[..., : int(self.sizes[0]), :].view(len(found), -1, 4, int(self.sizes[1]) * 2))  # type: ignore[no-any-return,index]

    graph = trace_channels(Sized(), torch.randn(2, 3, 8, 8))
    assert graph["body"].frozen is None
    assert graph.max_relative_diff is not None


def test_other_devices_keep_their_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)  # as torch.manual_seed does it
    net, images, graph = traced("chain")
    verify_graph(net, graph, images)
    assert seeds == []
