from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import typer
from click.testing import CliRunner

from ecc.cli.app import app
from ecc.cli.app import VERBS, verb
from ecc.cli.parameters import Argument, Context, Option, for_typer, verb_help


def with_default(context: Context, word: str) -> str:
    context.default_map = {"count": 7}
    return word


def paint(
    context: Context,
    file: Annotated[Path, Argument(metavar="FILE", help="What to paint.")],
    word: Annotated[str, Option("--word", "-w", help="A word.", is_eager=True, callback=with_default)] = "red",
    count: Annotated[int, Option(help="How often.", min=1, max=9)] = 2,
    shiny: Annotated[bool, Option(help="Whether it shines.")] = True,
    dry: Annotated[bool, Option("--dry", help="Do nothing.")] = False,
    names: Annotated[list[str] | None, Option("--name", metavar="NAME", help="Repeatable. " * 8)] = None,
) -> None:
    """Paint a file.

    \b
    Examples:
      ecc paint wall
    """
    typer.echo(f"{type(context).__name__} {file} {word} {count} {shiny} {dry} {names}")


HELP = """\
Usage: ecc paint [OPTIONS] FILE

  Paint a file.

  Examples:
    ecc paint wall

Arguments:
  FILE  What to paint.  [required]

Options:
  -w, --word TEXT       A word.  [default: red]
  --count INTEGER       How often.  [from 1, up to 9, default: 2]
  --shiny / --no-shiny  Whether it shines.
  --dry                 Do nothing.
  --name NAME           Repeatable. Repeatable. Repeatable. Repeatable.
                        Repeatable. Repeatable. Repeatable. Repeatable.
  -h, --help            Show this message and exit.
"""


def test_help_is_made_of_the_records() -> None:
    assert verb_help("paint", paint) == HELP


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["wall"], "Context wall red 7 True False None"),  # the callback set a default
        (["wall", "--count", "3", "--no-shiny", "--dry"], "Context wall red 3 False True None"),
        (["wall", "-w", "blue", "--name", "a", "--name", "b"], "Context wall blue 7 True False ['a', 'b']"),
    ],
)
def test_typer_parses_by_the_same_records(args: list[str], words: str) -> None:
    single = typer.Typer()
    single.command()(for_typer(paint))
    result = CliRunner().invoke(single, args)
    assert (result.exit_code, result.stdout) == (0, f"{words}\n"), result.output


def test_typer_keeps_to_a_range() -> None:
    single = typer.Typer(rich_markup_mode=None)
    single.command()(for_typer(paint))
    assert CliRunner().invoke(single, ["wall", "--count", "10"]).exit_code == 2


@pytest.mark.parametrize("name", VERBS)
def test_help_shows_every_option_that_typer_parses(name: str) -> None:
    command = typer.main.get_command(app).commands[name]  # type: ignore[attr-defined]
    text = verb_help(name, verb(name))
    words = {word.strip(",") for line in text.partition("Options:")[2].splitlines() for word in line.split()}
    for param in command.params:
        shown = [*param.opts, *param.secondary_opts] if param.param_type_name == "option" else [param.metavar]
        assert set(shown) <= words | set(text.splitlines()[0].split()), param.name
    assert max(len(line) for line in text.partition("Options:")[2].splitlines()) <= 80
    assert CliRunner().invoke(app, [name, "--help"]).stdout.strip() == text.strip()
