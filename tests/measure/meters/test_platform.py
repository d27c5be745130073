from __future__ import annotations

import math
import re
import statistics
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ecc.errors import BadWidths, NoMeter
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Analytic, Estimated, Meter, Reading
from ecc.measure.meters.platform import PLATFORMS, Platform, open_meter
from ecc.zoo import AlexNet, ERFNet, MobileNetV1

# Joules of the dense networks in the paper, batch 1: (Jetson TX2, GTX 1080 Ti).
PAPER = {"alexnet": (0.0498, 0.2339), "mobilenet": (0.0487, 0.2877), "erfnet": (1.3213, 1.9708)}
BUILDERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "alexnet": (AlexNet, (1, 3, 224, 224)),
    "mobilenet": (MobileNetV1, (1, 3, 224, 224)),
    "erfnet": (ERFNet, (1, 3, 512, 1024)),
}


@pytest.fixture(scope="module")
def graphs() -> dict[str, ChannelGraph]:
    found = {}
    for name, (build, shape) in BUILDERS.items():
        with torch.device("meta"):  # shapes are all that is needed
            net, example = build(), torch.empty(shape)
        found[name] = trace_channels(net, example, verify=False)
    return found


@pytest.fixture(scope="module")
def small() -> ChannelGraph:
    net = nn.Sequential(
        nn.Conv2d(3, 10, 3, padding=1),
        nn.BatchNorm2d(10),
        nn.ReLU(),
        nn.Conv2d(10, 7, 1),
        nn.Flatten(),
        nn.Linear(28, 5),
    )
    return trace_channels(net, torch.randn(1, 3, 2, 2), verify=False)


def thinner(graph: ChannelGraph, share: float) -> dict[str, int]:
    return {group.name: max(1, round(share * group.width)) for group in graph.prunable}


# --- what the paper measured ------------------------------------------------------------------------


@pytest.mark.parametrize("network", PAPER)
def test_dense_networks_use_the_energy_of_the_paper(graphs: dict[str, ChannelGraph], network: str) -> None:
    for name, joules in zip(("jetson-tx2", "gtx-1080-ti"), PAPER[network], strict=True):
        assert Platform(name).cost(graphs[network], {}).joules == pytest.approx(joules, rel=0.006)


def test_the_authors_fit_for_alexnet_is_reproduced(graphs: dict[str, ChannelGraph]) -> None:
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
    assert len(per_mac) == 5
    assert all(31.8 <= value <= 34.9 for value in per_mac)
    assert len(per_byte) == 3
    assert all(107 <= value <= 119.5 for value in per_byte)
    assert 1e-3 <= per_kernel * len(graph.layers) <= 2.5e-3  # theirs, with all small kernels: 2.48 mJ


def test_the_order_of_two_networks_depends_on_the_device_as_in_the_paper(graphs: dict[str, ChannelGraph]) -> None:
    """Many small kernels are cheap on a small GPU and expensive on a large one that waits for its host."""
    tx2, desktop = Platform("jetson-tx2"), Platform("gtx-1080-ti")
    assert tx2.cost(graphs["mobilenet"], {}).joules < tx2.cost(graphs["alexnet"], {}).joules
    assert desktop.cost(graphs["mobilenet"], {}).joules > desktop.cost(graphs["alexnet"], {}).joules


@pytest.mark.parametrize(
    ("name", "watts"), [("jetson-tx2", (3, 8)), ("gtx-1080-ti", (80, 250)), ("eyeriss", (0.1, 0.5))]
)
def test_power_is_plausible(graphs: dict[str, ChannelGraph], name: str, watts: tuple[float, float]) -> None:
    for graph in graphs.values():
        reading = Platform(name).cost(graph, {})
        assert watts[0] <= reading.joules / reading.seconds <= watts[1]


def test_eyeriss_constants_follow_from_the_publications() -> None:
    eyeriss = PLATFORMS["eyeriss"]
    assert eyeriss.joules_per_mac == pytest.approx(12.0e-12, rel=0.01)
    unit = eyeriss.joules_per_mac / 6
    assert eyeriss.joules_per_weight_byte == pytest.approx(206 / 2 * unit)


