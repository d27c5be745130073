"""`ecc report`: an HTML report of a run or of a comparison."""

from __future__ import annotations

from pathlib import Path

import click

from ecc.errors import EccError

from .options import PATH, Command, option, waiting

PORT = 8123


@click.command(cls=Command)
@click.argument("folder", type=PATH, metavar="RUN")
@option("-o", "--output", type=PATH, metavar="FILE", help="The page; RUN/report.html if not given.")
@option("--figures", type=PATH, metavar="FOLDER", help="Also write every figure as SVG and PNG.")
@option("--live", is_flag=True, help="Serve the page on this machine and follow the run.")
@option("--port", metavar="N", type=click.IntRange(0, 65535), default=PORT, help="Port of --live; 0 takes a free one.")
def report(folder: Path, output: Path | None, figures: Path | None, live: bool, port: int) -> None:
    """Write an HTML report of a run, or of a comparison.

    The page is one file that loads nothing from the network. It has a light
    and a dark theme, prints well, and works on phones.

    \b
    Examples:
      ecc report run
      ecc report runs -o report.html --figures figures
      ecc report --live run
    """
    if not live and port != PORT:
        raise EccError(f"--port {port} is for --live; give both, or neither.")
    if live and (output or figures):
        raise EccError("--live serves the page and writes no file; leave out -o and --figures, or call it twice.")
    from ecc.report.load import load_report
    from ecc.report.page import write_report
    from ecc.report.serve import LiveServer, serve

    if live:
        server = LiveServer(folder, port)
        click.echo(f"{server.url} follows {folder}; Ctrl-C ends it.")
        serve(server)
        return
    with waiting("writing the page"):
        page = write_report(folder, output)
    click.echo(page)
    if figures is not None:
        from ecc.report.figures import draw_figures

        with waiting("drawing the figures"):
            paths = draw_figures(load_report(folder), figures)
        for path in paths:
            click.echo(path)
