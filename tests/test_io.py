"""Files: bounded reads, atomic writes, JSON records, declared options."""

from __future__ import annotations

import errno
import os
import stat
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import BadFile, EccError
from ecc.io import lock_folder, read_bytes, read_lines, read_text, refuse_other_file, sync_folder, write_text
from ecc.options import check_options, flat_values, option, options_of, settings_from
from ecc.records import from_builtins, from_json, read_record, to_builtins, to_json, write_record
from ecc.training import save_state

posix = pytest.mark.skipif(os.name != "posix", reason="needs devices and pipes")

# ---------------------------------------------------------------- writing


def test_a_file_is_replaced_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    write_text(tmp_path / "a.json", "old")
    write_text(tmp_path / "a.json", "new ü\n")
    assert read_text(tmp_path / "a.json") == "new ü\n"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_write_keeps_the_old_file_and_no_temporary_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write_text(tmp_path / "a.json", "old")

    def failing(_: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "fsync", failing)
    with pytest.raises(BadFile, match=rf"cannot write .*a\.json: {os.strerror(code)}\.$"):
        write_text(tmp_path / "a.json", "new")
    assert (tmp_path / "a.json").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    with pytest.raises(OSError, match=os.strerror(code)):
        sync_folder(tmp_path)


def test_a_file_system_that_cannot_sync_folders_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def unsupported(descriptor: int) -> None:
        called.append(descriptor)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unsupported)
    sync_folder(tmp_path)
    sync_folder(tmp_path / "missing")
    assert len(called) == 1
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(called[0])  # it was closed


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o000])
def test_files_get_the_permissions_of_the_umask(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write_text(tmp_path / "a.json", "text")
        save_state(tmp_path / "b.safetensors", {"a": torch.zeros(1)})
    finally:
        os.umask(before)
    for name in ("a.json", "b.safetensors"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o666 & ~mask


def test_a_file_of_another_kind_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    refuse_other_file(file, "of a kind", "thing")  # it does not exist
    for text in ("", "this is of a kind"):
        file.write_text(text, encoding="utf-8")
        refuse_other_file(file, "of a kind", "thing")
    refuse_other_file(tmp_path, "of a kind", "thing")  # writing to a folder raises later
    file.write_text("measured for hours", encoding="utf-8")
    with pytest.raises(BadFile, match=r"a.json exists and is not a thing\. Give another name"):
        refuse_other_file(file, "of a kind", "thing")


def test_two_processes_take_turns_in_a_folder(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    order = []

    def other() -> None:
        with lock_folder(tmp_path):
            order.append("second")

    with lock_folder(tmp_path):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


# ---------------------------------------------------------------- reading


def test_the_size_of_a_file_is_limited_and_no_more_is_allocated(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes((1 << 20) + 1))
    with pytest.raises(BadFile, match=r"a is larger than 1 MiB"):
        read_bytes(tmp_path / "a", most=1 << 20)
    assert len(read_bytes(tmp_path / "a", most=1 << 60)) == (1 << 20) + 1


def test_complete_lines_are_read_one_at_a_time(tmp_path: Path) -> None:
    file = tmp_path / "h"
    file.write_bytes(b"one\n\ntwo\r\nthr")
    assert list(read_lines(file)) == [b"one\n", b"\n", b"two\r\n"]
    assert list(read_lines(file, start=4)) == [b"\n", b"two\r\n"]
    with file.open("wb") as hole:
        hole.write(b"one\n")
        hole.truncate(1 << 40)  # a terabyte, most of it a hole
    lines = read_lines(file)
    assert next(lines) == b"one\n"
    with pytest.raises(BadFile, match="h:2: the line is longer than 1 MiB; the file is damaged"):
        next(lines)
    for bad in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BadFile, match="cannot read"):
            list(read_lines(bad))


# ---------------------------------------------------------------- records


@dataclass(frozen=True)
class Inner:
    value: float

    def __post_init__(self) -> None:
        if self.value < 0:
            raise EccError("value is negative.")


@dataclass(frozen=True)
class Record:
    name: str
    inner: Inner
    widths: dict[str, int] = field(default_factory=dict)
    note: str = ""


def test_a_record_comes_back_and_its_json_is_readable(tmp_path: Path) -> None:
    record = Record("a", Inner(0.1), {"conv": 3})
    write_record(tmp_path / "a.json", record)
    assert read_record(tmp_path / "a.json", Record) == record
    assert (tmp_path / "a.json").read_text().splitlines()[1] == ' "name": "a",'
    assert from_builtins(to_builtins(record), Record, "here") == record
    extended = b'{"name": "a", "inner": {"value": 0.1}, "new": 1}'
    assert from_json(extended, Record, "here") == Record("a", Inner(0.1))  # defaults, and unknown keys


def test_values_beyond_json_become_plain_ones() -> None:
    value = {"nan": float("nan"), "inf": float("inf"), "path": Path("a/b"), "tensor": torch.tensor(2.5), "pair": (1, 2)}
    assert to_builtins(value) == {"nan": None, "inf": None, "path": "a/b", "tensor": 2.5, "pair": [1, 2]}
    for bad in (torch.zeros(2), object()):
        with pytest.raises(EccError, match=f"dict cannot be written as JSON: it holds a {type(bad).__name__}"):
            to_json({"a": bad})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{torn", "a.json is not valid JSON: .*Restore the file"),
        ("[]", "a.json is not a valid Record: Expected `object`, got `array`"),
        ('{"name": "a"}', "a.json is not a valid Record: Object missing required field `inner`"),
        ('{"name": 1, "inner": {"value": 1}}', r"Expected `str`, got `int` - at `\$.name`"),
        ('{"name": "a", "inner": {"value": -1}}', "a.json is not a valid Record: .*value is negative"),
        ("[" * 100_000, "a.json is not (valid JSON|a valid Record)"),
        ("\udcff", "a.json is not valid JSON"),
    ],
)
def test_a_damaged_record_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(BadFile, match=message) as caught:
        read_record(tmp_path / "a.json", Record)
    assert "\n" not in str(caught.value)


# ---------------------------------------------------------------- options


@dataclass(frozen=True, kw_only=True)
class Distill:
    weight: float = option(0.5, "Weight.", range=(0, 1), flag="kd_weight")

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, kw_only=True)
class Settings:
    steps: int = option(10, "Steps.", range=(1, None), common=True)
    lr: float | None = option(None, "Learning rate.", above=0)
    name: str = option("a", "Name.", choices=("a", "b"))
    fast: bool = option(False, "Fast.", changes_result=False)
    distill: Distill = field(default_factory=Distill)

    def __post_init__(self) -> None:
        check_options(self)


