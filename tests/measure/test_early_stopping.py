from __future__ import annotations

import numpy as np
import pytest
import torch

from ecc.errors import BadMeasurement
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Profile
from ecc.measure.design import sample_widths
from ecc.measure.early_stopping import MIN_SAMPLES, EarlyStop, _features, check_points, parse_share, quick_error
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
    groups = tuple(group.name for group in graph.prunable)
    full = tuple(group.width for group in graph.prunable)
    return Profile(header(groups=groups, full_widths=full, structure=graph.structure), tuple(samples))


# --- the quick fit ---


def test_features_are_counted_from_the_graph(graph: ChannelGraph) -> None:
    dense, thin = _features(graph, [graph.full_widths, {group.name: 1 for group in graph.prunable}])
    assert dense[0] == thin[0] == 1
    assert dense[1] + dense[2] == float(graph.macs())
    assert dense[2] == 16 * 9 * 64  # the depthwise convolution on 8x8 pixels
    assert dense[3:].tolist() == [float(graph.activation_bytes()), float(graph.weight_bytes())]
    assert (thin[1:] < dense[1:]).all()


def test_energy_of_the_five_terms_is_fitted_exactly(graph: ChannelGraph) -> None:
    error = quick_error(graph, profile_with(graph, 30))
    assert error is not None
    assert error < 1e-6


def test_the_error_is_the_noise_of_the_samples(graph: ChannelGraph) -> None:
    error = quick_error(graph, profile_with(graph, 150, noise=0.02))
    assert error == pytest.approx(0.02 * np.sqrt(2 / np.pi), rel=0.2)


def test_coefficients_are_not_negative(graph: ChannelGraph) -> None:
    falling = COEFFICIENTS * [1, -1, 1, 1, 0]
    error = quick_error(graph, profile_with(graph, 60, coefficients=falling))
    assert error is not None
    assert error > 1e-3


def test_few_samples_give_no_error(graph: ChannelGraph) -> None:
    assert quick_error(graph, profile_with(graph, 9)) is None


def test_equal_widths_do_not_divide_by_zero() -> None:
    samples = tuple(sample(i, 1.0) for i in range(12))
    assert quick_error(small_graph(), Profile(header(), samples)) == pytest.approx(0.0, abs=1e-9)


# --- early stop ---


def stopped_at(
    graph: ChannelGraph, errors: list[float | None], target_error: float | None, samples: int
) -> tuple[int, str] | None:
    """When a profile with these errors at 10, 20, ... samples stops, and why."""
    stop = EarlyStop(graph, target_error, lambda _, profile: errors[len(profile.design_samples) // 10 - 1])
    profile = profile_with(graph, samples)
    for count in range(1, samples + 1):
        if stop.is_due(count):
            reason = stop.reason(profile.head(count))
            if reason is not None:
                # A new check, as after an interruption, decides the same.
                again = EarlyStop(graph, target_error, lambda _, profile: errors[len(profile.design_samples) // 10 - 1])
                assert again.reason(profile.head(count)) == reason
                return count, reason
    return None


def test_a_profile_stops_after_two_low_errors(graph: ChannelGraph) -> None:
    low = stopped_at(graph, [0.01, 0.01, 0.01, 0.01, 0.03, 0.019, 0.018, 0.01], 0.02, 80)
    assert low == (70, "the error of the fit is 1.80%, below 2.00%, with 70 samples")


def test_a_profile_has_a_minimum_of_samples(graph: ChannelGraph) -> None:
    assert stopped_at(graph, [0.001] * 8, 0.02, MIN_SAMPLES) is None
    assert stopped_at(graph, [0.001] * 8, 0.02, 80) is not None


def test_a_profile_stops_when_the_error_no_longer_improves(graph: ChannelGraph) -> None:
    flat = stopped_at(graph, [0.2, 0.15, 0.1, 0.060, 0.059, 0.061, 0.058, 0.060, 0.0571, 0.06], 0.02, 100)
    assert flat == (90, "the error of the fit no longer improves: 6.00% with 40 samples, 5.71% with 90")


def test_a_profile_continues_while_the_error_falls(graph: ChannelGraph) -> None:
    assert stopped_at(graph, [0.2 * 0.93**i for i in range(12)], 0.02, 120) is None


def test_a_profile_continues_without_an_error(graph: ChannelGraph) -> None:
    assert stopped_at(graph, [None] * 12, 0.02, 120) is None


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
    stop = EarlyStop(small_graph(), None, lambda *_: 0.5)
    assert not stop.is_due(9)
    assert stop.is_due(10)
    stop.reason(Profile(header(), tuple(sample(i) for i in range(10))))
    assert not stop.is_due(19)
    assert stop.is_due(20)


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), (" 2.5 %", 0.025)])
def test_fractions_are_parsed(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "two", "2%%"])
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(BadMeasurement, match=r"is not a fraction; write 2% or 0\.02"):
        parse_share(text)
