"""`Recipe`: a comparison in a TOML file, so that an experiment can be repeated by name.

task = "mobilenet_v1"
batch_size = 128
budgets = ["65%", "50%"]
methods = ["ecc", "netadapt"]

[settings]            # options of CompressSettings
prune_steps = 300_000
lr = 1e-5
"""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ecc.errors import BadFile, EccError
from ecc.io import read_text
from ecc.methods import CompressSettings
from ecc.options import options_of, settings_from
from ecc.records import from_builtins

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True, kw_only=True)
class RecipeFile:
    """The top level of a recipe."""

    task: str = ""
    """As for `find_task`, but no file that would be executed; empty if the command line names it."""
    data: str | None = None
    """Data folder, relative to the folder of the recipe."""
    weights: str | None = None
    """Safetensors file, relative to the folder of the recipe."""
    image_size: tuple[int, int] | None = None
    """(height, width) of the images."""
    batch_size: int | None = None
    budgets: list[str] | None = None
    methods: list[str] | None = None
    seeds: int | None = None
    meter: str | None = None
    freeze: list[str] | None = None
    """Modules whose outputs are not pruned, as for `trace_channels`."""


@dataclass(frozen=True, kw_only=True)
class Recipe(RecipeFile):
    """A comparison; None for values that the recipe does not set."""

    settings: CompressSettings = field(default_factory=CompressSettings)
    given: tuple[str, ...] = ()
    """Names of the settings that the recipe sets."""


def read_recipe(path: str | Path, *, needs_task: bool = True) -> Recipe:
    """Read a recipe.

    Args:
        path: The file.
        needs_task: Whether to refuse a file without a task.

    Raises:
        BadFile: If a key is unknown, or a value is not valid.
    """
    path = Path(path)
    try:
        table = tomllib.loads(read_text(path))
    except (ValueError, RecursionError) as error:  # ValueError: no TOML, no text, or a number of thousands of digits
        raise BadFile(f"{path} is not valid TOML: {error}") from None
    settings = table.pop("settings", {})
    if not isinstance(settings, dict):
        raise BadFile(f"{path}: settings is {settings!r}; write a table [settings].")
    known = [one.name for one in fields(RecipeFile)]
    for key in table:
        if key not in known:
            if any(key == one.name for one in options_of(CompressSettings)):
                raise BadFile(f"{path}: {key} is a setting; write it below a line [settings].")
            raise BadFile(f"{path}: unknown key {key!r}; known keys: {', '.join(known)}, and the table [settings].")
    if needs_task and "task" not in table:
        raise BadFile(f'{path} has no key task; add for example task = "mobilenet_v1".')
    _refuse_code(path, table, settings)
    file = from_builtins(table, RecipeFile, path)
    try:
        made = settings_from(CompressSettings, settings, f"{path}: ")
    except EccError as error:
        raise BadFile(str(error)) from None
    paths: dict[str, Any] = {name: str(path.parent / table[name]) for name in ("data", "weights") if name in table}
    values: dict[str, Any] = {**vars(file), **paths}
    return Recipe(**values, settings=made, given=tuple(settings))


def _refuse_code(path: Path, table: dict[str, Any], settings: dict[str, Any]) -> None:
    """A recipe may come from someone else, so it must not name code to execute."""
    for name, values, advice in (
        ("task", table, "a recipe may name a bundled network, torchvision:NAME, timm:NAME or hf:NAME"),
        ("meter", table, "give it with --meter"),
        ("runner", settings, "give it with --runner"),
    ):
        value = str(values.get(name, ""))
        # A file may stand behind another colon, as in C:\net.py:build.
        if value.startswith("command:") or re.search(r"\.py(:|$)", value, re.IGNORECASE):
            raise BadFile(f"{path}: {name} is {value!r}, which would be executed; {advice}.")
