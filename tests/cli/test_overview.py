from __future__ import annotations

import typer
from ecc.cli.overview import OPTIONS, VERBS, overview, verb

from ecc.cli.app import app


def test_every_verb_is_a_function_of_its_module() -> None:
    for name in VERBS:
        assert verb(name).__name__ == name
        assert verb(name).__module__ == f"ecc.cli.{VERBS[name].module}"


def test_the_options_are_those_that_typer_parses() -> None:
    """The overview is written out, since typer itself takes longer to import than the text to show."""
    with typer.main.get_command(app).make_context("ecc", ["doctor"]) as context:
        known = {name for param in context.command.get_params(context) for name in param.opts}
    assert {name for names in OPTIONS for name in names.split(", ")} == known


def test_the_overview_fits_eighty_columns() -> None:
    assert max(map(len, overview().splitlines())) <= 80
