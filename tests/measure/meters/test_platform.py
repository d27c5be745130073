from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from ecc.errors import BadWidths
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure.meters.platform import PLATFORMS, Platform
from ecc.zoo import AlexNet, ERFNet, MobileNetV1

Graphs = dict[str, ChannelGraph]

# Joules of the dense networks in the paper, batch 1: (Jetson TX2, GTX 1080 Ti).
PAPER = {"alexnet": (0.0498, 0.2339), "mobilenet": (0.0487, 0.2877), "erfnet": (1.3213, 1.9708)}
BUILDERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "alexnet": (AlexNet, (1, 3, 224, 224)),
    "mobilenet": (MobileNetV1, (1, 3, 224, 224)),
    "erfnet": (ERFNet, (1, 3, 512, 1024)),
}


@pytest.fixture(scope="module")
def graphs() -> Graphs:
    found = {}
    for name, (build, shape) in BUILDERS.items():
        with torch.device("meta"):  # shapes are all that is needed
            net, example = build(), torch.empty(shape)
        found[name] = trace_channels(net, example, verify=False)
    return found


@pytest.fixture(scope="module")
def small() -> ChannelGraph:
    convolutions = (nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 7, 1))
    net = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(28, 5))
    return trace_channels(net, torch.randn(1, 3, 2, 2), verify=False)


# --- what the paper measured -------------------------------------------------------------------------


def test_dense_networks_use_the_energy_of_the_paper(graphs: Graphs) -> None:
    """Many small kernels are cheap on a small GPU and expensive on a large one that waits for its host."""
    for network, expected in PAPER.items():
        for name, joules in zip(("jetson-tx2", "gtx-1080-ti"), expected, strict=True):
            assert Platform(name).cost(graphs[network], {}).joules == pytest.approx(joules, rel=0.006)


def test_the_authors_fit_for_alexnet_is_reproduced(graphs: Graphs) -> None:
    """Their constant term is separate from their layers, so our energy per kernel is subtracted first."""
    graph, platform = graphs["alexnet"], Platform("jetson-tx2")
    widths = graph.widths()
    per_kernel = platform.constants.joules_per_kernel
    joules = [reading.joules - per_kernel for reading in platform.per_layer(graph, {})]
    macs = graph.costs.macs_per_layer(widths).tolist()
    weights = graph.costs.weight_bytes_per_layer(widths).tolist()
    samples = list(zip(graph.layers, joules, macs, weights, strict=True))
    per_mac = [1e12 * j / m for layer, j, m, _ in samples if layer.kind == "conv"]
    per_byte = [1e12 * j / w for layer, j, _, w in samples if layer.kind == "linear"]
    assert (len(per_mac), len(per_byte)) == (5, 3)
    assert all(31.8 <= value <= 34.9 for value in per_mac)
    assert all(107 <= value <= 119.5 for value in per_byte)
    assert 1e-3 <= per_kernel * len(graph.layers) <= 2.5e-3  # theirs, with all small kernels: 2.48 mJ


def test_eyeriss_follows_from_the_publications(graphs: Graphs) -> None:
    eyeriss = PLATFORMS["eyeriss"]
    assert eyeriss.joules_per_mac == pytest.approx(12.0e-12, rel=0.01)
    assert eyeriss.joules_per_weight_byte == pytest.approx(206 / 2 * eyeriss.joules_per_mac / 6)
    graph, joules = graphs["alexnet"], {"conv": 0.0, "linear": 0.0, "elementwise": 0.0}
    for layer, reading in zip(graph.layers, Platform("eyeriss").per_layer(graph, {}), strict=True):
        joules[layer.kind] = joules.get(layer.kind, 0.0) + reading.joules
    assert joules["conv"] == pytest.approx(0.0092, rel=0.05)  # chip, 7.9 mJ, and what convolutions fetch from DRAM
    assert joules["linear"] > 2 * joules["conv"]  # batch 1: every weight is fetched for one use
    assert joules["elementwise"] == 0  # fused with the convolution


# --- the formula, by hand ----------------------------------------------------------------------------


def by_hand(platform: Platform, macs: float, weight_bytes: float, activation_bytes: float) -> tuple[float, float]:
    c = platform.constants
    compute = 2 * macs / (c.peak_share * c.peak_flops)
    seconds = max(c.launch_seconds, compute, (weight_bytes + activation_bytes) / (c.bandwidth_share * c.bandwidth))
    moved = c.joules_per_weight_byte * weight_bytes + c.joules_per_activation_byte * activation_bytes
    return c.joules_per_mac * macs + moved + c.joules_per_kernel + c.static_watts * seconds, seconds


