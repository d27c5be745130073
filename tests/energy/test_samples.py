from __future__ import annotations

import math
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ecc.energy.samples import RESOURCES, samples_from_profile
from ecc.errors import BadFile, BadMeasurement
from ecc.measure import Profile, Sample
from energy.cases import computed
from measure.profile_cases import profile_of, reference, sample, small_graph

STEADY = (reference(2.0), sample(0, 0.5, seconds=0.1), sample(1, 0.7, (8, 6), seconds=0.2), reference(2.01))


def test_rows_become_widths_of_all_groups_and_values() -> None:
    samples = samples_from_profile(profile_of(*STEADY))
    assert samples.structure == small_graph().structure
    assert samples.widths.tolist() == [[4, 3, 4], [8, 6, 4], [16, 12, 4]]  # the head cannot be cut
    assert samples.values.tolist() == [0.5, 0.7, 2.005]
    assert samples.weights is not None
    assert samples.weights.tolist() == [1, 1, 2]  # the reference was measured twice
    assert len(samples) == 3


def test_seconds_are_taken_where_latency_is_asked_for() -> None:
    assert samples_from_profile(profile_of(*STEADY), "latency").values.tolist() == [0.1, 0.2, 1e-3]
    assert set(RESOURCES) == {"energy", "latency"}


def test_groups_are_found_by_name_whatever_their_order() -> None:
    rows = (sample(0, widths=(3, 4)),)
    samples = samples_from_profile(profile_of(*rows, groups=("second", "first"), full_widths=(12, 16)))
    assert samples.widths.tolist() == [[4, 3, 4]]


def test_the_dense_network_of_the_design_is_one_more_reference() -> None:
    samples = samples_from_profile(profile_of(reference(2.0), sample(0, 1.9, (16, 12)), reference(2.0)))
    assert samples.values.tolist() == [2.0]
    assert samples.weights is not None
    assert samples.weights.tolist() == [3]
    assert samples.is_dense.tolist() == [True]


@given(st.lists(st.floats(1.98, 2.02), min_size=1, max_size=9))
def test_the_reference_counts_once_as_its_median(joules: list[float]) -> None:
    samples = samples_from_profile(profile_of(sample(0), *map(reference, joules)))
    assert samples.values.tolist()[1:] == [statistics.median(joules)]


def test_rounds_are_combined_and_drift_is_divided_out() -> None:
    rows = [sample(0, joules, round=number) for number, joules in enumerate((1.0, 3.0, 1.1))]
    assert samples_from_profile(profile_of(*rows)).values.tolist() == [1.1]
    drifting: list[Sample] = []
    for number in range(11):
        warm = 1 + 0.004 * (number - 5)
        drifting += [reference(2 * warm), sample(number, 0.5 * warm)]
    assert samples_from_profile(profile_of(*drifting)).values[:-1] == pytest.approx([0.5] * 11, rel=0.004)


def test_shares_are_of_the_groups_that_can_be_cut() -> None:
    samples = samples_from_profile(profile_of(*STEADY))
    assert samples.mean_share.tolist() == [0.25, 0.5, 1.0]
    assert samples.is_dense.tolist() == [False, False, True]


def test_some_rows_are_taken_by_number_or_by_mask() -> None:
    samples = samples_from_profile(profile_of(*STEADY))
    for some in ([0, 2], np.array([0, 2]), np.array([True, False, True])):
        assert samples.take(some).values.tolist() == [0.5, 2.005]
        assert samples.take(some).widths.tolist() == [[4, 3, 4], [16, 12, 4]]


def test_a_profile_of_a_platform_has_all_its_rows() -> None:
    profile = computed("digits", "jetson-tx2")
    samples = samples_from_profile(profile)
    assert len(samples) == len(profile.design_samples)
    assert samples.is_dense.sum() == 1
    found = {tuple(widths) for widths in samples.widths.tolist()}
    for network in profile.corrected():
        assert tuple(profile.header.structure.widths(profile.named(network.widths)).tolist()) in found


# ---------------------------------------------------------------- what it refuses


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, -1.0])
@pytest.mark.parametrize("field", ["joules", "seconds"])
@pytest.mark.parametrize("resource", RESOURCES)
def test_a_row_that_is_no_measurement_is_refused_by_its_number(resource: str, field: str, value: float) -> None:
    bad = sample(17, **{field: value})
    said = rf"^row 17 of the profile has {value} {field}; it must be above 0\. Remove the row\.$"
    with pytest.raises(BadFile, match=said):
        samples_from_profile(profile_of(reference(2.0), sample(0), bad, sample(3), reference(2.0)), resource)


@pytest.mark.parametrize("value", [math.nan, 0.0, -1.0])
def test_a_reference_that_is_no_measurement_is_refused(value: float) -> None:
    with pytest.raises(BadFile, match=f"^the dense reference of the profile has {value} joules"):
        samples_from_profile(profile_of(reference(2.0), sample(0), reference(value), sample(1), reference(2.0)))


def test_one_bad_round_is_not_hidden_by_the_others() -> None:
    rounds = [sample(5, value, round=number) for number, value in enumerate((1.0, 1.1, math.nan, 1.2))]
    with pytest.raises(BadFile, match=r"^row 5 of the profile has nan joules"):
        samples_from_profile(profile_of(*rounds))


@pytest.mark.parametrize("widths", [(17, 3), (4, 0), (4, -1), (4,), (4, 3, 4)])
def test_widths_of_no_such_network_are_refused_by_their_row(widths: tuple[int, ...]) -> None:
    with pytest.raises(BadFile, match=r"^row 9 of the profile has widths \[.*\], outside 1\.\.\[16, 12\]"):
        samples_from_profile(profile_of(sample(0), sample(9, widths=widths)))


def test_a_row_that_stands_twice_is_refused_by_its_number() -> None:
    twice = profile_of(sample(0), sample(4), sample(4, round=1), sample(4, 1.1))
    with pytest.raises(BadFile, match=r"^row 4 of the profile stands there twice for round 0\. Remove one"):
        samples_from_profile(twice)


def test_an_unsteady_profile_is_refused_unless_allowed() -> None:
    unsteady = profile_of(reference(2.0), sample(0), reference(2.3), sample(1), reference(2.0))
    with pytest.raises(BadMeasurement, match=r"varied by 8\.2%"):
        samples_from_profile(unsteady)
    assert len(samples_from_profile(unsteady, allow_drift=True)) == 3


@pytest.mark.parametrize("resource", ["macs", "", "joules"])
def test_a_resource_that_no_profile_has_is_refused(resource: Any) -> None:
    with pytest.raises(BadFile, match=f"knows nothing of {resource!r}; it knows energy and latency"):
        samples_from_profile(profile_of(*STEADY), resource)


def test_a_profile_without_a_reference_has_its_rows_alone() -> None:
    profile = Profile(profile_of().header, (sample(0), sample(1)))
    assert len(samples_from_profile(profile)) == 2
