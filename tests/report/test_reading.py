from __future__ import annotations

from pathlib import Path

import pytest

from ecc.errors import BadFile
from ecc.report.reading import number, parsed_line, positive, read_json, reading


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


@pytest.mark.parametrize("line", [b"nonsense\n", b"[1]\n", b"\xff\n", b"\n", b"[" * 100_000 + b"\n"])
def test_a_damaged_line_is_named_by_its_number(line: bytes) -> None:
    assert parsed_line(b'{"step": NaN}\n', Path("h"), 1) == {"step": None}
    with pytest.raises(BadFile, match=r"^h:7: the line is damaged"):
        parsed_line(line, Path("h"), 7)


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
