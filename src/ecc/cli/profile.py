"""`ecc profile` and `ecc merge`: measure a network at many widths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from ecc.errors import EccError
from ecc.settings import PROFILE_SETTINGS, Design, MeasureSettings, TraceSettings

from .options import (
    PATH,
    Command,
    build_task,
    console,
    freeze_option,
    json_option,
    option,
    print_json,
    quiet_option,
    settings_options,
    target_option,
    task_argument,
    task_options,
)


@click.command(cls=Command)
@task_argument
@option("-o", "--output", required=True, type=PATH, metavar="FILE", help="The profile; an existing one is resumed.")
@task_options
@option("--meter", metavar="METER", default="auto", help="Energy meter: auto, nvml, rapl, platform:jetson-tx2, ...")
@target_option
@option(
    "--target-error",
    metavar="SHARE",
    help="Stop when the error of a quick fit is below, for example, 2%, or no longer improves.",
)
@option("--batch", metavar="N", type=int, help="Items per inference; as the example input of the task if not given.")
@option("--device", metavar="DEVICE", help="Device to run on: cuda, cuda:1, cpu, ...; one that the meter sees.")
@settings_options(Design, argument="design")
@option("--shard", metavar="K/N", common=False, help="Samples for device K of N equal devices.")
@settings_options(PROFILE_SETTINGS)
@freeze_option
@settings_options(TraceSettings, argument="trace")
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
    trace: dict[str, Any],
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
    from ecc.measure import Analytic, EnergySource, close_meter, find_meter
    from ecc.measure.design import parse_shard
    from ecc.measure.early_stopping import parse_share
    from ecc.measure.profiler import default_device, profile_settings
    from ecc.measure.remote.client import InstalledSpec, open_targets
    from ecc.methods.base import trace_task
    from ecc.options import flat_values, settings_from
    from ecc.profiling import profile_task
    from ecc.records import to_builtins
    from ecc.report.live import ProfileProgress
    from ecc.report.terminal import profile_summary, profile_text

    if shard is not None and len(targets) > 1:
        raise EccError("--shard has no effect with several --target: they share the samples.")
    job = build_task(task, data, weights, image_size)
    source: EnergySource
    if targets:
        wanted = settings_from(MeasureSettings, {**flat_values(PROFILE_SETTINGS), **settings})
        installed = InstalledSpec(task=task, batch=batch, freeze=freeze, device=device, image_size=image_size, **trace)
        source = open_targets(targets, meter, task=installed, settings=wanted)
    else:
        source = find_meter(meter, device_type=device and device.partition(":")[0])
    view = ProfileProgress(console(is_shown=not quiet and not as_json))
    try:
        chosen = profile_settings(source, device=device, **settings)
        is_local = not targets and not isinstance(source, Analytic)
        device = (device or default_device(source, chosen.runner)) if is_local else None
        view.announce(source.describe(), ", ".join(targets) or device)
        graph, example_input = trace_task(job, batch, freeze, **trace)
        with view:
            result = profile_task(
                job, graph, example_input, source, output, chosen, view, device=device, **design,
                target_error=None if target_error is None else parse_share(target_error),
                shard=None if shard is None else parse_shard(shard),
            )  # fmt: skip
    except KeyboardInterrupt:
        click.echo(f"\nstopped; {view.so_far(output)}", err=True)
        raise click.exceptions.Exit(130) from None
    finally:
        close_meter(source)
    if as_json:
        print_json({"file": str(output), **to_builtins(profile_summary(result, graph))})
    elif not quiet:
        if result.header.runner_search is not None:
            click.echo(result.header.runner_search.table())
        click.echo(profile_text(result, output, graph))


@click.command(cls=Command)
@click.argument("files", nargs=-1, required=True, type=PATH, metavar="FILE...")
@option("-o", "--output", required=True, type=PATH, metavar="FILE", help="The joined profile.")
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
