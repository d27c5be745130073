"""Runs and grids of runs, read from their folders as typed records.

    load_report("run")      a `Report`: all that the page shows, of one run or of a grid of runs
    load_grid("runs")       the rows of `ecc compare`: one per method and budget, without histories

Files may be damaged or hostile. Each is checked by `ecc.records`, and an error is one line that names the file.
Numbers keep the units of the files: joules are for the whole batch.
"""

from __future__ import annotations

import re
import shlex
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from ecc.budget import MEASURED_UNITS
from ecc.energy import EnergyModel
from ecc.energy.quality import describe_learning_curve, describe_outlier_widths
from ecc.errors import BadFile
from ecc.records import read_record, to_builtins
from ecc.run_records import FRONT_FILE, Front, GridFailure, GridRunInfo, Number, RunSummary

from .history import Curves, Follower, History, thinned
from .records import GridRow, GroupWidth, LayerCost, MeanStd, ModelInfo, Report, Resource, Run, mean_of

MAX_HELD_OUT = 2000
"""Samples in the chart of predicted against measured energy."""

_SHARE_OF_DENSE = re.compile(r"^(\w+) ([0-9.e+-]+%) of dense$")
_ENVIRONMENT = ("device", "ecc", "python", "torch", "system", "threads", "cuda", "cudnn", "driver")


# ---------------------------------------------------------------- files


@dataclass(frozen=True, kw_only=True)
class _Config:
    """The part of a config.json that the report needs."""

    verb: str
    task: str
    budgets: list[str]
    limits: list[Number]
    settings: dict[str, Any]
    method: dict[str, Any] | None = None
    meter: str | None = None
    unstructured: bool = False


@dataclass(frozen=True, kw_only=True)
class _ConfigFile:
    config: _Config


@dataclass(frozen=True, kw_only=True)
class _EnvironmentFile:
    sessions: list[dict[str, Any]]


