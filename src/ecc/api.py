"""`compress` and `inspect`: the whole of ECC in one call each.

`compress` traces the network, measures it at many widths (`profile`), fits an energy model (`fit`), prunes during
training, measures the final widths, and finetunes the slim network. All files go into one run folder; the same call
again resumes. `compress_task` does the same for a `Task`; the command line uses it.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from ecc.budget import (
    MEASURED_UNITS,
    Budget,
    budgets_of_workloads,
    measured_resources,
    parse_budgets,
    parse_several_budgets,
)
from ecc.constants import EXPORT_FORMATS
from ecc.energy import EnergyModel
from ecc.errors import BadTask, EccError, EccWarning, UntraceableModel
from ecc.formatting import si
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import EnergySource
from ecc.measure.remote.client import InstalledSpec
from ecc.methods import Compression, CompressSettings
from ecc.methods.base import can_remove_branches, check_method
from ecc.methods.optimizers import optimizer_factory
from ecc.methods.registry import find_method
from ecc.methods.runner import OptimizerFactory
from ecc.methods.several_budgets import StageFactory, budget_stages, check_several, make_front
from ecc.profiling import check_inference, open_meter, profile_and_fit
from ecc.records import write_record
from ecc.report.live import CompressProgress
from ecc.report.terminal import feasibility_table, graph_table
from ecc.run_records import FRONT_FILE, Feasibility, RunSummary
from ecc.settings import make_settings
from ecc.task import (
    WORKLOADS,
    Inputs,
    Task,
    TokenWorkload,
    batch_size_of,
    check_input,
    check_model,
    split_batch,
    takes_model,
)
from ecc.torch_utils import device_of, usable_device
from ecc.training import DistributedContext, Logger, open_run
from ecc.training.batches import to_device
from ecc.training.run_dir import check_run_folder

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
    front: tuple[CompressResult, ...] = field(default=(), repr=False)
    """With several budgets, the results of all, from the mildest to the tightest; this result is that of the last."""

    @property
    def widths(self) -> dict[str, int]:
        """Channels that are left, by group."""
        return self.summary.widths

    @property
    def score(self) -> float | None:
        """Score of the slim network; None without `evaluate`."""
        return self.summary.score

    @property
    def energy(self) -> float | None:
        """Joules per inference of one batch of the slim network; None if no budget needed a meter.

        For a language model it is the energy of one decode step, or of a prefill if decode was not measured.
        """
        for name in ("energy", *WORKLOADS):
            measured, budget = self.summary.measured.get(name), self.summary.budgets.get(name)
            if measured or budget:
                return measured.result if measured else budget.result if budget else None
        return None

    def energy_per_token(self, workload: str = "decode") -> float | None:
        """Joules per token of the slim language model; None if the workload was not measured.

        Args:
            workload: decode or prefill.
        """
        measured, tokens = self.summary.measured.get(workload), self.summary.tokens.get(workload)
        return None if measured is None or tokens is None else measured.result / tokens

    @property
    def met(self) -> bool:
        """Whether every budget is met."""
        return self.summary.met

    def report(self, path: str | Path | None = None) -> Path:
        """Write the HTML report of the run; with several budgets, that of all of them.

        Args:
            path: The file; `report.html` in the run folder by default.
        """
        from ecc.report.page import write_report

        return write_report(self.folder.parent if self.front else self.folder, path)

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
            per, (before, after, limit) = summary.amounts(resource)
            per = per or (f" per batch of {summary.batch}" if resource in MEASURED_UNITS else "")
            change = f"{before} -> {after}{per} ({source})"
            rows.append((resource, f"{change}, budget {limit}: {'met' if one.met else 'NOT MET'}"))
        scores = " -> ".join(filter(None, summary.score_texts()))
        rows.append((summary.metric, "none (no evaluate= was given)" if self.score is None else scores))
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
    workloads: Sequence[TokenWorkload] | None = None,
    budgets: Sequence[str] | None = None,
    **settings: Any,
) -> CompressResult:
    """Prune a network during training until its measured cost meets the budget.

    A budget on energy or latency is measured: the network is profiled at many widths, an energy model is fitted, and
    the final widths are measured before the network is pruned to them. Budgets on MACs, parameters and bytes are
    counted and need no meter.

    Args:
        model: The trained dense network. It is left unchanged.
        train_loader: A DataLoader or another iterable of batches that starts again each time, or a function of the
            epoch that returns one. A batch is `(inputs, targets)`; with `loss(model, batch)` it is what you like.
        budget: "50%" of the energy of the dense network, "24 mJ", "latency=12ms", "macs=50%", "params=2M", or a list.
            Language models: "decode=70%", "prefill=60%", "0.8 mJ/token"; without a name decode is meant.
        loss: `loss(outputs, targets)`, or `loss(model, batch)`: the first parameter has to be named `model`.
        evaluate: Score of a model; higher is better. For the report only.
        epochs: Passes over `train_loader`: half of them for pruning, half for finetuning. `prune_steps=` and
            `finetune_steps=` set the two numbers of steps directly.
        lr: Learning rate of pruning, and of finetuning, where it follows a cosine to 0. By default that of
            `optimizer`, or that of the preset: 1e-4 for "default", 1e-5 for "paper".
        optimizer: None for Adam; a class such as `torch.optim.SGD`; an optimizer, of which the class and the settings
            are used for new ones; or a function from parameters to an optimizer.
        meter: "auto", "nvml", "rapl", "platform:jetson-tx2" and so on (see `find_meter`), or a meter of your own.
        target: Measure on another machine, which is reached by ssh: "ssh://user@host[:port]", or a list of equal
            machines. The meter is then a meter of that machine. Networks are sent as ONNX files.
        example_input: One batch of inputs as deployed, which is measured; by default that of the first batch.
        folder: Run folder. The same call again resumes the run in it, or returns its result.
        distill: Weight of the distillation loss from 0 to 1; "auto" is 0.5 where outputs can be compared, else 0.
        method: "ecc", "one_shot" (without training), or a baseline: "uniform", "netadapt", "amc", "eap", "lcp",
            "legr", "greedy", "greedy_taylor", "isomorphic", "halp", "tp_magnitude", "tp_taylor", "tp_group_norm";
            for transformers also "wanda_sp", "flap", "llm_pruner", "shortgpt", "2ssp".
        progress: Whether to show progress on stderr.
        energy_model: Fitted models of energy and latency, if you have them; nothing is profiled then.
        samples: Width configurations to measure; by default at most 250, fewer if the fit is good earlier.
        preset: "paper" uses the published algorithm with its settings.
        freeze: Patterns of modules whose output channels are not pruned, such as "layer1.*".
        device: Training device; by default that of the model.
        evaluate_held_out: Score on held-out training data, for baselines that search.
        name: Name in tables and files; the class of the model by default.
        workloads: What a language model is measured on; by default decode with a cache as long as the example input,
            and prefill of the example input.
        budgets: In place of `budget`: several budgets on one resource, such as ["80%", "50%", "35%"]. Each has a result
            of its own, in `front` and in a folder of the run folder. The tightest has all steps; one short pruning
            passes the others and finetunes each, so that they take far fewer batches than as many runs.
        **settings: Other settings of `CompressSettings`, such as `min_width_ratio=0.2` or `precision="bf16"`.

    Raises:
        InfeasibleBudget: If no widths meet the budget.
        NoMeter: If a budget has to be measured and no meter works; the message lists what to do.
        EccError: For other mistakes; the message says what to do.

    Warns:
        EccWarning: If a budget is not met in the end.
    """
    check_model(model)
    several = None if budgets is None else parse_several_budgets(budgets)
    parsed = parse_budgets(budget) if several is None else several
    is_first_batch = example_input is None
    if example_input is None:
        example_input = _first_input(train_loader, loss)
    task = Task(
        name=name or type(model).__name__,
        model=model,
        example_input=to_device(check_input(example_input), device_of(model)),
        loss=loss,
        train_batches=train_loader,
        evaluate=evaluate,
        evaluate_held_out=evaluate_held_out,
        metric="perplexity" if getattr(evaluate, "is_perplexity", False) else "score",
        workloads=default_workloads(model, example_input) if workloads is None else tuple(workloads),
    )
    given = {**_steps(train_loader, epochs, settings), **settings}
    if lr is not None:
        given["lr"] = lr
    if distill != "auto":
        given["kd_weight"] = distill
    with _explain_first_input(example_input if is_first_batch else None):
        result = compress_task(
            task,
            parsed,
            several=several is not None,
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
            device=device_of(model) if device is None else usable_device(device),
            console=Console(stderr=True) if progress else None,
        )
    for one in result.front or (result,):
        if not one.met:
            warnings.warn(f"the budget is not met: {one.summary.note}", EccWarning, stacklevel=2)
    return result


def compress_task(
    task: Task,
    budgets: Sequence[Budget],
    *,
    folder: str | Path,
    several: bool = False,
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
    """`compress` for a task: without energy models, a network whose budgets need one is profiled first.

    The arguments are those of `compress`, and: `batch`, the items per inference; `task_spec`, the name of the task on
    the targets; `distributed`, the processes that train together; `loggers`, which get every number of the history;
    `console`, where progress is shown; and `several`, whether each budget gets a result of its own.
    """
    _check_values(task.model)
    distributed = distributed or DistributedContext(torch.device(device))
    check_method(find_method(method), task, settings)
    if several:
        check_several(method, settings, len(budgets))
    names = [one.name for one in task.workloads]
    together = [[budget] for budget in budgets] if several else [budgets]  # those of one result
    budgets = [budget for some in together for budget in budgets_of_workloads(some, names)]
    models, resources = list(energy_models), measured_resources(budgets)
    is_profiled = bool(resources) and not models
    check_inference(models, settings)
    items = models[0].origin.batch if models and not task.workloads else batch  # as the networks of the models
    installed = (
        None
        if task_spec is None
        else InstalledSpec(task=task_spec, batch=items, freeze=tuple(freeze), attention=settings.trace.attention)
    )
    with open_meter(
        meter if resources else None, distributed.device, models,
        targets=targets, inference=settings.inference, task=installed,
    ) as source:  # fmt: skip
        if is_profiled:
            assert source is not None  # without an energy model there has to be one
            check_run_folder(Path(folder))
            models = profile_and_fit(
                task, resources, source, Path(folder), distributed=distributed, console=console, samples=samples,
                preset=preset, batch=batch, freeze=freeze, attention=settings.trace.attention,
                width_multiple=settings.width_multiple,
                inference=settings.inference, depth=can_remove_branches(find_method(method), settings),
            )  # fmt: skip

        def make(
            task: Task, own: Sequence[Budget], settings: CompressSettings, start: Mapping[str, Any] | None = None
        ) -> Compression:
            return Compression(
                task, own, models, meter=source, settings=settings, device=distributed.device, freeze=freeze,
                method=method, optimizer=optimizer, start_weights=start,
            )  # fmt: skip

        def run(job: Compression, place: Path) -> CompressResult:
            found = job.feasibility()
            full = dict(zip(job.costs[0].groups, job.costs[0].full_widths, strict=True))
            with show_progress(console, job.settings, found, full, distributed, task.metric) as view:
                if note := _attention_note(job.graph):
                    view.say(note)
                done = job.run(place, distributed=distributed, history=view, loggers=loggers, progress=view.say)
            return CompressResult(done.model, done.summary, place, done.graph, task)

        if not several:
            return run(make(task, budgets, settings), Path(folder))
        return _run_stages(task, budgets, settings, Path(folder), make, run, distributed)


def _attention_note(graph: ChannelGraph) -> str:
    """A note if channels of attention are not prunable; otherwise empty."""
    found = [one for one in graph.groups if one.frozen is not None and ("attn" in one.name or "attention" in one.name)]
    if not found:
        return ""
    return (
        f"note: {len(found)} groups of attention channels are not pruned ({found[0].name}: {found[0].frozen}); the "
        "other parts are. ecc inspect lists all."
    )


def _run_stages(
    task: Task,
    budgets: Sequence[Budget],
    settings: CompressSettings,
    folder: Path,
    make: StageFactory,
    run: Callable[[Compression, Path], CompressResult],
    distributed: DistributedContext,
) -> CompressResult:
    """Run the compressions of several budgets, and write front.json."""
    for budget in budgets:
        make(task, [budget], settings, None).check_feasible()  # before anything is trained
    config = {"verb": "compress", "task": task.name, "budgets": [str(budget) for budget in budgets]}
    with open_run(folder, config, device_type=distributed.device.type, writes=distributed.is_main) as whole:
        results = [run(job, place) for job, place in budget_stages(task, budgets, settings, folder, make)]
        if whole.writes:
            write_record(folder / FRONT_FILE, make_front({one.folder.name: one.summary for one in results}))
    return replace(results[-1], front=tuple(results))


@contextmanager
def show_progress(
    console: Console | None,
    settings: CompressSettings,
    feasibility: Sequence[Feasibility],
    full: Mapping[str, int],
    distributed: DistributedContext,
    metric: str = "score",
) -> Iterator[CompressProgress]:
    """Show what the budgets require, and then the progress of a run, in the first process."""
    view = CompressProgress(console if distributed.is_main else None)
    view.show(feasibility_table(feasibility))
    ends = dict(zip(settings.phase_steps, accumulate(settings.phase_steps.values()), strict=True))
    view.plan(ends, feasibility, full, distributed.size, metric)
    with view:
        yield view


# ---------------------------------------------------------------- parts of a call


LABELS = ("label", "labels", "label_ids", "target", "targets")
"""Keys of a dict batch that are not inputs of the deployed network."""


def _check_values(model: nn.Module) -> None:
    """Refuse a network that was built without values, on the device meta."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.is_meta:
            raise BadTask(
                f"{name} of the model is on the device meta and has no values; build the network on the CPU and load "
                "its weights first."
            )


