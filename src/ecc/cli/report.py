"""`ecc report`: a run, or a grid of runs, as one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ecc.errors import EccError

from .parameters import Argument, Option

PORT = 8123


def report(
    folder: Annotated[
        Path, Argument(metavar="RUN", help="The folder of a run, or of a grid of runs.", show_default=False)
    ],
    output: Annotated[Path | None, Option("-o", "--output", metavar="FILE", help="Write the page.")] = None,
    figures: Annotated[
        Path | None, Option("--figures", metavar="FOLDER", help="Write every figure as SVG and PNG, for papers.")
    ] = None,
    live: Annotated[bool, Option("--live", help="Serve the page on this machine, and follow the run.")] = False,
    port: Annotated[int, Option("--port", metavar="N", help="With --live; 0 takes any that is free.")] = PORT,
) -> None:
    """Make one page of a run, or of a comparison, from its folder alone.

    The page holds everything that it shows and asks the network for nothing.
    It has light and dark, prints, and reads on a phone.

    \b
    Examples:
      ecc report run -o report.html
      ecc report runs -o report.html --figures figures
      ecc report --live run
    """
    if not live and port != PORT:
        raise EccError(f"--port {port} is where --live serves the page; give both, or neither.")
    if live and (output or figures):
        raise EccError("--live serves the page and writes nothing; leave -o and --figures out, or call it twice.")
    import typer

    from ecc.io import refuse_other_file, write_text
    from ecc.report.figures import draw_figures
    from ecc.report.html import page_of
    from ecc.report.page import page_facts
    from ecc.report.serve import LiveServer, serve

    if live:
        server = LiveServer(folder, port)
        typer.echo(f"{server.url} follows {folder}; Ctrl-C ends it.")
        serve(server)
        return
    if output is None and figures is None:
        raise EccError("nothing to do: say where the page goes with -o report.html, or follow the run with --live.")
    if output is not None:
        refuse_other_file(output, "<!doctype html>", "page")
    facts = page_facts(folder)
    if output is not None:
        write_text(output, page_of(facts))
        typer.echo(output)
    if figures is not None:
        for path in draw_figures(facts, figures):
            typer.echo(path)
