"""Channel importance and masks, against slow sums over slices."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from step_time import MlpStack
from torch import Tensor, nn

from ecc.graph import ChannelGraph, live_masks, trace_channels
from ecc.graph.model_copy import named_tensors
from ecc.methods.ecc import importance as module
from ecc.methods.ecc.importance import (
    TAYLOR_DECAY,
    BranchExits,
    ConsumerSlices,
    SliceMasks,
    TaylorImportance,
    adam_preconditioners,
    taylor_interval,
)
from methods.nets import NETS, Kernels, traced, train

CPU = torch.device("cpu")


def slow_sums(net: nn.Module, graph: ChannelGraph, values: dict[str, Tensor]) -> Tensor:
    """Sum of values over all consumer slices of each channel, one index after another."""
    sums = torch.zeros(graph.num_channel_ids - 1)
    for group in graph.prunable:
        first, _ = graph.channel_ids(group.name)
        for one in (one for one in group.slices if one.is_consumer):
            by_index = values[one.tensor].movedim(one.axis, 0).flatten(1).sum(1)
            for unit in range(group.width):
                sums[first - 1 + unit] += by_index[one.index[unit]].sum()
    return sums


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.SGD])
@pytest.mark.parametrize("name", NETS)
def test_norms_products_masks_and_live_channels(name: str, kind: Any) -> None:
    net, example, graph = traced(name)
    optimizer = kind(net.parameters(), lr=1e-3)
    train(net, optimizer, example, range(3))
    slices, tensors = ConsumerSlices(net, graph, CPU), named_tensors(net)

    weighted = {}
    for key, tensor in tensors.items():
        state = optimizer.state.get(tensor, {})
        v_hat = state["exp_avg_sq"] / (1 - 0.999 ** int(state["step"])) if "exp_avg_sq" in state else None
        weighted[key] = tensor.detach() ** 2 * (1 if v_hat is None else v_hat.sqrt() + 1e-8)
    norms = slices.norms(adam_preconditioners(optimizer, slices.tensors))
    torch.testing.assert_close(norms, slow_sums(net, graph, weighted), rtol=1e-5, atol=1e-12)
    assert (norms > 0).sum() == sum(group.width for group in graph.prunable)

    net(example).square().mean().backward()
    gradients = {key: tensor.detach() * tensor.grad for key, tensor in tensors.items() if tensor.grad is not None}
    products = slices.products()
    torch.testing.assert_close(products, slow_sums(net, graph, gradients), rtol=1e-4, atol=1e-7)
    assert products.abs().max() > 0

    before = {key: tensor.clone() for key, tensor in tensors.items()}
    slices.apply_mask_()  # no mask yet
    assert all(torch.equal(tensor, before[key]) for key, tensor in tensors.items())
    alive = torch.rand(graph.num_channel_ids - 1, generator=torch.Generator().manual_seed(0)) > 0.4
    slices.set_mask(alive)
    slices.apply_mask_()
    widths = [group.width for group in graph.groups]
    for group, kept, here, live in zip(
        graph.groups, alive.split(widths), slices.live().split(widths), live_masks(net, graph), strict=True
    ):
        assert group.frozen is not None or kept.tolist() == here.tolist() == live.tolist()
    assert all(((tensor == before[key]) | (tensor == 0)).all() for key, tensor in tensors.items())
    assert (slices.norms()[~alive] == 0).all()


def test_products_do_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    net, example, graph = traced("digits")
    net(example).square().mean().backward()
    slices = ConsumerSlices(net, graph, CPU)
    at_once = slices.products()
    for most in (0, 100):
        monkeypatch.setattr(module, "_MAX_PRODUCTS", most)
        assert torch.equal(slices.products(), at_once)


def test_slices_without_a_gradient_count_by_their_norm() -> None:
    net, example, graph = traced("chain")
    slices = ConsumerSlices(net, graph, CPU)
    frozen = slices.tensors[-1]
    net(example).square().mean().backward()
    whole = slices.products()
    frozen.grad = None
    part = slices.products()
    only = slices.norms([None if t is frozen else torch.zeros(()) for t in slices.tensors]) > 0
    assert 0 < only.sum() < len(only)
    mixed = slices.norms([None if t is frozen else torch.zeros(()) for t in slices.tensors]) == 0
    torch.testing.assert_close(part[mixed], whole[mixed])
    assert torch.equal(part[only].sign(), -slices.products()[only].sign())  # alternates, so that the mean is 0
    ratio = part.square()[only] / slices.norms()[only]
    assert (ratio > 0).all()
    torch.testing.assert_close(ratio, ratio[:1].expand(len(ratio)), rtol=1e-4, atol=1e-12)


@pytest.mark.gpu
@pytest.mark.parametrize("small", [module._SMALL, 100])
def test_on_a_gpu_cuda_graphs_give_the_same_sums_and_masks(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL", small)
    net, _, graph = traced("digits")
    other = copy.deepcopy(net).cuda()
    cpu, gpu = ConsumerSlices(net, graph, CPU), ConsumerSlices(other, graph, next(other.parameters()).device)
    draw = torch.Generator().manual_seed(0)
    for number in range(12):
        if number == 6:
            other.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            mine.data.normal_(generator=draw)
            mine.grad = torch.randn(mine.shape, generator=draw)
            theirs.data.copy_(mine.data)
            theirs.grad = torch.empty_like(theirs).copy_(mine.grad)
        torch.testing.assert_close(gpu.products().cpu(), cpu.products(), rtol=1e-4, atol=1e-4)
        alive = torch.rand(graph.num_channel_ids - 1, generator=draw) > 0.3
        for slices, where in ((cpu, alive), (gpu, alive.cuda())):
            slices.set_mask(where)
            slices.apply_mask_()
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs.cpu()), number
        assert torch.equal(cpu.live(), gpu.live().cpu())
    assert gpu._products_graph._graph is not None
    assert gpu._masks_graph._graph is not None


# ---------------------------------------------------------------- B of Adam


def stepped(gradients: list[float], **settings: Any) -> tuple[nn.Parameter, torch.optim.Adam]:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.0, betas=(0.9, 0.5), eps=0.0, **settings)
    for gradient in gradients:
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
    return weight, optimizer


def test_amsgrad_uses_its_maximum_and_steps_may_be_counted_in_the_group() -> None:
    weight, optimizer = stepped([4.0, 0.0, 0.0], amsgrad=True)
    (found,) = adam_preconditioners(optimizer, [weight])
    torch.testing.assert_close(found, torch.full((3,), (8 / (1 - 0.5**3)) ** 0.5))
    weight, optimizer = stepped([4.0])
    (wanted,) = adam_preconditioners(optimizer, [weight])
    torch.testing.assert_close(wanted, torch.full((3,), 4.0))
    optimizer.param_groups[0]["step"] = optimizer.state[weight].pop("step")  # as fused optimizers do
    (found,) = adam_preconditioners(optimizer, [weight])
    torch.testing.assert_close(found, wanted)
    del optimizer.param_groups[0]["step"]
    (raw,) = adam_preconditioners(optimizer, [weight])
    torch.testing.assert_close(raw, torch.full((3,), 8.0**0.5))


def test_a_frozen_parameter_takes_the_mean_of_the_others() -> None:
    first, second, frozen = (nn.Parameter(torch.ones(size), requires_grad=False) for size in (2, 6, 5))
    optimizer = torch.optim.Adam([first, second], eps=0.0)
    for parameter, gradient in ((first, 1.0), (second, 3.0)):
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    *_, borrowed = adam_preconditioners(optimizer, [first, second, frozen])
    assert borrowed is not None
    assert float(borrowed) == pytest.approx((2 * 1.0 + 6 * 3.0) / 8, rel=1e-4)


# ---------------------------------------------------------------- Taylor


def test_taylor_is_the_bias_corrected_variance_and_resumes() -> None:
    samples = torch.randn(30, 5, generator=torch.Generator().manual_seed(0)) + 3
    taylor, resumed = TaylorImportance(5, CPU), TaylorImportance(5, CPU)
    assert taylor.values.tolist() == [0.0] * 5
    for number, sample in enumerate(samples):
        taylor.add(sample)
        if number == 10:
            resumed.load(taylor.state)
        elif number > 10:
            resumed.add(sample)
    weights = TAYLOR_DECAY ** torch.arange(29, -1, -1.0)
    weights = (weights / weights.sum())[:, None]
    mean, square = (weights * samples).sum(0), (weights * samples**2).sum(0)
    torch.testing.assert_close(taylor.values, square - (1 - weights.square().sum()) * mean**2, rtol=1e-4, atol=1e-4)
    assert float(taylor.values.mean()) == pytest.approx(1.0 + 9 / 30, abs=0.4)  # 9 is the square of the mean
    assert torch.equal(resumed.values, taylor.values)
    assert resumed.state[2] == 30


def test_samples_are_dense_in_short_runs_and_few_in_long_ones() -> None:
    assert [taylor_interval(steps) for steps in (1, 999, 2500, 20_000, 10**6)] == [1, 1, 2, 20, 20]


def test_behind_a_batch_norm_the_products_of_a_group_sum_to_zero() -> None:
    """A lone channel has no product, although the network depends on it: hence the division by the remaining share."""
    torch.manual_seed(0)
    for width in (1, 5):
        conv, norm = nn.Conv2d(width, 3, 1, bias=False).double(), nn.BatchNorm2d(3, eps=1e-12).double()
        norm(conv(torch.randn(8, width, 4, 4, dtype=torch.float64))).pow(3).mean().backward()
        assert conv.weight.grad is not None
        products = (conv.weight.detach() * conv.weight.grad).sum((0, 2, 3))
        assert float(products.sum()) == pytest.approx(0.0, abs=1e-8)
        assert width == 1 or products.abs().max() > 1e-3


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_exploded_gradients_do_not_stay_in_the_mean(bad: float) -> None:
    taylor = TaylorImportance(2, CPU)
    taylor.add(torch.tensor([bad, 2.0]))
    taylor.add(torch.tensor([1.0, -2.0]))
    assert taylor.values.isfinite().all()
    assert float(taylor.values[1]) == pytest.approx(4.0, rel=1e-3)


def test_taylor_is_the_squared_first_order_change_of_the_loss() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)

    def loss(scale: Tensor) -> Tensor:
        return (layer(inputs * scale) - targets).square().mean()

    loss(torch.ones(4, dtype=torch.float64)).backward()
    assert layer.weight.grad is not None
    taylor = TaylorImportance(4, CPU)
    taylor.add((layer.weight.detach() * layer.weight.grad).sum(0).float())
    slopes = torch.autograd.functional.jacobian(loss, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(taylor.values.double(), slopes**2, rtol=1e-5, atol=1e-10)


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize(("broadcast", "small"), [({"cpu"}, 0), (set(), 0), (set(), 30), (set(), 2**20)])
def test_masks_zero_single_slices(broadcast: set[str], small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BROADCAST", broadcast)
    monkeypatch.setattr(module, "_SMALL", small)
    draw = torch.Generator().manual_seed(0)
    conv, linear, bias = (torch.randn(shape, generator=draw) for shape in ((6, 4, 3, 3), (5, 7), (9,)))
    double = torch.randn((4, 3), generator=draw, dtype=torch.float64).requires_grad_()
    tensors, axes = [conv, linear, linear, bias, double], [1, 1, 0, 0, 1]
    masks = SliceMasks(tensors, axes, CPU)
    for _ in range(3):
        kept = torch.rand(4 + 7 + 5 + 9 + 3, generator=draw) > 0.3
        with torch.no_grad():
            for tensor in tensors:
                tensor.normal_(generator=draw)
        expected = {id(tensor): tensor.detach().clone() for tensor in tensors}
        for tensor, axis, part in zip(tensors, axes, kept.split([4, 7, 5, 9, 3]), strict=True):
            expected[id(tensor)].index_fill_(axis, (~part).nonzero().flatten(), 0)
        masks.allocate()
        masks.write(kept)
        masks.apply_()
        assert all(torch.equal(tensor, expected[id(tensor)]) for tensor in tensors)


@pytest.mark.parametrize("small", [0, 2**20])
def test_masks_follow_tensors_to_another_memory_format(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BROADCAST", set())
    monkeypatch.setattr(module, "_SMALL", small)
    conv = nn.Conv2d(4, 6, 3)
    masks = SliceMasks([conv.weight], [1], CPU)
    assert masks.allocate()
    conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # not in torch's stubs
    assert masks.allocate()
    assert not masks.allocate()
    masks.write(torch.tensor([0, 1, 1, 1]))
    masks.apply_()
    assert [*masks._factors, *masks._dead][0].stride() == conv.weight.stride()
    assert not conv.weight[:, 0].any()
    assert conv.weight[:, 1:].all()


# ---------------------------------------------------------------- number of operations

DEPTH = 16


def test_a_stack_of_linear_layers_needs_few_operations_on_a_gpu() -> None:
    """On the device "meta", which takes the same paths as a GPU and computes nothing."""
    meta = torch.device("meta")
    net = MlpStack(16, 32, DEPTH)
    graph = trace_channels(net, torch.randn(1, 16), verify=False)
    net = net.to(meta)
    for parameter in net.parameters():
        parameter.grad = torch.empty_like(parameter)
    slices, exits = ConsumerSlices(net, graph, meta), BranchExits(net, graph.branches, meta)
    slices.set_mask(torch.ones(graph.num_channel_ids - 1, dtype=torch.bool, device=meta))
    assert (len(slices.tensors), len(exits.tensors)) == (DEPTH, 2 * DEPTH)
    for call, most in ((slices.apply_mask_, 1), (slices.products, 24), (exits.products, 2 * DEPTH + 4)):
        with Kernels() as kernels:
            call()
        assert 0 < len(kernels.seen) <= most, kernels.seen


def test_large_tensors_are_masked_by_one_operation_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SMALL", 100)
    tensors = [torch.empty(shape, device="meta") for shape in ((20, 30), (30, 20), (5, 6), (6, 5))]
    masks = SliceMasks([*tensors, tensors[0]], [1, 1, 1, 1, 0], torch.device("meta"))
    masks.allocate()
    with Kernels() as kernels:
        masks.apply_()
    assert sorted(kernels.seen) == ["_foreach_mul_", "masked_fill_", "masked_fill_"]


def test_the_products_of_branches_are_sums_over_their_exits() -> None:
    net = MlpStack(8, 12, 3)
    example = torch.randn(5, 8)
    graph = trace_channels(net, example[:1], verify=False)
    net(example).square().mean().backward()
    frozen = net.blocks[1][3].bias  # type: ignore[index]
    frozen.grad = None
    exits = BranchExits(net, graph.branches, CPU)
    products = {
        name: tensor.detach() * tensor.grad for name, tensor in named_tensors(net).items() if tensor is not frozen
    }
    expected = [sum(products[name].sum() for name in branch.exits if name in products) for branch in graph.branches]
    assert len(expected) == 3
    torch.testing.assert_close(exits.products(), torch.stack(expected), rtol=1e-4, atol=1e-7)
