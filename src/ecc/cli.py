"""The command line: verbs to functions, nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from typer.core import TyperGroup

import ecc
from ecc.errors import EccError
from ecc.graph import trace_channels
from ecc.report.inspect import graph_facts, graph_table
from ecc.zoo.find import BUNDLED_TASKS, find_task

PIPELINE = f"""
Make a neural network fit an energy budget.

\b
    model --> channel graph --> profile --> energy model --> compressed network
              ecc inspect       (coming)    (coming)         (coming)

\b
TASK names what to work on:
    {", ".join(BUNDLED_TASKS)}
    torchvision:NAME or timm:NAME, where those are installed
    file.py:function, a function of yours that returns a model and an example input;
        the file is run like any Python program
"""


class _Verbs(TyperGroup):
    """Turns our errors into one line and exit code 2."""

    def invoke(self, ctx: Any) -> Any:
        """Run a verb."""
        try:
            return super().invoke(ctx)
        except EccError as error:
            Console(stderr=True, soft_wrap=True, highlight=False).print(f"error: {error}", markup=False)
            raise typer.Exit(2) from None


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


@app.command()
def inspect(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to look at.", show_default=False)],
    freeze: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Keep the outputs of these modules whole, e.g. 'layer1.*'. Repeatable."),
    ] = None,
    proof: Annotated[
        bool, typer.Option(help="Compare the masked with the cut network in numbers (two forward passes).")
    ] = True,
    save: Annotated[Path | None, typer.Option("-o", "--save", metavar="FILE", help="Write the graph as JSON.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Show which channels of a network can be cut, who writes and who reads them, and what is frozen and why.

    \b
    Examples:
      ecc inspect digits
      ecc inspect mobilenet_v1 --freeze conv1
      ecc inspect net.py:build --json
    """
    job = find_task(task)
    graph = trace_channels(job.model, job.example_input, freeze=freeze or [], proven=proof)
    if save is not None:
        graph.save(save)
    if as_json:
        typer.echo(json.dumps(graph_facts(graph), indent=1))
    else:
        Console().print(graph_table(graph, f"Channel groups of {job.name}"))


def main() -> None:
    """Entry point of the `ecc` command."""
    app(prog_name="ecc")
