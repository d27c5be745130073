"""The command line itself: its help, and errors in one line. The verbs are in the files beside this."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from typer.core import TyperGroup

import ecc
from ecc.errors import EccError
from ecc.zoo.find import BUNDLED_TASKS

PIPELINE = f"""
Make a neural network fit an energy budget.

\b
    model --> channel graph --> profile --> energy model --> small network
              ecc inspect       ecc profile ecc fit          ecc compress

ecc doctor tells what can be measured on this machine, and ecc export
writes the small network for other programs; ecc report draws a page.

\b
TASK names what to work on:
    {", ".join(BUNDLED_TASKS)}
    torchvision:NAME or timm:NAME, where those are installed
    file.py:function, a function of yours that returns a model and an
        example input; the file is run like any Python program
"""


class _Verbs(TyperGroup):
    """Turns our errors, and slips at the command line, into one line and exit code 2."""

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
    line = " ".join(message.split()) if "Usage:" not in message else message  # without arguments, help is shown
    Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {line}", markup=False)
    sys.exit(2)


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    help=PIPELINE,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ecc {ecc.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """See PIPELINE: typer shows that text, since the app was made with it."""


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    del frame
    sys.exit(128 + number)


def main() -> None:
    """Entry point of the `ecc` command."""
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _leave)  # temporary files are removed on the way out; training saves, too
    app(prog_name="ecc")
