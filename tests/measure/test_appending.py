from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ecc.errors import BadFile
from ecc.measure import Profile
from ecc.measure.profile_writer import open_profile
from measure.profile_cases import header, profile_of, reference, sample


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "a.profile"


def test_rows_are_in_the_file_as_soon_as_they_are_appended(path: Path) -> None:
    with open_profile(path) as file:
        assert (file.header, file.samples) == (None, [])
        file.start(header())
        for count, one in enumerate((reference(2.0), sample(0)), start=1):
            file.append(one)
            assert len(Profile.load(path).samples) == count
        assert file.profile() == Profile.load(path)


def test_a_file_is_continued(path: Path) -> None:
    profile_of(reference(2.0), sample(0)).save(path)
    with open_profile(path) as file:
        assert file.header == header()
        file.append(sample(1))
    assert Profile.load(path) == profile_of(reference(2.0), sample(0), sample(1))


def test_a_false_start_leaves_nothing(path: Path) -> None:
    with open_profile(path) as file:
        file.start(header())
        assert path.exists()
    assert not path.exists()


def test_a_torn_line_is_cut_off_before_anything_is_appended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_of(sample(0), sample(1)).save(path)
    data = path.read_bytes()
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # hundreds of them take long
    for end in [*range(1, len(data) - 250, 11), *range(len(data) - 250, len(data))]:
        path.write_bytes(data[:end])
        with open_profile(path) as file:
            if file.header is None:
                file.start(header())
            for number in range(len(file.samples), 2):
                file.append(sample(number))
        assert path.read_bytes() == data


@pytest.mark.parametrize(
    "text", ["my thesis, without a backup", '{"header": 1', "\n", '{"header": {"format": "other"}}\n']
)
def test_a_file_that_is_no_profile_is_left_as_it_is(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(BadFile, match="is not a profile, and is left as it is"), open_profile(path):
        pass
    assert path.read_text() == text


def test_a_damaged_profile_is_left_as_it_is(path: Path) -> None:
    profile_of(sample(0)).save(path)
    text = path.read_text() + "{}\n" + '{"sample": 1, "ref'
    path.write_text(text)
    with pytest.raises(BadFile, match=r"a\.profile:3: "), open_profile(path):
        pass
    assert path.read_text() == text


def test_bytes_that_are_no_text_are_refused(path: Path) -> None:
    profile_of(sample(0)).save(path)
    path.write_bytes(path.read_bytes() + b"\xff\xfe\n")
    with pytest.raises(BadFile, match=r"a\.profile:3: "), open_profile(path):
        pass


def test_a_compressed_file_cannot_grow(tmp_path: Path) -> None:
    with (
        pytest.raises(BadFile, match=r"a\.gz is compressed, and samples cannot be appended"),
        open_profile(tmp_path / "a.gz"),
    ):
        pass


def test_a_folder_that_is_missing_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot write .*: No such file"), open_profile(tmp_path / "no" / "a"):
        pass


def test_a_full_disk_is_told_and_what_is_there_is_safe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile_of(sample(0)).save(path)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with open_profile(path) as file:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(BadFile, match=r"No space left on device\. What it holds so far is safe"):
            file.append(sample(1))
        assert len(file.samples) == 1


# ---------------------------------------------------------------- the lock


def test_two_writers_in_one_process_are_kept_apart(path: Path) -> None:
    with (
        open_profile(path),
        pytest.raises(BadFile, match="is being written by another process"),
        open_profile(path),
    ):
        pass


HOLDER = """
import fcntl, os, sys
descriptor = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
fcntl.flock(descriptor, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_the_lock_ends_with_its_process(path: Path) -> None:
    profile_of(sample(0)).save(path)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(BadFile, match="is being written by another process"), open_profile(path):
            pass
        holder.kill()
        holder.wait()
        with open_profile(path) as file:
            file.append(sample(1))
    assert len(Profile.load(path).samples) == 2


def test_a_file_removed_before_it_was_locked_is_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have removed it, still empty, between our opening and our locking."""
    fcntl = pytest.importorskip("fcntl")
    lock = fcntl.flock
    removed = []

    def flock(descriptor: int, operation: int) -> None:
        lock(descriptor, operation)
        if not removed:
            removed.append(True)
            path.unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with open_profile(path) as file:
        file.start(header())
        file.append(sample(0))
    assert len(Profile.load(path).samples) == 1
