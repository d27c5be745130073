"""`ecc export`: the slim network of a run as files for deployment."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecc.constants import EXPORT_FORMATS

from .options import PATH, Command, build_task, console, json_option, option, print_json, quiet_option, recall_task

if TYPE_CHECKING:
    from ecc.task import Task


@click.command(cls=Command)
@click.argument("run", type=PATH, metavar="RUN")
@option(
    "-f", "--format", "formats", metavar="NAME", multiple=True, default=EXPORT_FORMATS[:1],
    help=f"{', '.join(EXPORT_FORMATS)}. Repeatable.",
)  # fmt: skip
@option("-o", "--output", type=PATH, metavar="FOLDER", help="Folder of the files; RUN/export if not given.")
@option(
    "--task",
    metavar="TASK",
    help="Task of the run; needed if it is a Python file, since no code named by a run folder is executed.",
)
@option("--int8", metavar="MODE", help="Also quantize the ONNX file: dynamic or static.")
@option("--license", "licence", metavar="NAME", default="unknown", help="For the model card, such as apache-2.0.")
@option("--force", is_flag=True, help="Overwrite files that differ.")
@quiet_option
@json_option
def export(
    run: Path,
    formats: tuple[str, ...],
    output: Path | None,
    task: str | None,
    int8: str | None,
    licence: str,
    force: bool,
    quiet: bool,
    as_json: bool,
) -> None:
    """Write the slim network of a run for deployment, with a model card.

    Each file is loaded again and compared with the network at several batch
    sizes; a file that differs is not kept. ONNX is also timed next to the
    dense network. TorchScript is deprecated by PyTorch.

    \b
    Examples:
      ecc export run
      ecc export run --format onnx --format pt2 --license apache-2.0
      ecc export run --format onnx --int8 static --task net.py:build
    """
    from rich.console import Console

    from ecc.export import export_run
    from ecc.report.terminal import export_table

    shown = console(is_shown=not quiet and not as_json)
    result = export_run(
        run,
        build_task(task) if task is not None else _task_of(run),
        formats=formats,
        output=output,
        int8=int8,
        licence=licence,
        force=force,
        log=(lambda _: None) if shown is None else lambda line: shown.print(line, markup=False, highlight=False),
    )
    if as_json:
        facts = {"folder": str(result.folder), "files": result.files, "notes": result.notes}
        print_json({**facts, "score": result.summary.score})
    elif not quiet:
        Console().print(export_table(result))


def _task_of(run: Path) -> Task:
    """The task that the run was made with."""
    found = recall_task(run)
    text: dict[str, Any] = {"text": found.text, "test_text": found.test_text, "length": found.length}
    return build_task(found.task, found.data, found.weights, found.image_size, **text)
