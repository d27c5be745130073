"""The command line: `ecc VERB ...`. `app.py` finds the verb; each verb has a file beside it.

torch is imported when a verb runs, so that help and mistakes in the command line are answered at once.
"""

from __future__ import annotations

__all__ = ["main"]


def main() -> None:
    """Entry point of the `ecc` command."""
    from ecc.cli.app import run

    run()
