"""`ecc compare`: several methods at equal budgets and equal training steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecc.budget import budgets_of_workloads, measured_resources, parse_budget
from ecc.constants import COMPARED_METHODS, METHOD_NAMES, PRESETS, PROTOCOLS, SCRATCH
from ecc.errors import EccError
from ecc.settings import CompressSettings, make_settings

from .options import (
    PATH,
    Command,
    build_task,
    console,
    describe_report,
    json_option,
    option,
    print_json,
    run_options,
    task_argument,
    task_defaults,
    text_options,
)

if TYPE_CHECKING:
    from ecc.methods.grid import Comparison

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
    "--methods", metavar="LIST", default=",".join(COMPARED_METHODS), show_default=False,
    help=f"Some of {', '.join((*METHOD_NAMES, SCRATCH))}; the default is those up to {COMPARED_METHODS[-1]}.",
)  # fmt: skip
@option("--seeds", metavar="N", type=click.IntRange(1, 1000), default=3, help="Runs of each method and budget.")
@option(
    "--quick", is_flag=True, is_eager=True, callback=_use_quick, help="Few steps, one seed, two budgets: to try it out."
)
@option(
    "--protocol", type=click.Choice(PROTOCOLS), default=PROTOCOLS[0], common=False,
    help="equal: as many batches for every method; published: each method searches as in its paper.",
)  # fmt: skip
@run_options(common=False)
@text_options
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
    protocol: str,
    settings: dict[str, Any],
    batch: int | None,
    samples: int | None,
    freeze: tuple[str, ...],
    device: str | None,
    backend: str,
    as_json: bool,
    **data: Any,
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
      ecc compare hf:./model --text train.txt --budgets decode=70%,decode=50% --methods one_shot,flap,2ssp -o runs
      ecc compare net.py:build --energy e.json -o /shared/runs --backend ray
    """
    spec = GridSpec(
        task=task,
        data={**data, **({"batch": batch} if task.startswith("hf:") else {})},
        energy=energy,
        methods=_words(methods),
        budgets=_words(budgets),
        seeds=seeds,
        meter=meter,
        targets=targets,
        settings=make_settings(PRESETS[0], {**task_defaults(task, PRESETS[0], settings), **settings}),
        device=device,
        freeze=freeze,
        quick=quick,
        protocol=protocol,
    )
    for text in spec.budgets:
        parse_budget(text)

    from rich.console import Console  # here and not above: mistakes in the command line are answered at once

    from ecc.methods.cluster import open_cluster, run_on_cluster
    from ecc.report.load import load_grid
    from ecc.report.terminal import grid_table
    from ecc.training import Interrupted

    shown = console(is_shown=not as_json)

    def tell(line: str) -> None:
        if shown is not None:
            shown.print(line, markup=False, highlight=False)

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
    if as_json:
        print_json(rows)
    else:
        Console().print(grid_table(rows))
    if len(failed) == len(grid.runs):
        raise EccError("every run failed; the lines above say why.")
    tell(describe_report(output))


@dataclass(frozen=True, kw_only=True)
class GridSpec:
    """A comparison in plain values, from which any process on any machine builds the same one.

    Paths are as they were typed, relative to the folder in which the command was given.
    """

    task: str
    energy: tuple[Path, ...]
    """Files of energy models; none if every budget is counted."""
    methods: tuple[str, ...]
    budgets: tuple[str, ...]
    seeds: int
    data: Mapping[str, Any] = field(default_factory=dict)
    """Options of the task: data, weights, image_size, batch_size, and those of a Hugging Face model."""
    settings: CompressSettings = field(default_factory=CompressSettings)
    meter: str = "auto"
    targets: tuple[str, ...] = ()
    device: str | None = None
    """Training device; None for a GPU, if the process has one."""
    freeze: tuple[str, ...] = ()
    quick: bool = False
    """Whether methods search for a tenth of their time."""
    protocol: str = PROTOCOLS[0]
    """One of `PROTOCOLS`."""

    def installed(self, batch: int | None = None) -> Any:
        """The task as it is named on the targets."""
        from ecc.measure.remote.client import InstalledSpec

        return InstalledSpec(
            task=self.task, batch=batch, freeze=tuple(self.freeze), attention=self.settings.trace.attention
        )

    @contextmanager
    def opened(self) -> Iterator[Comparison]:
        """The comparison, with an open meter."""
        import torch

        from ecc.energy import EnergyModel
        from ecc.methods.grid import Comparison
        from ecc.profiling import open_meter
        from ecc.torch_utils import usable_device

        models = [EnergyModel.load(path) for path in self.energy]
        device = usable_device(self.device)
        batch = models[0].origin.batch if models and not self.task.startswith("hf:") else None
        way: dict[str, Any] = {"targets": self.targets, "inference": self.settings.inference}
        way["task"] = self.installed(batch)
        with open_meter(self.meter if models else None, torch.device(device), models[:1], **way) as source:
            yield Comparison(
                build_task(self.task, **self.data, device=device),
                models,
                methods=self.methods,
                budgets=self.budgets,
                seeds=self.seeds,
                meter=source,
                settings=self.settings,
                device=device,
                freeze=self.freeze,
                quick=self.quick,
                protocol=self.protocol,
            )


def _with_energy(spec: GridSpec, output: Path, samples: int | None, batch: int | None, shown: Any) -> GridSpec:
    """The same comparison with energy models: those of the command, or new ones in the folder of the runs."""
    import torch

    from ecc.energy import EnergyModel
    from ecc.methods.base import check_trainable
    from ecc.methods.grid import check_grid_folder
    from ecc.profiling import check_inference, open_meter, profile_and_fit
    from ecc.torch_utils import usable_device
    from ecc.training import DistributedContext

    budgets = [parse_budget(text) for text in spec.budgets]
    if spec.energy or not measured_resources(budgets):
        check_inference([EnergyModel.load(path) for path in spec.energy], spec.settings)
        return spec
    check_grid_folder(output)
    device, task = usable_device(spec.device), build_task(spec.task, **spec.data)
    check_trainable(task)
    workloads = [one.name for one in task.workloads]
    resources = measured_resources([one for each in budgets for one in budgets_of_workloads([each], workloads)])
    way: dict[str, Any] = {"inference": spec.settings.inference, "task": spec.installed(batch)}
    with open_meter(spec.meter, torch.device(device), targets=spec.targets, **way) as source:
        assert source is not None  # without an energy model there has to be one
        models = profile_and_fit(
            task,
            resources,
            source,
            output,
            distributed=DistributedContext(device),
            console=shown,
            width_multiple=spec.settings.width_multiple,
            samples=samples,
            batch=batch,
            freeze=spec.freeze,
            attention=spec.settings.trace.attention,
            inference=spec.settings.inference,
        )
    files = []
    for model in models:
        files.append(output / f"{model.resource}.json")
        model.save(files[-1])
    return replace(spec, energy=tuple(files))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
