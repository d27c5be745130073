"""Verification: right and wrong graphs, precision, and runs without randomness."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import EccWarning, UntraceableModel
from ecc.graph import ChannelGraph, ParamSlice, trace_channels
from ecc.graph.numerics import (
    ALLOWED_FLOAT32,
    ALLOWED_FLOAT64,
    CannotVerify,
    allowed_difference,
    materialize,
    other_inputs,
    randomize_constants_,
    relative_error,
    run_without_randomness,
)
from ecc.graph.verification import Check, Result, verify_graph
from graph.cases import conv, image, traced

DIFFERS = "verification failed: outputs differ by "


def result_of(net: nn.Module, graph: ChannelGraph, inputs: Any, *, seed: int = 0) -> Result:
    """Result for all prunable groups at once, in the network's own precision."""
    return Check(net, graph, inputs, seed)(graph.prunable, ())


def why(graph: ChannelGraph, name: str) -> str:
    """Why a group is not prunable; empty if it is."""
    return graph[name].frozen or ""


def planted(graph: ChannelGraph, group: str, tensor: str, index: Any) -> ChannelGraph:
    """The graph with another index in one slice of one group; None removes the slice."""

    def change(one: ParamSlice) -> ParamSlice | None:
        if one.tensor != tensor:
            return one
        return None if index is None else replace(one, index=index(one.index))

    changed = tuple(one for p in graph[group].slices if (one := change(p)) is not None)
    groups = tuple(replace(g, slices=changed) if g.name == group else g for g in graph.groups)
    return replace(graph, groups=groups)


def rolled(index: Tensor) -> Tensor:
    return index.roll(1, 0)


