"""Settings that are declared once: a field of a dataclass, an option of the command line and a key of a TOML file.

    @dataclass(frozen=True, kw_only=True)
    class DistillSettings:
        weight: float = option(0.5, "Weight of the distillation loss; 0 turns distillation off.", range=(0, 1))

        def __post_init__(self) -> None:
            check_options(self)

`options_of` lists the options of a settings class, those of nested settings classes included, and `settings_from`
builds the settings from a flat mapping such as a TOML table or the parsed command line.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from ecc.errors import EccError, closest

S = TypeVar("S")


@dataclass(frozen=True)
class Option:
    """What is known of a setting besides its type and default."""

    help: str
    """A noun phrase or an imperative, with a full stop."""
    range: tuple[float | None, float | None] = (None, None)
    """Smallest and largest allowed value, both included; None for no limit."""
    above: float | None = None
    """The value must be larger than this."""
    choices: tuple[str, ...] = ()
    flag: str | None = None
    """Name on the command line and in TOML files; the name of the field by default."""
    metavar: str | None = None
    common: bool = False
    """Whether `--help` shows it; `--help-all` shows every option."""
    changes_result: bool = True
    """Whether a run with another value is another run. False for logging, checkpoints and memory."""


@dataclass(frozen=True)
class Setting:
    """One option of a settings class."""

    name: str
    """Name on the command line (with dashes) and in TOML files (with underscores)."""
    path: tuple[str, ...]
    """Field names from the outermost settings class."""
    kind: type
    """bool, int, float or str."""
    optional: bool
    """Whether None is allowed."""
    default: Any
    option: Option


def option(default: Any, help: str, **details: Any) -> Any:  # noqa: A002 - the word that command lines use
    """A field with a default and an `Option`; the arguments are those of `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, **details)})


def options_of(kind: type, path: tuple[str, ...] = ()) -> list[Setting]:
    """Every option of a settings class, in order, those of nested settings classes included."""
    hints = get_type_hints(kind)
    found: list[Setting] = []
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            found += options_of(hint, (*path, field.name))
        elif "option" in field.metadata:
            about: Option = field.metadata["option"]
            kinds = [one for one in get_args(hint) or (hint,) if one is not NoneType]
            plain = kinds[0] if isinstance(kinds[0], type) else str
            name = about.flag or field.name
            where = (*path, field.name)
            found.append(Setting(name, where, plain, NoneType in get_args(hint), field.default, about))
    return found


def settings_from(kind: type[S], values: Mapping[str, Any], where: str = "") -> S:
    """Build settings from a flat mapping of option names (with underscores); others keep their default.

    `where` is a prefix of error messages, such as a file name and a colon.
    """
    known = {setting.name: setting for setting in options_of(kind)}
    nested: dict[str, Any] = {}
    for name, value in values.items():
        if name not in known:
            close = closest(name, known)
            hint = f"did you mean {close!r}?" if close else f"known settings: {', '.join(sorted(known))}."
            raise EccError(f"{where}unknown setting {name!r}; {hint}")
        place = nested
        for step in known[name].path[:-1]:
            place = place.setdefault(step, {})
        place[known[name].path[-1]] = value
    try:
        return _build(kind, nested)
    except EccError as error:
        raise EccError(f"{where}{error}") from None


def _build(kind: type[S], values: Mapping[str, Any]) -> S:
    hints = get_type_hints(kind)
    return kind(
        **{name: _build(hints[name], value) if isinstance(value, Mapping) else value for name, value in values.items()}
    )


def flat_values(settings: Any, *, only_result: bool = False) -> dict[str, Any]:
    """The reverse of `settings_from`; with `only_result` without logging, checkpoints and the like."""
    found = {}
    for setting in options_of(type(settings)):
        if only_result and not setting.option.changes_result:
            continue
        value = settings
        for step in setting.path:
            value = getattr(value, step)
        found[setting.name] = value
    return found


def check_options(settings: Any) -> None:
    """Check type, range and choices of every option of a settings object; for `__post_init__`."""
    for setting in options_of(type(settings)):
        if len(setting.path) == 1:  # nested settings check themselves
            _check(setting, getattr(settings, setting.path[0]))


def _check(setting: Setting, value: Any) -> None:
    about = setting.option
    if value is None and setting.optional:
        return
    if about.choices:
        if value not in about.choices:
            raise EccError(f"{setting.name} is {value!r}; choose one of {', '.join(about.choices)}.")
        return
    least, most = about.range
    wanted = _wanted(setting)
    if setting.kind is bool or isinstance(value, bool):
        fits = setting.kind is bool and isinstance(value, bool)
    elif setting.kind is int:
        fits = isinstance(value, int)
    elif setting.kind is float:
        fits = isinstance(value, int | float) and math.isfinite(value)
    else:
        fits = isinstance(value, setting.kind)
    if fits and isinstance(value, int | float) and not isinstance(value, bool):
        fits = (least is None or value >= least) and (most is None or value <= most)
        fits = fits and (about.above is None or value > about.above)
    if not fits:
        raise EccError(f"{setting.name} is {value!r}; give {wanted}.")


def _wanted(setting: Setting) -> str:
    """The allowed values in words."""
    about = setting.option
    least, most = about.range
    words = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}.get(setting.kind, "a value")
    limits = [] if about.above is None else [f"above {about.above:.12g}"]
    if least is not None and most is not None:
        limits.append(f"from {least:.12g} to {most:.12g}")
    elif least is not None:
        limits.append(f"of at least {least:.12g}")
    elif most is not None:
        limits.append(f"of at most {most:.12g}")
    words = f"{words} {' and '.join(limits)}".strip()
    return words + (" or leave it out" if setting.optional else "")
