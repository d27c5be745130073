"""Profiles: header, samples, correction, files, appending and merging."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import BadFile, BadMeasurement, option_names
from ecc.measure import (
    CounterProbe,
    Declared,
    Design,
    Measured,
    MeasureSettings,
    MeterInfo,
    Profile,
    ProfileHeader,
    Sample,
    merge_profiles,
    profile,
    sample_widths,
)
from ecc.measure.profile import header_conflict, header_line, parse_profile, sample_line
from ecc.measure.profile_writer import open_profile
from measure.profile_cases import EXAMPLE, FakeCosts, SmallNet, header, profile_of, reference, sample, small_graph

START = datetime(2026, 1, 1, tzinfo=timezone.utc)
SAMPLES = (reference(2.0), sample(1, 0.5), sample(0, 0.7, (16, 12)), reference(2.0))
PLAN = Design(kind="uniform", seed=3, width_multiple=8, samples=20, rounds=2, reference_every=5, shard=(3, 8))
METER = MeterInfo(name="nvml", device="GPU", device_id="GPU-1", provenance=Measured(), scope="board", covers=("cuda",))
SETTINGS = MeasureSettings(runner="cuda-graph", precision="tf32")
MEASURED = header(
    meter=METER,
    device_type="cuda",
    settings=SETTINGS,
    design=PLAN,
    counter=CounterProbe(moves=True, tick_seconds=0.1, read_seconds=1e-4, idle_watts=80.0),
    environment={"torch": "2.9", "python": "3.12", "ecc": "1", "driver": "550"},
    created="2026-01-01T00:00:00.000+00:00",
)
STATE: dict[str, Any] = {
    "temperature_celsius": -3.5,
    "clock_mhz": 1980.0,
    "power_capped": False,
    "host_bound_share": 0.0,
}
QUALITY: dict[str, Any] = {"relative_ci": 0.01, "edge_error": 0.002, "ticks": 5, "measured_at": START}
FULL_SAMPLE = sample(3, 0.1, round=1, session=2, seconds=0.2, **QUALITY, **STATE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.profile"


# --- header ------------------------------------------------------------------------------------------


def test_a_header_describes_graph_and_inputs() -> None:
    first, second = torch.ones(4, 3), torch.ones(4)
    fields: dict[str, Any] = {"meter": METER, "design": PLAN, "environment": {}}
    for inputs, shapes, batch in [
        ((first, second), {"0": (4, 3), "1": (4,)}, 4),
        ({"ids": first}, {"ids": (4, 3)}, 4),
        (torch.tensor(1.0), {"0": ()}, 1),
    ]:
        made = ProfileHeader.of(small_graph(), inputs, **fields)  # type: ignore[arg-type]
        assert (made.input_shapes, made.batch) == (shapes, batch)
        assert (made.groups, made.full_widths) == (("first", "second"), (16, 12))
        assert (made.fingerprint, made.label) == (small_graph().fingerprint, "measured")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"structure": replace(small_graph().structure, fingerprint="0" * 16)}, "fingerprint"),
        ({"batch": 64}, "batch"),
        ({"input_shapes": {"0": (2, 3, 6, 6), "1": (2,)}}, "input_shapes.1"),
        ({"device_type": "cpu"}, "device_type"),
        ({"meter": replace(METER, device_id="GPU-2")}, "meter.device_id"),
        ({"meter": replace(METER, reads="integrated power")}, "meter.reads"),
        ({"meter": replace(METER, provenance=Declared(15))}, "meter.provenance.kind"),
        ({"settings": replace(SETTINGS, channels_last=True)}, "settings.channels_last"),
        ({"settings": None}, "settings.runner"),
        ({"design": replace(PLAN, width_multiple=None)}, "design.width_multiple"),
        ({"design": replace(PLAN, shard=(4, 8))}, "design.shard"),
        ({"environment": {**MEASURED.environment, "driver": "560"}}, "environment.driver"),
        # The following do not change the energy.
        ({"created": None, "counter": None, "runner_reason": "chosen by the user"}, None),
        ({"design": replace(PLAN, samples=200, rounds=3)}, None),
        ({"environment": {**MEASURED.environment, "python": "3.13", "ecc": "2"}}, None),
        ({"meter": replace(METER, notes=("a note",))}, None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_headers_conflict_if_they_differ_in_what_changes_the_energy(change: dict[str, Any], field: str | None) -> None:
    other = replace(MEASURED, **change)
    found, back = header_conflict(MEASURED, other), header_conflict(other, MEASURED)
    assert (found and found[0], back is None) == (field, field is None)
    assert found is None or found[1] != found[2]


def test_computed_profiles_do_not_depend_on_the_software() -> None:
    assert header_conflict(header(), header(environment={"torch": "3"})) is None
    shards = replace(MEASURED, design=replace(PLAN, shard=None))
    assert header_conflict(MEASURED, shards, ignore=frozenset({"design.shard"})) is None


# --- samples -----------------------------------------------------------------------------------------


def test_samples_are_sorted_and_rounds_are_combined_by_the_median() -> None:
    made = profile_of(*SAMPLES)
    assert (made.design_samples, made.references) == (SAMPLES[1:3], (SAMPLES[0], SAMPLES[3]))
    assert made.widths_by_group((4, 3)) == {"first": 4, "second": 3}
    assert [made.head(count).samples for count in range(3)] == [(), SAMPLES[:2], SAMPLES[:3]]
    assert made.missing_samples() == list(range(2, 20))
    assert repr(made).endswith("2 samples, 2 of the dense network, estimated on paper>")
    corrected = [(s.index, s.widths, s.joules, s.relative_ci) for s in made.corrected()]
    assert corrected == [(0, (16, 12), 0.7, None), (1, (4, 3), 0.5, None)]
    rounds = [sample(0, joules, round=i, seconds=joules / 100) for i, joules in enumerate((1.0, 5.0, 2.0))]
    (found,) = profile_of(*rounds).corrected()
    assert (found.joules, found.seconds, found.relative_ci is None) == (2.0, 0.02, False)
    declared = replace(FakeCosts().describe(), provenance=Declared(15))
    assert profile_of(*rounds, meter=declared).corrected()[0].joules == 2.0  # errors have both signs


def test_repeat_noise_is_pooled_and_time_per_sample_is_the_median() -> None:
    pairs = [
        sample(i, joules, round=r) for i in range(50) for r, joules in enumerate((1.0, math.exp(0.01 * math.sqrt(2))))
    ]
    assert profile_of(*pairs).repeat_noise == pytest.approx(0.01)
    assert (profile_of(*SAMPLES).repeat_noise, profile_of(*SAMPLES).seconds_per_sample) == (None, None)
    times = [START + timedelta(seconds=second) for second in (1, 1.8, 2.7, 50, 50.6)]
    timed = [sample(i, measured_at=time, session=int(i > 2)) for i, time in enumerate(times)]
    assert profile_of(*timed).seconds_per_sample == pytest.approx(0.8)
    set_back = [replace(timed[0], measured_at=times[4]), *timed[1:3]]
    assert profile_of(*set_back).seconds_per_sample == pytest.approx(0.9)


def test_drift_is_divided_out_of_joules_and_seconds_separately() -> None:
    drifting: list[Sample] = []
    for i in range(11):
        warm = 1 + 0.004 * (i - 5)
        drifting += [reference(2 * warm, seconds=0.1), sample(i, 0.5 * warm, seconds=0.05)]
    made = profile_of(*drifting, reference(2 * (1 + 0.004 * 6), seconds=0.1))
    assert made.drift is not None
    assert made.drift.is_significant
    assert [one.joules for one in made.corrected()] == pytest.approx([0.5] * 11, rel=0.004)
    assert {one.seconds for one in made.corrected()} == {0.05}
    assert made.design_samples[0].joules == 0.5 * 0.98  # samples are not changed


def test_a_varying_reference_is_refused_unless_allowed() -> None:
    made = profile_of(reference(2.0), sample(0), reference(2.3), sample(1), reference(2.0))
    with pytest.raises(BadMeasurement, match=r"varied by 8\.2% .*at most 3% .*window_seconds=2.*allow_drift=True"):
        made.corrected()
    with option_names(), pytest.raises(BadMeasurement, match=r"\(--window 2\), or accept .* with --allow-drift\."):
        made.corrected()
    assert len(made.corrected(allow_drift=True)) == 2


# --- files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.profile", "a.profile.gz"])
def test_a_profile_survives_its_file(tmp_path: Path, name: str) -> None:
    for made in (profile_of(*SAMPLES), Profile(MEASURED, (FULL_SAMPLE, *SAMPLES))):
        made.save(tmp_path / name)
        back = Profile.load(tmp_path / name, small_graph())
        assert back == made
        assert header_conflict(back.header, made.header) is None
        back.save(tmp_path / f"again-{name}")
        assert (tmp_path / name).read_bytes() == (tmp_path / f"again-{name}").read_bytes()


def test_an_incomplete_last_line_is_ignored(path: Path) -> None:
    profile_of(*SAMPLES).save(path)
    data = path.read_bytes()
    for end in range(data[:-1].rfind(b"\n") + 1, len(data), 5):
        path.write_bytes(data[:end])
        assert Profile.load(path).samples == SAMPLES[:3]
    path.write_bytes(data + b"\0" * 100)  # as after a power failure
    assert Profile.load(path).samples == SAMPLES
    other = replace(small_graph(), layers=small_graph().layers[:-1])
    with pytest.raises(BadFile, match=f"network {small_graph().fingerprint}, and this network is {other.fingerprint}"):
        Profile.load(path, other)


GOOD = sample_line(sample(2))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (GOOD.replace(b"1.0", b"NaN"), "not valid JSON"),
        (GOOD.replace(b"1.0", b"-1.0"), r"Expected `float` > 0.0 - at `\$.joules`"),
        (GOOD.replace(b'"seconds"', b'"later"'), "missing required field `seconds`"),
        (GOOD.replace(b"[4,3]", b"[4]"), r"widths \[4\] do not fit the full widths \[16, 12\]"),
        (GOOD.replace(b"}", b',"measured_at":"2026-01-01T00:00:00"}'), "timezone"),
        (b'{"index":' + b"[" * 100_000 + b"\n", "not a valid|not valid"),
        (sample_line(sample(1)), r"sample 1 of round 0 is already in .*:3\."),
    ],
    ids=range(7),
)
def test_a_damaged_or_repeated_sample_is_refused_with_its_line(path: Path, line: bytes, message: str) -> None:
    profile_of(*SAMPLES).save(path)
    path.write_bytes(path.read_bytes() + line + GOOD)
    with pytest.raises(BadFile, match=rf"a\.profile:6.*({message})"):
        Profile.load(path)


def changed_header(**changes: Any) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(header_line(MEASURED))["header"]
    for name, value in changes.items():
        data[name] = {**data[name], **value} if isinstance(value, dict) else value
    return data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"index": 1}, "is not a profile; give a file that `ecc profile` wrote"),
        ({"header": {"format": "other", "version": 3}}, "is not a profile"),
        ({"header": changed_header(version=7)}, "has version 7; this version of ecc reads version 4"),
        ({"header": changed_header(groups=["first"])}, "do not fit the structure"),
        ({"header": changed_header(settings={"runner": "warp"})}, "runner is 'warp'"),
        ({"header": changed_header(settings={"min_ticks": 0})}, "min_ticks is 0"),
        ({"header": changed_header(design={"samples": 10**18})}, "samples is 1000000000000000000"),
        ({"header": changed_header(meter={"device": "\x1b[2J"})}, "control characters"),
    ],
)
def test_a_damaged_header_is_refused(path: Path, data: dict[str, Any], message: str) -> None:
    path.write_text(json.dumps(data) + "\n")
    with pytest.raises(BadFile, match=message):
        Profile.load(path)


def test_fields_of_later_versions_are_ignored() -> None:
    data = {"header": {**changed_header(settings={"later": 9}), "later": True}}
    assert parse_profile(json.dumps(data).encode() + b"\n", "file").header == MEASURED


# --- appending ---------------------------------------------------------------------------------------


def test_samples_are_in_the_file_as_soon_as_they_are_appended(path: Path) -> None:
    with open_profile(path) as writer:
        writer.start(header())
    assert not path.exists()  # a failed start leaves no file
    with open_profile(path) as writer:
        assert (writer.header, writer.samples) == (None, [])
        writer.start(header())
        for count, one in enumerate((reference(2.0), sample(0)), start=1):
            writer.append(one)
            assert len(Profile.load(path).samples) == count
        assert writer.profile() == Profile.load(path)
    with open_profile(path) as writer:
        assert writer.header == header()
        writer.append(sample(1))
    assert Profile.load(path) == profile_of(reference(2.0), sample(0), sample(1))


def test_an_incomplete_line_is_removed_before_appending(path: Path) -> None:
    profile_of(sample(0), sample(1)).save(path)
    data = path.read_bytes()
    for end in [*range(1, len(data) - 150, 97), *range(len(data) - 150, len(data), 7), len(data) - 1]:
        path.write_bytes(data[:end])
        with open_profile(path) as writer:
            if writer.header is None:
                writer.start(header())
            for number in range(len(writer.samples), 2):
                writer.append(sample(number))
        assert path.read_bytes() == data


def test_files_that_cannot_be_written_are_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadFile, match="cannot be appended to a compressed file"), open_profile("a.gz"):
        pass
    with pytest.raises(BadFile, match=r"cannot write .*: No such file"), open_profile(path / "no" / "a"):
        pass
    profile_of(sample(0)).save(path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with open_profile(path) as writer:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(BadFile, match=r"No space left on device\. The samples written so far are safe"):
            writer.append(sample(1))
        assert len(writer.samples) == 1


HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_ends_with_its_process(path: Path) -> None:
    profile_of(sample(0)).save(path)
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadFile, match="another process is writing"), open_profile(path):
            pass
        holder.kill()
        holder.wait()
        with open_profile(path) as writer:
            writer.append(sample(1))
    assert len(Profile.load(path).samples) == 2


def test_a_file_removed_before_it_was_locked_is_created_again(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")
    lock, removed = fcntl.flock, []

    def flock(descriptor: int, operation: int) -> None:
        lock(descriptor, operation)
        if not removed:
            removed.append(True)
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with open_profile(path) as writer:
        writer.start(header())
        writer.append(sample(0))
    assert len(Profile.load(path).samples) == 1


# --- merging -----------------------------------------------------------------------------------------


def shard(folder: Path, number: int, count: int = 3) -> Path:
    file = folder / f"{number}.profile"
    profile(SmallNet(), small_graph(), EXAMPLE, FakeCosts(), file, samples=20, shard=(number, count))
    return file


def test_merged_shards_are_the_whole_design(tmp_path: Path) -> None:
    whole = profile(SmallNet(), small_graph(), EXAMPLE, FakeCosts(), tmp_path / "whole", samples=20)
    files = [shard(tmp_path, number) for number in (1, 2, 3)]
    merged = merge_profiles(files, tmp_path / "merged.gz")
    assert merged == Profile.load(tmp_path / "merged.gz")
    assert merged.corrected() == whole.corrected()
    assert [s.widths for s in merged.corrected()] == [tuple(n.values()) for n in sample_widths(small_graph(), 20)]
    assert (merged.missing_samples(), merged.header.design) == ([], whole.header.design)
    assert [part.shard for part in merged.header.merged_from] == [(1, 3), (2, 3), (3, 3)]
    assert {one.session for one in merged.samples} == {0, 1, 2}
    two = merge_profiles(files[:2], tmp_path / "two")
    assert two.missing_samples() == [0, 3, 6, 9, 12, 15, 18]
    for out, again, message in [
        ("two", files[:2], "already exists"),
        ("x", [tmp_path / "two", files[2]], "two is already merged; give the files"),
        ("x", files[:1], "1 file given to merge; give two or more"),
        ("x", [files[0], files[0]], r"sample \d+ of round 0 is in .*1\.profile and in .*1\.profile"),
    ]:
        with pytest.raises(BadFile, match=message):
            merge_profiles(again, tmp_path / out)
    with pytest.raises(BadFile, match="two was merged from 2 files; extend those"):
        profile(SmallNet(), small_graph(), EXAMPLE, FakeCosts(), tmp_path / "two", samples=20)


def saved(path: Path, *samples: Sample, **changes: Any) -> Path:
    profile_of(*samples, **changes).save(path)
    return path


def two_devices(folder: Path, joules: float) -> list[Path]:
    """Two devices; the first uses 2 J for the reference, the second `joules`."""
    design, meter = header().design, header().meter
    first = {"design": replace(design, shard=(1, 2)), "meter": replace(meter, device_id="one")}
    second = {"design": replace(design, shard=(2, 2)), "meter": replace(meter, device_id="two")}
    return [
        saved(folder / "a", reference(2.0), sample(1, 1.0), reference(2.0), **first),
        saved(folder / "b", reference(joules), sample(2, 1.0, session=3), **second),
    ]


def test_equal_devices_are_merged_and_others_refused_or_rescaled(tmp_path: Path) -> None:
    merged = merge_profiles(two_devices(tmp_path, 2.039), tmp_path / "equal")
    assert [one.joules for one in merged.samples] == [2.0, 1.0, 2.0, 2.039, 1.0]
    assert [one.session for one in merged.samples] == [0, 0, 0, 1, 4]
    assert [part.device_id for part in merged.header.merged_from] == ["one", "two"]
    assert merged.header.meter.device_id == ""
    with pytest.raises(BadFile, match=r"uses 2 J in .*a and 2\.05 J in .*b, 2\.5% more \(2% .*rescale=True"):
        merge_profiles(two_devices(tmp_path, 2.05), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    merged = merge_profiles(two_devices(tmp_path, 8.0), tmp_path / "out", rescale=True)
    assert [one.joules for one in merged.references] == pytest.approx([4.0] * 3)
    assert [one.joules for one in merged.design_samples] == pytest.approx([2.0, 0.5])
    assert [one.seconds for one in merged.samples] == pytest.approx([1e-3] * 5)
    parts = Profile.load(tmp_path / "out").header.merged_from
    assert [part.rescaled_by for part in parts] == pytest.approx([2.0, 0.5])
    assert [part.reference_joules for part in parts] == [2.0, 8.0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 64}, "batch is 2 and 64"),
        ({"meter": replace(header().meter, device="another")}, "meter.device is 'paper' and 'another'"),
    ],
)
def test_different_profiles_are_not_merged(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    paths = [saved(tmp_path / "a", reference(2.0)), saved(tmp_path / "b", reference(2.0), **changes)]
    with pytest.raises(BadFile, match=f"b cannot be merged: {message}"):
        merge_profiles(paths, tmp_path / "out")
    paths = [saved(tmp_path / "a", sample(1)), saved(tmp_path / "b", reference(2.0), sample(2))]
    with pytest.raises(BadFile, match="a has no measurement of the dense reference"):
        merge_profiles(paths, tmp_path / "out")
