"""`ecc compress`: from a network and a budget to a small network that meets it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ecc.budget import Budget, parse_budgets, parse_several_budgets
from ecc.constants import BUNDLED_TASKS, METHOD_NAMES, PRESETS
from ecc.errors import EccError
from ecc.integrations.trackers import parse_tracker
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
    quiet_option,
    remember_task,
    run_options,
    task_argument,
    task_defaults,
    text_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from ecc.api import CompressResult
    from ecc.run_records import RunSummary
    from ecc.task import Task
    from ecc.training import DistributedContext, Logger


@click.command(cls=Command)
@task_argument
@option(
    "--budget", "budgets", metavar="BUDGET", multiple=True,
    help="50%, 24mJ, latency=12ms, macs=50%, params=2M, decode=70%. Repeatable.",
)  # fmt: skip
@option(
    "--budgets", "several", metavar="BUDGET,BUDGET,...", common=False,
    help="Several budgets on one resource, such as 80%,50%,35%, each with a result of its own.",
)  # fmt: skip
@option("-o", "--output", required=True, type=PATH, metavar="FOLDER", help="Run folder; an existing run is resumed.")
@run_options()
@text_options
@option("--method", type=click.Choice(METHOD_NAMES), default="ecc", common=False, help="ECC or a baseline.")
@option("--preset", type=click.Choice(PRESETS), default=PRESETS[0], common=False, help="paper: as published.")
@option(
    "--unstructured", is_flag=True, common=False,
    help="Prune single weights; --meter names the platform of a device that skips zeros.",
)  # fmt: skip
@option(
    "--tracker", "trackers", metavar="NAME:PLACE", multiple=True, common=False,
    help="Log the training to tensorboard:FOLDER, wandb:PROJECT or mlflow:URI. Repeatable.",
)  # fmt: skip
@quiet_option
@json_option
def compress(
    task: str,
    budgets: tuple[str, ...],
    several: str | None,
    output: Path,
    meter: str,
    targets: tuple[str, ...],
    energy: tuple[Path, ...],
    settings: dict[str, Any],
    batch: int | None,
    samples: int | None,
    method: str,
    preset: str,
    unstructured: bool,
    freeze: tuple[str, ...],
    device: str | None,
    trackers: tuple[str, ...],
    quiet: bool,
    as_json: bool,
    **data: Any,
) -> None:
    """Prune a network during training until its measured cost meets the budget.

    ECC measures the network at many widths, fits an energy model, prunes
    channels while it trains, measures the final widths, finetunes the slim
    network, and writes RUN/report.html. Run the same command again to resume.
    If a budget is not met in the end, the exit code is 2.

    \b
    Examples:
      ecc compress digits --budget 50% --meter platform:jetson-tx2 -o run --pretrain-steps 300
      ecc compress digits --budget macs=40% -o run --pretrain-steps 300
      ecc compress digits --budgets macs=80%,macs=50%,macs=35% -o run --pretrain-steps 300
      ecc compress mobilenet_v1 --data imagenet --budget 60% -o run
      ecc compress hf:./model --text train.txt --budget decode=70% --budget prefill=80% -o run
      ecc compress hf:./vit --data imagenet --budget 60% -o run
      ecc compress net.py:build --energy energy.json --budget 24mJ --budget params=2M -o run
      ecc compress net.py:build --target ssh://me@jetson --meter jetson --budget 60% -o run
      ecc compress digits --unstructured --meter platform:eyeriss --budget 60% -o sparse
      torchrun --nproc-per-node 4 -m ecc compress net.py:build --budget 60% -o run
    """
    parsed = _parse_budgets(budgets, several, unstructured)
    for spec in trackers:
        parse_tracker(spec)
    made = make_settings(preset, {**task_defaults(task, preset, settings), **settings})

    from rich.console import Console  # here and not above: mistakes in the command line are answered at once

    from ecc.api import compress_task
    from ecc.energy import EnergyModel
    from ecc.integrations.trackers import Tracker
    from ecc.records import read_record
    from ecc.report.terminal import compress_table, front_table
    from ecc.run_records import FRONT_FILE, Front
    from ecc.torch_utils import usable_device
    from ecc.training import Interrupted, find_distributed

    place = usable_device(device)
    _refuse_without_effect(method, unstructured, energy, freeze, settings, place)
    models = [EnergyModel.load(path) for path in energy]
    distributed = find_distributed(place)
    shown = console(is_shown=not quiet and not as_json and distributed.is_main)
    loggers: list[Logger] = [Tracker(spec) for spec in trackers] if distributed.is_main else []
    result: CompressResult | None = None
    try:
        more: dict[str, Any] = {"batch": batch} if task.startswith("hf:") else {}
        job = build_task(task, **data, **more, device=distributed.device)
        if shown is not None and (note := _untrained_note(task, data["weights"], made)):
            shown.print(note, markup=False, highlight=False, soft_wrap=True)
        if unstructured:
            summary = _compress_weights(job, parsed, meter, made, output, distributed, loggers, shown)
        else:
            result = compress_task(
                job,
                parsed,
                folder=output,
                several=bool(several),
                meter=meter,
                targets=targets,
                task_spec=task,
                energy_models=models,
                settings=made,
                samples=samples,
                preset=preset,
                batch=batch,
                freeze=freeze,
                method=method,
                distributed=distributed,
                loggers=loggers,
                console=shown,
            )
            summary = result.summary
    except Interrupted as stop:
        click.echo(f"\n{stop}", err=True)
        raise click.exceptions.Exit(128 + stop.signum) from None
    except KeyboardInterrupt:
        click.echo("\nstopped; run the same command again to continue.", err=True)
        raise click.exceptions.Exit(130) from None
    finally:
        for logger in loggers:
            logger.close()
        distributed.close()
    if not distributed.is_main:
        return
    results = {output: summary} if result is None else {one.folder: one.summary for one in result.front or (result,)}
    for one in () if result is None else result.front or (result,):
        _save_transformers_model(one.folder, task, one)
    for folder in results:
        remember_task(folder, task, data)
    reports = [describe_report(folder) for folder in (*results, *([output] if several else []))]
    front = read_record(output / FRONT_FILE, Front) if several else None
    if as_json:
        print_json(front or summary)
    elif not quiet:
        Console().print(compress_table(summary, output) if front is None else front_table(front, output))
        click.echo("\n".join(reports))
    _check_met(results.values())


def _parse_budgets(budgets: Sequence[str], several: str | None, unstructured: bool) -> Sequence[Budget]:
    if not budgets and not several:
        raise click.UsageError("--budget is missing, such as --budget 50%.")
    if several and (budgets or unstructured):
        raise click.UsageError(f"--budgets cannot be combined with {'--budget' if budgets else '--unstructured'}.")
    return parse_several_budgets(several.split(",")) if several else parse_budgets(budgets)


def _check_met(summaries: Iterable[RunSummary]) -> None:
    for summary in summaries:
        if not summary.met:
            raise EccError(f"the budget is not met: {summary.note}")


def _compress_weights(
    task: Task,
    budgets: Sequence[Budget],
    meter: str,
    settings: CompressSettings,
    folder: Path,
    distributed: DistributedContext,
    loggers: Sequence[Logger],
    shown: Console | None,
) -> RunSummary:
    """Prune single weights instead of channels."""
    from ecc.api import show_progress
    from ecc.methods import WeightCompression
    from ecc.methods.unstructured import zero_skipping_platform

    source = zero_skipping_platform(meter)
    job = WeightCompression(task, budgets, source, settings=settings, device=distributed.device)
    full = dict(zip(job.cost.groups, job.cost.full_widths, strict=True))
    with show_progress(shown, settings, job.feasibility(), full, distributed, task.metric) as view:
        return job.run(folder, distributed=distributed, history=view, loggers=loggers, progress=view.say).summary


def _save_transformers_model(folder: Path, task: str, result: CompressResult) -> None:
    """Write a pruned Hugging Face model with its tokenizer or preprocessor and model card into the run folder."""
    if task.startswith("hf:"):
        from ecc.integrations.huggingface import save_pruned

        save_pruned(result.model, folder / "model", source=task.removeprefix("hf:"), summary=result.summary)


def _removes_branches(method: str) -> bool:
    """Whether a method can remove residual branches."""
    from ecc.methods.registry import find_method

    return bool(getattr(find_method(method), "removes_branches", False))


def _refuse_without_effect(
    method: str,
    unstructured: bool,
    energy: Sequence[Path],
    freeze: Sequence[str],
    settings: dict[str, Any],
    device: str,
) -> None:
    """Refuse options that would have no effect."""
    if unstructured:
        for name, typed in (("--energy", energy), ("--freeze", freeze), ("--method", method != "ecc")):
            if typed:
                raise EccError(f"{name} applies to channels; leave it out with --unstructured.")
    if unstructured and "attention" in settings:
        raise EccError("--attention applies to channels; leave it out with --unstructured.")
    for name in ("importance", "solver", "uniform_floor", "depth"):
        applies = not unstructured and (method == "ecc" or (name == "depth" and _removes_branches(method)))
        if name in settings and not applies:
            whose = "methods that remove residual branches" if name == "depth" else "ecc"
            raise EccError(f"--{name.replace('_', '-')} is a setting of {whose}; leave it out with this method.")
    if settings.get("kd_temperature") is not None and settings.get("kd_weight") == 0:
        raise EccError("--kd-temperature has no effect with --kd-weight 0, which turns distillation off.")
    if settings.get("cuda_graph") and not device.startswith("cuda"):
        raise EccError(f"--cuda-graph needs a GPU, and the training device is {device}; leave it out.")


def _untrained_note(task: str, weights: Path | None, settings: CompressSettings) -> str:
    """A note for bundled networks with random weights; empty for others."""
    if task not in BUNDLED_TASKS or weights is not None or settings.pretrain_steps:
        return ""
    ways = "" if task == "digits" else "--weights FILE, or "
    return f"note: {task} starts from random weights; give {ways}--pretrain-steps N to train it first."
