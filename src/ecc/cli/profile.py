"""`ecc profile` and `ecc merge`: from a network to what its widths cost."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

from .options import DataOption, FreezeOption, SizeOption, WeightsOption, task_of
from .parameters import Argument, Option


def profile(
    task: Annotated[str, Argument(metavar="TASK", help="Whose widths to measure.", show_default=False)],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="Append to this file.", show_default=False)],
    data: DataOption = None,
    weights: WeightsOption = None,
    size: SizeOption = None,
    meter: Annotated[
        str,
        Option("--meter", metavar="METER", help="Where joules come from: auto, nvml, platform:jetson-tx2, ..."),
    ] = "auto",
    samples: Annotated[int, Option(help="Networks in the design; more than before extends a file.")] = 250,
    design: Annotated[str, Option(help="mixed, or uniform as in the paper.")] = "mixed",
    seed: Annotated[int, Option(help="Of the design and its order.")] = 0,
    width_multiple: Annotated[int | None, Option(metavar="N", help="Widths in multiples of N.")] = None,
    rounds: Annotated[int, Option(help="How often each network is measured, far apart in time.")] = 1,
    reference_every: Annotated[
        int, Option(metavar="N", help="Networks between two measurements of the dense reference.")
    ] = 10,
    target_error: Annotated[
        str | None,
        Option(metavar="SHARE", help="Stop when a quick fit errs by less, e.g. 2%, or no longer learns."),
    ] = None,
    shard: Annotated[
        str | None, Option(metavar="K/N", help="Measure only the K-th of N parts, for N equal devices.")
    ] = None,
    batch: Annotated[
        int | None, Option(metavar="N", help="Items in one inference; the task's own if not given.")
    ] = None,
    device: Annotated[str | None, Option(help="cuda, cuda:1, cpu, ...; one that the meter sees if not given.")] = None,
    mode: Annotated[
        str | None, Option(help="auto (a CUDA graph if possible, else eager), eager, graph or compile.")
    ] = None,
    precision: Annotated[str | None, Option(help="fp32, tf32, fp16 or bf16.")] = None,
    memory_format: Annotated[str | None, Option(help="contiguous or channels_last.")] = None,
    autotune: Annotated[bool | None, Option(help="Let cuDNN choose its algorithms by trying them.")] = None,
    window: Annotated[float | None, Option(metavar="SECONDS", help="Least length of a window.")] = None,
    min_ticks: Annotated[int | None, Option(metavar="N", help="Least counter ticks in a window.")] = None,
    allow_shared: Annotated[
        bool | None, Option("--allow-shared", help="Measure although others use the device.")
    ] = None,
    allow_throttling: Annotated[
        bool | None, Option("--allow-throttling", help="Measure although the device is too hot.")
    ] = None,
    freeze: FreezeOption = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print errors only.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Measure many widths of a network. The same command again goes on where the last one ended.

    \b
    Examples:
      ecc profile digits --meter platform:jetson-tx2 -o digits.profile
      ecc profile mobilenet_v1 --mode graph --precision tf32 -o mobile.profile
      ecc profile net.py:build --rounds 2 --target-error 2% -o net.profile
      ecc profile alexnet --shard 3/8 -o alexnet-3.profile

    \b
    The file is opened by pandas in one line:
      pandas.read_json("digits.profile", lines=True).dropna(subset="index")
    """
    import typer
    from rich.console import Console

    from ecc.graph import trace_channels, verify_graph
    from ecc.measure import Analytic, close_meter, find_meter
    from ecc.measure import profile as measure_profile
    from ecc.measure.design import parse_shard
    from ecc.measure.early_stopping import parse_share
    from ecc.measure.profiler import chosen_settings
    from ecc.measure.profilers import default_device
    from ecc.report.live_profile import ProfileView, profile_facts, profile_summary
    from ecc.task import with_batch_size

    job = task_of(task, data, weights, size)
    source = find_meter(meter, device_type=device and device.partition(":")[0])
    console = None if quiet or as_json else Console(stderr=True)
    view = ProfileView(console)
    try:
        settings = chosen_settings(
            source,
            device=device,
            mode=mode,
            precision=precision,
            memory_format=memory_format,
            cudnn_autotune=autotune,
            window_seconds=window,
            min_ticks=min_ticks,
            allow_shared=allow_shared,
            allow_throttling=allow_throttling,
        )
        device = None if isinstance(source, Analytic) else device or default_device(source)
        view.announce(source.describe(), device)
        example_input = job.example_input if batch is None else with_batch_size(job.example_input, batch)
        graph = trace_channels(job.model, example_input, freeze=freeze or [], verify=False)
        graph = verify_graph(job.model, graph, job.example_input)
        with view:
            result = measure_profile(
                job.model,
                graph,
                example_input,
                source,
                output,
                samples=samples,
                design=design,
                seed=seed,
                width_multiple=width_multiple,
                settings=settings,
                device=device,
                rounds=rounds,
                reference_every=reference_every,
                target_error=None if target_error is None else parse_share(target_error),
                shard=None if shard is None else parse_shard(shard),
                progress=view,
            )
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; {view.so_far(output)}", err=True)
        raise typer.Exit(130) from None
    finally:
        close_meter(source)
    if as_json:
        typer.echo(json.dumps({"file": str(output), **profile_facts(result, graph)}, indent=1))
    elif not quiet:
        typer.echo(profile_summary(result, output, graph))


def merge(
    files: Annotated[list[Path], Argument(metavar="FILE...", help="Shards of one design.", show_default=False)],
    output: Annotated[Path, Option("-o", "--output", metavar="FILE", help="The joined profile.", show_default=False)],
    rescale: Annotated[
        bool, Option("--rescale", help="Scale devices that differ to one another by their reference.")
    ] = False,
) -> None:
    """Join profiles that equal devices measured in shards, after checking that they agree.

    \b
    Examples:
      ecc merge alexnet-1.profile alexnet-2.profile -o alexnet.profile
      ecc merge alexnet-*.profile -o alexnet.profile.gz --rescale
    """
    import typer

    from ecc.measure import merge_profiles
    from ecc.measure.merge_profiles import missing_samples
    from ecc.report.live_profile import profile_summary

    result = merge_profiles(files, output, rescale=rescale)
    typer.echo(profile_summary(result, output))
    missing = missing_samples(result)
    if missing:
        typer.echo(f"{len(missing)} samples of the design are in none of the files, such as sample {missing[0]}.")
