from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from ecc.errors import BadFile, BadMeasurement, BadWidths, EccError
from ecc.measure import (
    Analytic,
    Declared,
    Design,
    Estimated,
    Measured,
    MeasureSettings,
    Meter,
    MeterInfo,
    Profile,
    Provenance,
    Reading,
)
from ecc.measure.meters.replay import Replay
from measure.profile_cases import header, reference, sample, small_graph

GRAPH = small_graph()  # groups `first` of 16 and `second` of 12 channels
RECORDING = (
    reference(10.0, seconds=1.0),
    sample(0, 4.0, (6, 5), seconds=0.4),
    *(
        sample(1, joules, (1, 1), round=r, seconds=s)
        for r, (joules, s) in enumerate([(1, 0.1), (1.2, 0.1), (1.1, 0.2)])
    ),
    reference(10.2, seconds=1.0),
)


def recorded(*samples: Any, provenance: Provenance | None = None) -> Profile:
    info = MeterInfo(
        name="nvml",
        device="NVIDIA H200",
        device_id="GPU-8f3a",
        provenance=provenance or Measured(),
        scope="board",
        covers=("cuda",),
        notes=("counts all processes",),
    )
    settings = MeasureSettings(runner="eager")
    return Profile(header(meter=info, device_type="cuda", settings=settings, design=Design(samples=2)), samples)


def test_recorded_numbers_are_returned_without_drift_and_rounds() -> None:
    replay = Replay(recorded(*RECORDING), "h200.profile")
    assert isinstance(replay, Analytic)
    assert not isinstance(replay, Meter)
    assert replay.cost(GRAPH, {"first": 6, "second": 5}) == Reading(4.0, 0.4)
    assert replay.cost(GRAPH, {"first": 1, "second": 1}) == Reading(1.1, 0.1)  # median over its rounds
    assert replay.cost(GRAPH, {}) == Reading(10.1, 1.0)  # the dense reference
    # A dense network in the design is used before the reference.
    assert Replay(recorded(reference(10.0), sample(0, 10.1, (16, 12))), "x").cost(GRAPH, {}).joules == 10.1
    # References rise by 2 % over the recording; a network measured at the end is returned as in its middle.
    rising = [reference(10 * 1.001**k) for k in range(21)]
    replay = Replay(recorded(*rising, sample(0, 4 * 1.001**20, (6, 5))), "x")
    assert replay.cost(GRAPH, {"first": 6, "second": 5}).joules == pytest.approx(4 * 1.001**10)


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        (
            {"first": 7, "second": 5},
            "h200.profile has 3 width configurations, but not this one. The nearest is sample 0 (first: 6 instead of "
            "7). Use recorded widths, or measure on the device.",
        ),
        ({"second": 11}, "the dense reference (second: 12 instead of 11)"),
        ({"first": 17}, "outside 1"),
    ],
)
def test_other_widths_are_refused_with_the_nearest(widths: dict[str, int], message: str) -> None:
    with pytest.raises(BadWidths, match=re.escape(message)):
        Replay(recorded(*RECORDING), "h200.profile").cost(GRAPH, widths)


@pytest.mark.parametrize(
    ("samples", "error", "message"),
    [
        ((), BadFile, "x contains no samples"),
        (tuple(reference(joules) for joules in (10.0, 11.0, 12.0)), BadMeasurement, "varied by"),
    ],
)
def test_an_empty_or_unsteady_recording_is_refused(samples: Any, error: type[EccError], message: str) -> None:
    with pytest.raises(error, match=message):
        Replay(recorded(*samples), "x")


@pytest.mark.parametrize(
    ("provenance", "label"),
    [
        (Measured(), "measured (replayed from h200.profile)"),
        (Measured("on-chip model"), "measured (on-chip model, replayed from h200.profile)"),
        (Measured("replayed from first.profile"), "measured (replayed from first.profile)"),
        (Estimated("a table"), "estimated"),
        (Declared(15), "CPU time x declared 15 W"),
    ],
)
def test_the_provenance_is_kept_and_marked_as_replay(provenance: Provenance, label: str) -> None:
    made = recorded(*RECORDING, provenance=provenance)
    info = Replay(made, "h200.profile").describe()
    assert type(info.provenance) is type(provenance)
    assert (info.label, info.name, info.reads) == (label, "replay", "replay of h200.profile")
    assert (info.device, info.device_id, info.scope) == ("NVIDIA H200", "GPU-8f3a", "board")
    assert info.covers == ()  # nothing runs
    assert info.notes == ("recorded by nvml (energy counter) on cuda, batch 2, eager, fp32", "counts all processes")
    computed = replace(made, header=replace(made.header, device_type=None, settings=None))
    assert Replay(computed, "x").describe().notes[0] == "recorded by nvml (energy counter), batch 2"
