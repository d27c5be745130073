"""Help, version and examples."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

import ecc as package
from cli.command import ecc, run_ok
from ecc.cli.app import VERBS, app
from ecc.cli.options import options_of
from ecc.constants import BUNDLED_TASKS
from ecc.methods import CompressSettings

CONTEXT = click.Context(app)
COMMANDS = {name: app.get_command(CONTEXT, name) for name in VERBS}


def test_the_overview_names_every_verb_and_fits_one_screen() -> None:
    text = run_ok("--help").stdout
    assert len(text.splitlines()) <= 40
    assert max(map(len, text.splitlines())) <= 100
    assert all(name in text for name in (*VERBS, *BUNDLED_TASKS))
    assert run_ok("-h").stdout == text
    assert text in ecc().stderr
    assert run_ok("--version").stdout == f"ecc {package.__version__}\n"


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_at_most_twelve_options_and_help_all_shows_every_option(verb: str) -> None:
    short = run_ok(verb, "--help").stdout.partition("\nOptions:\n")[2]
    every = "--help-all" if "--help-all" in short else "--help"
    long = run_ok(verb, every).stdout.partition("\nOptions:\n")[2]
    assert len(re.findall(r"^  -", short, re.MULTILINE)) <= 12
    options = [param for param in COMMANDS[verb].params if isinstance(param, click.Option)]
    assert all(param.help for param in options)
    assert len(re.findall(r"^  -", long, re.MULTILINE)) >= len(options)


def test_every_setting_is_an_option_of_compress_and_compare_with_its_default() -> None:
    for verb in ("compress", "compare"):
        params = {param.name: param for param in COMMANDS[verb].params}
        for setting in options_of(CompressSettings):
            assert params[setting.name].default == setting.default, setting.name
            assert f"--{setting.name.replace('_', '-')}" in params[setting.name].opts


def imported(*words: str) -> list[str]:
    """Those of some large libraries that a command imports."""
    code = (
        "import atexit, sys\n"
        "names = ('torch', 'numpy', 'scipy', 'rich', 'ray', 'altair')\n"
        "atexit.register(lambda: print([n for n in names if n in sys.modules], file=sys.stderr))\n"
        f"sys.argv = ['ecc', *{words}]\nfrom ecc.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr, done.stderr
    return list(ast.literal_eval(done.stderr.splitlines()[-1]))


@pytest.mark.parametrize("words", [["--version"], ["fit", "--nope"], ["compress", "--help"], ["compare", "digits"]])
def test_help_and_typing_mistakes_are_answered_without_torch(words: list[str]) -> None:
    assert imported(*words) == []


# ---------------------------------------------------------------- examples; test_verbs.py and docs/ run every verb


def examples() -> list[str]:
    texts = [inspect.getdoc(command.callback) or "" for command in COMMANDS.values()]
    blocks = [text.partition("Examples:\n")[2].partition("\n\n")[0] for text in texts]
    return [line.strip() for block in blocks for line in block.splitlines()]


LINES = examples()


def test_every_verb_has_examples() -> None:
    assert all(any(f"ecc {verb}" in line for line in LINES) for verb in VERBS)


@pytest.mark.parametrize("line", LINES)
def test_an_example_is_parsed(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "recipe.toml").write_text('task = "alexnet"\n')
    monkeypatch.chdir(tmp_path)
    verb, *arguments = shlex.split(line.partition("ecc ")[2])
    assert COMMANDS[verb].make_context(verb, arguments, parent=CONTEXT).params
