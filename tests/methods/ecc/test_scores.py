from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ecc.graph import ChannelGraph, live_masks
from ecc.graph.model_copy import named_tensors
from ecc.methods.ecc import importance as scores_module
from ecc.methods.ecc.importance import ConsumerSlices, adam_metrics
from methods.nets import NETS, traced, train

CPU = torch.device("cpu")


def slow_scores(net: nn.Module, graph: ChannelGraph, metrics: dict[int, Tensor | float]) -> Tensor:
    """One channel after another: all slices that read it, squared, times B."""
    tensors = named_tensors(net)
    scores = torch.zeros(graph.num_channel_ids - 1)
    for group in graph.prunable:
        first, _ = graph.channel_ids(group.name)
        for place in group.slices:
            if place.is_consumer:
                weighted = tensors[place.tensor].detach() ** 2 * metrics[id(tensors[place.tensor])]
                for unit in range(group.width):
                    for index in place.index[unit].tolist():
                        scores[first - 1 + unit] += weighted.select(place.axis, index).sum()
    return scores


def adam_by_hand(optimizer: torch.optim.Optimizer, tensor: Tensor) -> Tensor:
    state, group = optimizer.state[tensor], optimizer.param_groups[0]
    return (state["exp_avg_sq"] / (1 - group["betas"][1] ** int(state["step"]))).sqrt() + group["eps"]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD])
def test_scores_are_sums_over_all_reading_slices(name: str, kind: type[torch.optim.Optimizer]) -> None:
    net, example, graph = traced(name)
    optimizer = kind(net.parameters(), lr=1e-3)  # type: ignore[call-arg]
    train(net, optimizer, example, range(3))
    readers = ConsumerSlices(net, graph, CPU)
    metrics: dict[int, Tensor | float] = {
        id(t): 1.0 if kind is torch.optim.SGD else adam_by_hand(optimizer, t) for t in readers.tensors
    }
    scores = readers.scores(adam_metrics(optimizer, readers.tensors))
    torch.testing.assert_close(scores, slow_scores(net, graph, metrics), rtol=1e-5, atol=1e-12)
    assert (scores > 0).sum() == sum(group.width for group in graph.prunable)


@pytest.mark.parametrize("name", NETS)
def test_masks_silence_exactly_the_dead_channels(name: str) -> None:
    net, _, graph = traced(name)
    before = {key: tensor.clone() for key, tensor in named_tensors(net).items()}
    alive = torch.rand(graph.num_channel_ids - 1) > 0.4
    readers = ConsumerSlices(net, graph, CPU)
    readers.apply_mask_()  # no mask yet
    assert all(torch.equal(tensor, before[key]) for key, tensor in named_tensors(net).items())
    readers.set_mask(alive)
    readers.apply_mask_()
    for group, live in zip(graph.groups, live_masks(net, graph), strict=True):
        first, stop = graph.channel_ids(group.name)
        if group.frozen is None:
            assert torch.equal(live, alive[first - 1 : stop - 1])
    for key, tensor in named_tensors(net).items():
        assert ((tensor == before[key]) | (tensor == 0)).all()
    scores = readers.scores([None] * len(readers.tensors))
    assert (scores[~alive] == 0).all()


def test_amsgrad_takes_its_own_square() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], lr=0.0, amsgrad=True, betas=(0.9, 0.5), eps=0.0)
    for gradient in (4.0, 0.0, 0.0):
        weight.grad = torch.full((3,), gradient)
        optimizer.step()
    (metric,) = adam_metrics(optimizer, [weight])
    assert metric is not None
    torch.testing.assert_close(metric, torch.full((3,), (8 / (1 - 0.5**3)) ** 0.5))


def test_steps_may_be_counted_in_the_group() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.Adam([weight], betas=(0.9, 0.5), eps=0.0)
    weight.grad = torch.full((3,), 4.0)
    optimizer.step()
    (wanted,) = adam_metrics(optimizer, [weight])
    optimizer.param_groups[0]["step"] = optimizer.state[weight].pop("step")  # as fused ones do
    (found,) = adam_metrics(optimizer, [weight])
    torch.testing.assert_close(found, wanted)
    del optimizer.param_groups[0]["step"]
    (raw,) = adam_metrics(optimizer, [weight])
    torch.testing.assert_close(raw, torch.full((3,), 8.0**0.5))


