"""`ecc compress`: from a trained network and a budget to a small network that meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ecc.energy import EnergyModel, parse_budgets
from ecc.errors import BadMeasurement, EccError
from ecc.measure import Source, close_meter, find_meter
from ecc.methods import Compression, CompressSettings, reaches
from ecc.report.compress import CompressView, compress_view, feasibility_table
from ecc.training import Interrupted, find_world
from ecc.zoo.find import find_task

from .app import app


@app.command()
def compress(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to compress.", show_default=False)],
    energy: Annotated[
        list[Path], typer.Option("--energy", metavar="FILE", help="From `ecc fit`. Repeatable: energy, latency.")
    ],
    budget: Annotated[
        list[str],
        typer.Option("--budget", metavar="BUDGET", help="60%, 24 mJ, latency=12ms, params=2M. Repeatable."),
    ],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The folder of the run.")],
    meter: Annotated[
        str,
        typer.Option("--meter", metavar="METER", help="Weighs the result: auto, nvml, platform:..., none."),
    ] = "auto",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Of pruning while training.")] = 2000,
    tune_steps: Annotated[int, typer.Option("--tune-steps", metavar="N", help="Of the slim network after.")] = 1000,
    train_steps: Annotated[
        int, typer.Option("--train-steps", metavar="N", help="Of the dense network before, if it is untrained.")
    ] = 0,
    lr: Annotated[float, typer.Option("--lr", metavar="RATE", help="Of Adam in pruning and tuning.")] = 1e-4,
    train_lr: Annotated[float, typer.Option("--train-lr", metavar="RATE", help="Of Adam before pruning.")] = 1e-3,
    distill: Annotated[
        float, typer.Option("--distill", metavar="SHARE", help="Of the dense network's word in the loss.")
    ] = 0.5,
    temperature: Annotated[
        float | None, typer.Option("--temperature", metavar="T", help="Compare probabilities instead of logits.")
    ] = None,
    min_share: Annotated[
        float, typer.Option("--min-share", metavar="SHARE", help="No group keeps less of its channels.")
    ] = 0.1,
    round_to: Annotated[
        int | None, typer.Option("--round-to", metavar="N", help="Widths in multiples of N; as the profile's.")
    ] = None,
    device: Annotated[str | None, typer.Option("--device", help="Where to train; a GPU if there is one.")] = None,
    precision: Annotated[str, typer.Option("--precision", help="Of training: fp32, bf16 or fp16.")] = "fp32",
    micro_batch: Annotated[
        int | None, typer.Option("--micro-batch", metavar="N", help="Items at once, where a batch does not fit.")
    ] = None,
    channels_last: Annotated[bool, typer.Option("--channels-last", help="Faster on most GPUs.")] = False,
    clip_norm: Annotated[float | None, typer.Option("--clip-norm", metavar="NORM", help="Of the gradient.")] = None,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    freeze: Annotated[
        list[str] | None,
        typer.Option("--freeze", metavar="PATTERN", help="Keep the outputs of these modules whole. Repeatable."),
    ] = None,
    checkpoint_seconds: Annotated[
        float, typer.Option("--checkpoint-seconds", metavar="S", help="Between two checkpoints.")
    ] = 300.0,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary for programs.")] = False,
) -> None:
    """Prune a network while it trains, until it meets its budgets on the scales.

    First a table tells what can be reached. The same command again goes on
    where the last one ended; a finished run is shown again.

    \b
    Examples:
      ecc compress digits --energy energy.json --budget 50% -o run --train-steps 300
      ecc compress net.py:build --energy energy.json --budget 24mJ --budget params=2M -o run
      torchrun --nproc-per-node 4 -m ecc compress net.py:build --energy e.json --budget 60% -o run
    """
    budgets = parse_budgets(budget)
    models = [EnergyModel.load(path) for path in energy]
    settings = CompressSettings(
        train_steps=train_steps,
        steps=steps,
        tune_steps=tune_steps,
        lr=lr,
        train_lr=train_lr,
        distill=distill,
        temperature=temperature,
        min_share=min_share,
        round_to=round_to,
        precision=precision,
        micro_batch=micro_batch,
        channels_last=channels_last,
        clip_norm=clip_norm,
        seed=seed,
        checkpoint_seconds=checkpoint_seconds,
    )
    world = find_world(_usable(device or ("cuda" if torch.cuda.is_available() else "cpu")))
    source = _source(meter, models[0])
    view = CompressView(None if quiet or as_json or not world.is_main else Console(stderr=True))
    try:
        job = Compression(
            find_task(task), budgets, models, source=source, settings=settings, device=world.device, freeze=freeze or ()
        )
        found = reaches(job.graph, job.costs, job.limits, min_share=settings.min_share, round_to=job.round_to)
        view.show(feasibility_table(found))
        with view:
            result = job.run(output, world=world, history=view, progress=view.tell)
    except Interrupted as stop:
        typer.echo(f"\n{stop}", err=True)
        raise typer.Exit(128 + stop.number) from None
    finally:
        if source is not None:
            close_meter(source)
        world.close()
    if not world.is_main:
        return
    if as_json:
        typer.echo(json.dumps(result.summary, indent=1))
    elif not quiet:
        Console().print(compress_view(result.summary, output))
    if not result.summary["met"]:
        raise EccError(f"the budget is not met: {result.summary['note']}")


def _usable(device: str) -> str:
    """The same name, if torch can compute there."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for the device
        reason = str(error).strip().splitlines()[0].rstrip(".")
        raise EccError(f"device {device!r} cannot be used here: {reason}. Give --device cpu or leave it out.") from None
    return device


def _source(spec: str, energy: EnergyModel) -> Source | None:
    """The meter or platform of the energy model; None if the model's word must do."""
    if spec == "none":
        return None
    origin = energy.origin
    if spec == "auto" and origin.meter.name == "platform":
        return find_meter(f"platform:{origin.meter.device_id}")
    try:
        return find_meter(spec if spec != "auto" else origin.meter.name, runs_on=origin.device_type)
    except EccError as error:
        if spec != "auto":
            raise
        raise BadMeasurement(
            f"the energy model was measured by {origin.meter.name} on {origin.meter.device}, which cannot be read "
            f"here: {error} Compress on that device, or say --meter none to trust the model's predictions."
        ) from None
