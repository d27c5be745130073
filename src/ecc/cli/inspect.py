"""`ecc doctor` and `ecc inspect`: what is here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from .options import DataOption, FreezeOption, SizeOption, WeightsOption, task_of
from .parameters import Argument, Option


def doctor(
    meter: Annotated[
        str, Option("--meter", metavar="METER", help="Examine this one alone, such as nvml:1 or file.py:MyMeter.")
    ] = "auto",
    seconds: Annotated[float, Option(min=1, max=3600, help="Length of the self-test of each meter, about.")] = 10.0,
    quick: Annotated[bool, Option("--quick", help="Leave the self-test out.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Show what can be measured on this machine, how well, and why the rest cannot.

    Every meter is tried. One that works is watched at rest and at work, and
    a small network is measured again and again to see how far its joules
    repeat. Where no meter works, the ways forward are named.

    \b
    Examples:
      ecc doctor
      ecc doctor --quick
      ecc doctor --meter 'command:read-joules --port 3' --seconds 30
      ecc doctor --json
    """
    import typer
    from rich.console import Console

    from ecc.measure.doctor import diagnose
    from ecc.report.doctor import doctor_view

    with Console(stderr=True).status("looking for meters") as status:
        found = diagnose(meter, seconds=seconds, quick=quick, say=status.update)
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=1))
    else:
        Console(highlight=False).print(doctor_view(found))


def inspect(
    task: Annotated[str, Argument(metavar="TASK", help="What to look at.", show_default=False)],
    data: DataOption = None,
    weights: WeightsOption = None,
    size: SizeOption = None,
    freeze: FreezeOption = None,
    verify: Annotated[
        bool, Option(help="Compare the masked with the cut network in numbers (four forward passes).")
    ] = True,
    save: Annotated[Path | None, Option("-o", "--save", metavar="FILE", help="Write the graph as JSON.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Show which channels of a network can be cut, who writes and who reads them, and what is frozen and why.

    \b
    Examples:
      ecc inspect digits
      ecc inspect mobilenet_v1 --freeze conv1
      ecc inspect net.py:build --json
    """
    import typer
    from rich.console import Console

    from ecc.graph import trace_channels
    from ecc.graph.channel_graph import FORMAT
    from ecc.io import refuse_other_file
    from ecc.report.inspect import graph_facts, graph_table

    if save is not None:
        refuse_other_file(save, FORMAT, "channel graph")
    job = task_of(task, data, weights, size)
    graph = trace_channels(job.model, job.example_input, freeze=freeze or [], verify=verify)
    if save is not None:
        graph.save(save)
    if as_json:
        typer.echo(json.dumps(graph_facts(graph), indent=1))
    else:
        Console().print(graph_table(graph, f"Channel groups of {job.name}"))