def test_a_frozen_parameter_takes_the_mean_metric_of_the_others() -> None:
    first, second, frozen = (nn.Parameter(torch.ones(size), requires_grad=False) for size in (2, 6, 5))
    optimizer = torch.optim.Adam([first, second], eps=0.0)
    for parameter, gradient in ((first, 1.0), (second, 3.0)):
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    *_, borrowed = adam_metrics(optimizer, [first, second, frozen])
    assert borrowed is not None
    assert float(borrowed) == pytest.approx((2 * 1.0 + 6 * 3.0) / 8, rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_scored_in_single_and_masked_in_their_own(dtype: torch.dtype) -> None:
    net, _, graph = traced("residual")
    net = net.to(dtype)
    readers = ConsumerSlices(net, graph, CPU)
    assert readers.scores([None] * len(readers.tensors)).dtype == torch.float32
    alive = torch.rand(graph.num_channel_ids - 1) > 0.5
    readers.set_mask(alive)
    readers.apply_mask_()
    assert all(parameter.dtype == dtype for parameter in net.parameters())
    first, stop = graph.channel_ids("stem")
    assert torch.equal(live_masks(net, graph)[0], alive[first - 1 : stop - 1])


def test_sums_do_not_depend_on_other_networks_of_the_same_weights() -> None:
    """The same weights give the same bits, as two processes of a distributed run need."""
    results = []
    for _ in range(2):
        net, _, graph = traced("digits", seed=3)
        readers = ConsumerSlices(net, graph, CPU)
        results.append(readers.scores([None] * len(readers.tensors)))
    assert torch.equal(*results)


# ---------------------------------------------------------------- w g


@pytest.mark.parametrize("name", NETS)
def test_products_are_the_slopes_of_the_loss_in_the_scale_of_each_channel(name: str) -> None:
    net, example, graph = traced(name)
    net(example).square().mean().backward()
    products = ConsumerSlices(net, graph, CPU).products()
    tensors = named_tensors(net)
    expected = torch.zeros(graph.num_channel_ids - 1)
    for group in graph.prunable:
        first, _ = graph.channel_ids(group.name)
        for place in (place for place in group.slices if place.is_consumer):
            grad = tensors[place.tensor].grad
            assert grad is not None
            slopes = (tensors[place.tensor].detach() * grad).sum([k for k in range(grad.dim()) if k != place.axis])
            for unit in range(group.width):
                expected[first - 1 + unit] += slopes[place.index[unit]].sum()
    torch.testing.assert_close(products, expected, rtol=1e-4, atol=1e-7)
    assert products.abs().max() > 0


def test_slices_without_a_gradient_count_by_their_norm() -> None:
    net, example, graph = traced("chain")
    readers = ConsumerSlices(net, graph, CPU)
    frozen = readers.tensors[-1]
    net(example).square().mean().backward()
    whole = readers.products()
    frozen.grad = None
    part = readers.products()
    only = readers.scores([None if t is frozen else torch.zeros(()) for t in readers.tensors]) > 0
    assert only.any()
    assert not only.all()
    torch.testing.assert_close(part[~only], whole[~only].abs())
    assert (part[only] > 0).all()
    norms = readers.scores([None] * len(readers.tensors))
    ratio = part.square() / norms
    torch.testing.assert_close(ratio[only], ratio[only][:1].expand(int(only.sum())), rtol=1e-4, atol=1e-12)


@pytest.mark.parametrize("name", NETS)
def test_live_channels_are_those_of_the_network(name: str) -> None:
    net, _, graph = traced(name)
    readers = ConsumerSlices(net, graph, CPU)
    readers.set_mask(torch.rand(graph.num_channel_ids - 1, generator=torch.Generator().manual_seed(0)) > 0.4)
    readers.apply_mask_()
    live = readers.live().split([group.width for group in graph.groups])
    for group, mine, theirs in zip(graph.groups, live, live_masks(net, graph), strict=True):
        if group.frozen is None:
            assert torch.equal(mine, theirs), group.name


def test_products_are_the_same_however_many_are_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    net, example, graph = traced("digits")
    net(example).square().mean().backward()
    readers = ConsumerSlices(net, graph, CPU)
    at_once = readers.products()
    assert at_once.any()
    for most in (0, 100):
        monkeypatch.setattr(scores_module, "_AT_ONCE", most)
        assert torch.equal(readers.products(), at_once)


@pytest.mark.gpu
def test_on_a_gpu_graphs_give_the_same_sums_and_masks() -> None:
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
        for readers, where in ((cpu, alive), (gpu, alive.cuda())):
            readers.set_mask(where)
            readers.apply_mask_()
        for mine, theirs in zip(net.parameters(), other.parameters(), strict=True):
            assert torch.equal(mine, theirs.cpu()), number
        assert torch.equal(cpu.live(), gpu.live().cpu())
    assert gpu._graphed_sums._graph is not None
    assert gpu._graphed_masks._graph is not None
