"""`ecc compress`: from a trained network and a budget to a small network that meets it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from ecc.constants import BUNDLED_TASKS, METHOD_NAMES, MIN_WIDTH_RATIO
from ecc.errors import BadFile, EccError

from .options import (
    BatchSizeOption,
    DataOption,
    FreezeOption,
    MicroBatchOption,
    MinShareOption,
    RoundToOption,
    SizeOption,
    WeightsOption,
    source_of,
    task_of,
    usable_device,
)
from .parameters import Argument, Option

if TYPE_CHECKING:
    from rich.console import RenderableType


def compress(
    task: Annotated[str, Argument(metavar="TASK", help="What to compress.", show_default=False)],
    budget: Annotated[
        list[str],
        Option("--budget", metavar="BUDGET", help="60%, 24 mJ, latency=12ms, params=2M. Repeatable."),
    ],
    output: Annotated[Path, Option("-o", "--output", metavar="FOLDER", help="The folder of the run.")],
    energy: Annotated[
        list[Path] | None,
        Option("--energy", metavar="FILE", help="From `ecc fit`. Repeatable: energy, latency."),
    ] = None,
    data: DataOption = None,
    weights: WeightsOption = None,
    size: SizeOption = None,
    batch_size: BatchSizeOption = None,
    method: Annotated[
        str, Option("--method", metavar="NAME", help=f"How: {', '.join(METHOD_NAMES)}. All get the same batches.")
    ] = "ecc",
    granularity: Annotated[
        str, Option("--granularity", metavar="WHAT", help="What is removed: channel, or weight (see above).")
    ] = "channel",
    meter: Annotated[
        str,
        Option("--meter", metavar="METER", help="Weighs the result: auto, nvml, platform:..., none."),
    ] = "auto",
    prune_steps: Annotated[int, Option("--prune-steps", metavar="N", help="Number of pruning steps.")] = 2000,
    finetune_steps: Annotated[int, Option("--finetune-steps", metavar="N", help="Of the slim network after.")] = 1000,
    pretrain_steps: Annotated[
        int, Option("--pretrain-steps", metavar="N", help="Of the dense network before; 0 if it comes trained.")
    ] = 0,
    lr: Annotated[float, Option("--lr", metavar="RATE", help="Of Adam in pruning and tuning.")] = 1e-4,
    pretrain_lr: Annotated[float, Option("--pretrain-lr", metavar="RATE", help="Of Adam before pruning.")] = 1e-3,
    kd_weight: Annotated[
        float | None, Option("--kd-weight", metavar="W", help="Weight of the distillation loss (0: off).")
    ] = None,
    kd_temperature: Annotated[
        float | None, Option("--kd-temperature", metavar="T", help="Softmax temperature of distillation.")
    ] = None,
    importance: Annotated[
        str | None,
        Option("--importance", help="What a channel counts for: taylor, or adam_norm as in the paper."),
    ] = None,
    min_width_ratio: MinShareOption = MIN_WIDTH_RATIO,
    width_multiple: RoundToOption = None,
    device: Annotated[str | None, Option("--device", help="Where to train; a GPU if there is one.")] = None,
    precision: Annotated[str, Option("--precision", help="Of training: fp32, bf16 or fp16.")] = "fp32",
    micro_batch: MicroBatchOption = None,
    channels_last: Annotated[bool, Option("--channels-last", help="Faster on most GPUs.")] = False,
    cuda_graph: Annotated[bool, Option("--cuda-graph", help="Faster for small networks on large GPUs.")] = False,
    clip_norm: Annotated[float | None, Option("--clip-norm", metavar="NORM", help="Of the gradient.")] = None,
    seed: Annotated[int, Option("--seed", metavar="N", help="Of batches and of all that is drawn.")] = 0,
    freeze: FreezeOption = None,
    checkpoint_seconds: Annotated[
        float, Option("--checkpoint-seconds", metavar="S", help="Between two checkpoints.")
    ] = 300.0,
    tensorboard: Annotated[
        Path | None,
        Option("--tensorboard", metavar="FOLDER", help="Curves for TensorBoard, in a folder for this run alone."),
    ] = None,
    quiet: Annotated[bool, Option("--quiet", "-q", help="Print errors only.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print the summary for programs.")] = False,
) -> None:
    """Prune a network while it trains, until it meets its budgets on the scales.

    First a table tells what can be reached. The same command again goes on
    where the last one ended; a finished run is shown again.

    With --granularity weight, single weights go instead of channels. Only
    a device that skips zeros saves energy so; --meter names its platform,
    and --energy is not needed.

    \b
    Examples:
      ecc compress digits --energy energy.json --budget 50% -o run --pretrain-steps 300
      ecc compress digits --granularity weight --meter platform:eyeriss --budget 40% -o fine
      ecc compress mobilenet_v1 --data imagenet --energy e.json --budget 60% -o run
      ecc compress net.py:build --energy energy.json --budget 24mJ --budget params=2M -o run
      torchrun --nproc-per-node 4 -m ecc compress net.py:build --energy e.json --budget 60% -o run
    """
    import torch
    import typer
    from rich.console import Console

    from ecc.energy import EnergyModel, parse_budgets
    from ecc.measure import close_meter
    from ecc.methods import Compression, CompressSettings, WeightCompression, check_feasibility
    from ecc.methods.registry import find_method
    from ecc.methods.unstructured import zero_skipping_platform
    from ecc.options import settings_from
    from ecc.records import to_builtins
    from ecc.report.compress import compress_view, feasibility_table
    from ecc.report.live_compress import CompressView
    from ecc.report.weights import weights_view
    from ecc.training import Interrupted, TensorBoardLogger, find_distributed

    budgets = parse_budgets(budget)
    is_fine = _is_fine(granularity, energy or [], freeze or [], importance)
    rival = find_method(method)
    _refuse_without_effect(method, is_fine, importance, kd_temperature, kd_weight)
    models = [EnergyModel.load(path) for path in energy or []]
    settings = settings_from(
        CompressSettings,
        {
            "pretrain_steps": pretrain_steps,
            "prune_steps": prune_steps,
            "finetune_steps": finetune_steps,
            "lr": lr,
            "pretrain_lr": pretrain_lr,
            "kd_weight": kd_weight,
            "kd_temperature": kd_temperature,
            "importance": importance or "taylor",
            "min_width_ratio": min_width_ratio,
            "width_multiple": width_multiple,
            "precision": precision,
            "micro_batch": micro_batch,
            "channels_last": channels_last,
            "cuda_graph": cuda_graph,
            "clip_norm": clip_norm,
            "seed": seed,
            "log_every": max(1, min(50, prune_steps // 50)),  # a short run is drawn as finely as a long one
            "checkpoint_seconds": checkpoint_seconds,
        },
    )
    place = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if cuda_graph and torch.device(place).type != "cuda":
        raise EccError(f"--cuda-graph is for GPUs, and this trains on {place}; leave it out.")
    distributed = find_distributed(place)
    source = zero_skipping_platform(meter) if is_fine else source_of(meter, models[0])
    view = CompressView(None if quiet or as_json or not distributed.is_main else Console(stderr=True))
    loggers = [TensorBoardLogger(tensorboard)] if tensorboard is not None and distributed.is_main else []
    job: Compression | WeightCompression
    try:
        job_task = task_of(task, data, weights, size, batch_size, distributed.device)
        if is_fine:
            assert source is not None
            job = WeightCompression(job_task, budgets, source, settings=settings, device=distributed.device)
            found, groups, full = [job.reach()], job.cost.groups, job.cost.full_widths
        else:
            job = Compression(
                job_task,
                budgets,
                models,
                source=source,
                settings=settings,
                device=distributed.device,
                freeze=freeze or (),
                method=rival,
            )
            found = check_feasibility(
                job.graph,
                job.costs,
                job.limits,
                min_width_ratio=settings.min_width_ratio,
                width_multiple=job.width_multiple,
            )
            groups, full = job.costs[0].groups, job.costs[0].full_widths
        view.show(feasibility_table(found))
        if note := _untrained(task, weights, pretrain_steps):
            view.tell(note)
        ends = dict(zip(settings.phase_steps, accumulate(settings.phase_steps.values()), strict=True))
        view.plan(ends, found, dict(zip(groups, full, strict=True)), distributed.size)
        with view:
            result = job.run(output, distributed=distributed, history=view, loggers=loggers, progress=view.tell)
    except Interrupted as stop:
        typer.echo(f"\n{stop}", err=True)
        raise typer.Exit(128 + stop.signum) from None
    finally:
        for logger in loggers:
            logger.close()
        if source is not None:
            close_meter(source)
        distributed.close()
    if not distributed.is_main:
        return
    summary = to_builtins(result.summary)
    if as_json:
        typer.echo(json.dumps(summary, indent=1))
    elif not quiet:
        show(summary, output, weights_view if is_fine else compress_view)
    if not result.summary.met:
        raise EccError(f"the budget is not met: {result.summary.note}")


def show(summary: dict[str, Any], folder: Path, view: Callable[[dict[str, Any], Path], RenderableType]) -> None:
    """Prints the summary of a run, which may be that of a run that ended long ago.

    Raises:
        BadFile: If it is not one that can be shown.
    """
    import typer
    from rich.console import Console
    from rich.errors import NotRenderableError

    console = Console()
    try:
        plain = json.dumps(summary, ensure_ascii=False)
        if "\\u00" in plain or not plain.isprintable():
            raise ValueError("codes for a terminal")
        with console.capture() as text:
            console.print(view(summary, folder))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, NotRenderableError) as error:
        file = folder / "summary.json"
        raise BadFile(f"{file} is damaged ({type(error).__name__}); restore it from a copy.") from None
    typer.echo(text.get(), nl=False)


def _is_fine(granularity: str, energy: Sequence[Path], freeze: Sequence[str], importance: str | None) -> bool:
    """Whether single weights are pruned; refuses options that do not go together."""
    if granularity not in ("channel", "weight"):
        raise EccError(f"granularity {granularity!r} is unknown; there are channel and weight.")
    if granularity == "channel":
        if not energy:
            raise EccError(
                "--energy is missing: channels are pruned by an energy model. Fit one: ecc fit PROFILE -o energy.json"
            )
        return False
    for option, given in (("--energy", energy), ("--freeze", freeze), ("--importance", importance)):
        if given:
            raise EccError(f"{option} is for channels; with --granularity weight leave it out.")
    return True


def _refuse_without_effect(
    method: str, is_fine: bool, importance: str | None, temperature: float | None, kd_weight: float | None
) -> None:
    """Refuses options that would be read by nobody."""
    if is_fine and method != "ecc":
        raise EccError(f"--method {method} prunes channels; with --granularity weight leave it out.")
    if importance is not None and method != "ecc":
        raise EccError(f"--importance {importance} is what ECC ranks channels by; with --method {method} leave it out.")
    if temperature is not None and kd_weight == 0:
        raise EccError(f"--kd-temperature {temperature:g} has no effect with --kd-weight 0.")


def _untrained(task: str, weights: Path | None, pretrain_steps: int) -> str:
    """A note for networks that nothing has trained; empty for others."""
    if task not in BUNDLED_TASKS or weights is not None or pretrain_steps:
        return ""
    ways = "" if task == "digits" else "--weights FILE, or "
    return f"note: {task} starts from random weights; give {ways}--pretrain-steps N to train it first."
