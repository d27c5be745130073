from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from ecc.errors import BadFile, BadMeasurement, BadWidths, NoMeter
from ecc.graph import ChannelGraph, trace_channels
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
    ProfileHeader,
    Provenance,
    Reading,
    Sample,
    find_meter,
)
from ecc.measure.meters.replay import Replay, open_meter


@pytest.fixture(scope="module")
def graph() -> ChannelGraph:
    net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 9), nn.ReLU(), nn.Linear(9, 3))
    return trace_channels(net, torch.randn(2, 4), verify=False)


def header(graph: ChannelGraph, provenance: Provenance) -> ProfileHeader:
    info = MeterInfo(
        name="nvml",
        device="NVIDIA H200",
        device_id="GPU-8f3a",
        provenance=provenance,
        scope="board",
        covers=("cuda",),
        settle_seconds=0.1,
        notes=("counts all processes",),
    )
    return ProfileHeader.of(
        graph,
        torch.ones(2, 4),
        meter=info,
        device_type="cuda",
        settings=MeasureSettings(mode="eager"),
        design=Design(samples=2),
        environment={},
    )


def recorded(
    graph: ChannelGraph, provenance: Provenance | None = None, samples: tuple[Sample, ...] | None = None
) -> Profile:
    """Two networks, one of them in three rounds, and the dense reference before and after."""
    samples = samples or (
        Sample(widths=(12, 9), joules=10.0, seconds=1.0),
        Sample(index=0, widths=(6, 5), joules=4.0, seconds=0.4),
        Sample(index=1, widths=(1, 1), joules=1.0, seconds=0.1),
        Sample(index=1, widths=(1, 1), joules=1.2, seconds=0.1, round=1),
        Sample(index=1, widths=(1, 1), joules=1.1, seconds=0.2, round=2),
        Sample(widths=(12, 9), joules=10.2, seconds=1.0),
    )
    return Profile(header(graph, provenance or Measured()), samples)


def names(graph: ChannelGraph) -> tuple[str, str]:
    first, second = (group.name for group in graph.prunable)
    return first, second


# --- the numbers ------------------------------------------------------------------------------------


def test_recorded_numbers_are_returned(graph: ChannelGraph) -> None:
    replay, (first, second) = Replay(recorded(graph), "h200.profile"), names(graph)
    assert replay.cost(graph, {first: 6, second: 5}) == Reading(4.0, 0.4)
    assert replay.cost(graph, {first: 1, second: 1}) == Reading(1.1, 0.1)  # median over its rounds
    assert replay.cost(graph, {}) == Reading(10.1, 1.0)  # the dense reference
    assert replay.cost(graph, graph.full_widths) == Reading(10.1, 1.0)


def test_drift_of_the_recording_is_divided_out(graph: ChannelGraph) -> None:
    """References rise by 2 % over the recording; a network measured at the end comes back as in its middle."""
    samples = [Sample(widths=(12, 9), joules=10 * 1.001**k, seconds=1.0) for k in range(21)]
    last = Sample(index=0, widths=(6, 5), joules=4 * 1.001**20, seconds=0.4)
    replay, (first, second) = Replay(recorded(graph, samples=(*samples, last)), "x"), names(graph)
    assert replay.cost(graph, {first: 6, second: 5}).joules == pytest.approx(4 * 1.001**10)


def test_the_dense_network_of_the_design_counts_before_the_reference(graph: ChannelGraph) -> None:
    samples = (
        Sample(widths=(12, 9), joules=10.0, seconds=1.0),
        Sample(index=0, widths=(12, 9), joules=10.1, seconds=1.0),
    )
    assert Replay(recorded(graph, samples=samples), "x").cost(graph, {}).joules == 10.1


# --- what it refuses --------------------------------------------------------------------------------


def test_other_widths_are_refused_with_the_nearest(graph: ChannelGraph) -> None:
    replay, (first, second) = Replay(recorded(graph), "h200.profile"), names(graph)
    message = re.escape(
        f"h200.profile has 3 width configurations, but not this one. The nearest is sample 0 "
        f"({first}: 6 instead of 7). Use recorded widths, or measure on the device."
    )
    with pytest.raises(BadWidths, match=message):
        replay.cost(graph, {first: 7, second: 5})
    with pytest.raises(BadWidths, match=re.escape(f"the dense reference ({second}: 9 instead of 8)")):
        replay.cost(graph, {second: 8})
    with pytest.raises(BadWidths, match="outside 1"):
        replay.cost(graph, {first: 13})


