"""`compress` and `inspect`: the whole of ECC in one call each.

`compress` traces the network, measures it at many widths (`profile`), fits an energy model (`fit`), prunes during
training, finetunes the slim network, and measures the result. All files go into one run folder; the same call again
resumes. `compress_task` does the same for a `Task`; the command line uses it.
"""

from __future__ import annotations

import inspect as signatures
import io
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from torch import nn

from ecc.constants import EXPORT_FORMATS, PRESETS, RUN_PROFILE
from ecc.energy import Budget, EnergyModel, fit, parse_budgets
from ecc.errors import BadMeasurement, BadTask, EccError, EccWarning, NoMeter, option_hint
from ecc.formatting import si
from ecc.graph import ChannelGraph, trace_channels, verify_graph
from ecc.io import refuse_other_file, write_text
from ecc.measure import PROFILE_SETTINGS, Analytic, EnergySource, MeasureSettings, Profile, close_meter, find_meter
from ecc.measure.profiler import default_device, find_runner, profile_on_targets, profile_settings
from ecc.measure.remote.client import RemoteMeter
from ecc.methods import Compression, CompressSettings
from ecc.methods.runner import OptimizerFactory
from ecc.options import flat_values, settings_from
from ecc.report.live import CompressProgress, ProfileProgress
from ecc.report.terminal import feasibility_table, graph_table
from ecc.run_records import RunSummary
from ecc.task import Inputs, Task, check_input, split_batch, with_batch_size
from ecc.torch_utils import device_of
from ecc.training import DistributedContext, Logger
from ecc.training.batches import to_device
from ecc.training.run_dir import check_run_folder

if TYPE_CHECKING:
    from ecc.methods.feasibility import Feasibility

MEASURED = ("energy", "latency")
"""Resources that need a meter or a platform. The others are counted."""

SAMPLES = 250
"""Most width configurations that `compress` measures; it stops earlier when the fit is good enough."""

LR = 1e-3
"""Default learning rate of `compress`."""

TARGET_ERROR = 0.02
"""Relative error of a quick fit at which `compress` stops measuring."""


# ---------------------------------------------------------------- one call


@dataclass(frozen=True, eq=False)
class CompressResult:
    """The result of `compress`. Print it for a summary of five lines."""

    model: nn.Module
    """The slim network, on the device that it was trained on."""
    summary: RunSummary
    """Every number, as in summary.json."""
    folder: Path
    """The run folder."""
    graph: ChannelGraph = field(repr=False)
    """Channel graph of the dense network."""
    task: Task = field(repr=False)

    @property
    def widths(self) -> dict[str, int]:
        """Channels that are left, by group."""
        return self.summary.widths

    @property
    def score(self) -> float | None:
        """Score of the slim network; None without `evaluate`."""
        scores = self.summary.scores
        return scores.get("finetuned", scores.get("pruned"))

    @property
    def energy(self) -> float | None:
        """Joules per inference of one batch of the slim network; None if no budget needed a meter."""
        measured, budget = self.summary.measured.get("energy"), self.summary.budgets.get("energy")
        return measured.result if measured else budget.result if budget else None

    @property
    def met(self) -> bool:
        """Whether every budget is met."""
        return self.summary.met

    def report(self, path: str | Path | None = None) -> Path:
        """Write the HTML report of the run.

        Args:
            path: The file; `report.html` in the run folder by default.
        """
        return write_report(self.folder, path)

    def export(self, *formats: str, folder: str | Path | None = None, force: bool = False) -> list[Path]:
        """Write the slim network for deployment, with a model card; every file is compared with the network.

        Args:
            *formats: `onnx`, `pt2`, `torchscript` or `safetensors`, which is the default.
            folder: Folder of the files; `export` in the run folder by default.
            force: Overwrite files that differ.

        Returns:
            The files.
        """
        from ecc.export import export_run

        done = export_run(self.folder, self.task, formats=formats or EXPORT_FORMATS[:1], output=folder, force=force)
        return [done.folder / file.file for file in done.files]

    def __str__(self) -> str:
        summary = self.summary
        rows = []
        for resource, one in summary.budgets.items():
            source = one.label if one.label == "counted" else f"{one.label}, {summary.device}"
            per = f" per batch of {summary.batch}" if resource in MEASURED else ""
            change = f"{si(one.dense, one.unit)} -> {si(one.result, one.unit)}{per} ({source})"
            rows.append((resource, f"{change}, budget {si(one.limit, one.unit)}: {'met' if one.met else 'NOT MET'}"))
        dense = summary.scores.get("dense")
        if self.score is not None:
            rows.append(("score", f"{self.score:.4f}" if dense is None else f"{dense:.4f} -> {self.score:.4f}"))
        for name, budget, count in (("MACs", "macs", summary.macs), ("parameters", "params", summary.parameters)):
            if budget not in summary.budgets and count is not None:
                rows.append((name, f"{si(count.dense, '')} -> {si(count.result, '')}"))
        pruned = sum(width < summary.full_widths.get(name, width) for name, width in self.widths.items())
        rows.append(("run", f"{self.folder} ({pruned} of {len(self.widths)} channel groups pruned)"))
        return "\n".join(f"{name:<11} {text}" for name, text in rows)


