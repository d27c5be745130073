from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from ecc.errors import BadFile
from ecc.files import write_text


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
