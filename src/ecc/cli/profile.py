"""`ecc profile` and `ecc merge`: measure a network at many widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ecc.errors import EccError
from ecc.settings import PROFILE_SETTINGS, Design, MeasureSettings

from .options import (
    Command,
    build_task,
    console,
    freeze_option,
    json_option,
    open_targets,
    option,
    print_json,
    quiet_option,
    settings_options,
    target_option,
    task_argument,
    task_options,
)

FILE = click.Path(path_type=Path)


@click.command(cls=Command)
@task_argument
@option("-o", "--output", required=True, type=FILE, metavar="FILE", help="The profile; an existing one is resumed.")
@task_options
@option("--meter", metavar="METER", default="auto", help="Energy meter: auto, nvml, rapl, platform:jetson-tx2, ...")
@target_option
@option("--target-error", metavar="SHARE", help="Stop when the error of a quick fit is below, for example, 2%.")
@option("--batch", metavar="N", type=int, help="Items per inference; as the example input of the task if not given.")
@option("--device", metavar="DEVICE", help="Device to run on: cuda, cuda:1, cpu, ...; one that the meter sees.")
@settings_options(Design, argument="design")
@option("--shard", metavar="K/N", common=False, help="Samples for device K of N equal devices.")
@settings_options(PROFILE_SETTINGS)
@freeze_option
@quiet_option
@json_option
def profile(
    task: str,
    output: Path,
    meter: str,
    targets: tuple[str, ...],
    target_error: str | None,
    batch: int | None,
    device: str | None,
    design: dict[str, Any],
    shard: str | None,
    settings: dict[str, Any],
    freeze: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    data: Path | None,
    weights: Path | None,
    image_size: str | None,
) -> None:
    """Measure a network at many widths. Run the same command again to resume.

    \b
    Examples:
      ecc profile digits --meter platform:jetson-tx2 -o digits.profile
      ecc profile mobilenet_v1 --runner cuda-graph --precision tf32 -o mobile.profile
      ecc profile net.py:build --rounds 2 --target-error 2% -o net.profile
      ecc profile alexnet --shard 3/8 -o alexnet-3.profile
      ecc profile digits --runner auto -o digits.profile
      ecc profile net.py:build --target ssh://me@jetson --meter jetson -o net.profile

    \b
    Open the file with pandas:
      pandas.read_json("digits.profile", lines=True).dropna(subset="index")
    """
    from ecc.api import calibration_inputs
    from ecc.graph import trace_channels, verify_graph
    from ecc.measure import Analytic, close_meter, find_meter
    from ecc.measure.design import parse_shard
    from ecc.measure.early_stopping import parse_share
    from ecc.measure.profiler import default_device, find_runner, profile_on_targets, profile_settings
    from ecc.options import flat_values, settings_from
    from ecc.records import to_builtins
    from ecc.report.live import ProfileProgress
    from ecc.report.terminal import profile_summary, profile_text
    from ecc.task import with_batch_size

    if shard is not None and len(targets) > 1:
        raise EccError("--shard has no effect with several --target: they share the samples.")
    job = build_task(task, data, weights, image_size)
    if targets:
        wanted = settings_from(MeasureSettings, {**flat_values(PROFILE_SETTINGS), **settings})
        details = {"batch": batch, "freeze": freeze, "device": device, "image_size": image_size}
        sources = open_targets(targets, meter, task, wanted, **details)
    else:
        sources = [find_meter(meter, device_type=device and device.partition(":")[0])]
    source = sources[0]
    view = ProfileProgress(console(is_shown=not quiet and not as_json))
    try:
        chosen = profile_settings(source, device=device, **settings)
        is_local = not targets and not isinstance(source, Analytic)
        device = (device or default_device(source, chosen.runner)) if is_local else None
        view.announce(source.describe(), ", ".join(targets) or device)
        extra: dict[str, Any] = {} if shard is None else {"shard": parse_shard(shard)}
        example_input = job.example_input if batch is None else with_batch_size(job.example_input, batch)
        graph = trace_channels(job.model, example_input, freeze=freeze, verify=False)
        graph = verify_graph(job.model, graph, job.example_input)
        with view:
            chosen, search = find_runner(
                output,
                job.model,
                example_input,
                source,
                chosen,
                device=device,
                evaluate=job.evaluate,
                calibration=calibration_inputs(job),
                report=view.say,
            )
            result = profile_on_targets(
                job.model,
                graph,
                example_input,
                sources,
                output,
                **design,
                settings=chosen,
                runner_search=search,
                device=device,
                target_error=None if target_error is None else parse_share(target_error),
                **extra,
                progress=view,
            )
    except KeyboardInterrupt:
        click.echo(f"\nstopped; {view.so_far(output)}", err=True)
        raise click.exceptions.Exit(130) from None
    finally:
        for one in sources:
            close_meter(one)
    if as_json:
        print_json({"file": str(output), **to_builtins(profile_summary(result, graph))})
    elif not quiet:
        if search is not None:
            click.echo(search.table())
        click.echo(profile_text(result, output, graph))


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=FILE, metavar="FILE...")
@option("-o", "--output", required=True, type=FILE, metavar="FILE", help="The joined profile.")
@option("--rescale", is_flag=True, help="Scale devices that differ by their measurements of the dense network.")
def merge(files: tuple[Path, ...], output: Path, rescale: bool) -> None:
    """Join profiles that equal devices measured in shards, after checking that they agree.

    \b
    Examples:
      ecc merge alexnet-1.profile alexnet-2.profile -o alexnet.profile
      ecc merge alexnet-*.profile -o alexnet.profile.gz --rescale
    """
    from ecc.measure import merge_profiles
    from ecc.report.terminal import profile_text

    result = merge_profiles(files, output, rescale=rescale)
    click.echo(profile_text(result, output))
    missing = result.missing_samples()
    if missing:
        click.echo(f"{len(missing)} samples of the design are in none of the files, such as sample {missing[0]}.")
