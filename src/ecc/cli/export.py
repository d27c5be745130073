"""`ecc export`: the slim network of a run as files for other programs."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ecc.constants import BUNDLED_TASKS, EXPORT_FORMATS
from ecc.errors import BadTask

from .parameters import Argument, Option

if TYPE_CHECKING:
    from ecc.export.job import ExportedRun
    from ecc.task import Task


def export(
    run: Annotated[Path, Argument(metavar="RUN", help="The folder of a finished run.", show_default=False)],
    formats: Annotated[
        list[str] | None,
        Option("--format", "-f", metavar="NAME", help=f"{', '.join(EXPORT_FORMATS)}. Repeatable."),
    ] = None,
    output: Annotated[
        Path | None, Option("-o", "--output", metavar="FOLDER", help="Of the files; by default RUN/export.")
    ] = None,
    task: Annotated[
        str | None,
        Option("--task", metavar="TASK", help="The run's task, unless it is a bundled one. Its file is run."),
    ] = None,
    int8: Annotated[
        str | None, Option("--int8", metavar="MODE", help="dynamic or static: a further ONNX file of integers.")
    ] = None,
    licence: Annotated[
        str, Option("--license", metavar="NAME", help="For the model card, such as apache-2.0.")
    ] = "unknown",
    force: Annotated[bool, Option("--force", help="Overwrite files that are there and differ.")] = False,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print errors only.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Write the slim network of a run for other programs, with a model card.

    Each file is read back by its own program and compared with the network
    at several batch sizes; one that differs is not kept. ONNX is also timed
    beside the dense network. torchscript is deprecated by torch.

    \b
    Examples:
      ecc export run --format safetensors
      ecc export run --format onnx --format pt2 --license apache-2.0
      ecc export run --format onnx --int8 static --task net.py:build
    """
    import typer
    from rich.console import Console

    from ecc.export import export_run
    from ecc.report.export import export_view

    console = Console(stderr=True)
    is_shown = not quiet and not as_json
    result = export_run(
        run,
        _task_of(run, task),
        formats=formats or EXPORT_FORMATS[:1],
        output=output,
        int8=int8,
        licence=licence,
        force=force,
        tell=(lambda line: console.print(line, markup=False, highlight=False)) if is_shown else None,
    )
    facts = facts_of(result)
    if as_json:
        typer.echo(json.dumps(facts, indent=1))
    elif not quiet:
        Console().print(export_view(facts))


def _task_of(run: Path, spec: str | None) -> Task:
    """The task of a run. A file of yours is executed only if you name it: a run may come from someone else."""
    from ecc.export.job import read_json
    from ecc.zoo.registry import find_task

    if spec is not None:
        return find_task(spec)
    name = read_json(run / "summary.json").get("task")
    if name in BUNDLED_TASKS:
        return find_task(str(name))
    raise BadTask(f"{run} is of the task {name!r}, which is not bundled; name it again: --task file.py:function.")


def facts_of(result: ExportedRun) -> dict[str, Any]:
    """Plain values, for programs and for the table."""
    scores = result.summary.get("scores") or {}
    score = scores.get("finetuned", scores.get("pruned"))
    return {
        "folder": str(result.folder),
        "files": [asdict(file) for file in result.files],
        "score": score if isinstance(score, int | float) else None,
        "notes": list(result.notes),
    }
