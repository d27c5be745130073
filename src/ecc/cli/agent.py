"""`ecc agent`: the agent for tasks that are installed on this machine; started over ssh by `--target`."""

from __future__ import annotations

from typing import Any

import click

from .options import Command


@click.command(cls=Command)
def agent() -> None:
    """Measure for another machine, on stdin and stdout. It is started by `ecc profile --target ssh://...`."""
    from ecc.measure.remote.agent import main

    main(_build_task)


def _build_task(request: Any) -> Any:
    """The task of a request, traced on this machine."""
    from ecc.graph import trace_channels
    from ecc.measure.remote.installed import InstalledTask
    from ecc.task import with_batch_size

    from .options import build_task

    job = build_task(request["task"], image_size=request.get("image_size"))
    batch, device = request.get("batch"), request.get("device")
    example_input = job.example_input if batch is None else with_batch_size(job.example_input, batch)
    options = {"freeze": tuple(request.get("freeze", ())), "attention": request.get("attention", "heads")}
    graph = trace_channels(job.model, example_input, **options, verify=False)
    return InstalledTask(job.model, graph, example_input, request["meter"], request["settings"], device)