def test_on_eyeriss_fully_connected_layers_dominate_alexnet(graphs: dict[str, ChannelGraph]) -> None:
    graph, platform = graphs["alexnet"], Platform("eyeriss")
    joules = {"conv": 0.0, "linear": 0.0, "elementwise": 0.0}
    for layer, reading in zip(graph.layers, platform.per_layer(graph, {}), strict=True):
        joules[layer.kind] = joules.get(layer.kind, 0.0) + reading.joules
    assert joules["conv"] == pytest.approx(0.0092, rel=0.05)  # chip, 7.9 mJ, and what convolutions fetch from DRAM
    assert joules["linear"] > 2 * joules["conv"]  # batch 1: every weight is fetched for one use
    assert joules["elementwise"] == 0  # fused with the convolution


# --- the formula, by hand ---------------------------------------------------------------------------


def by_hand(platform: Platform, macs: float, weight_bytes: float, activation_bytes: float) -> Reading:
    c = platform.constants
    seconds = max(
        c.launch_seconds,
        2 * macs / (c.peak_share * c.peak_flops),
        (weight_bytes + activation_bytes) / (c.bandwidth_share * c.bandwidth),
    )
    joules = (
        c.joules_per_mac * macs
        + c.joules_per_weight_byte * weight_bytes
        + c.joules_per_activation_byte * activation_bytes
        + c.joules_per_kernel
        + c.static_watts * seconds
    )
    return Reading(joules, seconds)


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
        assert got.joules == pytest.approx(expected.joules, rel=1e-12)
        assert got.seconds == pytest.approx(expected.seconds, rel=1e-12)
        assert platform.cost(graph, {}) == got
        compute = 2 * macs / (platform.constants.peak_share * platform.constants.peak_flops)
        launch = got.seconds == platform.constants.launch_seconds
        bound.add("launch" if launch else "compute" if got.seconds == compute else "memory")
    assert bound == {"launch", "memory", "compute"}


def test_eyeriss_stores_two_bytes_and_fuses_norm_and_activation(small: ChannelGraph) -> None:
    platform = Platform("eyeriss")
    widths = small.widths()
    macs = small.costs.macs_per_layer(widths).tolist()
    weights = small.costs.weight_bytes_per_layer(widths).tolist()
    activations = small.costs.activation_bytes_per_layer(widths).tolist()
    layers = zip(small.layers, macs, weights, activations, strict=True)
    for (layer, m, w, a), got in zip(layers, platform.per_layer(small, {}), strict=True):
        expected = by_hand(platform, m, w / 2, a / 2)
        if layer.kind in ("norm", "elementwise"):
            expected = Reading(0, 0)
        assert (got.joules, got.seconds) == pytest.approx((expected.joules, expected.seconds), rel=1e-12)