def _first_input(loader: Any, loss: Callable[..., Any] | None) -> Any:
    """The inputs of the first batch of a loader, as the deployed network gets them."""
    batches: Iterable[Any] = loader(0) if callable(loader) else loader
    if not hasattr(batches, "__iter__"):
        what = f"train_loader{' returned' if callable(loader) else ' is'} {type(batches).__name__}"
        raise BadTask(f"{what}; give a DataLoader, another iterable of batches, or a function of the epoch.")
    with torch.random.fork_rng(devices=[]):  # a loader that shuffles draws its seed
        batch = next(iter(batches), None)
    if batch is None:
        raise BadTask("train_loader has no batches.")
    if isinstance(batch, tuple | list) and not takes_model(loss):
        split_batch(batch)  # refuses what the training could not use, before anything is measured
    if isinstance(batch, dict):
        return {key: value for key, value in batch.items() if key not in LABELS and isinstance(value, torch.Tensor)}
    if isinstance(batch, tuple | list) and batch:
        return tuple(batch[0]) if isinstance(batch[0], list) else batch[0]
    if isinstance(batch, torch.Tensor):
        return batch
    raise BadTask(f"a batch of train_loader is {type(batch).__name__}; give example_input=, one batch of inputs.")


@contextmanager
def _explain_first_input(first: Any) -> Iterator[None]:
    """If the network does not run on the input of the first batch, say where that input came from."""
    try:
        yield
    except UntraceableModel as error:
        if first is None or "on the example input" not in str(error):
            raise
        if isinstance(first, dict):
            found = f"a dict with the keys {', '.join(map(str, first))}, which are arguments of the network"
        else:
            found = " and ".join(str(tuple(one.shape)) for one in (first if isinstance(first, tuple) else (first,)))
            found = f"of shape {found}"
        raise UntraceableModel(
            f"{error}. It was taken from the first batch of train_loader ({found}). If the deployed network gets "
            "something else, give example_input=, one batch of its inputs."
        ) from error.__cause__


