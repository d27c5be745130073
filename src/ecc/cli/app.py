"""The command line itself: which verb is run, and errors in one line. The verbs are in the files beside this."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from types import FrameType
from typing import Annotated, Any, NoReturn, cast

import typer
from typer.core import TyperCommand, TyperGroup

from ecc.cli.overview import OPTIONS, PIPELINE, VERBS, overview, verb, version_line
from ecc.cli.parameters import for_typer, verb_help
from ecc.errors import EccError


class _Commands(Mapping[str, Any]):
    """Commands of typer by the names of their verbs. The module of a verb is imported when it is looked up."""

    def __getitem__(self, name: str) -> Any:
        if name not in VERBS:
            raise KeyError(name)
        return _command(name)

    def __iter__(self) -> Iterator[str]:
        return iter(VERBS)

    def __len__(self) -> int:
        return len(VERBS)


@cache
def _command(name: str) -> Any:
    single = typer.Typer(add_completion=False, rich_markup_mode=None)
    single.command(name, cls=_Verb)(for_typer(verb(name)))
    return typer.main.get_command(single)


class _Verb(TyperCommand):
    """Shows the same help as without typer."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The text of `ecc VERB --help`."""
        del ctx
        assert self.name is not None
        formatter.write(verb_help(self.name, verb(self.name)))


class _Verbs(TyperGroup):
    """Turns our errors, and slips at the command line, into one line and exit code 2."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands = cast(Any, _Commands())

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """The same text as without typer."""
        del ctx
        formatter.write(overview())

    def main(self, *args: Any, **settings: Any) -> Any:
        """Run the command line."""
        if not settings.get("standalone_mode", True):
            return super().main(*args, **settings)
        try:
            code = super().main(*args, **{**settings, "standalone_mode": False})
        except EccError as error:
            _complain(str(error))
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's own errors have one
                raise
            _complain(error.format_message())
        sys.exit(code if isinstance(code, int) else 0)


def _complain(message: str) -> NoReturn:
    line = f"error: {' '.join(message.split())}"
    sys.stderr.write(f"{message if 'Usage:' in message else line}\n")  # without arguments, help is shown
    sys.exit(2)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    help=PIPELINE,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(version_line(), nl=False)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help=OPTIONS["--version"])
    ] = False,
) -> None:
    """See `overview`: that text is shown."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    sys.exit(128 + number)


def run() -> None:
    """Runs what was typed."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)  # temporary files are removed on the way out; training saves, too
    app(prog_name="ecc")
