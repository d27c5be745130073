from __future__ import annotations

import os
import stat
import tracemalloc
from pathlib import Path

import pytest
import torch

from ecc.errors import BadFile
from ecc.io import read_bytes, read_lines, read_text, refuse_other_file, remove_abandoned, temporary, write_text
from ecc.training import save_state


def test_a_file_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "old")
    write_text(tmp_path / "a.json", "new ü\n")
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == "new ü\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_failed_write_keeps_the_old_file_and_no_temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_text(tmp_path / "a.json", "old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadFile, match=r"cannot write .*a\.json: No space left on device\.$"):
        write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


def test_a_missing_folder_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"cannot write .*missing.*: No such file or directory\.$"):
        write_text(tmp_path / "missing" / "a.json", "text")


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002, 0o000])
def test_a_written_file_gets_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    """As any file that is opened and written; a temporary one would be for its owner alone."""
    before = os.umask(mask)
    try:
        write_text(tmp_path / "a.json", "text")
        (tmp_path / "b.json").write_text("text")
        assert os.umask(mask) == mask  # it is left as it was
    finally:
        os.umask(before)
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("a.json", "b.json")]
    assert modes == [0o666 & ~mask] * 2


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_so_does_a_checkpoint(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        save_state(tmp_path / "a.safetensors", {"a": torch.zeros(1)})
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a.safetensors").stat().st_mode) == 0o666 & ~mask


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    refuse_other_file(file, "of a kind", "thing")  # nothing is there
    file.write_text("", encoding="utf-8")
    refuse_other_file(file, "of a kind", "thing")
    file.write_text("this is of a kind", encoding="utf-8")
    refuse_other_file(file, "of a kind", "thing")
    refuse_other_file(tmp_path, "of a kind", "thing")  # a folder has its own error
    file.write_text("measured for hours", encoding="utf-8")
    with pytest.raises(BadFile, match=r"a.json is there and is no thing; it is left as it is\. Give another name"):
        refuse_other_file(file, "of a kind", "thing")


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "ü\n")
    assert read_text(tmp_path / "a.json") == "ü\n"
    assert read_bytes(tmp_path / "a.json", most=3) == "ü\n".encode()


def test_what_is_too_large_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(BadFile, match=r"a is larger than 1 MiB"):
        read_bytes(tmp_path / "a", most=1 << 20)


@pytest.mark.skipif(os.name != "posix", reason="needs devices and pipes")
def test_devices_and_pipes_are_refused_without_waiting(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(BadFile, match="is not a plain file"):
            read_bytes(path)


@pytest.mark.parametrize(("name", "words"), [("none", "No such file"), (".", "Is a directory"), ("a\0b", "null")])
def test_what_cannot_be_read_is_one_clear_line(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(BadFile, match=f"^cannot read .*{words}"):
        read_text(tmp_path / name)
    if name != ".":
        with pytest.raises(BadFile, match=r"^cannot write "):
            write_text(tmp_path / name / "a", "text")


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_what_a_killed_writer_left_goes_with_the_next_write(tmp_path: Path) -> None:
    for name in (".a.json.12345678.tmp", ".b.json.12345678.tmp", ".a.json.mine.tmp"):
        (tmp_path / name).write_text("half")
    write_text(tmp_path / "a.json", "new")
    assert sorted(file.name for file in tmp_path.iterdir()) == [".a.json.mine.tmp", ".b.json.12345678.tmp", "a.json"]


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_what_a_living_writer_makes_stays(tmp_path: Path) -> None:
    def made() -> Path:
        (tmp_path / ".shop.12345678").mkdir()
        return tmp_path / ".shop.12345678"

    with temporary(made) as shop:
        remove_abandoned(tmp_path, ".shop.")
        assert shop.is_dir()
    remove_abandoned(tmp_path, ".shop.")
    assert not shop.exists()


@pytest.mark.skipif(os.name != "posix", reason="needs locks")
def test_a_link_in_the_place_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / ".shop.12345678").symlink_to(tmp_path / "kept")
    remove_abandoned(tmp_path, ".shop.")
    assert (tmp_path / "kept").is_dir()


def test_what_was_taken_for_abandoned_before_its_lock_is_made_again(tmp_path: Path) -> None:
    made = [tmp_path / "gone", tmp_path / "there"]
    made[1].touch()
    with temporary(lambda: made.pop(0)) as path:
        assert path == tmp_path / "there"


@pytest.mark.skipif(os.name != "posix", reason="needs pipes")
def test_a_pipe_or_a_device_is_neither_read_nor_replaced(tmp_path: Path) -> None:
    """Root could put a file in the place of the null device."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    for name in ("pipe", "link"):
        with pytest.raises(BadFile, match="is not a plain file"):
            read_bytes(tmp_path / name)
        with pytest.raises(BadFile, match="it is not a plain file"):
            write_text(tmp_path / name, "text")
    assert (tmp_path / "pipe").is_fifo()
    assert (tmp_path / "link").is_symlink()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "pipe"]


def test_what_is_reserved_to_read_a_file_is_its_size(tmp_path: Path) -> None:
    """A limit may be larger than the memory."""
    (tmp_path / "a").write_bytes(b"text")
    assert read_bytes(tmp_path / "a", most=1 << 60) == b"text"


def test_lines_come_one_at_a_time_and_a_torn_one_does_not(tmp_path: Path) -> None:
    file = tmp_path / "h"
    file.write_bytes(b"one\n\ntwo\r\nthr")
    assert list(read_lines(file)) == [b"one\n", b"\n", b"two\r\n"]
    assert list(read_lines(file, start=4)) == [b"\n", b"two\r\n"]
    for bad in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadFile, match="cannot read"):
            list(read_lines(bad))


def test_a_line_without_an_end_in_sight_is_refused_before_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "h"
    with file.open("wb") as hole:
        hole.write(b"one\n")
        hole.truncate(1 << 40)  # a terabyte, most of it a hole
    lines = read_lines(file)
    assert next(lines) == b"one\n"
    with pytest.raises(BadFile, match="h:2: the line is damaged: it is longer than 1 MiB"):
        next(lines)


def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    file = tmp_path / "h"
    file.write_bytes(b'{"step": 1}\n' * 200_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_lines(file)) == 200_000
        assert tracemalloc.get_traced_memory()[1] < 200_000
    finally:
        tracemalloc.stop()
