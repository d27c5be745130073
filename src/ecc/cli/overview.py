"""Help texts, and the verbs with the modules they are in. Imports neither typer nor torch."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import ecc
from ecc.constants import BUNDLED_TASKS


class Verb(NamedTuple):
    """A verb of the command line."""

    module: str
    """Its file in `ecc.cli`; the function has the name of the verb."""
    summary: str
    """One line of `ecc --help`."""


VERBS = {
    "doctor": Verb("looking", "Show which energy meters work here, and why others do not."),
    "inspect": Verb("looking", "Show which channels can be pruned, and why others cannot."),
    "profile": Verb("measuring", "Measure what the network costs at many widths."),
    "merge": Verb("measuring", "Join profiles that several devices measured in shards."),
    "fit": Verb("learning", "Fit an energy model to a profile, and report its error."),
    "compress": Verb("compressing", "Prune a network during training until it meets its budgets."),
    "compare": Verb("comparing", "Compress a network by several methods, at equal budgets and steps."),
    "export": Verb("exporting", "Write the slim network of a run for other programs."),
    "report": Verb("reporting", "Write one page about a run, or about a comparison."),
}

OPTIONS = {
    "--version": "Print the version and exit.",
    "--install-completion": "Install completion for the current shell.",
    "--show-completion": "Print the completion script of the current shell.",
    "-h, --help": "Show this message and exit.",
}

PIPELINE = f"""\
Make a neural network fit an energy budget.

    model --> channel graph --> profile --> energy model --> small network
              ecc inspect       ecc profile ecc fit          ecc compress

TASK names what to work on:
    {", ".join(BUNDLED_TASKS)}
    torchvision:NAME or timm:NAME, where those are installed
    file.py:function, a function of yours that returns a model and an
        example input; the file is run like any Python program
"""


def overview() -> str:
    """The text of `ecc --help`."""
    lines = ["Usage: ecc [OPTIONS] COMMAND [ARGS]...", ""]
    lines += [f"  {line}" if line else "" for line in PIPELINE.splitlines()]
    lines += ["", "Options:", *_table(OPTIONS)]
    lines += ["", "Commands:", *_table({name: verb.summary for name, verb in VERBS.items()})]
    lines += ["", "ecc COMMAND --help shows the options of a command, with examples."]
    return "\n".join(lines) + "\n"


def _table(rows: dict[str, str]) -> list[str]:
    width = max(map(len, rows))
    return [f"  {name:<{width}}  {text}" for name, text in rows.items()]


def verb(name: str) -> Callable[..., None]:
    """The function of a verb."""
    function: Callable[..., None] = getattr(import_module(f"ecc.cli.{VERBS[name].module}"), name)
    return function


def version_line() -> str:
    """The text of `ecc --version`."""
    return f"ecc {ecc.__version__}\n"
