"""`ecc compare`: several methods at equal budgets and equal training steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecc.constants import METHOD_NAMES, SCRATCH
from ecc.errors import EccError
from ecc.settings import CompressSettings

from .options import (
    Command,
    batch_size_option,
    build_task,
    config_option,
    console,
    device_option,
    freeze_option,
    json_option,
    option,
    print_json,
    settings_options,
    target_option,
    task_argument,
    task_options,
    usable_device,
)

if TYPE_CHECKING:
    from ecc.methods.grid import Comparison

PATH = click.Path(path_type=Path)
BACKENDS = ("local", "ray")

QUICK = {
    "pretrain_steps": 60,
    "prune_steps": 40,
    "finetune_steps": 20,
    "lr": 1e-3,
    "pretrain_lr": 3e-3,
    "seeds": 1,
    "budgets": "65%,40%",
}
"""Defaults with --quick."""


def _use_quick(ctx: click.Context, param: click.Parameter, wanted: bool) -> bool:
    del param
    if wanted:
        ctx.default_map = {**(ctx.default_map or {}), **QUICK}
    return wanted


@click.command(cls=Command)
@task_argument
@option("-o", "--output", required=True, type=PATH, metavar="FOLDER", help="Folder of the runs; it is resumed.")
@option("--budgets", metavar="LIST", default="80%,65%,50%,35%", help="Budgets, with commas between them.")
@option(
    "--methods", metavar="LIST", default=",".join(METHOD_NAMES), show_default=False,
    help=f"Some of {', '.join((*METHOD_NAMES, SCRATCH))}; the default is all but scratch.",
)  # fmt: skip
@option("--seeds", metavar="N", type=click.IntRange(1, 1000), default=3, help="Runs of each method and budget.")
@option("--meter", metavar="METER", default="auto", help="auto, nvml, rapl, platform:jetson-tx2, ..., none.")
@target_option
@option(
    "--energy", type=PATH, metavar="FILE", multiple=True,
    help="Energy model from `ecc fit`; without it the network is profiled. Repeatable.",
)  # fmt: skip
@option(
    "--quick", is_flag=True, is_eager=True, callback=_use_quick, help="Few steps, one seed, two budgets: to try it out."
)
@task_options
@config_option
@settings_options(CompressSettings, common=False)
@batch_size_option
@option(
    "--batch", type=click.IntRange(1), metavar="N", common=False,
    help="Items per inference; as the example input of the task if not given.",
)  # fmt: skip
@option("--samples", type=click.IntRange(1), metavar="N", common=False, help="Width configurations to measure.")
@freeze_option
@device_option
@option("--figure", type=PATH, metavar="FILE", common=False, help="Draw the score over the cost.")
@option(
    "--backend", type=click.Choice(BACKENDS), default=BACKENDS[0], common=False,
    help="local, or ray: on all machines of a Ray cluster.",
)  # fmt: skip
@json_option
def compare(
    task: str,
    output: Path,
    budgets: str,
    methods: str,
    seeds: int,
    meter: str,
    targets: tuple[str, ...],
    energy: tuple[Path, ...],
    quick: bool,
    settings: dict[str, Any],
    data: Path | None,
    weights: Path | None,
    image_size: str | None,
    batch_size: int | None,
    batch: int | None,
    samples: int | None,
    freeze: tuple[str, ...],
    device: str | None,
    figure: Path | None,
    backend: str,
    as_json: bool,
) -> None:
    """Compress a network by several methods at equal budgets and equal training steps.

    Every method, budget and seed has a run folder of its own, and the page
    OUTPUT/report.html compares them. Run the same command again to resume;
    more budgets, methods or seeds extend the comparison.

    With --backend ray the runs are spread over the cluster that RAY_ADDRESS
    names, one for each GPU (or CPU); without a cluster, over this machine.
    All machines must see the same folders.

    \b
    Examples:
      ecc compare digits --quick --meter platform:jetson-tx2 -o runs
      ecc compare recipe.toml --data imagenet --energy e.json -o runs
      ecc compare net.py:build --energy e.json --budgets 65%,35% --methods ecc,netadapt -o runs
      ecc compare net.py:build --energy e.json -o /shared/runs --backend ray
    """
    from rich.console import Console

    from ecc.api import make_settings, write_report
    from ecc.methods.cluster import open_cluster, run_on_cluster
    from ecc.report.load import load_grid, load_report
    from ecc.report.terminal import grid_table
    from ecc.training import Interrupted

    if figure is not None:
        from ecc.report.figures import check_figure_path

        check_figure_path(figure)
    shown = console(is_shown=not as_json)

    def tell(line: str) -> None:
        if shown is not None:
            shown.print(line, markup=False, highlight=False)

    spec = GridSpec(
        task=task,
        data=None if data is None else str(data),
        weights=None if weights is None else str(weights),
        image_size=image_size,
        batch_size=batch_size,
        energy=tuple(map(str, energy)),
        methods=_words(methods),
        budgets=_words(budgets),
        seeds=seeds,
        meter=meter,
        targets=targets,
        settings=make_settings("default", settings),
        device=device,
        freeze=freeze,
        quick=quick,
    )
    try:
        spec = _with_energy(spec, output, samples, batch, shown)
        if backend == "local":
            with spec.opened() as grid:
                failed = grid.run(output, tell)
        else:
            # The workers read the meter; this machine may have none.
            with replace(spec, meter="none", device="cpu").opened() as grid, open_cluster(device) as cluster:
                tell(f"Ray: {cluster}")
                failed = run_on_cluster(grid, replace(spec, device=cluster.device).opened, output, cluster, tell)
    except Interrupted as stop:
        click.echo(f"\n{stop}", err=True)
        raise click.exceptions.Exit(128 + stop.signum) from None
    rows = load_grid(output)
    if figure is not None:
        from ecc.report.figures import draw_tradeoff

        draw_tradeoff(load_report(output), figure)
    if as_json:
        print_json(rows)
    else:
        Console().print(grid_table(rows))
    if len(failed) == len(grid.runs):
        raise EccError("every run failed; the lines above say why.")
    try:
        tell(f"report: {write_report(output)}")
    except (EccError, ImportError) as error:
        tell(f"note: no report was written: {error}")


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """A comparison in plain values, from which any process on any machine builds the same one.

    Paths are as they were typed, relative to the folder in which the command was given.
    """

    task: str
    energy: tuple[str, ...]
    """Files of energy models; none if every budget is counted."""
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    seeds: int
    data: str | None = None
    weights: str | None = None
    image_size: str | None = None
    batch_size: int | None = None
    settings: CompressSettings = field(default_factory=CompressSettings)
    meter: str = "auto"
    targets: tuple[str, ...] = ()
    device: str | None = None
    """Training device; None for a GPU, if the process has one."""
    freeze: tuple[str, ...] = ()
    quick: bool = False
    """Whether methods search for a tenth of their time."""

    def build_task(self, device: str) -> Any:
        """The task of the options."""
        data, weights = (None if path is None else Path(path) for path in (self.data, self.weights))
        return build_task(self.task, data, weights, self.image_size, self.batch_size, device)

    @contextmanager
    def opened(self) -> Iterator[Comparison]:
        """The comparison, with an open meter.

        Raises:
            EccError: If the task cannot be built, a file or the meter cannot be read, or the device cannot be used.
        """
        import torch

        from ecc.api import open_meters
        from ecc.energy import EnergyModel
        from ecc.methods.grid import Comparison

        models = [EnergyModel.load(path) for path in self.energy]
        device = usable_device(self.device)
        meter = self.meter if models else None
        with open_meters(
            meter, torch.device(device), models[:1], self.targets, self.settings, self.task, None, self.freeze
        ) as sources:
            yield Comparison(
                self.build_task(device),
                models,
                methods=self.methods,
                budgets=self.budgets,
                seeds=self.seeds,
                meter=sources[0],
                settings=self.settings,
                device=device,
                freeze=self.freeze,
                quick=self.quick,
            )


def _with_energy(spec: GridSpec, output: Path, samples: int | None, batch: int | None, shown: Any) -> GridSpec:
    """The same comparison with energy models: those of the command, or new ones in the folder of the runs."""
    import torch

    from ecc.api import measured_resources, open_meters, profile_and_fit
    from ecc.energy import parse_budget
    from ecc.methods.grid import check_grid_folder
    from ecc.training import DistributedContext

    resources = measured_resources([parse_budget(text) for text in spec.budgets])
    if spec.energy or not resources:
        return spec
    check_grid_folder(output)
    device = usable_device(spec.device)
    place = torch.device(device)
    with open_meters(spec.meter, place, [], spec.targets, spec.settings, spec.task, batch, spec.freeze) as sources:
        models = profile_and_fit(
            spec.build_task("cpu"),
            resources,
            sources,
            output,
            samples=samples,
            batch=batch,
            freeze=spec.freeze,
            width_multiple=spec.settings.width_multiple,
            inference=spec.settings.inference,
            distributed=DistributedContext(device),
            console=shown,
        )
    files = []
    for model in models:
        files.append(output / f"{model.resource}.json")
        model.save(files[-1])
    return replace(spec, energy=tuple(map(str, files)))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
