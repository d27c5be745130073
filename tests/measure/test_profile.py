from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from ecc.measure.samples import sample_line

from ecc.errors import BadFile, BadMeasurement
from ecc.measure import Declared, Profile, Sample
from ecc.measure.profile import HEADER_START, header_line
from measure.profile_cases import Prices, header, profile_of, reference, sample, small_graph

ROWS = (reference(2.0), sample(1, 0.5), sample(0, 0.7, (16, 12)), reference(2.0))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "a.profile"
    profile_of(*ROWS).save(path)
    return path


# ---------------------------------------------------------------- what it tells


def test_networks_and_references_are_told_apart() -> None:
    profile = profile_of(*ROWS)
    assert profile.design_samples == ROWS[1:3]
    assert profile.references == (ROWS[0], ROWS[3])
    assert profile.label == "estimated"
    assert profile.named((4, 3)) == {"first": 4, "second": 3}


def test_the_first_networks_are_the_profile_as_it_was() -> None:
    profile = profile_of(*ROWS)
    assert profile.first(0).samples == ()
    assert profile.first(1).samples == ROWS[:2]
    assert profile.first(2).samples == ROWS[:3]


def test_samples_come_in_the_order_of_the_design() -> None:
    samples = profile_of(*ROWS).corrected()
    assert [(s.index, s.widths, s.joules, s.relative_ci) for s in samples] == [
        (0, (16, 12), 0.7, None),
        (1, (4, 3), 0.5, None),
    ]


def test_rounds_are_combined_by_the_median() -> None:
    samples = [sample(0, joules, round=i, seconds=joules / 100) for i, joules in enumerate((1.0, 5.0, 1.1))]
    (sample,) = profile_of(*samples).corrected()
    assert (sample.joules, sample.seconds) == (1.1, 1.1 / 100)
    assert sample.relative_ci is not None


def test_rounds_of_cpu_time_are_combined_by_the_lower_quartile() -> None:
    samples = [sample(0, joules, round=i) for i, joules in enumerate((1.0, 5.0, 2.0))]
    meter = replace(Prices().describe(), provenance=Declared(15))
    (sample,) = profile_of(*samples, meter=meter).corrected()
    assert sample.joules == 1.5


def test_the_noise_of_repeats_is_pooled_over_networks() -> None:
    samples = [
        sample(i, joules, round=r) for i in range(50) for r, joules in enumerate((1.0, math.exp(0.01 * math.sqrt(2))))
    ]
    assert profile_of(*samples).repeat_noise == pytest.approx(0.01)
    assert profile_of(*ROWS).repeat_noise is None


def test_the_time_of_a_network_is_told_by_when_rows_were_measured() -> None:
    at = [f"2026-01-01T00:00:{second:06.3f}+00:00" for second in (1, 1.8, 2.7, 50, 50.6)]
    samples = [sample(i, measured_at=moment, session=int(i > 2)) for i, moment in enumerate(at)]
    assert profile_of(*samples).seconds_per_sample == pytest.approx(0.8)
    assert profile_of(*ROWS).seconds_per_sample is None
    back = [replace(samples[0], measured_at=at[4]), *samples[1:3]]  # a clock that was set back by 49 s
    assert profile_of(*back).seconds_per_sample == pytest.approx(0.9)


def test_drift_is_divided_out_of_joules_and_seconds_apart() -> None:
    samples: list[Sample] = []
    for i in range(11):
        warm = 1 + 0.004 * (i - 5)
        samples += [reference(2 * warm, seconds=0.1), sample(i, 0.5 * warm, seconds=0.05)]
    profile = profile_of(*samples, reference(2 * (1 + 0.004 * 6), seconds=0.1))
    assert profile.drift is not None
    assert profile.drift.is_significant
    assert [sample.joules for sample in profile.corrected()] == pytest.approx([0.5] * 11, rel=0.004)
    assert {sample.seconds for sample in profile.corrected()} == {0.05}
    assert profile.design_samples[0].joules == 0.5 * 0.98  # the samples stay as they were read


def test_an_unsteady_reference_is_refused_unless_allowed() -> None:
    profile = profile_of(reference(2.0), sample(0), reference(2.3), sample(1), reference(2.0))
    with pytest.raises(
        BadMeasurement, match=r"varied by 8\.2% .* 3% is the most .*ecc fit --allow-drift \(allow_drift=True\)"
    ):
        profile.corrected()
    assert len(profile.corrected(allow_drift=True)) == 2


# ---------------------------------------------------------------- its file


@pytest.mark.parametrize("name", ["a.profile", "a.profile.gz"])
def test_a_profile_comes_back_as_it_was(tmp_path: Path, name: str) -> None:
    profile = profile_of(*ROWS)
    profile.save(tmp_path / name)
    assert Profile.load(tmp_path / name) == profile
    profile.save(tmp_path / "again.gz")
    if name.endswith(".gz"):
        assert (tmp_path / name).read_bytes() == (tmp_path / "again.gz").read_bytes()


