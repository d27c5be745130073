"""Evidence for language models: perplexity of SmolLM2-135M against measured joules per token.

    python3 benchmarks/llm.py --weights vendor/smollm2 --text vendor/wikitext2 --out results/llm.json --seconds 450
    python3 benchmarks/llm.py --weights vendor/smollm2 --text vendor/wikitext2 --out results/llm.json --list

Calibrates and heals on WikiText-2 valid, chooses on its last tenth, and reports perplexity on test. Every method gets the
same calibration batches, the same budget on the same meter (closed loop, 98 to 100 %), and the same batches for healing.
The seed draws the sequences for calibration and the order of those for healing. Budgets are shares of the dense energy
that the same call has measured. What blocks save is measured in the first call only, and scaled by the dense energy later.

A call has two phases. First networks are pruned, measured and evaluated one after the other; a method is calibrated once
for all its cells, and starts from what its last measurement has shown of the cost model. As soon as the time that is left
is needed to heal these networks, they are healed in several processes at the same time (`llm_healing.py`), and nothing is
measured any more. Cells, deadline and the record are those of `cells.py`; the most important cells come first. A cell that
was not healed is marked `is_partial`, and is run again in the next call. Every cell has the seconds of its parts.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from cells import Cells, Deadline, Key, add_options, print_cells, run_in_processes, run_in_turn, shared_gpu
from llm_cost import Bench, BlockCost, kind_of
from llm_healing import TOKENS, heal_cells, load_network, perplexity, save_pruned, token_stream
from safetensors.torch import save_file
from smollm2 import load_tokenizer
from torch import Tensor, nn

from ecc.errors import EccError
from ecc.graph import ChannelGraph
from ecc.graph.slimming import build_slim
from ecc.measure import find_meter
from ecc.methods.base import PruningContext
from ecc.methods.baselines.two_ssp import TwoSsp
from ecc.methods.budget_controller import BudgetController
from ecc.methods.calibration import BATCHES
from ecc.methods.cost_evaluator import MeasuredCost
from ecc.methods.one_shot import Round
from ecc.methods.registry import find_method
from ecc.settings import CompressSettings
from ecc.task import TokenWorkload
from ecc.zoo.language import LogLikelihood, token_sequences

BAND = (0.98, 1.0)
"""Measured cost of a good result, as a fraction of the budget."""
AIM = 0.994
"""Where in the band the first network of a cell is expected."""
WIDE, MULTIPLE = 512, 8
"""Groups of at least so many channels, the MLPs, get widths that are multiples of 8, as `one_shot` does by itself: kernels
for half precision are slow with other widths."""
BASELINES = ("flap", "wanda_sp", "llm_pruner", "2ssp", "shortgpt", "uniform")
SECONDS = {"one_shot": 45.0, "flap": 15.0, "2ssp": 35.0}
"""Of the first cell of a method on an H200, without healing; 12 for other methods. Then what the last one took counts."""
HEAL_START, HEAL_CELL, HEAL_TOKEN = 20.0, 1.0, 7e-6
"""Seconds until processes are ready, and of a network and a token if several are healed at once on an H200; estimated."""
ENDING = 10.0
"""Seconds before the end after which no network starts to be healed."""
PARTS = ("fitting", "calibrating", "searching", "measuring", "evaluating")
"""Of a cell, whose seconds are recorded; `seconds_healing` is added later."""
FREE = (
    *("weights", "text", "out", "graph", "earlier", "seconds", "only", "again", "list", "main", "shares", "seeds"),
    *("processes", "evaluation_batch"),
)
"""Options that a single cell does not depend on."""


# ---------------------------------------------------------------- a cell


class AlignedContext(PruningContext):
    """A context in which the widths of wide groups are multiples of 8, and heads are not rounded."""

    def round_widths(self, widths: Sequence[float]) -> list[int]:
        """The largest allowed widths that are not above the given ones."""
        return super().round_widths(
            [
                width if group.width < WIDE or width >= group.width else max(MULTIPLE, width // MULTIPLE * MULTIPLE)
                for group, width in zip(self.graph.groups, widths, strict=True)
            ]
        )


class HeldOut:
    """Mean log-likelihood of a held-out token, in half precision on a GPU.

    Args:
        sequences: The text.
        batch: Sequences at once.
    """

    def __init__(self, sequences: Tensor, batch: int) -> None:
        self._batches = sequences.split(batch)
        self._count = sequences[:, 1:].numel()

    @torch.no_grad()
    def __call__(self, model: nn.Module) -> float:
        """The score; higher is better."""
        losses = []
        for tokens in self._batches:
            half = tokens.device.type == "cuda"
            with torch.autocast(tokens.device.type, dtype=torch.bfloat16, enabled=half, cache_enabled=False):
                logits = model(input_ids=tokens, use_cache=False).logits[:, :-1].float()
            losses.append(F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum"))
        return -float(torch.stack(losses).sum()) / self._count


@dataclass
class Setup:
    """Everything that cells share."""

    options: argparse.Namespace
    model: nn.Module
    """The dense network."""
    work: nn.Module
    """The network that methods prune."""
    graph: ChannelGraph
    bench: Bench
    learn: Tensor
    """Sequences for calibration and healing."""
    held_out: HeldOut
    test: LogLikelihood
    device: torch.device
    folder: Path
    """For the networks that are healed later."""
    costs: dict[str, BlockCost] = field(default_factory=dict)
    dense: dict[str, Any] = field(default_factory=dict)
    """Results of the dense network, for the record."""
    started: dict[tuple[str, int], Any] = field(default_factory=dict)
    """Calibrated methods."""
    paths: dict[tuple[str, int], list[Round]] = field(default_factory=dict)
    """Rounds of `one_shot`, which do not depend on the budget."""
    errors: dict[tuple[str, str], dict[float, float]] = field(default_factory=dict)
    """Measured by predicted cost of the last network of a method, by share."""
    pending: list[Key] = field(default_factory=list)
    """Cells that have to be healed."""

    def method(self, name: str, seed: int, context: PruningContext) -> Any:
        """A calibrated method for another budget."""
        if (name, seed) not in self.started:
            self.started = {key: one for key, one in self.started.items() if key[1] == seed}  # they keep activations
            method: Any = find_method(name)
            method.start(context)
            self.started[name, seed] = method
        found = copy.copy(self.started[name, seed])  # as it was after its start
        found.context = context
        if name == "one_shot":
            found.path = self.paths.setdefault((context.costs[0].resource, seed), [])
        return found

    def first_target(self, name: str, resource: str, share: float) -> float:
        """Predicted cost that a method aims at first, with the error of the cost model at the closest share."""
        known = self.errors.get((name, resource), {})
        error = known[min(known, key=lambda one: abs(one - share))] if known else 1.0
        return AIM * share * self.costs[resource].dense_profiled / error


class Timer:
    """Seconds of the parts of a cell."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        """A block whose seconds belong to a part."""
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.monotonic() - started

    def fields(self) -> dict[str, float]:
        """For the record; readings are part of the search, and are not counted twice."""
        inside = self.seconds.get("measuring", 0.0)
        return {
            f"seconds_{name}": round(seconds - inside * (name == "searching"), 2)
            for name, seconds in self.seconds.items()
        }


def run_cell(setup: Setup, key: Key) -> dict[str, Any]:
    """Prune with one method to one budget, measure and evaluate."""
    gc.collect()  # the last cell kept gigabytes of activations
    timer, options = Timer(), setup.options
    name, resource, share, seed = (key[part] for part in ("method", "resource", "share", "seed"))
    if resource not in setup.costs:
        with timer("fitting"):
            fit_costs(setup, resource)
    model, cost, dense = setup.work, setup.costs[resource], setup.model.state_dict()
    model.load_state_dict(dense)
    limit = share * cost.dense_profiled
    context = AlignedContext(
        model=model,
        graph=setup.graph,
        costs=(cost,),
        targets=[setup.first_target(name, resource, share)],
        settings=CompressSettings(prune_steps=0, finetune_steps=0, min_width_ratio=0.0),
        width_multiple=1,
        stream=token_stream(model, setup.learn, options.calibration_batch, seed, setup.device),
        teacher=None,
        held_out=setup.held_out,
        train=_no_training,
        log=lambda _: None,
        loss=None,
    )

    def measure(widths: Mapping[str, int]) -> MeasuredCost:
        with timer("measuring"):
            joules, _, interval = setup.bench.measure(resource, widths, careful=True)
        return MeasuredCost({resource: joules}, setup.bench.label, interval)

    with timer("calibrating"):
        method = setup.method(name, seed, context)
    with timer("searching"):
        controller = BudgetController(method, context, [limit], measure, band=BAND)
        controller.run(lambda _: None)
    if isinstance(method, TwoSsp):  # the order of dense attention blocks does not depend on the budget
        setup.started[name, seed]._order = max(method._order, setup.started[name, seed]._order, key=len)
    last = controller.checks[-1]
    setup.errors.setdefault((name, resource), {})[share] = last.measured[resource] / last.predicted[resource]
    with timer("evaluating"):
        small = build_slim(model, setup.graph)
        reached = perplexity(small, setup.test, setup.device)
    found: dict[str, Any] = {
        "met": controller.is_met,
        "note": controller.note,
        "of_budget": last.measured[resource] / limit,
        "of_dense": last.measured[resource] / cost.dense_profiled,
        "joules_per_token": last.measured[resource] / setup.bench.workloads[resource].tokens,
        "cost_checks": len(controller.checks),
        "joules": last.measured[resource],
        "relative_ci": last.relative_ci,
        "batches": BATCHES,
        "refit": refit if (refit := getattr(method, "refit", None)) is None else asdict(refit),
        "perplexity": reached,
        "parameters": sum(one.numel() for one in small.parameters()),
        "removed": {
            kind: sum(width == 0 for group, width in last.widths.items() if kind_of(group) == kind)
            for kind in ("attention", "mlp")
        },
        "widths": {group: width for group, width in last.widths.items() if width != setup.graph.full_widths[group]},
        **timer.fields(),
    }
    if options.heal_steps:
        found["is_partial"] = True
        save_pruned(setup.folder, key, model, dense, {**found, "seconds_before": sum(timer.fields().values())})
        setup.pending.append(key)
    return found


def _no_training(*_: Any) -> None:
    raise EccError("methods of this comparison do not train while they prune.")


# ---------------------------------------------------------------- the comparison


def keys_of(options: argparse.Namespace) -> list[Key]:
    """Cells, the most important ones first."""
    main, shares, seeds = options.main, options.shares, options.seeds
    methods = ("one_shot", *BASELINES)
    found: list[tuple[str, str, float, int]] = []
    for resource in ("decode", "prefill"):
        found += [(name, resource, main, 0) for name in methods]
        found += [("one_shot", resource, share, 0) for share in shares]
        found += [(name, resource, share, 0) for share in shares for name in methods]
        found += [(name, resource, main, seed) for seed in seeds if seed for name in methods]
    names = ("method", "resource", "share", "seed")
    return [dict(zip(names, one, strict=True)) for one in dict.fromkeys(found)]


def prepare(options: argparse.Namespace, folder: Path) -> Setup:
    """Model, text, graph and meter."""
    device, length = torch.device(options.device), options.length
    model, graph = load_network(options)
    tokenizer = load_tokenizer(options.weights)
    valid, test = (
        token_sequences(tokenizer, [options.text / f"{name}.txt"], length)[: options.sequences]
        for name in ("valid", "test")
    )
    kept = max(2, len(valid) // 10)
    save_file({"learn": valid[:-kept].contiguous(), "test": test.contiguous()}, folder / TOKENS)
    workloads = [
        TokenWorkload(name="decode", batch=options.decode_batch, length=options.cache),
        TokenWorkload(name="prefill", batch=options.prefill_batch, length=options.cache),
    ]
    work = copy.deepcopy(model)
    return Setup(
        options=options,
        model=model,
        work=work,
        graph=graph,
        bench=Bench(model, graph, find_meter(options.meter), workloads),
        learn=valid[:-kept],
        held_out=HeldOut(valid[-kept:][: options.held_out].to(device), options.batch),
        test=LogLikelihood(test, options.evaluation_batch),
        device=device,
        folder=folder,
    )


def fit_costs(setup: Setup, resource: str) -> None:
    """Measure the networks that the cost of a workload is fitted to, unless an earlier call has."""
    bench = setup.bench
    cost = setup.costs[resource] = bench.fit(resource, setup.dense.get(resource))
    workload = bench.workloads[resource]
    found = {
        "joules_per_token": cost.dense_profiled / workload.tokens,
        "seconds_per_run": bench.measure(resource, {}, careful=True)[1],
        "batch": workload.batch,
        "length": workload.length,
        "savings": {kind: list(zip(*points, strict=True)) for kind, points in cost.savings.items()},
        **bench.runner(resource),
    }
    setup.dense[resource] = found
    print(
        f"{resource} {1e3 * found['joules_per_token']:.4g} mJ/token, a block saves (J) {found['savings']}", flush=True
    )


def heal_pending(setup: Setup, cells: Cells, deadline: Deadline) -> None:
    """Heal the networks of this call in several processes at the same time."""
    options, skipped = setup.options, list(cells.skipped)
    folder, pending, is_cuda = setup.folder, setup.pending, setup.device.type == "cuda"
    vars(setup).clear()  # the memory of the GPU is for the processes
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()
    print(f"{deadline.left:5.0f} s left  healing {len(pending)} networks", flush=True)
    with shared_gpu(is_cuda and shutil.which("nvidia-cuda-mps-control") is not None, folder):
        end = Deadline(deadline.end - ENDING)  # a process that runs then may end
        run_in_processes(cells, pending, heal_cells, [(options, folder)] * options.processes, end)
    cells.skipped[:] = skipped + [one for one in cells.skipped if one not in skipped]
    cells.write()


@dataclass(frozen=True)
class PruningDeadline(Deadline):
    """The time after which networks have to be healed, which is earlier the more there are."""

    options: argparse.Namespace
    pending: list[Key]

    @property
    def left(self) -> float:
        """Seconds that are left to prune."""
        options = self.options
        if not options.heal_steps or options.device == "cpu":
            return super().left
        tokens = options.heal_steps * options.batch * options.length
        each: float = HEAL_CELL + HEAL_TOKEN * tokens
        return super().left - ENDING - HEAL_START - each * (len(self.pending) + 1)


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
    parser.add_argument("--batch", type=int, default=8, help="Sequences per batch of healing, and held out.")
    parser.add_argument(
        "--evaluation-batch", type=int, default=16, help="Sequences per batch of the perplexity on test."
    )
    parser.add_argument("--calibration-batch", type=int, default=4, help="Sequences in each of 16 calibration batches.")
    parser.add_argument("--decode-batch", type=int, default=64)
    parser.add_argument("--prefill-batch", type=int, default=8)
    parser.add_argument("--cache", type=int, default=1024, help="Tokens in the cache, and of a prompt.")
    parser.add_argument("--heal-steps", type=int, default=40)
    parser.add_argument("--processes", type=int, default=4, help="Networks that are healed at the same time.")
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
    with TemporaryDirectory() as folder:
        setup = prepare(options, Path(folder))
        info = setup.bench.meter.describe()
        header |= {"device": info.device, "meter": info.name, "label": info.label}
        header["dense"] = setup.dense = {
            **dense_of([options.out, *options.earlier], cells.header),
            "perplexity": perplexity(setup.model, setup.test, setup.device),
            "parameters": sum(p.numel() for p in setup.model.parameters()),
            "test_tokens": setup.test.sequences.numel(),
            "calibration_tokens": BATCHES * options.calibration_batch * options.length,
            "heal_tokens": options.heal_steps * options.batch * options.length,
        }
        print(f"{deadline.left:5.0f} s left  dense perplexity {setup.dense['perplexity']:.3f}", flush=True)
        run_in_turn(
            cells,
            keys,
            lambda key: run_cell(setup, key),
            PruningDeadline(deadline.end, options, setup.pending),
            estimate=lambda key: SECONDS.get(key["method"], 12.0) if setup.device.type == "cuda" else 0.0,
            show=("perplexity", "of_budget", "cost_checks", *(f"seconds_{part}" for part in PARTS)),
        )
        if setup.pending:
            heal_pending(setup, cells, deadline)


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
