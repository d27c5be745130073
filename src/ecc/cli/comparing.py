"""`ecc compare`: methods against each other, at equal budgets and equal batches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from ecc.energy import EnergyModel
from ecc.measure import close_meter
from ecc.methods.compare import Comparison
from ecc.methods.find import METHODS
from ecc.report.compare import draw_grid, grid_facts, grid_view, load_grid

from .app import app
from .choosing import BatchSizeOption, DataOption, SizeOption, WeightsOption, source_of, task_of, usable_device
from .recipes import settings_of, with_quick, with_recipe


@app.command()
def compare(
    context: typer.Context,
    task: Annotated[
        str,
        typer.Argument(
            metavar="TASK",
            help="What to compress; or a recipe, FILE.toml, that says so and how.",
            show_default=False,
            is_eager=True,
            callback=with_recipe,
        ),
    ],
    energy: Annotated[list[Path], typer.Option("--energy", metavar="FILE", help="From `ecc fit`. Repeatable.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The folder of the grid.")],
    data: DataOption = None,
    weights: WeightsOption = None,
    size: SizeOption = None,
    batch_size: BatchSizeOption = None,
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="LIST", help="With commas between them.")
    ] = "80%,65%,50%,35%",
    methods: Annotated[str, typer.Option("--methods", metavar="LIST", help=f"Of {', '.join(METHODS)}.")] = ",".join(
        METHODS
    ),
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Runs of each cell.")] = 3,
    meter: Annotated[
        str, typer.Option("--meter", metavar="METER", help="Weighs the results: auto, nvml, platform:..., none.")
    ] = "auto",
    steps: Annotated[int, typer.Option("--steps", metavar="N", help="Batches to solve with, for each method.")] = 2000,
    tune_steps: Annotated[int, typer.Option("--tune-steps", metavar="N", help="Batches to tune with.")] = 1000,
    train_steps: Annotated[
        int, typer.Option("--train-steps", metavar="N", help="Of the dense network before, once a seed.")
    ] = 0,
    lr: Annotated[float, typer.Option("--lr", metavar="RATE", help="Of Adam in solving and tuning.")] = 1e-4,
    train_lr: Annotated[float, typer.Option("--train-lr", metavar="RATE", help="Of Adam before.")] = 1e-3,
    device: Annotated[str | None, typer.Option("--device", help="Where to train; a GPU if there is one.")] = None,
    quick: Annotated[  # noqa: ARG001 - its callback has done it
        bool,
        typer.Option(
            "--quick", help="A few steps, one seed, two budgets: to see it work.", is_eager=True, callback=with_quick
        ),
    ] = False,
    figure: Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw score against cost.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Compress one network by several methods, at equal budgets and equal batches.

    Every cell of the grid is a run folder. The same command again goes on
    where the last one ended; more budgets, methods or seeds extend it.

    A recipe brings task, budgets, methods and settings; options that are
    typed win over it.

    \b
    Examples:
      ecc compare digits --energy energy.json --quick -o runs
      ecc compare recipe.toml --data imagenet --energy e.json -o runs
      ecc compare net.py:build --energy e.json --budgets 65%,35% --methods ecc,netadapt -o runs
    """
    models = [EnergyModel.load(path) for path in energy]
    typed = {"train_steps": train_steps, "steps": steps, "tune_steps": tune_steps, "lr": lr, "train_lr": train_lr}
    settings = settings_of(context, typed)
    where = usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    source = source_of(meter, models[0])
    console = Console(stderr=True)
    try:
        grid = Comparison(
            task_of(task, data, weights, size, batch_size, where),
            models,
            methods=_listed(methods),
            budgets=_listed(budgets),
            seeds=seeds,
            source=source,
            settings=settings,
            device=where,
        )
        grid.run(output, None if as_json else lambda line: console.print(line, markup=False, highlight=False))
    finally:
        if source is not None:
            close_meter(source)
    entries = load_grid(output)
    if figure is not None:
        draw_grid(entries, figure)
    if as_json:
        typer.echo(json.dumps(grid_facts(entries), indent=1))
    else:
        Console().print(grid_view(entries))


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
