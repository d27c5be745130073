"""`ecc inspect` and `ecc doctor`: what can be pruned in a network, and what can be measured on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ecc.settings import TraceSettings

from .options import (
    Command,
    build_task,
    freeze_option,
    json_option,
    option,
    print_json,
    settings_options,
    task_argument,
    task_options,
    waiting,
)


@click.command(cls=Command)
@task_argument
@task_options
@freeze_option
@settings_options(TraceSettings, argument="trace")
@option("--verify/--no-verify", default=True, help="Compare the outputs of the masked and the slim network.")
@option("-o", "--output", metavar="FILE", type=click.Path(path_type=Path), help="Write the channel graph as JSON.")
@json_option
def inspect(
    task: str,
    freeze: tuple[str, ...],
    trace: dict[str, Any],
    verify: bool,
    output: Path | None,
    as_json: bool,
    **data: Any,
) -> None:
    """Show which channels of a network can be pruned, their producer and consumer layers, and what is frozen and why.

    \b
    Examples:
      ecc inspect digits
      ecc inspect mobilenet_v1 --freeze conv1
      ecc inspect net.py:build --json
    """
    from rich.console import Console

    from ecc.graph import trace_channels
    from ecc.graph.channel_graph import FORMAT
    from ecc.io import refuse_other_file
    from ecc.report.terminal import graph_summary, graph_table

    if output is not None:
        refuse_other_file(output, FORMAT, "channel graph")
    job = build_task(task, **data)
    with waiting(f"tracing {job.name}" + (" and verifying the slim networks" if verify else "")):
        graph = trace_channels(job.model, job.example_input, freeze=freeze, verify=verify, **trace)
    if output is not None:
        graph.save(output)
    if as_json:
        print_json(graph_summary(graph))
    else:
        Console().print(graph_table(graph, f"Channel groups of {job.name}"))


@click.command(cls=Command)
@option("--meter", metavar="METER", default="auto", help="Test this meter only, such as nvml:1 or file.py:MyMeter.")
@option("--seconds", type=click.FloatRange(1, 3600), metavar="S", default=10.0, help="Length of the test of a meter.")
@option("--quick", is_flag=True, help="Skip the test: only show which meters can be opened.")
@option("--target", metavar="URL", help="Look at another machine by ssh: ssh://user@host[:port].")
@json_option
def doctor(meter: str, seconds: float, quick: bool, target: str | None, as_json: bool) -> None:
    """Show what can be measured on this machine, how precisely, and why other meters do not work.

    Every meter is opened. One that works is read at rest and under load, and
    a small network is measured several times to see how well its energy
    repeats. If no meter works, the alternatives are listed.

    \b
    Examples:
      ecc doctor
      ecc doctor --quick
      ecc doctor --meter 'command:read-joules --port 3' --seconds 30
      ecc doctor --target ssh://me@jetson
      ecc doctor --json
    """
    from rich.console import Console

    from ecc.measure.doctor import diagnose, diagnose_target
    from ecc.report.doctor import doctor_table

    with Console(stderr=True).status("looking for meters") as status:
        if target is not None:
            found = diagnose_target(target, meter)
        else:
            found = diagnose(meter, seconds=seconds, quick=quick, report=status.update)
    if as_json:
        print_json(found)
    else:
        Console(highlight=False).print(doctor_table(found))