@contextmanager
def _blame(path: Path) -> Iterator[None]:
    """Report values that do not fit together as damage of a file."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        why = f"no entry {error}" if isinstance(error, KeyError) else str(error)
        raise BadFile(f"{path} is damaged ({why}). Restore it from a copy, or run again.") from None


# ---------------------------------------------------------------- one run


def load_run(folder: Path, follower: Follower | None = None) -> tuple[Run, EnergyModel | None]:
    """A run folder and its energy model, if it has one."""
    file = folder / "config.json"
    config = read_record(file, _ConfigFile).config
    if config.verb != "compress" or len(config.limits) != len(config.budgets):
        raise BadFile(f"{file} is not the config of a compression. Give the folder of `ecc compress`.")
    history = (follower or Follower()).read(folder / "history.jsonl")
    file = folder / "summary.json"
    summary = read_record(file, RunSummary) if file.exists() else None
    file = folder / "energy.json"
    model = EnergyModel.load(file) if file.exists() else None
    seed = config.settings.get("seed")
    run = Run(
        name=folder.name,
        task=config.task,
        method=str((config.method or {}).get("name", "ecc")),
        budget=", ".join(short_budget(text) for text in config.budgets),
        seed=seed if isinstance(seed, int) else 0,
        settings=config.settings,
        is_unstructured=config.unstructured,
        device=summary.device if summary is not None else config.meter or "",
        batch=summary.batch if summary is not None else None if model is None else model.origin.batch,
        label="predicted" if summary is None else summary.label,
        summary=summary,
        now=history.now,
        resources=_running(config, history, model) if summary is None else _finished(summary),
        widths=[],
        layers=[],
        curves=Curves(),
        sessions=_sessions(folder / "environment.json"),
        export_command=None,
    )
    if summary is not None and not config.unstructured:
        run.export_command = _export_command(folder, run.sessions)
    main = run.main
    run.curves = history.curves("energy" if main is None else main.resource, None if main is None else main.dense)
    with _blame(folder / ("summary.json" if model is None else "energy.json")):
        _add_widths_and_layers(run, history, model)
    return run, model


def _sessions(file: Path) -> list[dict[str, str]]:
    if not file.exists():
        return []
    return [{key: str(value) for key, value in one.items()} for one in read_record(file, _EnvironmentFile).sessions]


def _export_command(folder: Path, sessions: Sequence[Mapping[str, str]]) -> str | None:
    """`ecc export` for the run that these commands made, with the folder as the user gave it."""
    try:
        words = shlex.split(sessions[0]["command"])
        words = words[words.index("compress") + 1 :]
        place = next(b for a, b in pairwise(words) if a in ("-o", "--output"))
    except (LookupError, ValueError, StopIteration):
        return None
    if "--budgets" in words:
        place = f"{place}/{folder.name}"
    command = ["ecc", "export", place, "--format", "onnx"]
    task = next((word for word in words if ".py:" in word and not word.startswith("-")), None)
    return shlex.join(command if task is None else [*command, "--task", task])


def _finished(summary: RunSummary) -> list[Resource]:
    """Costs with a budget, other measured costs, and counts."""
    label, known = summary.label, summary.budgets
    rows = [
        Resource(name, row.unit, row.label, row.dense, row.result, row.limit, row.met) for name, row in known.items()
    ]
    for name, pair in summary.measured.items():
        if name not in known and pair.dense > 0:
            rows.append(Resource(name, MEASURED_UNITS.get(name, ""), label, pair.dense, pair.result))
        if name == "latency" and min(pair.dense, pair.result) > 0:
            rows.append(Resource("throughput", "", label, summary.batch / pair.dense, summary.batch / pair.result))
    counted = (
        ("macs", "", summary.macs),
        ("params", "", summary.parameters),
        ("weight_bytes", "B", summary.weight_bytes),
    )
    for name, unit, counts in counted:
        if name not in known and counts is not None and counts.dense > 0:
            rows.append(Resource(name, unit, "counted", counts.dense, counts.result))
    return rows


def _running(config: _Config, history: History, model: EnergyModel | None) -> list[Resource]:
    """What is known before the end: the budget, and the prediction of the last line."""
    if model is None or model.dense <= 0:
        return []
    return [
        Resource(name, model.unit, "predicted", model.dense, history.cost.get(name), limit if limit > 0 else None)
        for name, limit in zip((text.partition(" ")[0] for text in config.budgets), config.limits, strict=True)
        if name == model.resource
    ]


def _add_widths_and_layers(run: Run, history: History, model: EnergyModel | None) -> None:
    """Widths of the summary, or of the last line of a run that is not finished; joules by layer from the model."""
    summary = run.summary
    sparse = None if summary is None else summary.sparse
    if sparse is not None:
        run.widths = [GroupWidth(name, full, sparse.nonzeros[name]) for name, full in sparse.weights.items()]
        rows = [
            LayerCost(name.removesuffix(".weight"), sparse.coefficients[name] * full, sparse.coefficients[name] * kept)
            for name, full, kept in ((row.group, row.full, row.kept) for row in run.widths)
        ]
        rows.append(LayerCost("(independent of the weights)", sparse.base, sparse.base))
        run.layers = [row for row in rows if row.dense > 0]
        return
    if summary is not None:
        full, kept = summary.full_widths, summary.widths
    elif model is not None:
        full, kept = dict(zip(model.groups, model.full_widths, strict=True)), history.widths
    else:
        return
    channels = {} if summary is None else summary.unit_channels
    run.widths = [
        GroupWidth(name, width, kept[name], channels.get(name, 1)) for name, width in full.items() if name in kept
    ]
    if model is not None and run.widths:
        widths = {row.group: row.kept for row in run.widths if row.group in model.groups}
        dense, result = model.per_layer(), model.per_layer(widths)
        names = sorted(dense, key=lambda name: name == "")  # operators outside any layer come last
        rows = [
            LayerCost(
                name or "(outside any layer)", dense[name], result[name] if result[name] > 1e-9 * dense[name] else 0.0
            )
            for name in names
            if dense[name] > 0
        ]  # what is left of a removed branch is rounding
        _check_range([[row.dense, row.result] for row in rows])
        run.layers = _fold(rows, {} if summary is None else summary.follows)


def _fold(rows: Sequence[LayerCost], follows: Mapping[str, str]) -> list[LayerCost]:
    """Layers with MACs, each with the norms, activations and sums that come after it."""
    whole = {row.layer for row in rows if row.layer not in follows}
    parts: dict[str, list[LayerCost]] = {}
    for row in rows:
        after = follows.get(row.layer)
        parts.setdefault(after if after in whole else row.layer, []).append(row)
    return [
        found[0]
        if len(found) == 1
        else LayerCost(name, sum(row.dense for row in found), sum(row.result for row in found), tuple(found))
        for name, found in parts.items()
    ]


def _model_info(model: EnergyModel) -> ModelInfo:
    quality = replace(model.quality, held_out=tuple(thinned(model.quality.held_out, MAX_HELD_OUT)))
    if any(measured <= 0 or predicted <= 0 for measured, predicted in quality.held_out):
        raise ValueError("a held-out cost is not positive")
    _check_range(to_builtins(quality))
    advice = " ".join(filter(None, (describe_learning_curve(quality), describe_outlier_widths(quality))))
    return ModelInfo(kind=model.kind, label=model.label, origin=model.origin, quality=quality, advice=advice)


def _check_range(value: Any) -> None:
    """Refuse numbers that cannot be drawn."""
    if isinstance(value, float) and not abs(value) < 1e100:
        raise ValueError(f"{value} is out of range")
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
        _check_range(item)


# ---------------------------------------------------------------- grids


def load_grid(root: str | Path) -> list[GridRow]:
    """The rows of a grid, with methods and budgets in the order of the folders."""
    root = Path(root)
    if not (root / "grid.json").is_file():
        raise BadFile(f"{root} holds no grid of runs. Give the folder of `ecc compare`.")
    runs = []
    for file in sorted(root.glob("seed-*/*/cell.json")):
        info, summary = read_record(file, GridRunInfo), read_record(file.parent / "summary.json", RunSummary)
        if not summary.budgets:
            raise BadFile(f"{file.parent / 'summary.json'} is damaged: it has no budgets. Restore it, or run again.")
        runs.append((info, summary))
    return _grid_rows(runs, _failures(root))


def _failures(root: Path) -> list[GridFailure]:
    return [read_record(file, GridFailure) for file in sorted(root.glob("seed-*/*.failed.json"))]


def _grid_rows(runs: Sequence[tuple[GridRunInfo, RunSummary]], failures: Sequence[GridFailure]) -> list[GridRow]:
    keys = dict.fromkeys([(info.method, info.budget) for info, _ in runs] + [(x.method, x.budget) for x in failures])

    def scores(method: str, budget: str, name: str = "finetuned") -> dict[int, float]:
        return {
            info.seed: summary.scores[name]
            for info, summary in runs
            if (info.method, info.budget) == (method, budget) and name in summary.scores
        }

    rows = []
    for method, budget in keys:
        found = [(info, summary) for info, summary in runs if (info.method, info.budget) == (method, budget)]
        first = [next(iter(summary.budgets.values())) for _, summary in found]
        batches = [summary.batches for _, summary in found if summary.batches is not None]
        rows.append(
            GridRow(
                method=method,
                budget=budget,
                seeds=len(found),
                failures=[f"seed {x.seed}: {x.error}" for x in failures if (x.method, x.budget) == (method, budget)],
                labels=sorted({summary.label for _, summary in found}),
                pruned=_mean_std(scores(method, budget, "pruned").values()),
                finetuned=_mean_std(scores(method, budget).values()),
                cost_ratio=_mean_std(row.result / row.dense for row in first),
                met=all(summary.met for _, summary in found) if found else None,
                batches_total=mean_of(count.total for count in batches),
                batches_lineage=mean_of(count.lineage for count in batches),
                seconds=mean_of(info.seconds for info, _ in found if info.sessions == 1),
                peak_bytes=max((info.peak_bytes for info, _ in found if info.peak_bytes is not None), default=None),
                p_value=p_value(scores("ecc", budget), scores(method, budget)) if method != "ecc" else None,
                metric=next((summary.metric for _, summary in found), "score"),
            )
        )
    return rows


def p_value(one: Mapping[int, float], other: Mapping[int, float]) -> float | None:
    """Of a paired t-test over the common seeds; None with fewer than two, or if all differences are equal."""
    pairs = [(one[seed], other[seed]) for seed in sorted(set(one) & set(other))]
    if len(pairs) < 2 or len({a - b for a, b in pairs}) == 1:
        return None
    from scipy.stats import ttest_rel  # importing it takes half a second

    return float(ttest_rel([a for a, _ in pairs], [b for _, b in pairs]).pvalue)


def _mean_std(values: Iterable[float]) -> MeanStd | None:
    found = [float(value) for value in values]
    if not found:
        return None
    return MeanStd(statistics.fmean(found), statistics.stdev(found) if len(found) > 1 else 0.0)


# ---------------------------------------------------------------- reports


def load_report(folder: str | Path, follower: Follower | None = None) -> Report:
    """All that a page shows of a run or of a grid. A follower that is kept between calls reads only new lines."""
    folder = Path(folder)
    if not folder.is_dir():
        raise BadFile(f"{folder} is not a folder. Give the folder of `ecc compress` or `ecc compare`.")
    if (folder / "grid.json").is_file():
        return _grid_report(folder, follower)
    if (folder / FRONT_FILE).is_file():
        return _front_report(folder, follower)
    if not (folder / "config.json").is_file():
        raise BadFile(f"{folder} holds neither a run nor a grid. Give the folder of `ecc compress` or `ecc compare`.")
    run, model = load_run(folder, follower)
    return _report("run", folder, [run], model)


def _grid_report(folder: Path, follower: Follower | None) -> Report:
    runs: list[Run] = []
    model: EnergyModel | None = None
    for path in sorted(folder.glob("seed-*/*")):
        if path.name == "dense" or not (path / "config.json").is_file():
            continue
        run, own_model = load_run(path, follower)
        model = model or own_model  # all runs have the same one
        run.name = f"{path.parent.name}/{path.name}"
        run.curves.width_duals = []  # those of many runs cannot be distinguished
        if (file := path / "cell.json").exists():
            run.budget = short_budget(read_record(file, GridRunInfo).budget)
        runs.append(run)
    failures = _failures(folder)
    if not runs and not failures:
        raise BadFile(f"{folder} is a grid without any run. Wait for the first run to start.")
    seeds = sorted({run.seed for run in runs})
    for run in runs:
        if run.seed != seeds[0]:  # curves of several seeds would cover each other
            run.curves = Curves(checks=run.curves.checks, phases=run.curves.phases)
    report = _report("grid", folder, runs, model)
    return replace(report, rows=load_grid(folder), failures=failures)


def _front_report(folder: Path, follower: Follower | None) -> Report:
    """A run with several budgets, as a grid of one method."""
    front = read_record(folder / FRONT_FILE, Front)
    runs: list[Run] = []
    found: list[tuple[GridRunInfo, RunSummary]] = []
    model: EnergyModel | None = None
    for row in front.rows:
        if Path(row.folder).name != row.folder:
            raise BadFile(f"{folder / FRONT_FILE} is damaged: {row.folder!r} is not the name of a folder in it.")
        run, own_model = load_run(folder / row.folder, follower)
        if run.summary is None:
            raise BadFile(f"{folder / row.folder} has no summary.json. Run the command again to finish it.")
        model, run.seed, run.curves.width_duals = model or own_model, 0, []
        runs.append(run)
        info = GridRunInfo(method=run.method, budget=run.budget, seed=0, seconds=0.0, sessions=0)
        found.append((info, run.summary))
    if not runs:
        raise BadFile(f"{folder / FRONT_FILE} has no results. Run the command again.")
    report = _report("grid", folder, runs, model)
    return replace(report, budgets=[run.budget for run in runs], rows=_grid_rows(found, []), front=front)


def _report(kind: str, folder: Path, runs: list[Run], model: EnergyModel | None) -> Report:
    known = [run for run in runs if run.summary is not None] or runs
    with _blame(folder / "energy.json"):
        info = None if model is None else _model_info(model)
    environments = [{key: one[key] for key in _ENVIRONMENT if key in one} for run in runs for one in run.sessions]
    return Report(
        kind=kind,
        folder=folder.name or str(folder),
        task=runs[0].task if runs else "",
        device=known[0].device if known else "",
        batch=next((run.batch for run in known if run.batch), None),
        labels=sorted({run.label for run in known}),
        running=sum(run.summary is None for run in runs),
        methods=sorted({run.method for run in runs}, key=lambda name: (name != "ecc", name)),
        budgets=sorted({run.budget for run in runs}, key=_budget_size, reverse=True),
        seeds=sorted({run.seed for run in runs}),
        runs=runs,
        rows=[],
        failures=[],
        model=info,
        front=None,
        commands=list(dict.fromkeys(one["command"] for run in runs for one in run.sessions if "command" in one)),
        environments=[one for i, one in enumerate(environments) if one not in environments[:i]],
    )


def short_budget(text: str) -> str:
    """`energy 50% of dense` as `50%`, `macs 50% of dense` as `macs 50%`; other budgets as they are."""
    found = _SHARE_OF_DENSE.match(text)
    return text if not found else found[2] if found[1] == "energy" else f"{found[1]} {found[2]}"


def _budget_size(budget: str) -> tuple[float, str]:
    """Sort key: percentages by size, others by name."""
    try:
        return float(budget.removesuffix("%")), budget
    except ValueError:
        return 0.0, budget