def test_a_long_list_of_differences_is_shortened(graph: ChannelGraph) -> None:
    layers = [nn.Linear(4, 4) for _ in range(8)]
    deep = trace_channels(nn.Sequential(*layers), torch.randn(2, 4), verify=False)
    dense = Sample(index=0, widths=(4,) * 7, joules=1.0, seconds=1.0)
    replay = Replay(recorded(deep, samples=(dense,)), "x")
    with pytest.raises(BadWidths, match=r"sample 0 \((\S+: 4 instead of 3, ){3}\S+: 4 instead of 3 and 3 more\)\."):
        replay.cost(deep, {group.name: 3 for group in deep.prunable})


def test_another_network_is_refused(graph: ChannelGraph) -> None:
    other = trace_channels(nn.Sequential(nn.Linear(4, 12), nn.Linear(12, 3)), torch.randn(2, 4), verify=False)
    with pytest.raises(
        BadFile, match=f"recorded with network {graph.fingerprint}, and this one is {other.fingerprint}"
    ):
        Replay(recorded(graph), "x").cost(other, {})


def test_an_empty_or_unsteady_recording_is_refused(graph: ChannelGraph) -> None:
    empty = Profile(header(graph, Measured()), ())
    with pytest.raises(BadFile, match="x contains no samples"):
        Replay(empty, "x")
    samples = tuple(Sample(widths=(12, 9), joules=joules, seconds=1.0) for joules in (10.0, 11.0, 12.0))
    with pytest.raises(BadMeasurement, match="varied by"):
        Replay(recorded(graph, samples=samples), "x")


# --- what it says of itself -------------------------------------------------------------------------


def test_a_replay_is_not_a_meter(graph: ChannelGraph) -> None:
    replay = Replay(recorded(graph), "x")
    assert isinstance(replay, Analytic)
    assert not isinstance(replay, Meter)


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
def test_the_provenance_is_kept_and_marked_as_replay(graph: ChannelGraph, provenance: Provenance, label: str) -> None:
    info = Replay(recorded(graph, provenance), "h200.profile").describe()
    assert type(info.provenance) is type(provenance)
    assert info.label == label
    assert info.name == "replay"
    assert info.reads == "replay of h200.profile"
    assert (info.device, info.device_id, info.scope) == ("NVIDIA H200", "GPU-8f3a", "board")
    assert info.covers == ()  # nothing runs
    assert info.notes == ("recorded by nvml (energy counter) on cuda, batch 2, eager, fp32", "counts all processes")


def test_a_recording_of_an_estimate_has_no_settings(graph: ChannelGraph) -> None:
    profile = recorded(graph, Estimated("a table"))
    profile = replace(profile, header=replace(profile.header, device_type=None, settings=None))
    assert Replay(profile, "x").describe().notes[0] == "recorded by nvml (energy counter), batch 2"


# --- from the command line --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["h200.profile", "h200.profile.gz"])
def test_a_file_is_opened_by_name(graph: ChannelGraph, tmp_path: Path, name: str) -> None:
    recorded(graph).save(tmp_path / name)
    replay = find_meter(f"replay:{tmp_path / name}")
    assert isinstance(replay, Replay)
    assert replay.cost(graph, {}) == Reading(10.1, 1.0)
    assert replay.describe().label == f"measured (replayed from {name})"  # the name alone: folders are private


def test_a_file_that_cannot_be_replayed(graph: ChannelGraph, tmp_path: Path) -> None:
    with pytest.raises(NoMeter, match=r"no file given; give the profile to replay, such as replay:h200\.profile"):
        open_meter("")
    with pytest.raises(NoMeter, match=r"replay: cannot read .*missing\.profile: No such file"):
        open_meter(str(tmp_path / "missing.profile"))
    (tmp_path / "other").write_text("{}\n")
    with pytest.raises(NoMeter, match="is not a profile"):
        open_meter(str(tmp_path / "other"))
