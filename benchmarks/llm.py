"""Evidence for language models: perplexity of SmolLM2-135M against measured joules per token.

    python3 benchmarks/llm.py --weights vendor/smollm2 --text vendor/wikitext2 --out results/llm.json --seconds 450
    python3 benchmarks/llm.py --weights vendor/smollm2 --text vendor/wikitext2 --out results/llm.json --list

Calibrates and heals on WikiText-2 valid, chooses on its last tenth, and reports perplexity on test. Every method gets the
same calibration batches, the same budget on the same meter (closed loop, 98 to 100 %), and the same batches for healing.
The seed draws the sequences for calibration and the order of those for healing. Budgets are shares of the dense energy
that the same call has measured. What blocks save is measured in the first call only, and scaled by the dense energy later.

Cells, deadline and the record are those of `cells.py`; the most important cells come first. If there is no time to heal a
network, its cell is marked `is_partial` and is run again in the next call. Recorded on an H200: 25 s until the model is
ready, 42 s for what blocks save (first call), then 69 s for ECC, 23 to 45 s for a baseline, of which healing takes 20 s.
One call of 450 s has 9 cells: ECC and all baselines at 80 % of the decode energy, then ECC at 90 and 70 %. All 98 cells
(`--list`) need about 4,200 s.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cells import Cells, Deadline, Key, add_options, print_cells, run_in_turn
from smollm2 import load_model, load_tokenizer
from torch import Tensor, nn

from ecc.errors import BadFile, EccError
from ecc.graph import ChannelGraph, trace_channels
from ecc.graph.slimming import build_slim
from ecc.measure import Analytic, DeviceProfiler, find_meter
from ecc.measure.tokens import workload_graph, workload_input, workload_model
from ecc.methods.base import PruningContext
from ecc.methods.budget_controller import BudgetController
from ecc.methods.calibration import BATCHES
from ecc.methods.cost_evaluator import MeasuredCost
from ecc.methods.one_shot import OneShot, OneShotSettings, Round
from ecc.methods.registry import find_method
from ecc.settings import (
    PROFILE_SETTINGS,
    CompressSettings,
    Cosine,
    Design,
    DistillSettings,
    MeasureSettings,
    TrainSettings,
)
from ecc.task import Task, TokenWorkload
from ecc.torch_utils import device_of
from ecc.training import BatchStream, Teacher, train
from ecc.zoo.language import LogLikelihood, TokenBatches, token_sequences
from ecc.zoo.language import load_model as load_folder

BAND = (0.98, 1.0)
"""Measured cost of a good result, as a fraction of the budget."""
MLP_SHARES = (1.0, 0.75, 0.5, 0.25)
"""Widths of all MLPs at which the cost is measured, as fractions."""
BASELINES = ("flap", "wanda_sp", "llm_pruner", "2ssp", "shortgpt", "uniform")
HEALING = 22.0
"""Seconds of healing and its evaluation on an H200."""
SECONDS = {"one_shot": 69.0, "flap": 45.0, "shortgpt": 23.0}
"""Of a cell on an H200; 41 for other methods."""
FREE = ("weights", "text", "out", "graph", "earlier", "seconds", "only", "again", "list", "main", "shares", "seeds")
"""Options that a single cell does not depend on."""


# ---------------------------------------------------------------- cost


@dataclass(frozen=True)
class BlockCost:
    """Cost of a network whose blocks have equal shapes: that of the dense one minus what each block saves.

    A few networks are measured in which all blocks are changed alike. Since blocks of equal shapes cost the same, a
    block saves an equal part of the difference.
    """

    resource: str
    label: str
    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    branches: tuple[str, ...]
    dense_profiled: float
    savings: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    """For attention and mlp: widths in ascending order, and what one block saves at each."""
    unit: str = "J"

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths."""
        saved = 0.0
        for name, width in zip(self.groups, widths.tolist(), strict=True):
            kind = kind_of(name)
            if kind:
                saved += float(np.interp(width, *self.savings[kind]))
        return torch.tensor(self.dense_profiled - saved, dtype=torch.float64)

    def gradient(self, widths: Tensor) -> Tensor:
        """Not needed by methods that do not train."""
        raise NotImplementedError

    def form(self, budget: float) -> Any:
        """Not needed by methods that do not train."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> BlockCost:
        """Itself: it computes on the CPU."""
        del device
        return self


def kind_of(name: str) -> str:
    """Whether a group is of attention, of an MLP or of neither."""
    return "attention" if "attn" in name else "mlp" if "mlp" in name else ""


class Bench:
    """Measures workloads of the dense network at given widths."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, meter: Any, workloads: Sequence[TokenWorkload]) -> None:
        self.model, self.graph, self.meter = model, graph, meter
        self.workloads = {one.name: one for one in workloads}
        is_computed = isinstance(meter, Analytic)  # only formulas need the layers of a workload
        self.graphs = {one.name: workload_graph(model, graph, one) if is_computed else graph for one in workloads}
        self.label = meter.describe().label
        self.profilers = {} if is_computed else {one.name: self._open(one) for one in workloads}

    def _open(self, workload: TokenWorkload) -> tuple[DeviceProfiler, DeviceProfiler]:
        """A quick and a careful profiler of a workload; the counter is probed once."""
        device = device_of(self.model)
        settings: MeasureSettings = replace(PROFILE_SETTINGS, precision="bf16" if device.type == "cuda" else "fp32")
        kinds = ((2, 3, 0.01), (2, 6, 0.006))  # windows, and their confidence interval
        model, inputs = workload_model(self.model, workload), workload_input(self.model, workload)
        quick, careful = (
            DeviceProfiler(
                model,
                self.graph,
                inputs,
                self.meter,
                replace(settings, min_repeats=least, max_repeats=most, target_relative_ci=interval),
                device,
            )
            for least, most, interval in kinds
        )
        careful.prepare(quick.prepare())
        return quick, careful

    def runner(self, name: str) -> dict[str, Any]:
        """How the networks of a workload are run."""
        if name not in self.profilers:
            return {}
        header = self.profilers[name][0].header(Design(kind="uniform", samples=1))
        assert header.settings is not None
        return {"runner": header.settings.runner, "precision": header.settings.precision, "why": header.runner_reason}

    def measure(
        self, name: str, widths: Mapping[str, int], *, careful: bool = False
    ) -> tuple[float, float, float | None]:
        """Joules and seconds of one run, and the relative confidence interval."""
        if isinstance(self.meter, Analytic):
            cost = self.meter.cost(self.graphs[name], widths)
            return cost.joules, cost.seconds, None
        found = self.profilers[name][int(careful)].sample(None, 0, 0, {**self.graph.full_widths, **widths})
        return found.joules, found.seconds, found.relative_ci

    def fit(self, name: str, earlier: Mapping[str, Any] | None = None) -> BlockCost:
        """The cost of a workload, from networks in which all blocks are changed alike.

        Args:
            name: Of the workload.
            earlier: What an earlier call found: joules of a token, and what blocks save, which is scaled.
        """
        full = self.graph.full_widths
        by_kind = {kind: [one for one in full if kind_of(one) == kind] for kind in ("attention", "mlp")}
        dense = self.measure(name, {}, careful=True)[0]
        savings = {}
        if earlier is not None:
            scale = dense / (earlier["joules_per_token"] * self.workloads[name].tokens)
            for kind, points in earlier["savings"].items():
                savings[kind] = (tuple(width for width, _ in points), tuple(scale * saved for _, saved in points))
            by_kind = {}
        for kind, names in by_kind.items():
            width = full[names[0]]
            points = {width: 0.0}
            wanted = range(1, width) if kind == "attention" else [round(width * one) for one in MLP_SHARES[1:]]
            for less in wanted:
                points[less] = max(0.0, dense - self.measure(name, dict.fromkeys(names, less))[0]) / len(names)
            some = names[1 : max(2, len(names) // 2)]  # without any block nothing would be left to run
            removed = self.measure(name, dict.fromkeys(some, 0))[0]
            points[0] = max(*points.values(), (dense - removed) / len(some))
            ordered = sorted(points)
            saved = np.maximum.accumulate([points[one] for one in ordered][::-1])[::-1]  # less width never costs more
            savings[kind] = (tuple(map(float, ordered)), tuple(map(float, saved)))
        branches = tuple(branch.name for branch in self.graph.branches)
        return BlockCost(name, self.label, tuple(full), tuple(full.values()), branches, dense, savings)


# ---------------------------------------------------------------- a cell


@dataclass
class Setup:
    """Everything that cells share."""

    model: nn.Module
    graph: ChannelGraph
    bench: Bench
    costs: dict[str, BlockCost]
    learn: Tensor
    """Sequences for calibration and healing."""
    held_out: LogLikelihood
    test: LogLikelihood
    teacher: Teacher
    calibration_batch: int
    batch: int
    heal_steps: int
    heal_lr: float
    device: torch.device
    paths: dict[str, list[Round]]

    def stream(self, batch: int, seed: int) -> BatchStream:
        """Batches of the text in an order that the seed draws."""
        order = torch.randperm(len(self.learn), generator=torch.Generator().manual_seed(seed))
        batches = TokenBatches(self.learn[order], batch)
        task = Task(
            name="smollm2", model=self.model, example_input={"input_ids": self.learn[:1]}, train_batches=batches
        )
        return BatchStream(task, device=self.device, seed=seed)


def run_cell(setup: Setup, key: Key, deadline: Deadline) -> dict[str, Any]:
    """Prune with one method to one budget, measure and evaluate; then heal, if there is time, and evaluate again."""
    gc.collect()  # the last cell kept gigabytes of activations
    started = time.monotonic()
    method_name, resource, share, seed = (key[name] for name in ("method", "resource", "share", "seed"))
    model = copy.deepcopy(setup.model)
    cost = setup.costs[resource]
    limit = share * cost.dense_profiled
    is_shared = method_name == "one_shot" and seed == 0
    method = OneShot(OneShotSettings(), setup.paths.setdefault(resource, [])) if is_shared else find_method(method_name)
    context = PruningContext(
        model=model,
        graph=setup.graph,
        costs=(cost,),
        targets=[limit],
        settings=CompressSettings(prune_steps=0, finetune_steps=0, min_width_ratio=0.0),
        width_multiple=1,
        stream=setup.stream(setup.calibration_batch, seed),
        teacher=None,
        held_out=lambda model: score(model, setup.held_out, setup.device),
        train=_no_training,
        log=lambda _: None,
        loss=None,
    )

    def measure(widths: Mapping[str, int]) -> MeasuredCost:
        joules, _, interval = setup.bench.measure(resource, widths, careful=True)
        return MeasuredCost({resource: joules}, setup.bench.label, interval)

    method.start(context)
    controller = BudgetController(method, context, [limit], measure, band=BAND)
    controller.run(lambda _: None)
    last = controller.checks[-1]
    small = build_slim(model, setup.graph)
    found: dict[str, Any] = {
        "met": controller.is_met,
        "note": controller.note,
        "of_budget": last.measured[resource] / limit,
        "cost_checks": len(controller.checks),
        "joules": last.measured[resource],
        "relative_ci": last.relative_ci,
        "batches": BATCHES,
        "refit": refit if (refit := getattr(method, "refit", None)) is None else asdict(refit),
        "perplexity": perplexity(small, setup.test, setup.device),
        "parameters": sum(one.numel() for one in small.parameters()),
        "removed": {
            kind: sum(width == 0 for name, width in last.widths.items() if kind_of(name) == kind)
            for kind in ("attention", "mlp")
        },
        "widths": {name: width for name, width in last.widths.items() if width != setup.graph.full_widths[name]},
    }
    for name, workload in setup.bench.workloads.items():
        joules = last.measured[resource] if name == resource else setup.bench.measure(name, last.widths)[0]
        found[f"{name}_joules_per_token"] = joules / workload.tokens
        found[f"{name}_of_dense"] = joules / setup.costs[name].dense_profiled
    found["seconds_pruning"] = time.monotonic() - started
    if setup.heal_steps and deadline.left < HEALING:
        found["is_partial"] = True
    elif setup.heal_steps:
        heal(small, setup, seed)
        found["healed_perplexity"] = perplexity(small, setup.test, setup.device)
        found |= {"heal_steps": setup.heal_steps, "batches": BATCHES + setup.heal_steps}
    return found


def heal(model: nn.Module, setup: Setup, seed: int) -> None:
    """Distillation against the dense model; the same batches for every method."""
    half = setup.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=setup.heal_lr, betas=(0.9, 0.95), weight_decay=0.01, fused=half
    )
    train(
        model,
        optimizer,
        setup.stream(setup.batch, seed),
        steps=setup.heal_steps,
        loss=None,
        settings=TrainSettings(precision="bf16" if half else "fp32", clip_norm=1.0, log_every=1000, seed=seed),
        schedule=Cosine(start_lr=setup.heal_lr),
        teacher=setup.teacher,
    )


def _no_training(*_: Any) -> None:
    raise EccError("methods of this comparison do not train while they prune.")


def score(model: nn.Module, evaluate: LogLikelihood, device: torch.device) -> float:
    """Mean log-likelihood of a token, in half precision on a GPU."""
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
        return evaluate(model)


def perplexity(model: nn.Module, evaluate: LogLikelihood, device: torch.device) -> float:
    """Perplexity with the weights and activations in half precision on a GPU, as deployed."""
    used = copy.deepcopy(model).to(torch.bfloat16) if device.type == "cuda" else model
    return math.exp(min(50.0, -evaluate(used)))


# ---------------------------------------------------------------- the comparison


def keys_of(options: argparse.Namespace) -> list[Key]:
    """Cells, the most important ones first."""
    main, shares, seeds = options.main, options.shares, options.seeds
    first: list[tuple[str, str, float, int]] = [("one_shot", "decode", main, 0)]
    first += [(name, "decode", main, 0) for name in BASELINES]
    first += [("one_shot", "decode", share, 0) for share in shares]
    first += [("one_shot", "prefill", main, 0)]
    first += [(name, "prefill", main, 0) for name in BASELINES]
    first += [("one_shot", "prefill", share, 0) for share in shares]
    first += [(name, "decode", share, 0) for share in shares for name in BASELINES]
    first += [(name, "decode", main, seed) for seed in seeds if seed for name in ("one_shot", *BASELINES)]
    first += [(name, "prefill", share, 0) for share in shares for name in BASELINES]
    first += [(name, "prefill", main, seed) for seed in seeds if seed for name in ("one_shot", *BASELINES)]
    names = ("method", "resource", "share", "seed")
    return [dict(zip(names, one, strict=True)) for one in dict.fromkeys(first)]


def prepare(options: argparse.Namespace) -> Setup:
    """Model, text, graph and meter."""
    device = torch.device(options.device)
    folder, length = options.weights, options.length
    model: Any = load_model(folder) if (folder / "packed.json").is_file() else load_folder(folder)[0]
    tokenizer = load_tokenizer(folder)
    valid = token_sequences(tokenizer, [options.text / "valid.txt"], length)[: options.sequences]
    test = token_sequences(tokenizer, [options.text / "test.txt"], length)[: options.sequences]
    kept = max(2, len(valid) // 10)
    graph_file = options.graph or folder / "graph.json"
    try:
        graph = ChannelGraph.load(graph_file)
    except BadFile:  # missing, or of an earlier version
        graph = trace_channels(model, {"input_ids": torch.randint(1, model.config.vocab_size, (2, 8))}, verify=False)
        graph.save(graph_file)
    # Only what the costs below depend on is pruned, so that no method prunes what saves nothing here.
    graph = replace(
        graph,
        groups=tuple(
            one if kind_of(one.name) or one.frozen is not None else replace(one, frozen="not compared here")
            for one in graph.groups
        ),
    )
    model = model.to(device)
    workloads = [
        TokenWorkload(name="decode", batch=options.decode_batch, length=options.cache),
        TokenWorkload(name="prefill", batch=options.prefill_batch, length=options.cache),
    ]
    return Setup(
        model=model,
        graph=graph,
        bench=Bench(model, graph, find_meter(options.meter), workloads),
        costs={},
        learn=valid[:-kept],
        held_out=LogLikelihood(valid[-kept:][: options.held_out], options.batch),
        test=LogLikelihood(test, options.batch),
        teacher=Teacher(model, DistillSettings(weight=options.kd_weight, temperature=1.0)),
        calibration_batch=options.calibration_batch,
        batch=options.batch,
        heal_steps=options.heal_steps,
        heal_lr=options.heal_lr,
        device=device,
        paths={},
    )


def fit_costs(setup: Setup, resource: str, earlier: Mapping[str, Any] | None) -> dict[str, Any]:
    """Measure the networks that the cost of a workload is fitted to; the dense results."""
    bench, cost = setup.bench, setup.bench.fit(resource, earlier)
    setup.costs[resource] = cost
    workload = bench.workloads[resource]
    return {
        "joules_per_token": cost.dense_profiled / workload.tokens,
        "seconds_per_run": bench.measure(resource, {})[1],
        "batch": workload.batch,
        "length": workload.length,
        "savings": {kind: list(zip(*points, strict=True)) for kind, points in cost.savings.items()},
        **bench.runner(resource),
    }


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--weights", type=Path, required=True, help="Folder of benchmarks/smollm2.py, or of save_pretrained."
    )
    parser.add_argument("--text", type=Path, required=True, help="Folder with valid.txt and test.txt.")
    add_options(parser, seconds=450.0)
    parser.add_argument("--graph", type=Path, help="Channel graph; traced and saved with the weights if missing.")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--length", type=int, default=1024, help="Tokens per sequence of the text.")
    parser.add_argument("--sequences", type=int, default=100_000, help="Most sequences of each text.")
    parser.add_argument("--held-out", type=int, default=8, help="Sequences that choices are made by.")
    parser.add_argument("--batch", type=int, default=8, help="Sequences per batch of healing and evaluation.")
    parser.add_argument("--calibration-batch", type=int, default=8, help="Sequences in each of 16 calibration batches.")
    parser.add_argument("--decode-batch", type=int, default=64)
    parser.add_argument("--prefill-batch", type=int, default=8)
    parser.add_argument("--cache", type=int, default=1024, help="Tokens in the cache, and of a prompt.")
    parser.add_argument("--heal-steps", type=int, default=150)
    parser.add_argument("--heal-lr", type=float, default=3e-4)
    parser.add_argument("--kd-weight", type=float, default=0.5)
    parser.add_argument("--main", type=float, default=0.8, help="Share of the dense energy that comes first.")
    parser.add_argument(
        "--shares", type=lambda text: [float(one) for one in text.split(",") if one], default=[0.9, 0.7, 0.6, 0.5]
    )
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",") if one], default=[0, 1, 2])
    return parser.parse_args()


