from __future__ import annotations

import numpy as np
import pytest
import torch

from ecc.errors import BadMeasurement
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import Profile
from ecc.measure.design import design
from ecc.measure.early_stopping import MIN_SAMPLES, EarlyStop, features, looks, parse_share, quick_error
from ecc.zoo.digits import DigitsNet
from measure.profile_cases import header, sample, small_graph

PRICES = np.array([2e-3, 3e-9, 5e-9, 7e-9, 11e-9])


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    return trace_channels(DigitsNet(), torch.ones(1, 1, 8, 8), verify=False)


def profile_with(graph: ChannelGraph, count: int, noise: float = 0.0, coefficients: np.ndarray = PRICES) -> Profile:
    networks = design(graph, count)
    joules = features(graph, list(networks)) @ coefficients
    joules *= np.exp(noise * np.random.RandomState(0).standard_normal(count))
    samples = [sample(i, float(j), tuple(n.values())) for i, (n, j) in enumerate(zip(networks, joules, strict=True))]
    groups = tuple(group.name for group in graph.prunable)
    full = tuple(group.width for group in graph.prunable)
    return Profile(header(groups=groups, full_widths=full), tuple(samples))


# ---------------------------------------------------------------- the quick fit


def test_features_are_counted_from_the_graph(graph: ChannelGraph) -> None:
    dense, thin = features(graph, [graph.full_widths, {group.name: 1 for group in graph.prunable}])
    assert dense[0] == thin[0] == 1
    assert dense[1] + dense[2] == float(graph.macs())
    assert dense[2] == 16 * 9 * 64  # the depthwise convolution on 8x8 pixels
    assert dense[3:].tolist() == [float(graph.activation_bytes()), float(graph.weight_bytes())]
    assert (thin[1:] < dense[1:]).all()


def test_what_is_made_of_its_terms_is_learnt(graph: ChannelGraph) -> None:
    error = quick_error(graph, profile_with(graph, 30))
    assert error is not None
    assert error < 1e-6


def test_noise_cannot_be_learnt(graph: ChannelGraph) -> None:
    error = quick_error(graph, profile_with(graph, 150, noise=0.02))
    assert error == pytest.approx(0.02 * np.sqrt(2 / np.pi), rel=0.2)


def test_prices_are_not_negative(graph: ChannelGraph) -> None:
    falling = PRICES * [1, -1, 1, 1, 0]
    error = quick_error(graph, profile_with(graph, 60, coefficients=falling))
    assert error is not None
    assert error > 1e-3


def test_a_few_rows_teach_nothing(graph: ChannelGraph) -> None:
    assert quick_error(graph, profile_with(graph, 9)) is None


def test_equal_widths_everywhere_do_not_divide_by_zero() -> None:
    samples = tuple(sample(i, 1.0) for i in range(12))
    assert quick_error(small_graph(), Profile(header(), samples)) == pytest.approx(0.0, abs=1e-9)


# ---------------------------------------------------------------- early stop


def told(
    graph: ChannelGraph, errors: list[float | None], target_error: float | None, samples: int
) -> tuple[int, str] | None:
    """The errors at 10, 20, ... samples; when it stops, and why."""
    stop = EarlyStop(graph, target_error, lambda _, profile: errors[len(profile.design_samples) // 10 - 1])
    profile = profile_with(graph, samples)
    for count in range(1, samples + 1):
        if stop.is_due(count):
            reason = stop.reason(profile.first(count))
            if reason is not None:
                # Asked once only, as after an interruption, it says the same.
                again = EarlyStop(graph, target_error, lambda _, profile: errors[len(profile.design_samples) // 10 - 1])
                assert again.reason(profile.first(count)) == reason
                return count, reason
    return None


def test_it_stops_once_the_error_is_low_twice(graph: ChannelGraph) -> None:
    low = told(graph, [0.01, 0.01, 0.01, 0.01, 0.03, 0.019, 0.018, 0.01], 0.02, 80)
    assert low == (70, "the error of the fit is 1.80%, below 2.00%, with 70 networks")


def test_it_never_stops_before_there_are_enough_rows(graph: ChannelGraph) -> None:
    assert told(graph, [0.001] * 8, 0.02, MIN_SAMPLES) is None
    assert told(graph, [0.001] * 8, 0.02, 80) is not None


def test_it_stops_when_more_rows_do_not_help(graph: ChannelGraph) -> None:
    flat = told(graph, [0.2, 0.15, 0.1, 0.060, 0.059, 0.061, 0.058, 0.060, 0.0571, 0.06], 0.02, 100)
    assert flat == (90, "the error of the fit has stopped improving: 6.00% with 40 networks, 5.71% with 90")


def test_it_goes_on_while_the_error_falls(graph: ChannelGraph) -> None:
    assert told(graph, [0.2 * 0.93**i for i in range(12)], 0.02, 120) is None


def test_it_goes_on_while_nothing_is_known(graph: ChannelGraph) -> None:
    assert told(graph, [None] * 12, 0.02, 120) is None


def test_without_a_target_it_only_looks(graph: ChannelGraph) -> None:
    stop = EarlyStop(graph, None)
    assert stop.reason(profile_with(graph, 9)) is None
    assert stop.error is None
    assert stop.reason(profile_with(graph, 120)) is None
    assert stop.error is not None


def test_it_looks_every_ten_rows_and_more_rarely_at_many() -> None:
    assert looks(9) == []
    assert looks(35) == [10, 20, 30]
    assert looks(240)[-3:] == [200, 220, 240]
    assert len(looks(10_000)) < 70
    stop = EarlyStop(small_graph(), None, lambda *_: 0.5)
    assert not stop.is_due(9)
    assert stop.is_due(10)
    stop.reason(Profile(header(), tuple(sample(i) for i in range(10))))
    assert not stop.is_due(19)
    assert stop.is_due(20)


@pytest.mark.parametrize(("text", "share"), [("2%", 0.02), ("0.02", 0.02), (" 2.5 %", 0.025)])
def test_shares_are_read(text: str, share: float) -> None:
    assert parse_share(text) == pytest.approx(share)


@pytest.mark.parametrize("text", ["", "%", "two", "2%%"])
def test_what_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(BadMeasurement, match=r"is not a share; write it as 2% or 0\.02"):
        parse_share(text)