class Coded(nn.Module):
    """A convolution of eight channels, and code that makes the result from them."""

    def __init__(self, code: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.stem, self.head, self.code = conv(3, 8), conv(8, 4, 1), code

    def forward(self, x: Tensor) -> Tensor:
        return self.code(self, self.stem(x))


# ---------------------------------------------------------------- correct graphs


# ---------------------------------------------------------------- wrong graphs


@pytest.mark.parametrize("tensor", ["conv1.weight", "conv1.bias", "conv2.weight"])
def test_a_permuted_slice_freezes_only_its_group(tensor: str) -> None:
    net, inputs, graph = traced("chain")
    wrong = planted(graph, "conv1", tensor, rolled)
    fixed = verify_graph(net, wrong, inputs)
    assert [g.name for g in fixed.prunable] == ["conv2"]
    assert why(fixed, "conv1").startswith(DIFFERS)
    assert why(fixed, "conv3") == "it is an output of the network"
    assert fixed.max_relative_diff is not None
    assert fixed.max_relative_diff <= ALLOWED_FLOAT64


@pytest.mark.parametrize("tensor", ["bn1.weight", "bn1.bias", "bn1.running_mean", "bn1.running_var"])
def test_a_permuted_batch_norm_is_noticed_although_its_values_are_equal(tensor: str) -> None:
    net, inputs, graph = traced("chain")
    assert len(net.bn1.weight.unique()) == 1
    assert why(verify_graph(net, planted(graph, "conv1", tensor, rolled), inputs), "conv1").startswith(DIFFERS)


def add_to(unit: int) -> Callable[[Any, Tensor], Tensor]:
    """Adds to one channel, selected by number."""

    def code(net: Any, x: Tensor) -> Tensor:
        offset = torch.zeros_like(x)
        offset[:, min(unit, x.shape[1] - 1)] = 5.0
        return net.head(x + offset)  # type: ignore[no-any-return]

    return code


@pytest.mark.parametrize("unit", range(8))
def test_an_error_at_any_single_unit_is_noticed(unit: int) -> None:
    net, images = Coded(add_to(unit)), image()()
    graph = trace_channels(net, images, verify=False)
    assert verify_graph(net, graph, images)["stem"].frozen is not None


def test_an_error_behind_a_zero_scale_is_noticed() -> None:
    net, inputs, graph = traced("layer scale")
    nn.init.zeros_(net.scale)
    assert verify_graph(net, planted(graph, "stem", "conv.weight", lambda i: i), inputs)["stem"].frozen is None
    conv_bias = planted(graph, "stem", "conv.bias", rolled)
    assert why(verify_graph(net, conv_bias, inputs), "stem").startswith(DIFFERS)


def test_a_missing_slice_is_noticed() -> None:
    net, inputs, graph = traced("chain")
    fixed = verify_graph(net, planted(graph, "conv1", "bn1.bias", None), inputs)
    assert "the slim network raised RuntimeError: bias should contain 4 elements not 8" in why(fixed, "conv1")


def thawed(graph: ChannelGraph, *names: str) -> ChannelGraph:
    """The graph with these groups marked as prunable."""
    groups = tuple(replace(group, frozen=None) if group.name in names else group for group in graph.groups)
    return replace(graph, groups=groups)


def test_two_groups_that_fail_only_together_are_both_frozen() -> None:
    """Each group alone is right, both together are wrong."""
    net, images = Together(), torch.randn(2, 3, 8, 8)
    graph = verify_graph(net, thawed(trace_channels(net, images, verify=False), "left", "right"), images)
    assert why(graph, "left") == why(graph, "right")
    assert why(graph, "left").startswith(DIFFERS)
    assert graph.max_relative_diff == 0


def test_many_failures_give_a_warning_with_the_cause() -> None:
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
    """Arithmetic with channel counts that matters only if both branches are pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = conv(3, 6), conv(3, 6)
        self.first, self.second = conv(6, 4, 1), conv(6, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        left, right = self.left(x), self.right(x)
        both = torch.tensor(float((6 - left.shape[1]) * (6 - right.shape[1])))
        return self.first(left) + self.second(right) + both


def test_an_output_of_another_shape_differs_infinitely() -> None:
    net, images = Coded(lambda net, x: net.head(x)[:, :, : x.shape[1]]), image()()
    graph = thawed(trace_channels(net, images, verify=False), "stem")
    assert result_of(net, graph, images).reason == f"{DIFFERS}inf after pruning (allowed 1e-04, eval mode)"
    assert why(verify_graph(net, graph, images), "stem").startswith(DIFFERS)


def test_an_error_of_the_slim_network_is_the_reason() -> None:
    def refuses(net: Any, x: Tensor) -> Tensor:
        if x.shape[1] < 8 and x.device.type != "meta":
            raise ValueError("8 channels, please")
        return net.head(x)  # type: ignore[no-any-return]

    net, images = Coded(refuses), image()()
    graph = verify_graph(net, trace_channels(net, images, verify=False), images)
    assert why(graph, "stem") == (
        "verification failed: the slim network raised ValueError: 8 channels, please (eval mode)"
    )


def test_outputs_that_are_not_finite_cannot_be_verified() -> None:
    net, images = Coded(lambda net, x: net.head(x) * float("nan")), image()()
    graph = trace_channels(net, images, verify=False)
    with pytest.warns(EccWarning, match="could not run because the outputs of the masked network are not finite"):
        verified = verify_graph(net, graph, images)
    assert verified.max_relative_diff is None
    assert verified.groups == graph.groups
    assert verified.notes[-1].startswith("verification could not run because the outputs")


# ---------------------------------------------------------------- precision


class Scenes(nn.Module):
    """Many outputs, so that some are rounded differently."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = conv(3, 16), conv(16, 32), nn.Conv2d(32, 8, 1)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.second(torch.relu(self.first(images)))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_verified_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    net, images = Scenes().to(dtype), torch.randn(2, 3, 48, 48).to(dtype)
    graph = trace_channels(net, images)
    assert [group.name for group in graph.prunable] == ["first", "second"]
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff <= ALLOWED_FLOAT64  # it was computed in float64
    wrong = planted(graph, "first", "second.weight", rolled)
    assert why(verify_graph(net, wrong, images), "first").startswith(DIFFERS)


def test_outputs_masked_with_infinity_are_compared() -> None:
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


def test_a_network_that_cannot_run_is_refused() -> None:
    net, images, _ = traced("chain")
    with pytest.raises(UntraceableModel, match="the network cannot run on the example input: RuntimeError: Input type"):
        trace_channels(net.double(), images)


def test_a_network_that_needs_its_constants_is_verified_with_them() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = conv(3, 8), nn.Conv2d(8, 4, 1)
            self.register_buffer("sizes", torch.full((2,), 4.0))  # constants, which would get random values

        def forward(self, images: Tensor) -> Tensor:
            found = torch.relu(self.body(images))
            return self.head(found[..., : int(self.sizes[0]), :].view(len(found), -1, 4, int(self.sizes[1]) * 2))  # type: ignore[no-any-return,index]

    graph = trace_channels(Sized(), torch.randn(2, 3, 8, 8))
    assert graph["body"].frozen is None
    assert graph.max_relative_diff is not None


# ---------------------------------------------------------------- limits


def test_out_of_memory_gives_a_warning_and_freezes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images, graph = traced("chain")

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("ecc.graph.verification.run_without_randomness", full)
    with pytest.warns(EccWarning, match="verification could not run because .*Tried to allocate 2 GiB"):
        verified = verify_graph(net, graph, images)
    assert verified.max_relative_diff is None
    assert verified.groups == graph.groups


class NamesItsType(nn.Module):
    """Cannot run in float64: a matrix product with a float32 constant."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x @ torch.eye(6, dtype=torch.float32)))  # type: ignore[no-any-return]


def test_a_network_that_cannot_run_in_float64_is_verified_in_its_own_type() -> None:
    graph = trace_channels(NamesItsType(), torch.randn(3, 6))
    assert [group.name for group in graph.prunable] == ["body"]
    assert graph.max_relative_diff is not None
    assert ALLOWED_FLOAT64 < ALLOWED_FLOAT32
    assert 0 <= graph.max_relative_diff <= ALLOWED_FLOAT32


class NeedsTargets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = conv(3, 8), conv(8, 4, 1)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        if self.training and targets is None:
            raise ValueError("targets should not be none when in training mode")
        return self.head(torch.relu(self.body(x)))  # type: ignore[no-any-return]


def test_a_network_that_cannot_train_on_the_example_is_verified_in_eval_mode() -> None:
    graph = trace_channels(NeedsTargets(), torch.randn(2, 3, 8, 8))
    assert [group.name for group in graph.prunable] == ["body"]
    assert graph.notes == (
        "not verified in train mode, because the network raised "
        "ValueError: targets should not be none when in training mode",
    )


def test_a_large_network_is_verified_in_float32_and_failures_in_float64(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ecc.graph.verification.MAX_FLOAT64_MACS", 0)
    net, images, graph = traced("residual")
    verified = verify_graph(net, graph.without_branches(), images)
    assert verified.max_relative_diff is not None
    assert 1e-12 < verified.max_relative_diff < ALLOWED_FLOAT32  # as float32 rounds
    net, images, graph = traced("chain")
    wrong = verify_graph(net, planted(graph, "conv1", "conv1.bias", rolled), images)
    assert "allowed 1e-09" in why(wrong, "conv1")
    assert [group.name for group in wrong.prunable] == ["conv2"]


def test_a_network_that_amplifies_rounding_errors_is_not_frozen() -> None:
    steep = Coded(lambda net, x: (net.head(x.relu()) * 1e16).sin() if net.training else net.head(x.relu()))
    graph = trace_channels(steep, torch.randn(2, 3, 8, 8))
    assert [group.name for group in graph.prunable] == ["stem"]
    assert any(
        "train mode, because the network amplifies rounding errors too much there" in note for note in graph.notes
    )


def test_the_search_for_failing_groups_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images, graph = traced("chain")
    wrong = planted(graph, "conv1", "conv1.bias", rolled)
    assert [group.name for group in verify_graph(net, wrong, images).prunable] == ["conv2"]
    monkeypatch.setattr("ecc.graph.verification.MAX_CHECKS", 0)
    assert verify_graph(net, wrong, images).prunable == ()


# ---------------------------------------------------------------- runs and inputs


def eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def test_the_allowed_difference_depends_on_the_coarsest_type() -> None:
    assert allowed_difference(0.0, eps(torch.float64)) == ALLOWED_FLOAT64
    assert allowed_difference(eps(torch.float32), eps(torch.float64)) == ALLOWED_FLOAT32
    assert allowed_difference(eps(torch.bfloat16), 0.0) == 8 * eps(torch.bfloat16)


def test_gradients_are_compared_relative_to_the_largest() -> None:
    wanted, found = [torch.tensor([100.0]), torch.tensor([1e-8])], [torch.tensor([100.0]), torch.tensor([2e-8])]
    assert relative_error(wanted, found) == pytest.approx(1)
    assert relative_error(wanted, found, together=True) == pytest.approx(1e-10)


def test_integers_are_compared_if_there_are_no_floats() -> None:
    assert relative_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])]) == 0.25
    assert relative_error([torch.ones(2), torch.tensor([1])], [torch.ones(2), torch.tensor([2])]) == 0
    assert relative_error([torch.ones(2)], []) == float("inf")


class Randomness(nn.Module):
    """Uses all kinds of random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.dropout(self.layer(x), 0.5, self.training) + F.alpha_dropout(x, 0.3, self.training)
        noise = (
            torch.rand_like(x) + torch.randn(x.shape) + torch.empty_like(x).uniform_() + torch.bernoulli(x.sigmoid())
        )
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return x, noise, F.rrelu(x, training=self.training), attended, self.lstm(x)[0], torch.randint(0, 9, (3,))


@pytest.mark.parametrize("training", [True, False])
def test_two_runs_have_the_same_random_numbers(training: bool) -> None:
    net, x, state = Randomness(), torch.randn(2, 5, 4), torch.get_rng_state()
    one = run_without_randomness(net, x, training=training)
    torch.rand(7)
    torch.set_rng_state(state)
    other = run_without_randomness(net, x, training=training)
    assert all(torch.equal(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.epsilon == eps(torch.float32)


def test_gradients_are_those_of_autograd_and_of_kept_indices() -> None:
    net, x = nn.Linear(3, 4), torch.randn(2, 3)
    index = torch.tensor([0, 2])
    ran = run_without_randomness(net, x, training=True, gradients=True, slices={"weight": {1: index}})
    weights = torch.arange(8.0).cos().view(2, 4)
    torch.testing.assert_close(ran.gradients[0], (weights.T @ x)[:, index])
    torch.testing.assert_close(ran.gradients[1], weights.sum(0))


def test_other_inputs_have_other_values_of_the_same_kind() -> None:
    example = {"images": torch.rand(5, 3) + 10, "words": torch.arange(10).view(5, 2), "mask": torch.ones(5) > 0, "n": 3}
    small, whole, same = other_inputs(example)
    assert small["images"].shape == (2, 3)
    assert whole["words"].sort().values.shape == (5, 2)
    assert sorted(whole["words"].flatten().tolist()) == list(range(10))
    assert whole["words"].flatten().tolist() != list(range(10))
    assert float(whole["images"].mean()) < 0 < float(same["images"].mean())
    assert torch.equal(same["images"], example["images"])
    assert whole["n"] == 3
    (*_, last) = other_inputs(torch.zeros(1, 4), repeated=True)
    assert last.shape == (4, 4)
    assert len(last.unique(dim=0)) == 4, "equal items have zero variance"
    assert bool(next(other_inputs(torch.zeros(1, 4))).any()), "an all-zero input would hide differences"


def test_constant_tensors_get_random_values() -> None:
    net = nn.BatchNorm1d(6)
    randomize_constants_(net, torch.Generator().manual_seed(0))
    assert all(len(tensor.unique()) == 6 for name, tensor in net.state_dict().items() if name != "num_batches_tracked")
    assert bool((net.running_var > 0).all())


def test_meta_tensors_get_random_values(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 4, device="meta")
    made, inputs = materialize(net, torch.empty(2, 3, device="meta"))
    assert bool(made(inputs).isfinite().all())
    monkeypatch.setattr("ecc.graph.numerics.MAX_ELEMENTS", 15)
    with pytest.raises(CannotVerify, match=r"on the meta device and has 16 values \(limit 15\)"):
        materialize(net, torch.empty(2, 3))
    monkeypatch.undo()
    net.register_buffer("order", torch.empty(3, dtype=torch.long, device="meta"))
    with pytest.raises(CannotVerify, match="order is on the meta device, and its integer values are not known"):
        materialize(net, torch.empty(2, 3))


class _TokensOfOneImage(nn.Module):
    """Batch norm before tokens: torch computes wrong gradients for one image, since they are transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.stem(x).flatten(2).transpose(1, 2)
        return self.head(self.norm(tokens)).mean(1)


def test_wrong_gradients_of_torch_for_one_item_freeze_nothing() -> None:
    graph = trace_channels(_TokensOfOneImage(), torch.randn(1, 3, 7, 7))
    assert [(group.name, group.width) for group in graph.prunable] == [("stem.0", 8)]
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff < 1e-12


def conv_net(depth: int) -> tuple[nn.Module, Tensor]:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Conv2d(3, 8, 3), *blocks, nn.Conv2d(8, 4, 3)), torch.randn(2, 3, 8, 8)


def norm_net(depth: int) -> tuple[nn.Module, Tensor]:
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.ReLU()) for _ in range(depth)]
    return nn.Sequential(nn.Linear(6, 8), *blocks, nn.Linear(8, 4)), torch.randn(2, 5, 6)


def counted_synchronizations(build: Callable[[int], tuple[nn.Module, Tensor]], depth: int) -> int:
    """How often verification of a network on CUDA waits for the device."""
    net, x = build(depth)
    net, x = net.cuda(), x.cuda()
    graph = trace_channels(net, x, verify=False)
    assert len(graph.prunable) == depth + 1
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            assert verify_graph(net, graph, x).max_relative_diff is not None
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("called a synchronizing" in str(one.message) for one in caught)


@pytest.mark.gpu
@pytest.mark.parametrize("build", [conv_net, norm_net])
def test_a_deeper_network_is_verified_with_as_many_synchronizations(build: Any) -> None:
    few, many = counted_synchronizations(build, 2), counted_synchronizations(build, 20)
    assert few > 0
    assert many <= few + 9  # processes that share a GPU wait for each other in each of them