def test_files_begin_with_their_format(saved: Path) -> None:
    assert saved.read_text().startswith(HEADER_START)
    assert len(saved.read_text().splitlines()) == 5


def test_pandas_reads_it_in_the_line_that_the_docs_give(saved: Path) -> None:
    pandas = pytest.importorskip("pandas")
    assert len(pandas.read_json(saved, lines=True)) == 5
    frame = pandas.read_json(str(saved), lines=True).dropna(subset="sample")
    assert frame.joules.tolist() == pytest.approx([0.5, 0.7])
    assert frame.index.tolist() == [1, 0]
    assert frame.widths.tolist() == [[4, 3], [16, 12]]
    groups = pandas.read_json(str(saved), lines=True).header[0]["network"]["groups"]
    assert groups == ["first", "second"]


def test_a_torn_last_line_is_left_out(saved: Path) -> None:
    data = saved.read_bytes()
    last = data[:-1].rfind(b"\n") + 1
    for end in range(last, len(data)):
        saved.write_bytes(data[:end])
        assert Profile.load(saved).samples == ROWS[:3]


def test_a_tail_of_zeros_is_left_out(saved: Path) -> None:
    """What a file system may leave after the power went."""
    saved.write_bytes(saved.read_bytes() + b"\0" * 100)
    assert Profile.load(saved).samples == ROWS


def test_the_network_is_checked_if_it_is_given(saved: Path) -> None:
    assert Profile.load(saved, small_graph()).samples == ROWS
    structure = replace(small_graph().structure, fingerprint="0123456789abcdef")
    profile_of(*ROWS, structure=structure).save(saved)
    with pytest.raises(
        BadFile, match=f"belongs to network 0123456789abcdef, and this one is {small_graph().fingerprint}"
    ):
        Profile.load(saved, small_graph())


GOOD = sample_line(sample(2))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (GOOD.replace("1.0", "NaN"), "NaN is not a number"),
        (GOOD.replace("1.0", "-Infinity"), "-Infinity is not a number"),
        (GOOD.replace("1.0", "-1.0"), r"joules is -1\.0; it must be a number above 0"),
        (GOOD.replace("1.0", "0"), "joules is 0"),
        (GOOD.replace("[4, 3]", "[4]"), r"widths is \[4\]"),
        (GOOD.replace("[4, 3]", "[4, 13]"), "widths holds 13"),
        (GOOD[:20] + "\n", r"this is not JSON \("),
        ("[]\n", "not a line of a profile"),
        ("\n", "this is not JSON"),
        ("[" * 100_000 + "\n", "damaged \\(RecursionError|this is not JSON"),
    ],
)
def test_anything_else_is_refused_with_its_line(saved: Path, line: str, text: str) -> None:
    saved.write_text(saved.read_text() + line + GOOD)
    with pytest.raises(BadFile, match=rf"a\.profile:6: .*{text}"):
        Profile.load(saved)


def test_a_row_that_stands_twice_is_refused(saved: Path) -> None:
    saved.write_text(saved.read_text() + sample_line(sample(1, round=1)) + sample_line(sample(1)))
    with pytest.raises(BadFile, match=r"a\.profile:7: sample 1 of round 0 stands in line 3 already"):
        Profile.load(saved)


def test_a_damaged_header_is_refused_with_its_line(saved: Path) -> None:
    data = json.loads(header_line(header()))
    for header_data, text in [
        ({"sample": 1}, "not the header of a profile"),
        ({"header": {"format": "other"}}, "not the header of a profile, whose format is 'ecc profile'"),
        ({"header": {**data["header"], "version": 7}}, "has version 7"),
        ({"header": {"format": "ecc profile", "version": 2}}, r"damaged \(KeyError"),
        ({"header": 5}, r"damaged \(AttributeError"),
    ]:
        saved.write_text(json.dumps(header_data) + "\n")
        with pytest.raises(BadFile, match=rf"a\.profile:1: .*{text}"):
            Profile.load(saved)


def test_files_that_are_no_profile_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot read .*missing: No such file"):
        Profile.load(tmp_path / "missing")
    path = tmp_path / "x.gz"
    for data, text in [
        (b"plain", "not a whole gzip file"),
        (gzip.compress(b"a\n" * 1000)[:-12], "not a whole gzip file"),
        (gzip.compress(b"\xff\xfe\n"), "is not text"),
        (gzip.compress(b""), "holds no profile yet"),
    ]:
        path.write_bytes(data)
        with pytest.raises(BadFile, match=text):
            Profile.load(path)


def test_a_gzip_bomb_is_refused_before_it_unfolds(tmp_path: Path) -> None:
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(b" " * (20 << 20)) * 13)  # 20 KiB each, 260 MiB in all
    with pytest.raises(BadFile, match="unfolds into more than 256 MiB"):
        Profile.load(path)


def test_a_line_without_end_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.profile"
    path.write_bytes(b"[" * (9 << 20) + b"\n")
    with pytest.raises(BadFile, match=r"x\.profile:1: the line is longer than 8 MiB"):
        Profile.load(path)