@pytest.mark.parametrize("name", ["jetson-tx2", "gtx-1080-ti"])
def test_a_linear_layer_by_hand(name: str) -> None:
    """Launch-bound at one input, bandwidth-bound at 2,000 outputs, compute-bound at a batch of 4,000."""
    platform = Platform(name)
    bound = set()
    for inputs, outputs, batch in [(8, 4, 1), (1500, 2000, 1), (1500, 2000, 4000)]:
        net = nn.Sequential(nn.Linear(inputs, outputs, bias=False))
        graph = trace_channels(net, torch.empty(batch, inputs, device="meta"), verify=False)
        (got,) = platform.per_layer(graph, {})
        macs, activations = batch * inputs * outputs, 4 * batch * (inputs + outputs)
        expected = by_hand(platform, macs, 4 * inputs * outputs, activations)
        assert (got.joules, got.seconds) == pytest.approx(expected, rel=1e-12)
        assert platform.cost(graph, {}) == got
        compute = 2 * macs / (platform.constants.peak_share * platform.constants.peak_flops)
        launch = got.seconds == platform.constants.launch_seconds
        bound.add("launch" if launch else "compute" if got.seconds == compute else "memory")
    assert bound == {"launch", "memory", "compute"}


def test_eyeriss_stores_two_bytes_and_fuses_norm_and_activation(small: ChannelGraph) -> None:
    platform, widths, costs = Platform("eyeriss"), small.widths(), small.costs
    counts = (costs.macs_per_layer, costs.weight_bytes_per_layer, costs.activation_bytes_per_layer)
    layers = zip(small.layers, *(count(widths).tolist() for count in counts), strict=True)
    for (layer, m, w, a), got in zip(layers, platform.per_layer(small, {}), strict=True):
        expected = (0, 0) if layer.kind in ("norm", "elementwise") else by_hand(platform, m, w / 2, a / 2)
        assert (got.joules, got.seconds) == pytest.approx(expected, rel=1e-12)


def test_other_widths_are_full_and_wrong_ones_are_refused(small: ChannelGraph) -> None:
    platform, name = Platform("jetson-tx2"), small.prunable[0].name
    assert platform.cost(small, {}) == platform.cost(small, small.full_widths)
    assert platform.cost(small, {name: 3}) == platform.cost(small, {**small.full_widths, name: 3})
    with pytest.raises(BadWidths, match="outside 1"):
        platform.cost(small, {name: 99})
    with pytest.raises(BadWidths, match="no channel group"):
        platform.truth(small, {"nowhere": 1})


# --- tiles and noise ---------------------------------------------------------------------------------


def test_tiles_round_widths_up(small: ChannelGraph) -> None:
    name = next(group.name for group in small.prunable if group.width == 10)
    platform, smooth = Platform("jetson-tx2", tile=4), Platform("jetson-tx2")
    joules = {width: platform.cost(small, {name: width}).joules for width in range(1, 11)}
    assert joules[1] == joules[2] == joules[3] == joules[4] < joules[5] == joules[8] < joules[9] == joules[10]
    assert Platform("jetson-tx2", tile=1).cost(small, {name: 7}) == smooth.cost(small, {name: 7})
    assert joules[9] > smooth.cost(small, {name: 10}).joules  # 10 is padded to 12


def test_noise_depends_on_seed_widths_and_repeat_alone(small: ChannelGraph) -> None:
    name = small.prunable[0].name
    platform = Platform("jetson-tx2", noise=0.03, seed=1)
    first = platform.cost(small, {name: 3})
    platform.cost(small, {name: 4})
    assert platform.cost(small, {name: 3}, repeat=0) == first
    assert Platform("jetson-tx2", noise=0.03, seed=1).cost(small, {**small.full_widths, name: 3}) == first
    others = [
        platform.cost(small, {name: 3}, repeat=1),
        Platform("jetson-tx2", noise=0.03, seed=2).cost(small, {name: 3}),
        platform.truth(small, {name: 3}),
    ]
    assert len({first, *others}) == 4


# --- description -------------------------------------------------------------------------------------
