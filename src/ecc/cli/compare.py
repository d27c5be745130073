"""`ecc compare`: methods against each other, at equal budgets and equal batches."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from ecc.constants import METHOD_NAMES, MIN_WIDTH_RATIO, SCRATCH
from ecc.errors import EccError

from .options import (
    BatchSizeOption,
    DataOption,
    FreezeOption,
    MicroBatchOption,
    MinShareOption,
    RoundToOption,
    SizeOption,
    WeightsOption,
)
from .parameters import Argument, Context, Option
from .recipes import settings_of, with_quick, with_recipe

PLACES = ("here", "ray")


def compare(
    context: Context,
    task: Annotated[
        str,
        Argument(
            metavar="TASK",
            help="What to compress; or a recipe, FILE.toml, that says so and how.",
            show_default=False,
            is_eager=True,
            callback=with_recipe,
        ),
    ],
    energy: Annotated[list[Path], Option("--energy", metavar="FILE", help="From `ecc fit`. Repeatable.")],
    output: Annotated[Path, Option("-o", "--output", metavar="FOLDER", help="The folder of the grid.")],
    data: DataOption = None,
    weights: WeightsOption = None,
    size: SizeOption = None,
    batch_size: BatchSizeOption = None,
    budgets: Annotated[str, Option("--budgets", metavar="LIST", help="With commas between them.")] = "80%,65%,50%,35%",
    methods: Annotated[
        str, Option("--methods", metavar="LIST", help=f"Of {', '.join((*METHOD_NAMES, SCRATCH))}.")
    ] = ",".join(METHOD_NAMES),
    seeds: Annotated[int, Option("--seeds", metavar="N", max=1000, help="Runs of each cell.")] = 3,
    meter: Annotated[
        str, Option("--meter", metavar="METER", help="Weighs the results: auto, nvml, platform:..., none.")
    ] = "auto",
    prune_steps: Annotated[int, Option("--prune-steps", metavar="N", help="Pruning steps of each method.")] = 2000,
    finetune_steps: Annotated[int, Option("--finetune-steps", metavar="N", help="Batches to tune with.")] = 1000,
    pretrain_steps: Annotated[
        int, Option("--pretrain-steps", metavar="N", help="Of the dense network before, once a seed.")
    ] = 0,
    lr: Annotated[float, Option("--lr", metavar="RATE", help="Of Adam in solving and tuning.")] = 1e-4,
    pretrain_lr: Annotated[float, Option("--pretrain-lr", metavar="RATE", help="Of Adam before.")] = 1e-3,
    min_width_ratio: MinShareOption = MIN_WIDTH_RATIO,
    width_multiple: RoundToOption = None,
    micro_batch: MicroBatchOption = None,
    device: Annotated[str | None, Option("--device", help="Where to train; a GPU if there is one.")] = None,
    freeze: FreezeOption = None,
    quick: Annotated[
        bool,
        Option(
            "--quick",
            help="Few steps, short searches, one seed, two budgets: to see it work.",
            is_eager=True,
            callback=with_quick,
        ),
    ] = False,
    figure: Annotated[Path | None, Option("--figure", metavar="FILE", help="Draw score against cost.")] = None,
    on: Annotated[
        str, Option("--on", metavar="PLACE", help="here, or ray: on all machines of a Ray cluster.")
    ] = "here",
    as_json: Annotated[bool, Option("--json", help="Print facts for programs.")] = False,
) -> None:
    """Compress one network by several methods, at equal budgets and equal batches.

    Every cell of the grid is a run folder. The same command again goes on
    where the last one ended; more budgets, methods or seeds extend it.

    With --on ray the cells run side by side, one a GPU (or CPU), on the
    cluster that RAY_ADDRESS names or `ray start` began; without one, on
    this machine. All machines must share this folder and that of the grid.

    A recipe brings task, budgets, methods and settings; options that are
    typed win over it.

    \b
    Examples:
      ecc compare digits --energy energy.json --quick -o runs
      ecc compare recipe.toml --data imagenet --energy e.json -o runs
      ecc compare net.py:build --energy e.json --budgets 65%,35% --methods ecc,netadapt -o runs
      ecc compare net.py:build --energy e.json -o /shared/runs --on ray
    """
    import typer
    from rich.console import Console

    from ecc.methods.cluster import open_cluster, run_on_cluster
    from ecc.report.compare import draw_grid, grid_facts, grid_view, load_grid
    from ecc.report.fit_figures import refuse_undrawable
    from ecc.training import Interrupted

    from .grids import GridSpec

    if on not in PLACES:
        raise EccError(f"--on {on} is unknown; there are {' and '.join(PLACES)}.")
    if figure is not None:
        refuse_undrawable(figure)
    typed = {
        "pretrain_steps": pretrain_steps,
        "prune_steps": prune_steps,
        "finetune_steps": finetune_steps,
        "lr": lr,
        "pretrain_lr": pretrain_lr,
        "min_width_ratio": min_width_ratio,
        "width_multiple": width_multiple,
        "micro_batch": micro_batch,
    }
    spec = GridSpec(
        task=task,
        data=None if data is None else str(data),
        weights=None if weights is None else str(weights),
        size=size,
        batch_size=batch_size,
        energy=tuple(map(str, energy)),
        methods=_words(methods),
        budgets=_words(budgets),
        seeds=seeds,
        meter=meter,
        settings=settings_of(context, typed),
        device=device,
        freeze=tuple(freeze or ()),
        quick=quick,
    )
    console = Console(stderr=True)

    def tell(line: str) -> None:
        if not as_json:
            console.print(line, markup=False, highlight=False)

    try:
        if on == "here":
            with spec.opened() as grid:
                failed = grid.run(output, tell)
        else:
            # The meter is read by the workers; this machine may have none.
            with replace(spec, meter="none", device="cpu").opened() as grid, open_cluster(device) as cluster:
                tell(f"Ray: {cluster}")
                failed = run_on_cluster(grid, replace(spec, device=cluster.device).opened, output, cluster, tell)
    except Interrupted as stop:
        typer.echo(f"\n{stop}", err=True)
        raise typer.Exit(128 + stop.signum) from None
    entries = load_grid(output)
    if figure is not None:
        draw_grid(entries, figure)
    if as_json:
        typer.echo(json.dumps(grid_facts(entries), indent=1))
    else:
        Console().print(grid_view(entries))
    if len(failed) == len(grid.cells):
        raise EccError("no cell that was asked for has a result; each says why it failed.")


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