def compress(
    model: nn.Module,
    train_loader: Any,
    budget: str | Sequence[str] = "50%",
    *,
    loss: Callable[[Any, Any], Any],
    evaluate: Callable[[nn.Module], float] | None = None,
    epochs: float = 3,
    lr: float | None = None,
    optimizer: Any = None,
    meter: str | EnergySource = "auto",
    target: str | Sequence[str] = (),
    example_input: Inputs | None = None,
    folder: str | Path = "run",
    distill: str | float = "auto",
    method: str = "ecc",
    progress: bool = True,
    energy_model: EnergyModel | Sequence[EnergyModel] | None = None,
    samples: int | None = None,
    preset: str = "default",
    freeze: Sequence[str] = (),
    device: torch.device | str | None = None,
    evaluate_held_out: Callable[[nn.Module], float] | None = None,
    name: str | None = None,
    **settings: Any,
) -> CompressResult:
    """Prune a network during training until its measured cost meets the budget.

    A budget on energy or latency is measured: the network is profiled at many widths, an energy model is fitted, and
    the result is measured again. Budgets on MACs, parameters and bytes are counted and need no meter.

    Args:
        model: The trained dense network. It is left unchanged.
        train_loader: A DataLoader or another iterable of batches that starts again each time, or a function of the
            epoch that returns one. A batch is `(inputs, targets)`; with `loss(model, batch)` it is what you like.
        budget: "50%" of the energy of the dense network, "24 mJ", "latency=12ms", "macs=50%", "params=2M", or a list.
        loss: `loss(outputs, targets)`, or `loss(model, batch)`: the first parameter has to be named `model`.
        evaluate: Score of a model; higher is better. For the report only.
        epochs: Passes over `train_loader`: half of them for pruning, half for finetuning. `prune_steps=` and
            `finetune_steps=` set the two numbers of steps directly.
        lr: Learning rate of pruning, and of finetuning, where it follows a cosine to 0. By default that of
            `optimizer`, or 1e-3.
        optimizer: None for Adam; a class such as `torch.optim.SGD`; an optimizer, of which the class and the settings
            are used for new ones; or a function from parameters to an optimizer.
        meter: "auto", "nvml", "rapl", "platform:jetson-tx2" and so on (see `find_meter`), or a meter of your own.
        target: Measure on another machine, which is reached by ssh: "ssh://user@host[:port]", or a list of equal
            machines. The meter is then a meter of that machine. Networks are sent as ONNX files.
        example_input: One batch of inputs as deployed, which is measured; by default that of the first batch.
        folder: Run folder. The same call again resumes the run in it, or returns its result.
        distill: Weight of the distillation loss from 0 to 1; "auto" is 0.5 where outputs can be compared, else 0.
        method: "ecc", or a baseline: "uniform", "netadapt", "amc", "eap", "lcp", "greedy".
        progress: Whether to show progress on stderr.
        energy_model: Fitted models of energy and latency, if you have them; nothing is profiled then.
        samples: Width configurations to measure; by default at most 250, fewer if the fit is good earlier.
        preset: "paper" uses the published algorithm with its settings.
        freeze: Patterns of modules whose output channels are not pruned, such as "layer1.*".
        device: Training device; by default that of the model.
        evaluate_held_out: Score on held-out training data, for baselines that search.
        name: Name in tables and files; the class of the model by default.
        **settings: Other settings of `CompressSettings`, such as `min_width_ratio=0.2` or `precision="bf16"`.

    Raises:
        InfeasibleBudget: If no widths meet the budget.
        NoMeter: If a budget has to be measured and no meter works; the message lists what to do.
        EccError: For other mistakes; the message says what to do.

    Warns:
        EccWarning: If a budget is not met in the end.
    """
    _check_model(model)
    budgets = parse_budgets(budget)
    if example_input is None:
        example_input = _first_input(train_loader)
    task = Task(
        name=name or type(model).__name__,
        model=model,
        example_input=to_device(check_input(example_input), device_of(model)),
        loss=loss,
        train_batches=train_loader,
        evaluate=evaluate,
        evaluate_held_out=evaluate_held_out,
    )
    given = {**_steps(train_loader, epochs, settings), "lr": lr or LR, **settings}
    if distill != "auto":
        given["kd_weight"] = distill
    result = compress_task(
        task,
        budgets,
        folder=folder,
        meter=meter,
        targets=[target] if isinstance(target, str) else list(target),
        energy_models=[energy_model] if isinstance(energy_model, EnergyModel) else list(energy_model or ()),
        settings=make_settings(preset, given),
        samples=samples,
        preset=preset,
        freeze=freeze,
        method=method,
        optimizer=optimizer_factory(optimizer, lr),
        device=device or device_of(model),
        console=Console(stderr=True) if progress else None,
    )
    if not result.met:
        warnings.warn(f"the budget is not met: {result.summary.note}", EccWarning, stacklevel=2)
    return result


