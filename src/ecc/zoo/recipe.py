"""`Recipe`: one comparison in a TOML file, so that an experiment is repeated by naming it.

task = "mobilenet_v1"
batch_size = 128
budgets = ["65%", "50%"]
methods = ["ecc", "netadapt"]

[settings]            # options of CompressSettings
prune_steps = 300_000
lr = 1e-5
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from ecc.errors import BadFile, EccError
from ecc.io import read_text
from ecc.methods import CompressSettings
from ecc.options import settings_from

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SUFFIX = ".toml"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What a comparison asks for; None where it leaves the choice to whoever runs it."""

    task: str
    """As for `find_task`."""
    data: str | None = None
    """A folder; relative to that of the recipe."""
    weights: str | None = None
    """A safetensors file; relative to the folder of the recipe."""
    size: list[int] | None = None
    """(height, width) of the images."""
    batch_size: int | None = None
    budgets: list[str] | None = None
    methods: list[str] | None = None
    seeds: int | None = None
    meter: str | None = None
    freeze: list[str] | None = None
    """Modules whose outputs are kept whole, as for `trace_channels`."""
    settings: CompressSettings = field(default_factory=CompressSettings)
    given: tuple[str, ...] = ()
    """Names of the settings that the file gives."""


def is_recipe(spec: str) -> bool:
    """Whether what a user typed names a recipe."""
    return spec.endswith(SUFFIX)


def read_recipe(path: str | Path) -> Recipe:
    """Reads a recipe.

    Raises:
        BadFile: If it cannot be read, or has a key that is unknown, of another type, or out of its range.
    """
    path = Path(path)
    try:
        table = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, no text, or a number of thousands of digits
        raise BadFile(f"{path} is no TOML: {error}") from None
    settings = table.pop("settings", {})
    if not isinstance(settings, dict):
        raise BadFile(f"{path}: settings is {settings!r}; write them below a line [settings].")
    known = {name: kind for name, kind in _types(Recipe).items() if name not in ("settings", "given")}
    _check(path, "", table, known)
    if "task" not in table:
        raise BadFile(f'{path} has no key task; name what to compress, such as task = "mobilenet_v1".')
    if len(table.get("size", [1, 1])) != 2:
        raise BadFile(f"{path}: size is {table['size']}; give [height, width].")
    _refuse_code(path, table)
    for name in ("data", "weights"):
        if name in table:
            table[name] = str(path.parent / table[name])
    try:
        made = settings_from(CompressSettings, settings, f"{path}: ")
    except EccError as error:
        raise BadFile(str(error)) from None
    return Recipe(**table, settings=made, given=tuple(settings))


def _refuse_code(path: Path, table: dict[str, Any]) -> None:
    """Files are not trusted: what is run is named on the command line, and by nothing else."""
    for name, way_out in (
        ("task", "a recipe has a bundled network, torchvision:NAME or timm:NAME. Name yours in the recipe's place"),
        ("meter", "give it as --meter"),
    ):
        value = str(table.get(name, ""))
        if value.startswith("command:") or ".py" in Path(value.partition(":")[0]).suffix.lower():
            raise BadFile(f"{path}: {name} is {value!r}, which would be run; {way_out}.")


def _types(record: type) -> dict[str, Any]:
    hints = get_type_hints(record)
    return {one.name: hints[one.name] for one in fields(record)}


def _check(path: Path, prefix: str, table: dict[str, Any], known: dict[str, Any]) -> None:
    for key, value in table.items():
        if key not in known:
            raise BadFile(f"{path} has the key {prefix}{key}, which is unknown; there are {', '.join(known)}.")
        if not _fits(value, known[key]):
            raise BadFile(f"{path}: {prefix}{key} is {value!r}; it must be {_in_words(known[key])}.")


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of a type; TOML has no None, so a key that is left out is None."""
    if get_origin(kind) in (Union, types.UnionType):
        return any(_fits(value, one) for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is list:
        (inner,) = get_args(kind)
        return isinstance(value, list) and all(_fits(one, inner) for one in value)
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is kind


def _in_words(kind: Any) -> str:
    words = {int: "a whole number", float: "a number", str: "a text in quotes", bool: "true or false"}
    if get_origin(kind) in (Union, types.UnionType):
        return " or ".join(_in_words(one) for one in get_args(kind) if one is not type(None))
    if get_origin(kind) is list:
        return f"a list, each {_in_words(get_args(kind)[0])}"
    return words[kind]
