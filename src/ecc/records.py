"""JSON records: frozen dataclasses, written and checked by msgspec.

    write_record(path, record)              one file, replaced atomically
    read_record(path, RunSummary)           a checked instance, or `BadFile` with one clear line

The dataclass is the schema: types are checked when a file is read, missing keys take the default of their field, and
keys that the dataclass does not have are ignored.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from ecc.errors import BadFile, EccError
from ecc.io import read_bytes, write_bytes

T = TypeVar("T")


def to_json(record: Any) -> bytes:
    """One line of JSON. NaN and infinity become null; tensors of one number become numbers."""
    try:
        return msgspec.json.encode(record, enc_hook=_encode)
    except TypeError as error:
        raise EccError(f"{type(record).__name__} cannot be written as JSON: {error}.") from None


def _encode(value: Any) -> Any:
    """What msgspec does not know."""
    if isinstance(value, Path):
        return str(value)
    if callable(numel := getattr(value, "numel", None)) and numel() == 1:
        return value.item()
    raise TypeError(f"it holds a {type(value).__name__}")


def from_json(data: bytes | str, kind: type[T], where: str | Path) -> T:
    """Parse and check one JSON value of a dataclass, or of another type that msgspec knows.

    `where` is the file, with a line number if there is one, for error messages.
    """
    try:
        return _checked(lambda: msgspec.json.decode(data, type=kind), kind, where, " Restore the file from a copy.")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"{where} is not valid JSON: {error}. Restore the file from a copy.") from None


def _checked(read: Callable[[], T], kind: type[T], where: str | Path, advice: str = "") -> T:
    try:
        return _fill_defaults(read())
    except msgspec.ValidationError as error:
        raise BadFile(f"{where} is not a valid {kind.__name__}: {error}.{advice}") from None
    except EccError as error:  # raised by a `__post_init__`
        raise BadFile(f"{where} is not a valid {kind.__name__}: {error}") from None


def _fill_defaults(record: T) -> T:
    """Store defaults in the instances, because msgspec leaves them on the class and would not write them again."""
    if dataclasses.is_dataclass(record):
        values = vars(record)
        for name in record.__dataclass_fields__:
            if name not in values:
                object.__setattr__(record, name, getattr(record, name))
            else:
                _fill_defaults(values[name])
    elif isinstance(record, dict):
        for value in record.values():
            _fill_defaults(value)
    elif isinstance(record, (list, tuple)) and record and not isinstance(record[0], (int, float, str)):
        for value in record:
            _fill_defaults(value)
    return record


def to_builtins(record: Any) -> Any:
    """The record as dicts, lists, strings and numbers, as its JSON would be read back."""
    return msgspec.json.decode(to_json(record))


def from_builtins(value: Any, kind: type[T], where: str | Path) -> T:
    """The reverse of `to_builtins`, with the checks of `from_json`."""
    return _checked(lambda: msgspec.convert(value, kind), kind, where)


def write_record(path: str | Path, record: Any) -> None:
    """Write a record as indented JSON; an older file stays until the new one is complete."""
    write_bytes(path, msgspec.json.format(to_json(record), indent=1) + b"\n")


def read_record(path: str | Path, kind: type[T]) -> T:
    """Read and check a record."""
    return from_json(read_bytes(path), kind, path)