def compress_task(
    task: Task,
    budgets: Sequence[Budget],
    *,
    folder: str | Path,
    meter: str | EnergySource = "auto",
    targets: Sequence[str] = (),
    task_spec: str | None = None,
    energy_models: Sequence[EnergyModel] = (),
    settings: CompressSettings,
    samples: int | None = None,
    preset: str = "default",
    batch: int | None = None,
    freeze: Sequence[str] = (),
    method: str = "ecc",
    optimizer: OptimizerFactory | None = None,
    device: torch.device | str = "cpu",
    distributed: DistributedContext | None = None,
    loggers: Sequence[Logger] = (),
    console: Console | None = None,
) -> CompressResult:
    """`compress` for a task; see there.

    Args:
        task: With batches and a loss.
        budgets: From `parse_budgets`.
        folder: Run folder.
        meter: A spec for `find_meter`, a meter, or "none" to rely on the energy models.
        targets: Machines to measure on, as `ssh://user@host`; the meter is one of theirs.
        task_spec: Name of the task on the targets, for runners of PyTorch and analytic platforms.
        energy_models: Fitted models; if there are none, and a budget needs one, the network is profiled.
        settings: Of the compression.
        samples: Width configurations to measure.
        preset: One of `PRESETS`, for the profile and the fit.
        batch: Items per inference; that of the example input by default.
        freeze: Patterns of modules whose outputs are not pruned.
        method: Name of the method.
        optimizer: Function from parameters to an optimizer; None for Adam.
        device: Training device.
        distributed: The processes that train together.
        loggers: Get every number of the history.
        console: Where progress is shown.
    """
    distributed = distributed or DistributedContext(torch.device(device))
    models, resources = list(energy_models), measured_resources(budgets)
    is_profiled = bool(resources) and not models
    with open_meters(
        meter if resources else None, distributed.device, models, targets, settings, task_spec, batch, freeze
    ) as sources:
        source = sources[0]
        if is_profiled:
            assert source is not None  # without an energy model there has to be one
            check_run_folder(Path(folder))
            models = profile_and_fit(
                task,
                resources,
                sources,
                Path(folder),
                samples=samples,
                preset=preset,
                batch=batch,
                freeze=freeze,
                width_multiple=settings.width_multiple,
                inference=settings.inference,
                distributed=distributed,
                console=console,
            )
        else:
            _check_inference(models, settings)
        job = Compression(
            task,
            budgets,
            models,
            meter=source,
            settings=settings,
            device=distributed.device,
            freeze=freeze,
            method=method,
            optimizer=optimizer,
        )
        found = job.feasibility()
        full = dict(zip(job.costs[0].groups, job.costs[0].full_widths, strict=True))
        with show_progress(console, settings, found, full, distributed) as view:
            done = job.run(folder, distributed=distributed, history=view, loggers=loggers, progress=view.say)
    return CompressResult(done.model, done.summary, Path(folder), done.graph, task)