def test_the_total_is_the_sum_of_the_layers(graphs: dict[str, ChannelGraph]) -> None:
    graph = graphs["mobilenet"]
    for name in PLATFORMS:
        platform, widths = Platform(name), thinner(graph, 0.4)
        layers = platform.per_layer(graph, widths)
        total = platform.truth(graph, widths)
        assert total.joules == math.fsum(layer.joules for layer in layers)
        assert total.seconds == math.fsum(layer.seconds for layer in layers)


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_thinner_network_costs_less(graphs: dict[str, ChannelGraph], name: str) -> None:
    graph, platform = graphs["mobilenet"], Platform(name)
    joules = [platform.cost(graph, thinner(graph, share)).joules for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert joules == sorted(joules)
    assert len(set(joules)) == 5


def test_other_widths_are_full_and_wrong_ones_are_refused(small: ChannelGraph) -> None:
    platform = Platform("jetson-tx2")
    name = small.prunable[0].name
    assert platform.cost(small, {}) == platform.cost(small, small.full_widths)
    assert platform.cost(small, {name: 3}) == platform.cost(small, {**small.full_widths, name: 3})
    with pytest.raises(BadWidths, match="outside 1"):
        platform.cost(small, {name: 99})
    with pytest.raises(BadWidths, match="no channel group"):
        platform.truth(small, {"nowhere": 1})


# --- tiles and noise --------------------------------------------------------------------------------


def test_tiles_round_widths_up(small: ChannelGraph) -> None:
    name = next(group.name for group in small.prunable if group.width == 10)
    platform = Platform("jetson-tx2", tile=4)
    joules = {width: platform.cost(small, {name: width}).joules for width in range(1, 11)}
    assert joules[1] == joules[2] == joules[3] == joules[4] < joules[5] == joules[8] < joules[9] == joules[10]
    smooth = Platform("jetson-tx2")
    assert Platform("jetson-tx2", tile=1).cost(small, {name: 7}) == smooth.cost(small, {name: 7})
    assert platform.cost(small, {name: 9}).joules > smooth.cost(small, {name: 10}).joules  # 10 is padded to 12


def test_noise_depends_on_seed_widths_and_repeat_alone(small: ChannelGraph) -> None:
    name = small.prunable[0].name
    platform = Platform("jetson-tx2", noise=0.03, seed=1)
    first = platform.cost(small, {name: 3})
    platform.cost(small, {name: 4})
    assert platform.cost(small, {name: 3}) == first
    assert Platform("jetson-tx2", noise=0.03, seed=1).cost(small, {**small.full_widths, name: 3}) == first
    assert platform.cost(small, {name: 3}, repeat=0) == first
    others = [
        platform.cost(small, {name: 3}, repeat=1),
        Platform("jetson-tx2", noise=0.03, seed=2).cost(small, {name: 3}),
        platform.truth(small, {name: 3}),
    ]
    assert len({first, *others}) == 4


def test_noise_has_the_given_standard_deviation(small: ChannelGraph) -> None:
    platform = Platform("gtx-1080-ti", noise=0.03, seed=5)
    truth = platform.truth(small, {})
    assert truth == Platform("gtx-1080-ti").cost(small, {})
    readings = [platform.cost(small, {}, repeat=k) for k in range(600)]
    logs = {
        "joules": [math.log(reading.joules / truth.joules) for reading in readings],
        "seconds": [math.log(reading.seconds / truth.seconds) for reading in readings],
    }
    for values in logs.values():
        assert statistics.fmean(values) == pytest.approx(0, abs=0.004)
        assert statistics.stdev(values) == pytest.approx(0.03, rel=0.1)
    assert abs(statistics.correlation(*logs.values())) < 0.1


# --- description -------------------------------------------------------------------------


@pytest.mark.parametrize("name", PLATFORMS)
def test_a_platform_is_an_estimate_and_not_a_meter(name: str) -> None:
    platform = Platform(name)
    assert isinstance(platform, Analytic)
    assert not isinstance(platform, Meter)
    info = platform.describe()
    assert isinstance(info.provenance, Estimated)
    assert info.label == "estimated"
    assert "20" in info.provenance.source  # a year: it cites something
    assert info.device_id == name
    assert platform.constants.skips_zeros == (name == "eyeriss")


def test_options_are_part_of_the_description() -> None:
    info = open_meter("jetson-tx2, noise=0.03,seed=1 ,tile=8").describe()
    assert info.device_id == "jetson-tx2,tile=8,noise=0.03,seed=1"
    assert any("multiples of 8" in note for note in info.notes)
    assert any("artificial noise" in note for note in info.notes)
    assert open_meter("jetson-tx2,seed=4").describe() == open_meter("jetson-tx2").describe()  # nothing is random then


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("", "no name given; give one of platform:jetson-tx2, platform:gtx-1080-ti, platform:eyeriss"),
        (
            "jetson-tx1",
            "'jetson-tx1' is unknown (did you mean 'jetson-tx2'?); known are jetson-tx2, gtx-1080-ti, eyeriss",
        ),
        ("tx2", "did you mean 'jetson-tx2'?"),
        ("1080", "did you mean 'gtx-1080-ti'?"),
        ("GTX_1080_Ti", "did you mean 'gtx-1080-ti'?"),
        ("abacus", "'abacus' is unknown; known are jetson-tx2"),
        ("jetson-tx2,tiles=8", "option 'tiles=8' is unknown; options are noise=0.03, seed=1 and tile=8"),
        ("jetson-tx2,tile", "give option tile once, as tile=NUMBER"),
        ("jetson-tx2,tile=4,tile=8", "give option tile once"),
        ("jetson-tx2,tile=many", "'tile=many' is not valid"),
        ("jetson-tx2,tile=0", "tile=0 is below 1"),
        ("jetson-tx2,noise=-1", "noise=-1 is outside 0..1"),
        ("jetson-tx2,noise=nan", "noise=nan is outside 0..1"),
    ],
)
def test_wrong_specs_are_refused(argument: str, message: str) -> None:
    with pytest.raises(NoMeter, match=re.escape(message)):
        open_meter(argument)
