"""Masking channels, and building networks and optimizers without them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.energy import counted_cost
from ecc.errors import BadWidths
from ecc.graph import (
    ChannelGraph,
    live_channels,
    live_masks,
    mask_channels_,
    slim,
    slim_optimizer,
    trace_channels,
    with_widths,
)
from ecc.graph.model_copy import named_tensors
from ecc.methods import EccSolver
from ecc.torch_utils import tensors_in
from graph.cases import CASES, Inputs, call, chain, traced


def random_dead(graph: ChannelGraph, seed: int = 0) -> dict[str, Tensor]:
    """Some, but not all, units of every prunable group."""
    generator = torch.Generator().manual_seed(seed)
    dead = {}
    for group in graph.prunable:
        count = int(torch.randint(1, group.width - group.min_width + 1, (), generator=generator))
        dead[group.name] = torch.randperm(group.width, generator=generator)[:count]
    return dead


def masked_case(name: str) -> tuple[nn.Module, Inputs, ChannelGraph, dict[str, Tensor]]:
    """A case with random values in every tensor and some masked channels."""
    net, inputs, graph = traced(name)
    for key, tensor in named_tensors(net).items():
        if tensor.is_floating_point():
            tensor.data.uniform_(0.5, 1.5) if "var" in key else tensor.data.normal_(0, 0.5)
    dead = random_dead(graph)
    mask_channels_(net, graph, dead)
    return net, inputs, graph, dead


def outputs(net: nn.Module, inputs: Inputs) -> list[Tensor]:
    torch.manual_seed(0)
    return list(tensors_in(call(net, inputs)))


# ---------------------------------------------------------------- slim


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("name", CASES)
def test_slim_has_the_outputs_of_the_masked_network(name: str, training: bool) -> None:
    net, inputs, graph, dead = masked_case(name)
    small = slim(net, graph)
    widths = {group: graph[group].width - len(units) for group, units in dead.items()}
    assert sum(p.numel() for p in small.parameters()) == int(graph.parameters(widths))
    net.train(training)
    small.train(training)
    for expected, found in zip(outputs(net, inputs), outputs(small, inputs), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_slim_keeps_the_surviving_slices() -> None:
    net, _, graph = traced("chain")
    mask_channels_(net, graph, {"conv1": torch.tensor([0, 3, 7]), "conv2": torch.tensor([5])})
    small = slim(net, graph)
    first, second = [1, 2, 4, 5, 6], [0, 1, 2, 3, 4]
    assert torch.equal(small.conv1.weight, net.conv1.weight[first])
    assert torch.equal(small.conv1.bias, net.conv1.bias[first])
    assert torch.equal(small.bn1.running_var, net.bn1.running_var[first])
    assert torch.equal(small.conv2.weight, net.conv2.weight[second][:, first])
    assert torch.equal(small.conv3.weight, net.conv3.weight[:, second])
    assert torch.equal(small.conv3.bias, net.conv3.bias)
    assert (small.conv1.out_channels, small.bn1.num_features, small.conv2.in_channels) == (5, 5, 5)


def test_slim_keeps_the_minimum_width() -> None:
    net, inputs, graph = traced("squeeze")
    mask_channels_(net, graph, {"stem": torch.arange(8)})
    small = slim(net, graph)
    assert small.stem.out_channels == graph["stem"].min_width == 2
    torch.testing.assert_close(small(inputs), net(inputs))


@pytest.mark.parametrize(
    ("width_multiple", "widths"), [(1, (3, 5)), (2, (4, 6)), (4, (4, 6)), (5, (5, 5)), (99, (8, 6))]
)
def test_slim_rounds_widths_up_to_a_multiple(width_multiple: int, widths: tuple[int, int]) -> None:
    net, inputs, graph = traced("chain")
    mask_channels_(net, graph, {"conv1": torch.tensor([0, 2, 3, 5, 7]), "conv2": torch.tensor([4])})
    small = slim(net, graph, width_multiple)
    assert (small.conv1.out_channels, small.conv2.out_channels) == widths
    torch.testing.assert_close(small.eval()(inputs), net.eval()(inputs))
    with pytest.raises(BadWidths, match="width_multiple=0 is below 1"):
        slim(net, graph, 0)


def test_a_channel_is_live_while_one_consumer_uses_it() -> None:
    net, _, graph = traced("residual")  # stem is read by conv1 and by head
    with torch.no_grad():
        net.conv1.weight[:, 2] = 0
    assert live_channels(net, graph)["stem"] == 8
    with torch.no_grad():
        net.head.weight[:, 2] = 0
    assert live_channels(net, graph)["stem"] == 7


def test_a_zero_slice_of_the_producer_does_not_mask_a_channel() -> None:
    net, _, graph = traced("chain")
    with torch.no_grad():
        net.conv1.weight[3] = 0  # bias and batch norm are not zero
    assert live_channels(net, graph) == {"conv1": 8, "conv2": 6, "conv3": 4}


# ---------------------------------------------------------------- dtype, mode, memory format


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_precision_is_kept(dtype: torch.dtype) -> None:
    net = chain().to(dtype)
    graph = trace_channels(net, torch.randn(2, 3, 8, 8, dtype=dtype))
    assert {g.name for g in graph.prunable} == {"conv1", "conv2"}
    mask_channels_(net, graph, {"conv1": torch.tensor([1])})
    small = slim(net, graph)
    assert {t.dtype for t in small.parameters()} == {dtype}
    assert small.bn1.running_mean.dtype == dtype
    assert small.bn1.num_batches_tracked.dtype == torch.long


def test_requires_grad_is_kept() -> None:
    net, _, graph = traced("chain")
    net.conv1.requires_grad_(False)
    small = with_widths(net, graph, {"conv1": 5})
    assert [p.requires_grad for p in small.parameters()] == [p.requires_grad for p in net.parameters()]
    assert isinstance(small.conv1.weight, nn.Parameter)
    assert not isinstance(small.bn1.running_mean, nn.Parameter)


def test_buffers_and_modes_are_kept() -> None:
    net, inputs, graph = traced("chain")
    net.train()
    net(inputs)
    net.relu1.eval()
    small = with_widths(net, graph, {"conv1": 5})
    assert int(small.bn1.num_batches_tracked) == 1
    assert torch.equal(small.bn1.running_mean, net.bn1.running_mean[:5])
    assert [m.training for m in small.modules()] == [m.training for m in net.modules()]


@pytest.mark.parametrize("widths", [{}, {"conv1": 5}, {"conv1": 5, "conv2": 3}])
def test_channels_last_weights_stay_channels_last(widths: dict[str, int]) -> None:
    net = chain().to(memory_format=torch.channels_last)
    graph = trace_channels(net, torch.randn(2, 3, 8, 8))
    small = with_widths(net, graph, widths)
    assert small.conv2.weight.is_contiguous(memory_format=torch.channels_last)
    assert not small.conv2.weight.is_contiguous()


# ---------------------------------------------------------------- masking


def test_masking_changes_consumers_only() -> None:
    net, _, graph = traced("chain")
    before = {key: value.clone() for key, value in net.state_dict().items()}
    mask_channels_(net, graph, {"conv1": torch.tensor([0])})
    changed = {key for key, value in net.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"conv2.weight"}


def test_all_columns_of_a_unit_are_masked() -> None:
    net, _, graph = traced("flattened chain")
    mask_channels_(net, graph, {"conv": torch.tensor([1])})
    zero = (net.fc1.weight == 0).all(0).nonzero().flatten()
    assert zero.tolist() == list(range(16, 32))
    with torch.no_grad():
        net.fc1.weight[0, 20] = 1  # one column is not zero
    assert live_channels(net, graph)["conv"] == 8


def test_a_frozen_group_cannot_be_masked() -> None:
    net, _, graph = traced("chain")
    with pytest.raises(BadWidths, match="group 'conv3' is not prunable: it is an output of the network"):
        mask_channels_(net, graph, {"conv3": torch.tensor([0])})
    with pytest.raises(BadWidths, match="no channel group is called 'conv9'"):
        mask_channels_(net, graph, {"conv9": torch.tensor([0])})


def test_frozen_groups_stay_whole() -> None:
    net, _, graph = traced("group norm")
    with torch.no_grad():
        net.conv2.weight.zero_()  # the consumer of conv1, which is frozen
    small = slim(net, graph)
    assert small.conv1.out_channels == 8


# ---------------------------------------------------------------- with_widths


def test_with_widths_keeps_the_first_units() -> None:
    net, _, graph = traced("concat")
    small = with_widths(net, graph, {"left": 2, "right": 3})
    assert torch.equal(small.left.weight, net.left.weight[:2])
    assert torch.equal(small.head.weight, net.head.weight[:, [0, 1, 4, 5, 6]])


@pytest.mark.parametrize("name", CASES)
def test_with_widths_shares_no_storage_and_allocates_what_it_needs(name: str) -> None:
    net, _, graph = traced(name)
    small = with_widths(net, graph, {g.name: max(1, g.width // 2) for g in graph.prunable})
    mine = {t.untyped_storage().data_ptr() for t in named_tensors(net).values()}
    for tensor in named_tensors(small).values():
        storage = tensor.untyped_storage()
        assert storage.data_ptr() not in mine
        assert storage.nbytes() == tensor.numel() * tensor.element_size()


@pytest.mark.parametrize("device", [None, "meta"])
def test_a_norm_without_tensors_gets_its_new_size(device: str | None) -> None:
    net, _, graph = traced("instance norm")
    assert with_widths(net, graph, {"conv1": 5}, device=device).norm.num_features == 5
    assert net.norm.num_features == 8


def test_with_widths_on_meta_allocates_nothing() -> None:
    net, _, graph = traced("chain")
    small = with_widths(net, graph, {"conv1": 5}, device="meta")
    assert {t.device.type for t in small.parameters()} == {"meta"}
    assert small.conv2.weight.shape == (6, 5, 3, 3)
    assert small.conv1.out_channels == 5


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    "act", [slim, lambda n, g: with_widths(n, g, {}), live_channels, lambda n, g: mask_channels_(n, g, {})]
)
def test_the_graph_of_another_network_is_refused(act: Callable[..., Any]) -> None:
    graph = traced("chain")[2]
    with pytest.raises(BadWidths) as caught:
        act(CASES["residual"].build(), graph)
    assert str(caught.value) == (
        "this graph belongs to another network: it expects conv1.weight of shape [8, 3, 3, 3], "
        "found [6, 8, 3, 3]. Trace this network."
    )
    with pytest.raises(BadWidths, match=r"expects conv1\.weight of shape .* found nothing"):
        act(CASES["sequence"].build(), graph)


@pytest.mark.parametrize("units", [[0.5], torch.ones(8, dtype=torch.uint8), [[1], [2]], [-1], 3, [8]])
def test_units_are_a_sequence_of_integers_or_a_mask(units: Any) -> None:
    net, _, graph = traced("chain")
    mask_channels_(net, graph, {"conv1": (1, 2)})
    assert live_masks(net, graph)[0].tolist() == [True, False, False, True, True, True, True, True]
    with pytest.raises(
        BadWidths, match=r"units of group 'conv1' must be integers from 0 to 7, or a boolean mask of length 8"
    ):
        mask_channels_(net, graph, {"conv1": units})


# ---------------------------------------------------------------- optimizers

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd with momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5),
}


def step(net: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor) -> None:
    optimizer.zero_grad()
    net(inputs).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_slim_optimizer_continues_like_the_dense_one(name: str) -> None:
    net, inputs, _ = traced("residual")
    net.double().eval()  # in train mode a bias before a batch norm has only noise as gradient, which Adam amplifies
    graph = trace_channels(net, inputs.double(), verify=False)
    optimizer = OPTIMIZERS[name](net.parameters())
    for _ in range(3):
        step(net, optimizer, inputs.double())
    dead = {"stem": torch.tensor([1, 6]), "conv1": torch.tensor([0, 3])}
    mask_channels_(net, graph, dead)
    small = slim(net, graph)
    new = slim_optimizer(optimizer, net, small, graph)
    assert type(new) is type(optimizer)
    # One more step of both. Masked slices of the dense network may change, and are removed before comparing.
    for one, its in ((net, optimizer), (small, new)):
        step(one, its, inputs.double())
    mask_channels_(net, graph, dead)
    expected = slim(net, graph).state_dict()
    for key, value in small.state_dict().items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12)


def test_masked_channels_that_stay_keep_their_state() -> None:
    net, inputs, graph = traced("residual")
    optimizer = torch.optim.Adam(net.parameters())
    step(net, optimizer, inputs)
    mask_channels_(net, graph, {"conv1": torch.tensor([0, 2, 3])})
    small = slim(net, graph, 4)
    new = slim_optimizer(optimizer, net, small, graph, 4)
    kept = [0, 1, 4, 5]  # 3 live channels and the first masked one
    assert torch.equal(new.state[small.conv1.weight]["exp_avg"], optimizer.state[net.conv1.weight]["exp_avg"][kept])
    step(small, new, inputs)


def test_settings_of_each_parameter_group_are_kept() -> None:
    net, inputs, graph = traced("chain")
    optimizer = torch.optim.SGD(
        [{"params": net.conv1.parameters(), "lr": 0.5}, {"params": [net.conv2.weight], "momentum": 0.9}], lr=0.1
    )
    step(net, optimizer, inputs)
    small = slim(net, graph)
    new = slim_optimizer(optimizer, net, small, graph)
    assert [(g["lr"], g["momentum"], len(g["params"])) for g in new.param_groups] == [(0.5, 0, 2), (0.1, 0.9, 1)]
    assert new.param_groups[1]["params"][0] is small.conv2.weight


def test_parameter_names_are_kept() -> None:
    net, inputs, graph = traced("chain")
    optimizer = torch.optim.Adam(net.named_parameters())
    step(net, optimizer, inputs)
    new = slim_optimizer(optimizer, net, slim(net, graph), graph)
    assert new.param_groups[0]["param_names"] == [name for name, _ in net.named_parameters()]


def slim_chain(optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Any, ...]:
    net, inputs, graph = traced("chain")
    optimizer = optimizer_of(net)
    step(net, optimizer, inputs)
    mask_channels_(net, graph, {"conv1": [0, 2, 3]})
    return optimizer, net, slim(net, graph), graph, inputs


def test_defaults_are_kept() -> None:
    optimizer, net, small, graph, _ = slim_chain(lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    new = slim_optimizer(optimizer, net, small, graph)
    new.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    assert (new.param_groups[1]["lr"], new.param_groups[1]["momentum"]) == (0.1, 0.9)


def test_the_optimizer_inside_a_solver_is_slimmed() -> None:
    net, inputs, graph = traced("chain")
    solver = EccSolver(net, graph, counted_cost(graph, "macs"), "50%", 4, lr=1e-2)
    for _ in range(4):
        step(net, solver, inputs)
    small = slim(net, graph)
    new = slim_optimizer(solver, net, small, graph)
    assert type(new) is torch.optim.Adam
    step(small, new, inputs)


def test_state_that_cannot_be_sliced_is_refused() -> None:
    optimizer, net, small, graph, _ = slim_chain(lambda net: torch.optim.Adafactor(net.parameters()))
    with pytest.raises(BadWidths, match=r"Adafactor keeps row_var of conv\d\.weight in another shape"):
        slim_optimizer(optimizer, net, small, graph)
    optimizer, net, small, graph, _ = slim_chain(lambda net: torch.optim.AdamW(net.parameters()))
    with pytest.raises(
        BadWidths, match=r"conv1\.weight of the slim network has shape .* Use the same width_multiple as for slim"
    ):
        slim_optimizer(optimizer, net, small, graph, 4)

    class Needy(torch.optim.SGD):
        def __init__(self, parameters: Any, more: int) -> None:
            super().__init__(parameters, lr=0.1)

    optimizer, net, small, graph, _ = slim_chain(lambda net: Needy(net.parameters(), 1))
    with pytest.raises(BadWidths, match="a new Needy cannot be created from parameter groups alone"):
        slim_optimizer(optimizer, net, small, graph)