@contextmanager
def show_progress(
    console: Console | None,
    settings: CompressSettings,
    feasibility: Sequence[Feasibility],
    full: Mapping[str, int],
    distributed: DistributedContext,
) -> Iterator[CompressProgress]:
    """Show what the budgets require, and then the progress of a run.

    Args:
        console: Where; None shows nothing.
        settings: Of the run.
        feasibility: Of each budget.
        full: Channels, or weights, of each group in the dense network.
        distributed: Only the first process shows something.
    """
    view = CompressProgress(console if distributed.is_main else None)
    view.show(feasibility_table(feasibility))
    ends = dict(zip(settings.phase_steps, accumulate(settings.phase_steps.values()), strict=True))
    view.plan(ends, feasibility, full, distributed.size)
    with view:
        yield view


def measured_resources(budgets: Sequence[Budget]) -> list[str]:
    """Those of the budgets' resources that have to be measured, not counted."""
    return [resource for resource in MEASURED if any(budget.resource == resource for budget in budgets)]


def write_report(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write the HTML report of a run or of a comparison.

    Args:
        folder: Of the run or the comparison.
        path: The file; `report.html` in the folder by default.
    """
    from ecc.report.load import load_report
    from ecc.report.page import render_page

    path = Path(folder) / "report.html" if path is None else Path(path)
    refuse_other_file(path, "<!doctype html>", "page")
    write_text(path, render_page(load_report(folder)))
    return path


def make_settings(preset: str, values: dict[str, Any]) -> CompressSettings:
    """Settings of a preset with some of them changed.

    Args:
        preset: One of `PRESETS`.
        values: By option name.

    Raises:
        EccError: If there is no such preset or setting, or a value is out of range.
    """
    if preset not in PRESETS:
        raise EccError(f"preset {preset!r} is unknown; choose one of {', '.join(PRESETS)}.")
    base = flat_values(CompressSettings.paper()) if preset == "paper" else {}
    made = settings_from(CompressSettings, {**base, **values})
    if "log_every" in values:
        return made
    log_every = max(1, min(50, made.prune_steps // 50))  # a short run is drawn as finely as a long one
    return replace(made, train=replace(made.train, log_every=log_every))


# ---------------------------------------------------------------- parts of a call


def _check_model(model: object) -> None:
    """Refuse what looks like a model and is not one, such as `ultralytics.YOLO`, whose `train()` starts a training."""
    inner, kind = getattr(model, "model", None), type(model).__name__
    is_module = isinstance(model, nn.Module) and "mode" in signatures.signature(model.train).parameters
    if not is_module and isinstance(inner, nn.Module):
        raise BadTask(f"model is a {kind}, which only wraps a torch.nn.Module; pass `{kind.lower()}.model`.")
    if isinstance(model, type):
        raise BadTask(f"model is the class {model.__name__}; give an instance, such as {model.__name__}().")
    if not isinstance(model, nn.Module):
        raise BadTask(f"model is {kind}; give a torch.nn.Module instance.")


LABELS = ("label", "labels", "label_ids", "target", "targets")
"""Keys of a dict batch that are not inputs of the deployed network."""


def _first_input(loader: Any) -> Any:
    """The inputs of the first batch of a loader, as the deployed network gets them."""
    batches: Iterable[Any] = loader(0) if callable(loader) else loader
    with torch.random.fork_rng(devices=[]):  # a loader that shuffles draws its seed
        batch = next(iter(batches), None)
    if batch is None:
        raise BadTask("train_loader has no batches.")
    if isinstance(batch, dict):
        return {key: value for key, value in batch.items() if key not in LABELS and isinstance(value, torch.Tensor)}
    if isinstance(batch, tuple | list) and batch:
        return tuple(batch[0]) if isinstance(batch[0], list) else batch[0]
    if isinstance(batch, torch.Tensor):
        return batch
    raise BadTask(f"a batch of train_loader is {type(batch).__name__}; give example_input=, one batch of inputs.")


def _steps(loader: Any, epochs: float, settings: dict[str, Any]) -> dict[str, int]:
    """Steps of pruning and finetuning: half of the epochs each."""
    if {"prune_steps", "finetune_steps"} <= set(settings):
        return {}
    try:
        length = len(loader)
    except TypeError:
        raise BadTask(
            f"train_loader ({type(loader).__name__}) has no length, so epochs={epochs:g} is not a number of steps. "
            "Give prune_steps= and finetune_steps=."
        ) from None
    total = round(epochs * length)
    if total < 2:
        raise EccError(
            f"epochs={epochs:g} of {length} batches is {total} steps; pruning and finetuning need 2 or more."
        )
    return {"prune_steps": (total + 1) // 2, "finetune_steps": total // 2}


# ---------------------------------------------------------------- meter, profile and energy model


@contextmanager
def open_meter(
    meter: str | EnergySource | None,
    device: torch.device,
    models: Sequence[EnergyModel] = (),
) -> Iterator[EnergySource | None]:
    """The meter of a compression, closed at the end if it was opened here.

    Args:
        meter: A spec for `find_meter`, "none", an open meter, or None if nothing has to be measured.
        device: Training device: "auto" takes a meter that sees it.
        models: The energy models, if there are any: "auto" takes the meter or platform of the first one.

    Raises:
        NoMeter: If no meter works, with a list of choices.
        BadMeasurement: If the meter of the energy model cannot be read here.
    """
    if not isinstance(meter, str):
        yield meter
        return
    if models:
        source = _meter_of_model(meter, models[0])
    else:
        source = _meter_of_device(meter, device)
    try:
        yield source
    finally:
        if source is not None:
            close_meter(source)


@contextmanager
def open_meters(
    meter: str | EnergySource | None,
    device: torch.device,
    models: Sequence[EnergyModel],
    targets: Sequence[str],
    settings: CompressSettings,
    task_spec: str | None = None,
    batch: int | None = None,
    freeze: Sequence[str] = (),
) -> Iterator[list[EnergySource | None]]:
    """The meters of a compression: those of the targets, or that of this machine.

    Args:
        meter: As in `open_meter`; a spec if there are targets.
        device: Training device.
        models: The energy models, if there are any.
        targets: Machines to measure on.
        settings: Runner, precision and memory format of the measurements.
        task_spec: Name of the task on the targets.
        batch: Items per inference.
        freeze: Patterns of modules whose outputs are not pruned.
    """
    if not targets or meter is None or meter == "none":
        with open_meter(meter, device, models) as source:
            yield [source]
        return
    if not isinstance(meter, str):
        raise EccError("with a target, meter is the name of a meter of that machine, such as 'jetson'.")
    from ecc.measure.remote.client import InstalledSpec, open_target

    way = {name: getattr(models[0].origin.settings, name) for name in ("runner", "precision")} if models else {}
    chosen = settings_from(MeasureSettings, {**flat_values(PROFILE_SETTINGS), **way, **settings.inference})
    task = None if task_spec is None else InstalledSpec(task=task_spec, batch=batch, freeze=tuple(freeze))
    opened: list[EnergySource | None] = []
    try:
        for target in targets[:1] if models else targets:
            opened.append(open_target(target, meter, task=task, settings=chosen))  # noqa: PERF401 - closed on failure
        yield opened
    finally:
        for source in opened:
            if source is not None:
                close_meter(source)


def _meter_of_device(spec: str, device: torch.device) -> EnergySource:
    """A meter for a new profile."""
    if spec == "none":
        hint = option_hint("energy_model", cli="energy")
        hint = option_hint("energy_model", cli="energy")
        raise NoMeter(f"without a meter an energy model is needed; give {hint}.")
    try:
        return find_meter(spec, device_type=device.type) if spec == "auto" else find_meter(spec)
    except NoMeter:
        if spec != "auto":
            raise
        raise NoMeter(_no_meter()) from None


def _meter_of_model(spec: str, energy: EnergyModel) -> EnergySource | None:
    """The meter or platform that an energy model was fitted on."""
    origin = energy.origin
    if spec == "none":
        return None
    if spec == "auto" and origin.meter.name == "platform":
        return find_meter(f"platform:{origin.meter.device_id}")
    try:
        return find_meter(spec if spec != "auto" else origin.meter.name, device_type=origin.device_type)
    except EccError as error:
        if spec != "auto":
            raise
        raise BadMeasurement(
            f"the energy model was measured by {origin.meter.name} on {origin.meter.device}, which cannot be read "
            f"here: {error} Compress on that device, or rely on predictions with {option_hint('meter', 'none')}."
        ) from None


def _no_meter() -> str:
    """A short list of what to do where no meter works."""
    choices = (
        (option_hint("budget", "macs=50%"), "a budget on MACs, parameters (params=2M) or bytes needs no meter"),
        (option_hint("meter", "platform:jetson-tx2"), "estimate for another device from published constants"),
        (option_hint("meter", "cputime:15W"), "CPU time multiplied by a power that you declare"),
        (option_hint("meter", "command:PROGRAM"), "read an external meter by a program that prints joules or watts"),
    )
    width = max(len(text) for text, _ in choices)
    lines = ["no energy meter works on this machine; `ecc doctor` shows why. Choose one of", ""]
    return "\n".join([*lines, *(f"  {text:<{width}}  {why}" for text, why in choices)])


def profile_and_fit(
    task: Task,
    resources: Sequence[str],
    sources: Sequence[EnergySource | None],
    folder: Path,
    *,
    samples: int | None = None,
    preset: str = "default",
    batch: int | None = None,
    freeze: Sequence[str] = (),
    width_multiple: int | None = None,
    inference: Mapping[str, Any] | None = None,
    distributed: DistributedContext,
    console: Console | None = None,
) -> list[EnergyModel]:
    """Measure a network at many widths, and fit a model of each resource.

    The profile is `network.profile` in the folder; a profile that was begun there is resumed.

    Args:
        task: The network.
        resources: energy, latency or both.
        sources: The meter or platform; several share the samples.
        folder: Run folder.
        samples: Width configurations; by default at most `SAMPLES`, until the error is `TARGET_ERROR`.
        preset: One of `PRESETS`.
        batch: Items per inference; that of the example input by default.
        freeze: Patterns of modules whose outputs are not pruned.
        width_multiple: Widths are multiples of this.
        inference: Runner, precision and memory format, as `CompressSettings.inference` gives them.
        distributed: Only the first process measures.
        console: Where progress is shown.
    """
    path, meters = folder / RUN_PROFILE, [source for source in sources if source is not None]
    source = meters[0]
    if "energy" in resources and not source.describe().has_energy:
        raise BadMeasurement(
            f"{source.describe().name} is a clock and measures no energy; give a budget on latency, such as "
            f"{option_hint('budget', 'latency=50%')}, or an energy meter."
        )
    if distributed.is_main:
        folder.mkdir(parents=True, exist_ok=True)
        example = task.example_input if batch is None else with_batch_size(task.example_input, batch)
        graph = trace_channels(task.model, example, freeze=freeze, verify=False)
        graph = verify_graph(task.model, graph, task.example_input)
        chosen = profile_settings(source, **(inference or {}))
        is_local = not isinstance(source, Analytic | RemoteMeter)
        device = default_device(source, chosen.runner) if is_local else None
        possible = math.prod(max(1, group.width // (width_multiple or 1)) for group in graph.prunable)
        view = ProfileProgress(console)
        view.announce(source.describe(), device)
        with view:
            chosen, search = find_runner(
                path,
                task.model,
                example,
                source,
                chosen,
                device=device,
                evaluate=task.evaluate,
                calibration=calibration_inputs(task),
                resource=resources[0],
                report=view.say,
            )
            profile_on_targets(
                task.model,
                graph,
                example,
                meters,
                path,
                samples=samples or min(SAMPLES, max(1, possible // 2)),
                design="uniform" if preset == "paper" else "mixed",
                width_multiple=width_multiple,
                settings=chosen,
                runner_search=search,
                device=device,
                target_error=None if samples or preset == "paper" else TARGET_ERROR,
                progress=view,
            )
    distributed.gather(torch.zeros(1))  # the others wait for the profile
    measured = Profile.load(path)
    family = "bilinear" if preset == "paper" else "auto"
    # The result is measured in the end, so that a device that drifts is worth a warning and no refusal.
    return [fit(measured, family, resource=resource, allow_drift=True) for resource in dict.fromkeys(resources)]


def _check_inference(models: Sequence[EnergyModel], settings: CompressSettings) -> None:
    """Refuse a runner, precision or format that is not that of the energy models.

    Raises:
        EccError: If one differs.
    """
    for name, value in settings.inference.items():
        for model in models:
            found = getattr(model.origin.settings, name, None)
            if found != value and not str(found).startswith(f"{value}:"):
                raise EccError(
                    f"{name} is {value!r}, but the {model.resource} model was measured with {found!r}. Leave it out, "
                    "or profile and fit again."
                )


def calibration_inputs(task: Task, batches: int = 4) -> list[Inputs]:
    """Inputs of some training batches, for the calibration of int8; none if the task has no batches."""
    if task.train_batches is None:
        return []
    found = [split_batch(batch)[0] for _, batch in zip(range(batches), task.epoch_batches(0), strict=False)]
    return [inputs for inputs in found if isinstance(inputs, torch.Tensor | tuple | dict)]


# ---------------------------------------------------------------- optimizer


def optimizer_factory(optimizer: Any, lr: float | None = None) -> OptimizerFactory | None:
    """What `optimizer=` of `compress` means: a function from parameters to an optimizer; None for Adam.

    Args:
        optimizer: None, a class, an optimizer with one parameter group, or a function.
        lr: Learning rate in place of that of the optimizer.

    Raises:
        EccError: If it is something else; or later, if the function does not return an optimizer.
    """
    if optimizer is None:
        return None
    make, options = optimizer, {}
    if isinstance(optimizer, torch.optim.Optimizer):
        if len(optimizer.param_groups) > 1:
            raise EccError(
                f"optimizer has {len(optimizer.param_groups)} parameter groups, which belong to the dense network; "
                "give a function from parameters to an optimizer instead."
            )
        make = type(optimizer)
        known = signatures.signature(make).parameters
        options = {key: value for key, value in optimizer.param_groups[0].items() if key in known and key != "params"}
    elif isinstance(optimizer, type):
        options = {"lr": LR}
    if not callable(make):
        raise EccError(
            f"optimizer is {type(optimizer).__name__}; give an optimizer class, an optimizer, or a function from "
            "parameters to an optimizer."
        )

    def build(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        made = make(parameters, **options)
        if not isinstance(made, torch.optim.Optimizer):
            raise EccError(f"optimizer returned {type(made).__name__}; it must return a torch.optim.Optimizer.")
        for group in made.param_groups:
            group["lr"] = group["lr"] if lr is None else lr
        return made

    return build


# ---------------------------------------------------------------- inspect


@dataclass(frozen=True)
class Inspection:
    """The channel groups of a network: print it, or let a notebook show it."""

    graph: ChannelGraph
    title: str

    def __str__(self) -> str:
        return self._printed(Console(file=io.StringIO(), record=True, width=120, color_system=None)).export_text()

    def _repr_html_(self) -> str:
        style = "white-space:pre;font-family:monospace;line-height:normal"
        console = self._printed(Console(file=io.StringIO(), record=True, width=120, force_jupyter=False))
        return console.export_html(inline_styles=True, code_format=f'<pre style="{style}">{{code}}</pre>')

    def _printed(self, console: Console) -> Console:
        console.print(graph_table(self.graph, self.title))
        return console


def inspect(
    model: nn.Module, example_input: Any, *, freeze: Sequence[str] = (), verify: bool = True, name: str | None = None
) -> Inspection:
    """Show which channels of a network can be pruned, their producers and consumers, and what is frozen and why.

    Args:
        model: The network.
        example_input: One batch: a tensor, a tuple (positional arguments) or a dict (keyword arguments).
        freeze: Patterns of modules whose output channels are not pruned.
        verify: Whether to compare the outputs of the masked and the slim network.
        name: Name of the network in the title; its class by default.

    Returns:
        An object that prints the table; its `graph` is what `trace_channels` returns.
    """
    _check_model(model)
    graph = trace_channels(model, check_input(example_input), freeze=freeze, verify=verify)
    return Inspection(graph, f"Channel groups of {name or type(model).__name__}")
