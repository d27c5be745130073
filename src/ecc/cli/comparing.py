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
from ecc.methods import CompressSettings
from ecc.methods.compare import Comparison
from ecc.methods.find import METHODS
from ecc.report.compare import draw_grid, grid_facts, grid_view, load_grid
from ecc.training import Interrupted
from ecc.zoo.find import find_task

from .app import app
from .choosing import source_of, usable_device

QUICK = {"train_steps": 60, "steps": 40, "tune_steps": 20, "lr": 1e-3, "train_lr": 3e-3}


@app.command()
def compare(
    task: Annotated[str, typer.Argument(metavar="TASK", help="What to compress.", show_default=False)],
    energy: Annotated[list[Path], typer.Option("--energy", metavar="FILE", help="From `ecc fit`. Repeatable.")],
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FOLDER", help="The folder of the grid.")],
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="LIST", help="With commas between them.")
    ] = "80%,65%,50%,35%",
    methods: Annotated[str, typer.Option("--methods", metavar="LIST", help=f"Of {', '.join(METHODS)}.")] = ",".join(
        METHODS
    ),
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", max=1000, help="Runs of each cell.")] = 3,
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
    quick: Annotated[bool, typer.Option("--quick", help="A few steps, one seed, two budgets: to see it work.")] = False,
    figure: Annotated[Path | None, typer.Option("--figure", metavar="FILE", help="Draw score against cost.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Compress one network by several methods, at equal budgets and equal batches.

    Every cell of the grid is a run folder. The same command again goes on
    where the last one ended; more budgets, methods or seeds extend it.

    \\b
    Examples:
      ecc compare digits --energy energy.json --quick -o runs
      ecc compare net.py:build --energy e.json --budgets 65%,35% --methods ecc,netadapt -o runs
    """
    models = [EnergyModel.load(path) for path in energy]
    settings = CompressSettings(train_steps=train_steps, steps=steps, tune_steps=tune_steps, lr=lr, train_lr=train_lr)
    chosen = [text.strip() for text in budgets.split(",") if text.strip()]
    if quick:
        settings, seeds, chosen = CompressSettings(**QUICK), 1, ["65%", "40%"]  # type: ignore[arg-type]
    source = source_of(meter, models[0])
    console = Console(stderr=True)
    try:
        grid = Comparison(
            find_task(task),
            models,
            methods=[name.strip() for name in methods.split(",") if name.strip()],
            budgets=chosen,
            seeds=seeds,
            source=source,
            settings=settings,
            device=usable_device(device or ("cuda" if torch.cuda.is_available() else "cpu")),
        )
        grid.run(output, None if as_json else lambda line: console.print(line, markup=False, highlight=False))
    except Interrupted as stop:
        typer.echo(f"\n{stop}", err=True)
        raise typer.Exit(128 + stop.number) from None
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