def _steps(loader: Any, epochs: float, settings: dict[str, Any]) -> dict[str, int]:
    """Steps of pruning and finetuning: half of the epochs each."""
    if {"prune_steps", "finetune_steps"} <= set(settings):
        return {}
    if epochs == 0:  # a method that does not train
        return {"prune_steps": 0, "finetune_steps": 0}
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


def default_workloads(model: nn.Module, example_input: Inputs) -> tuple[TokenWorkload, ...]:
    """Decode and prefill with the batch and length of the example input, for a causal language model of transformers.

    Args:
        model: The network; any other has no workloads.
        example_input: One batch of tokens.
    """
    config = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", None)
    is_causal = callable(can_generate) and can_generate() and not getattr(config, "is_encoder_decoder", False)
    if config is None or not is_causal:
        return ()
    tokens = example_input.get("input_ids") if isinstance(example_input, dict) else example_input
    if not isinstance(tokens, torch.Tensor) or tokens.dim() != 2:
        return ()
    batch, length = batch_size_of(example_input), tokens.shape[1]
    return tuple(TokenWorkload(name=name, batch=batch, length=length) for name in WORKLOADS)


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
    model: nn.Module,
    example_input: Any,
    *,
    freeze: Sequence[str] = (),
    attention: str = "heads",
    verify: bool = True,
    name: str | None = None,
) -> Inspection:
    """Show which channels of a network can be pruned, their producers and consumers, and what is frozen and why.

    Args:
        model: The network.
        example_input: One batch: a tensor, a tuple (positional arguments) or a dict (keyword arguments).
        freeze: Patterns of modules whose output channels are not pruned.
        attention: What is pruned of attention layers: whole "heads", or the "width" inside them.
        verify: Whether to compare the outputs of the masked and the slim network.
        name: Name of the network in the title; its class by default.

    Returns:
        An object that prints the table; its `graph` is what `trace_channels` returns.
    """
    check_model(model)
    graph = trace_channels(model, check_input(example_input), freeze=freeze, attention=attention, verify=verify)
    return Inspection(graph, f"Channel groups of {name or type(model).__name__}")
