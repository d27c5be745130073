from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ecc.measure.merge_profiles import missing_samples

from ecc.errors import BadFile
from ecc.measure import Profile, design, merge, profile
from measure.profile_cases import EXAMPLE, Prices, SmallNet, header, profile_of, reference, sample, small_graph


def shard(path: Path, number: int, count: int = 3, samples: int = 20, source: Prices | None = None) -> Path:
    file = path / f"{number}.profile"
    profile(SmallNet(), small_graph(), EXAMPLE, source or Prices(), file, samples=samples, shard=(number, count))
    return file


def test_shards_together_are_the_whole_design(tmp_path: Path) -> None:
    whole = profile(SmallNet(), small_graph(), EXAMPLE, Prices(), tmp_path / "whole", samples=20)
    merged = merge([shard(tmp_path, number) for number in (1, 2, 3)], tmp_path / "merged.profile")
    assert merged == Profile.load(tmp_path / "merged.profile")
    assert merged.corrected() == whole.corrected()
    assert [s.widths for s in merged.corrected()] == [tuple(n.values()) for n in design(small_graph(), 20)]
    assert missing_samples(merged) == []
    assert merged.header.design == whole.header.design
    assert [part["shard"] for part in merged.header.merged_from] == [[1, 3], [2, 3], [3, 3]]
    assert [part["rescaled_by"] for part in merged.header.merged_from] == [None] * 3
    assert {one.session for one in merged.samples} == {0, 1, 2}


def test_the_joined_file_may_be_compressed(tmp_path: Path) -> None:
    merged = merge([shard(tmp_path, 1), shard(tmp_path, 2)], tmp_path / "merged.gz")
    assert Profile.load(tmp_path / "merged.gz") == merged
    assert missing_samples(merged) == [0, 3, 6, 9, 12, 15, 18]


def saved(path: Path, *samples: Any, **changes: Any) -> Path:
    profile_of(*samples, **changes).save(path)
    return path


def two(tmp_path: Path, joules: float) -> list[Path]:
    """Two devices; the second takes that much for the reference, against 2 J of the first."""
    plan, meter = header().design, header().meter
    return [
        saved(
            tmp_path / "a",
            reference(2.0),
            sample(1, 1.0),
            reference(2.0),
            design=replace(plan, shard=(1, 2)),
            meter=replace(meter, device_id="one"),
        ),
        saved(
            tmp_path / "b",
            reference(joules),
            sample(2, 1.0, session=3),
            design=replace(plan, shard=(2, 2)),
            meter=replace(meter, device_id="two"),
        ),
    ]


def test_devices_that_agree_are_joined(tmp_path: Path) -> None:
    merged = merge(two(tmp_path, 2.039), tmp_path / "out")
    assert [one.joules for one in merged.samples] == [2.0, 1.0, 2.0, 2.039, 1.0]
    assert [one.session for one in merged.samples] == [0, 0, 0, 1, 4]
    assert [part["device_id"] for part in merged.header.merged_from] == ["one", "two"]
    assert merged.header.meter.device_id == ""


def test_devices_that_differ_are_refused_with_both_numbers(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"takes 2 J in .*a and 2\.05 J in .*b, 2\.5% more; 2% is the most.*--rescale"):
        merge(two(tmp_path, 2.05), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_devices_that_differ_can_be_scaled_and_the_header_says_so(tmp_path: Path) -> None:
    merged = merge(two(tmp_path, 8.0), tmp_path / "out", rescale=True)
    assert [one.joules for one in merged.references] == pytest.approx([4.0] * 3)
    assert [one.joules for one in merged.design_samples] == pytest.approx([2.0, 0.5])
    assert [one.seconds for one in merged.samples] == pytest.approx([1e-3] * 5)
    head = json.loads((tmp_path / "out").read_text().splitlines()[0])["header"]
    assert [part["rescaled_by"] for part in head["merged_from"]] == pytest.approx([2.0, 0.5])
    assert [part["reference_joules"] for part in head["merged_from"]] == [2.0, 8.0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"structure": replace(small_graph().structure, fingerprint="0" * 16)}, "network.fingerprint"),
        ({"batch": 64}, "their input.batch is 2 and 64"),
        ({"meter": replace(header().meter, device="another")}, "their meter.device is 'paper' and 'another'"),
        ({"design": replace(header().design, seed=9)}, "their design.seed is 0 and 9"),
    ],
)
def test_files_of_different_things_are_refused(tmp_path: Path, changes: dict[str, Any], text: str) -> None:
    paths = [saved(tmp_path / "a", reference(2.0)), saved(tmp_path / "b", reference(2.0), **changes)]
    with pytest.raises(BadFile, match=f"b cannot be merged: .*{text}"):
        merge(paths, tmp_path / "out")


def test_a_row_that_two_files_hold_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", reference(2.0), sample(1))
    with pytest.raises(BadFile, match=r"sample 1 of round 0 stands both in .*a and in .*a\. Leave one"):
        merge([path, path], tmp_path / "out")


def test_a_file_without_a_reference_is_refused(tmp_path: Path) -> None:
    paths = [saved(tmp_path / "a", sample(1)), saved(tmp_path / "b", reference(2.0), sample(2))]
    with pytest.raises(BadFile, match="a holds no measurement of the dense reference"):
        merge(paths, tmp_path / "out")


def test_what_was_merged_is_not_merged_again_nor_continued(tmp_path: Path) -> None:
    first, second, third = (shard(tmp_path, number) for number in (1, 2, 3))
    merge([first, second], tmp_path / "ab")
    with pytest.raises(BadFile, match="ab was merged already; give the files"):
        merge([tmp_path / "ab", third], tmp_path / "abc")
    with pytest.raises(BadFile, match="ab was merged from 2 files; extend those"):
        profile(SmallNet(), small_graph(), EXAMPLE, Prices(), tmp_path / "ab", samples=20)


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    with pytest.raises(BadFile, match="out exists already, and is left as it is"):
        merge([shard(tmp_path, 1), shard(tmp_path, 2)], tmp_path / "out")


def test_one_file_is_not_enough(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="1 file was given to merge; give two or more"):
        merge([tmp_path / "a"], tmp_path / "out")
