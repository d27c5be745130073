"""Options and arguments of the verbs as plain records: for help, which needs no typer, and for typer, which parses.

Verbs are functions whose parameters are annotated as for typer, with `Option`, `Argument` and `Context` of this file.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

_WIDTH = 80
_METAVARS = {str: "TEXT", int: "INTEGER", float: "FLOAT", Path: "PATH"}


class Option:
    """An option of a verb.

    Args:
        names: Such as `-o`, `--output`; by default the name of the parameter.
        settings: As of `typer.Option`.
    """

    def __init__(self, *names: str, **settings: Any) -> None:
        self.names, self.settings = names, settings


class Argument:
    """An argument of a verb.

    Args:
        settings: As of `typer.Argument`.
    """

    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class Context:
    """Stands for `typer.Context`, which a verb gets."""

    obj: Any
    default_map: dict[str, Any] | None


# ---------------------------------------------------------------- for typer


def for_typer(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, annotated with records of typer."""
    import typer

    def converted(annotation: Any) -> Any:
        if annotation is Context:
            return typer.Context
        if get_origin(annotation) is not Annotated:
            return annotation
        kind, record = get_args(annotation)
        settings = dict(record.settings)
        if "callback" in settings:
            settings["callback"] = for_typer(settings["callback"])
        if isinstance(record, Option):
            return Annotated[kind, typer.Option(*record.names, **settings)]
        return Annotated[kind, typer.Argument(**settings)]

    @wraps(function)
    def same(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    hints = {name: converted(hint) for name, hint in get_type_hints(function, include_extras=True).items()}
    signature = inspect.signature(function)
    parameters = [one.replace(annotation=hints[one.name]) for one in signature.parameters.values()]
    same.__annotations__ = hints
    same.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined] # read by typer
    return same


# ---------------------------------------------------------------- for readers


def verb_help(name: str, function: Callable[..., Any]) -> str:
    """The text of `ecc VERB --help`."""
    hints = get_type_hints(function, include_extras=True)
    defaults = {one.name: one.default for one in inspect.signature(function).parameters.values()}
    arguments: dict[str, str] = {}
    options: dict[str, str] = {}
    for parameter, hint in hints.items():
        if get_origin(hint) is not Annotated:
            continue
        kind, record = get_args(hint)
        label = _label(parameter, kind, record)
        text = f"{record.settings['help']}{_notes(kind, record, defaults[parameter])}"
        (options if isinstance(record, Option) else arguments)[label] = text
    options["-h, --help"] = "Show this message and exit."
    usage = f"Usage: ecc {name} [OPTIONS]{''.join(f' {label}' for label in arguments)}"
    doc = [line for line in inspect.cleandoc(function.__doc__ or "").splitlines() if line != "\b"]
    lines = [usage, "", *(f"  {line}".rstrip() for line in doc)]
    for title, rows in (("Arguments", arguments), ("Options", options)):
        if rows:
            lines += ["", f"{title}:", *_columns(rows)]
    return "\n".join(lines) + "\n"


def _label(parameter: str, kind: Any, record: Option | Argument) -> str:
    """`-o, --output FILE`, `--verify / --no-verify` or `TASK`."""
    metavar = record.settings.get("metavar") or _METAVARS.get(_plain(kind), "")
    if isinstance(record, Argument):
        return str(metavar)
    word = parameter.replace("_", "-")
    if record.names:
        flags = ", ".join(sorted(record.names, key=len))
    else:
        flags = f"--{word} / --no-{word}" if _plain(kind) is bool else f"--{word}"
    return f"{flags} {metavar}".rstrip()


def _plain(kind: Any) -> Any:
    """`int` of `int`, `int | None` and `list[int]`."""
    inner = [one for one in get_args(kind) if one is not NoneType]
    return _plain(inner[0]) if inner else kind


def _notes(kind: Any, record: Option | Argument, default: Any) -> str:
    """What follows the help of a parameter: its range and its default."""
    least, most = record.settings.get("min"), record.settings.get("max")
    notes = [f"from {least}"] if least is not None else []
    notes += [f"up to {most}"] if most is not None else []
    if default is inspect.Parameter.empty:
        notes += ["required"]
    elif _plain(kind) is not bool and default is not None and record.settings.get("show_default", True):
        notes += [f"default:\xa0{default}"]
    return f"  [{', '.join(notes)}]" if notes else ""


def _columns(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    lines = []
    for label, text in rows.items():
        first, *more = (line.replace("\xa0", " ") for line in textwrap.wrap(text, _WIDTH - width - 4))
        lines += [f"  {label:<{width}}  {first}", *(" " * (width + 4) + line for line in more)]
    return lines