def test_options_are_declared_once_and_listed_in_order() -> None:
    found = {one.name: one for one in options_of(Settings)}
    assert list(found) == ["steps", "lr", "name", "fast", "kd_weight"]
    assert [(one.kind, one.optional) for one in found.values()] == [
        *((int, False), (float, True), (str, False), (bool, False), (float, False)),
    ]
    assert found["kd_weight"].path == ("distill", "weight")
    assert found["steps"].option.common


def test_settings_come_from_flat_values_and_back() -> None:
    settings = settings_from(Settings, {"steps": 3, "kd_weight": 0.25, "lr": 1})
    assert settings == Settings(steps=3, lr=1, distill=Distill(weight=0.25))
    values = {"steps": 3, "lr": 1, "name": "a", "fast": False, "kd_weight": 0.25}
    assert flat_values(settings) == values
    assert flat_values(settings, only_result=True) == {name: value for name, value in values.items() if name != "fast"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"stepps": 1}, "a.toml: unknown setting 'stepps'; did you mean 'steps'?"),
        ({"xyz": 1}, "a.toml: unknown setting 'xyz'; known settings: fast, kd_weight, lr, name, steps."),
        ({"steps": 0}, "a.toml: steps is 0; give a whole number of at least 1."),
        ({"steps": 1.5}, "a.toml: steps is 1.5; give a whole number of at least 1."),
        ({"steps": True}, "a.toml: steps is True; give a whole number of at least 1."),
        ({"lr": 0}, "a.toml: lr is 0; give a number above 0 or leave it out."),
        ({"lr": float("nan")}, "a.toml: lr is nan; give a number above 0 or leave it out."),
        ({"name": "c"}, "a.toml: name is 'c'; choose one of a, b."),
        ({"fast": 1}, "a.toml: fast is 1; give true or false."),
        ({"kd_weight": 2}, "a.toml: kd_weight is 2; give a number from 0 to 1."),
        ({"kd_weight": "x"}, "a.toml: kd_weight is 'x'; give a number from 0 to 1."),
    ],
)
def test_wrong_settings_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(EccError) as caught:
        settings_from(Settings, values, "a.toml: ")
    assert str(caught.value) == message