def main() -> None:
    """Run cells until the time is over."""
    options = parse()
    deadline, keys = Deadline.after(options.seconds), keys_of(options)
    settings = {key: value for key, value in vars(options).items() if key not in FREE}
    header: dict[str, Any] = {"what": "perplexity against measured joules per token", "settings": settings}
    cells = Cells(options.out, header, options.earlier, options.again, options.only)
    if options.list:
        print_cells(cells, keys)
        return
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # statistics and refits; the score and the measurements are bfloat16
    setup = prepare(options)
    info = setup.bench.meter.describe()
    header |= {"device": info.device, "meter": info.name, "label": info.label}
    earlier = dense_of([options.out, *options.earlier], cells.header)
    dense: dict[str, Any] = {
        "perplexity": perplexity(setup.model, setup.test, setup.device),
        "parameters": sum(p.numel() for p in setup.model.parameters()),
        "test_tokens": setup.test.sequences.numel(),
        "calibration_tokens": BATCHES * options.calibration_batch * options.length,
        "heal_tokens": options.heal_steps * options.batch * options.length,
    }
    header["dense"] = dense
    print(f"{deadline.left:5.0f} s left  dense perplexity {dense['perplexity']:.3f}", flush=True)
    for name in setup.bench.workloads:
        dense[name] = fit_costs(setup, name, earlier.get(name))
        print(f"{deadline.left:5.0f} s left  {name} {1e3 * dense[name]['joules_per_token']:.4g} mJ/token", flush=True)
        cells.write()
    shown = ("perplexity", "healed_perplexity", "of_budget", "decode_of_dense", "prefill_of_dense", "cost_checks")
    run_in_turn(
        cells,
        keys,
        lambda key: run_cell(setup, key, deadline),
        deadline,
        estimate=lambda key: SECONDS.get(key["method"], 41.0) if setup.device.type == "cuda" else 0.0,
        show=shown,
    )


def dense_of(files: Sequence[Path], header: Mapping[str, Any]) -> dict[str, Any]:
    """What an earlier call on the same device with the same settings measured of the dense network."""
    for file in files:
        if file.is_file():
            record = json.loads(file.read_text(encoding="utf-8"))
            if all(record.get(name) == header[name] for name in ("device", "settings")):
                return dict(record.get("dense", {}))
    return {}


if __name__ == "__main__":
    main()
