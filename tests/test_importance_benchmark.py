"""The criteria of channel importance that the benchmark takes from other publications."""

from __future__ import annotations

import importance
import pytest
import torch
from torch import nn

from ecc.graph import ChannelGraph, trace_channels


@pytest.fixture
def network() -> tuple[nn.Module, ChannelGraph]:
    torch.manual_seed(0)
    first, second = nn.Conv2d(2, 3, 1), nn.Conv2d(3, 4, 1, bias=False)
    model = nn.Sequential(first, nn.BatchNorm2d(3), nn.ReLU(), second)
    return model, trace_channels(model.eval(), torch.randn(2, 2, 4, 4))


def test_counts_and_lamp_are_relative_to_the_group(network: tuple[nn.Module, ChannelGraph]) -> None:
    _, graph = network
    (group,) = graph.prunable
    places = importance.all_of(graph, group)
    assert importance.equal_shares(graph)[places].tolist() == pytest.approx([1 / 3] * 3)
    norms = torch.zeros(graph.num_channel_ids - 1, dtype=torch.float64)
    norms[places] = torch.tensor([1.0, 4.0, 5.0], dtype=torch.float64)
    assert importance.lamp(graph, norms)[places].tolist() == pytest.approx([0.1, 4 / 9, 1.0])


def test_scales_of_batch_norms_need_one_in_every_group(network: tuple[nn.Module, ChannelGraph]) -> None:
    model, graph = network
    (group,) = graph.prunable
    assert isinstance(model[1], nn.BatchNorm2d)
    with torch.no_grad():
        model[1].weight.copy_(torch.tensor([0.5, -2.0, 1.0]))
    scales = importance.batch_norm_scales(model, graph)
    assert scales is not None
    assert scales[importance.all_of(graph, group)].tolist() == [0.5, 2.0, 1.0]
    plain = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)).eval()
    assert importance.batch_norm_scales(plain, trace_channels(plain, torch.randn(2, 2))) is None


def test_shares_of_squared_outputs_are_those_of_single_inputs(network: tuple[nn.Module, ChannelGraph]) -> None:
    model, graph = network
    (group,) = graph.prunable
    observed = importance.OutputShares(model, graph)
    x = torch.randn(5, 2, 4, 4)
    with torch.no_grad():
        model(x)
        hidden = model[:3](x)
        squares = [float(model[3](hidden * (torch.arange(3) == k).view(1, 3, 1, 1)).square().sum()) for k in range(3)]
    shares = observed.finish()[importance.all_of(graph, group)]
    assert shares.tolist() == pytest.approx([one / sum(squares) for one in squares], rel=1e-5)
    model(x)
    assert torch.equal(observed.finish()[importance.all_of(graph, group)], shares)  # nothing is observed any more
