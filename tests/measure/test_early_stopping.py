from __future__ import annotations

import numpy as np
import pytest
import torch

from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Profile
from ecc.measure.design import sample_widths
from ecc.measure.early_stopping import MIN_SAMPLES, EarlyStop, _features, check_points, quick_error
from ecc.zoo.digits import DigitsNet
from measure.profile_cases import header, sample, small_graph

COEFFICIENTS = np.array([2e-3, 3e-9, 5e-9, 7e-9, 11e-9])


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    return trace_channels(DigitsNet(), torch.ones(1, 1, 8, 8), verify=False)


def profile_with(
    graph: ChannelGraph, count: int, noise: float = 0.0, coefficients: np.ndarray = COEFFICIENTS
) -> Profile:
    networks = sample_widths(graph, count)
    joules = _features(graph, list(networks)) @ coefficients
    joules *= np.exp(noise * np.random.RandomState(0).standard_normal(count))
    samples = [sample(i, float(j), tuple(n.values())) for i, (n, j) in enumerate(zip(networks, joules, strict=True))]
    groups, full = zip(*((group.name, group.width) for group in graph.prunable), strict=True)
    return Profile(header(groups=groups, full_widths=full, structure=graph.structure), tuple(samples))


def test_features_are_counted_from_the_graph(graph: ChannelGraph) -> None:
    dense, thin = _features(graph, [graph.full_widths, {group.name: 1 for group in graph.prunable}])
    assert dense[0] == thin[0] == 1
    assert dense[1] + dense[2] == float(graph.macs())
    assert dense[2] == 16 * 9 * 64  # the depthwise convolution on 8x8 pixels
    assert dense[3:].tolist() == [float(graph.activation_bytes()), float(graph.weight_bytes())]
    assert (thin[1:] < dense[1:]).all()


def test_the_error_of_the_quick_fit_is_the_noise_of_the_samples(graph: ChannelGraph) -> None:
    exact = quick_error(graph, profile_with(graph, 30))
    assert exact is not None
    assert exact < 1e-6
    assert quick_error(graph, profile_with(graph, 150, noise=0.02)) == pytest.approx(0.02 * np.sqrt(2 / np.pi), rel=0.2)
    negative = quick_error(graph, profile_with(graph, 60, coefficients=COEFFICIENTS * [1, -1, 1, 1, 0]))
    assert negative is not None
    assert negative > 1e-3  # coefficients are not negative
    assert quick_error(graph, profile_with(graph, 9)) is None
    equal = Profile(header(), tuple(sample(i, 1.0) for i in range(12)))
    assert quick_error(small_graph(), equal) == pytest.approx(0.0, abs=1e-9)


LOW = (70, "the error of a quick fit is 1.80%, below 2.00%, with 70 samples")
FLAT = (90, "the error of a quick fit no longer improves: 6.00% with 40 samples, 5.71% with 90")


@pytest.mark.parametrize(
    ("errors", "samples", "stopped"),
    [
        ([0.01, 0.01, 0.01, 0.01, 0.03, 0.019, 0.018, 0.01], 80, LOW),  # below the target twice
        ([0.001] * 8, MIN_SAMPLES, None),
        ([0.001] * 8, 80, (50, "the error of a quick fit is 0.10%, below 2.00%, with 50 samples")),
        ([0.2, 0.15, 0.1, 0.060, 0.059, 0.061, 0.058, 0.060, 0.0571, 0.06], 100, FLAT),
        ([0.2 * 0.93**i for i in range(12)], 120, None),  # still falling
        ([None] * 12, 120, None),
    ],
)
def test_a_profile_stops_when_its_error_is_low_or_no_longer_improves(
    errors: list[float | None], samples: int, stopped: tuple[int, str] | None
) -> None:
    def new_stop() -> EarlyStop:
        return EarlyStop(small_graph(), 0.02, lambda _, profile: errors[len(profile.design_samples) // 10 - 1])

    stop, whole, found = new_stop(), Profile(header(), tuple(sample(i) for i in range(samples))), None
    for count in range(1, samples + 1):
        if stop.is_due(count) and (reason := stop.reason(whole.head(count))) is not None:
            found = (count, reason)
            break
    assert found == stopped
    if stopped is not None:  # a new check, as after an interruption, decides the same
        assert new_stop().reason(whole.head(stopped[0])) == stopped[1]


def test_without_a_target_the_error_is_only_reported(graph: ChannelGraph) -> None:
    stop = EarlyStop(graph, None)
    assert stop.reason(profile_with(graph, 9)) is None
    assert stop.error is None
    assert stop.reason(profile_with(graph, 120)) is None
    assert stop.error is not None


def test_the_error_is_checked_every_ten_samples_and_rarely_in_large_profiles() -> None:
    assert check_points(9) == []
    assert check_points(35) == [10, 20, 30]
    assert check_points(240)[-3:] == [200, 220, 240]
    assert len(check_points(10_000)) < 70
