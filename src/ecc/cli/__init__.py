"""The command line: verbs to functions, nothing else.

`main` answers `--version` and `--help` by itself, within milliseconds. Anything else is parsed by typer (`app.py`).
A verb imports torch, and all that needs it, when it is run.
"""

from __future__ import annotations

import sys

from ecc.cli.overview import VERBS, overview, verb, version_line

__all__ = ["main"]

HELP = ("-h", "--help")


def main() -> None:
    """Entry point of the `ecc` command."""
    first, second = (*sys.argv[1:3], "", "")[:2]
    if first == "--version":
        answer = version_line()
    elif first in HELP:
        answer = overview()
    elif first in VERBS and second in HELP:
        from ecc.cli.parameters import verb_help

        answer = verb_help(first, verb(first))
    else:
        from ecc.cli.app import run

        run()
        return
    sys.stdout.write(answer)
    sys.exit(0)
