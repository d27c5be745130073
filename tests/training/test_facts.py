from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.errors import BadFile, EccError
from ecc.training.jsonl import first_difference, json_line, parsed_lines, plain


def test_facts_become_plain() -> None:
    facts = {"a": (1, 2.5), "b": torch.tensor(3.0), "c": {"nan": float("nan")}, "d": Path("x"), "e": [None, True, "s"]}
    assert plain(facts) == {"a": [1, 2.5], "b": 3.0, "c": {"nan": None}, "d": "x", "e": [None, True, "s"]}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": {1}}}, r"config\.a\.b is a set"),
        ({"a": [torch.zeros(2)]}, r"config\.a\[0\] is a Tensor"),
        ({1: 2}, "config has keys that are no strings"),
    ],
)
def test_what_json_cannot_hold_is_refused_with_its_place(value: Any, message: str) -> None:
    with pytest.raises(EccError, match=message):
        plain(value)


def lines_of(data: bytes, folder: Path) -> list[tuple[dict[str, Any], int]]:
    (folder / "h").write_bytes(data)
    return list(parsed_lines(folder / "h"))


def test_lines_are_read_back_with_their_ends(tmp_path: Path) -> None:
    first, second = json_line({"a": "é\n"}), json_line({"b": float("inf")})
    assert first.count(b"\n") == 1
    found = lines_of(first + second, tmp_path)
    assert found == [({"a": "é\n"}, len(first)), ({"b": None}, len(first) + len(second))]


def test_a_torn_last_line_is_left_out_wherever_it_was_torn(tmp_path: Path) -> None:
    first, second = json_line({"a": 1}), json_line({"b": 2})
    for end in range(len(first), len(first + second)):
        assert lines_of((first + second)[:end], tmp_path) == [({"a": 1}, len(first))]


@pytest.mark.parametrize("line", [b"{torn\n", b"[1]\n", b"\xff\n", b"\n"])
def test_a_damaged_line_is_told_by_its_number(line: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match=r"/h:2: the line is damaged"):
        lines_of(json_line({}) + line + json_line({}), tmp_path)


@pytest.mark.parametrize(
    ("then", "now", "difference"),
    [
        ({"a": 1}, {"a": 1}, None),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}, None),
        ({"a": 1, "b": {"c": [1, 2]}}, {"a": 1, "b": {"c": [1, 3]}}, ("b.c[1]", "2", "3")),
        ({"a": 1}, {"a": 1, "b": None}, ("b", "(absent)", "null")),
        ({"a": 1, "b": "x"}, {"a": 1}, ("b", '"x"', "(absent)")),
        ({"a": 1}, {"a": True}, ("a", "1", "true")),
        ({"a": [1]}, {"a": [1, 2]}, ("a", "[1]", "[1, 2]")),
        ({"a": {"b": 1}}, {"a": 1}, ("a", '{"b": 1}', "1")),
        ({"a": 1, "b": 2}, {"a": 3, "b": 4}, ("a", "1", "3")),
    ],
)
def test_the_first_difference_is_named(then: Any, now: Any, difference: Any) -> None:
    assert first_difference(then, now) == difference


@pytest.mark.parametrize("line", [b"{" * 100_000, b'{"a": [' + b"[]," * 400_000 + b"1]}"])
def test_a_line_that_unfolds_into_much_is_damaged(line: bytes, tmp_path: Path) -> None:
    with pytest.raises(BadFile, match="/h:2: the line is damaged"):
        lines_of(b"{}\n" + line + b"\n", tmp_path)
