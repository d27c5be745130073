from __future__ import annotations

import os
from pathlib import Path

import pytest

from ecc.errors import BadFile
from ecc.report.reading import number, positive, read_json, read_lines, reading


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"\xff\xfe", b"[" * 100_000])
def test_what_is_no_object_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "summary.json"
    file.write_bytes(data)
    with pytest.raises(BadFile, match=r"summary\.json is damaged") as error:
        read_json(file)
    assert "\n" not in str(error.value)


def test_what_is_no_number_is_none(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": NaN, "b": -Infinity, "c": 1}')
    assert read_json(tmp_path / "a.json") == {"a": None, "b": None, "c": 1}


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="cannot read"):
        read_json(tmp_path / "a.json")


def test_a_last_line_without_its_end_is_still_being_written(tmp_path: Path) -> None:
    file = tmp_path / "history.jsonl"
    assert read_lines(file) == []
    file.write_bytes(b'{"step": 1}\n{"step": 2')
    assert read_lines(file) == [{"step": 1}]
    file.write_bytes(b'{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(BadFile, match=r"history\.jsonl:2: the line is damaged"):
        read_lines(file)


def test_whatever_goes_wrong_inside_is_wrong_with_the_file() -> None:
    with pytest.raises(BadFile, match=r"a\.json is damaged \(no field 'x'\)"), reading(Path("a.json")):
        _ = {}["x"]
    with pytest.raises(BadFile, match=r"a\.json is damaged"), reading(Path("a.json")):
        float("much")


@pytest.mark.parametrize("value", [None, "1", True, [], float("nan"), float("inf"), 1e200])
def test_what_cannot_be_computed_with_is_no_number(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        number(value)


def test_what_others_are_divided_by_is_above_zero() -> None:
    assert (number(-3), number(0), positive(0.5)) == (-3.0, 0.0, 0.5)
    with pytest.raises(ValueError, match="0 is not above 0"):
        positive(0)


@pytest.mark.parametrize("value", ["1e400", "-1e400", "NaN", "Infinity"])
def test_what_is_no_finite_number_is_nothing(value: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(f'{{"a": [{value}, 1.5]}}')
    assert read_json(tmp_path / "a.json") == {"a": [None, 1.5]}


def test_a_line_that_is_too_long_is_not_taken_apart(tmp_path: Path) -> None:
    (tmp_path / "history.jsonl").write_bytes(b'{"a": "' + b"x" * (1 << 20) + b'"}\n')
    with pytest.raises(BadFile, match=r"history\.jsonl:1: the line is damaged"):
        read_lines(tmp_path / "history.jsonl")


@pytest.mark.skipif(os.name != "posix", reason="needs pipes")
def test_a_pipe_in_a_run_folder_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "history.jsonl")
    for read in (read_json, read_lines):
        with pytest.raises(BadFile, match="is not a plain file"):
            read(tmp_path / "history.jsonl")
