"""ResNet-56 on CIFAR-10 at 47 % of the MACs with a long training: ECC, uniform, greedy, Torch-Pruning, in one loop.

    PYTHONPATH=src python3 benchmarks/resnet56.py --data DATA --vendor VENDOR --out results/resnet56.json --mps --processes 18
    PYTHONPATH=src python3 benchmarks/resnet56.py --data DATA --vendor VENDOR --out probe.json --probe --processes 18
    PYTHONPATH=src python3 benchmarks/resnet56.py --data DATA --out choice.json --held-out --epochs 15 --methods ecc,ecc_early

Every cell is a method and a seed. All start from the same weights and train on the same total number of batches with the
same SGD, cosine, crops and flips, distillation from the dense network, and recalibration of batch norms
(`resnet56_training.py`; the methods are in `resnet56_methods.py`). The headline of ECC is its default (`ecc`), chosen
before any run. The test set is scored once, at the end of a cell. With `--held-out` a tenth of the training images is
left out and scored in place of the test images: choices are made there. The published weights have seen all training
images, so the dense network is then trained here, from random weights on the other images.

The JSON is written as each cell finishes, and each cell is printed in one line. Cells that `--out` or `--earlier` has
for the same settings are not repeated. The copy of CIFAR-10 is lossy, so the numbers compare methods with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from machine import commit, machine, write_record
from packed import as_packed, packed_data
from resnet56_methods import DEFAULT_METHODS, ECC, HEADLINE, METHODS, build, match_widths, run_cell
from resnet56_training import Images, Recipe, Trainer, accuracy, padded, teacher_logits

from ecc.energy import counted_cost
from ecc.graph import trace_channels, with_widths
from ecc.methods import EccSolver
from ecc.zoo.image_task import read_weights

PIPES = "CUDA_MPS_PIPE_DIRECTORY"
PROBE_STEPS = 60
TUNING_SEED = 1000  # of the training of the common dense network
SCRATCH_EPOCHS, SCRATCH_LR = 40, 0.1  # of a dense network from random weights
SLOW = ("tp_group_norm", "dense_distilled", "dense", "ecc_late", "ecc", "ecc_widths")  # started first


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a cell depends on besides method and seed."""
    recipe = recipe_of(options)
    keys = ("network", "share", "tune_epochs", "scratch", "held_out", "limit")
    return {**asdict(recipe), **{key: getattr(options, key) for key in keys}}


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe of the training."""
    return Recipe(
        epochs=options.epochs,
        batch=options.batch,
        lr=options.lr,
        weight_decay=options.weight_decay,
        distill=options.distill,
        ema=options.ema,
        precision=options.precision,
        channels_last=not options.contiguous,
    )


def load_data(options: argparse.Namespace) -> dict[str, Images]:
    """Padded training images, and the images that are scored."""
    found = packed_data("cifar10", options.data, options.limit)
    train, held, test = (as_packed(one) for one in (found.train, found.held_out, found.test))
    images, labels = train.images, train.labels
    if not options.held_out:
        images, labels = torch.cat([images, held.images]), torch.cat([labels, held.labels])
    score = held if options.held_out else test
    return {
        "train": Images(padded(images), labels),
        "score": Images(score.images.permute(0, 2, 3, 1).contiguous(), score.labels),
    }


# ---------------------------------------------------------------- processes


def set_up(options: argparse.Namespace) -> torch.device:
    """Settings of a process, and its device."""
    torch.set_num_threads(1)
    torch.backends.cudnn.benchmark = options.autotune
    return torch.device(options.device)


def read_data(folder: Path, device: torch.device) -> dict[str, Images]:
    """The images that `main` wrote, on a device."""
    return {name: Images(*split).to(device) for name, split in torch.load(folder / "data.pt", mmap=True).items()}


def prepare(options: argparse.Namespace, folder: Path) -> None:
    """Write the dense network that all methods start from, and the logits of it as the teacher of each seed."""
    device = set_up(options)
    recipe = recipe_of(options)
    data = read_data(folder, device)
    train = data["train"]
    published = options.data / f"cifar10_{options.network}.safetensors"
    torch.manual_seed(TUNING_SEED)
    if options.start is not None:
        model = build(options.network, torch.load(options.start, weights_only=True))
    else:
        model = build(options.network, {} if options.scratch else read_weights(published))
        tuning = replace(recipe, epochs=options.tune_epochs, lr=SCRATCH_LR if options.scratch else recipe.lr)
        trainer = Trainer(train, tuning, TUNING_SEED)
        model = trainer.prepared(model)
        if options.tune_epochs:
            trainer.train(model, trainer.optimizer(model), trainer.steps, average=True)
            trainer.finish(model)
    print(json.dumps({"dense_network": accuracy(model.to(device), data["score"])}), flush=True)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    torch.save(state, folder / "start.pt")
    model = Trainer(train, recipe, 0).prepared(model)
    for seed in options.seeds:
        torch.save(teacher_logits(model, train, recipe, seed).cpu(), folder / f"logits-{seed}.pt")


def work(options: argparse.Namespace, folder: Path, cells: Any, found: Any) -> None:
    """Run cells until there are none."""
    device = set_up(options)
    on_device = read_data(folder, device)
    model = build(options.network, torch.load(folder / "start.pt", weights_only=True))
    while True:
        try:
            method, seed = cells.get_nowait()
        except queue.Empty:
            return
        try:
            logits = torch.load(folder / f"logits-{seed}.pt", weights_only=True).to(device)
            prepared = Trainer(on_device["train"], recipe_of(options), seed).prepared(model)
            cell = run_cell(
                method, seed, recipe_of(options), options.share, prepared, on_device, logits, options.vendor
            )
        except Exception as error:  # noqa: BLE001 - the other cells go on
            cell = {"method": method, "seed": seed, "error": f"{type(error).__name__}: {error}"}
        found.put({**cell, "device": name_of(device)})


def name_of(device: torch.device) -> str:
    """Name of the GPU, or cpu."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@contextmanager
def sharing(is_on: bool, folder: Path) -> Iterator[None]:
    """Run CUDA MPS if requested, so that kernels of several processes run at the same time."""
    if not is_on:
        yield
        return
    pipes = folder / "mps"
    pipes.mkdir()
    os.environ |= {PIPES: str(pipes), "CUDA_MPS_LOG_DIRECTORY": str(pipes)}
    subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True)
    try:
        yield
    finally:
        with suppress(subprocess.TimeoutExpired):  # a process that was stopped in a kernel may keep it waiting
            subprocess.run(["nvidia-cuda-mps-control"], input="quit", text=True, check=False, timeout=20)


def run_alone(function: Any, *arguments: Any) -> None:
    """Run a function in a process of its own, so that this one has no CUDA context."""
    process = torch.multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__} failed with exit code {process.exitcode}")


def run_cells(
    options: argparse.Namespace, folder: Path, wanted: list[tuple[str, int]], until: float
) -> Iterator[dict[str, Any]]:
    """Cells as they finish, until the time is used up."""
    spawn = torch.multiprocessing.get_context("spawn")
    cells, found = spawn.Queue(), spawn.Queue()
    for one in wanted:
        cells.put(one)
    count = min(options.processes, len(wanted))
    workers = [spawn.Process(target=work, args=(options, folder, cells, found)) for _ in range(count)]
    for process in workers:
        process.start()
    done = 0
    while done < len(wanted) and time.monotonic() < until:
        try:
            yield found.get(timeout=1.0)
            done += 1
        except queue.Empty:  # noqa: PERF203 - nothing finished in this second
            if not any(process.is_alive() for process in workers) and found.empty():
                break
    for process in workers:
        if done < len(wanted):
            process.terminate()
        process.join(10)


# ---------------------------------------------------------------- probe


def timed_steps(kind: str, recipe: Recipe, data: Mapping[str, Images], state: Mapping[str, Any], options: Any) -> float:
    """Milliseconds of a training step with distillation, after a warm-up."""
    train = data["train"]
    trainer = Trainer(train, recipe, 0, torch.zeros(recipe.epochs, len(train.images), 10, device=train.images.device))
    model = build(options.network, state)
    optimizer: Any = None
    if kind != "dense":
        graph = trace_channels(model, torch.randn(2, 3, 32, 32))
        cost = counted_cost(graph, "macs")
    if kind == "slim":
        full = {group.name: group.width for group in graph.groups}
        least = {group.name: 1 if group.frozen is None else group.width for group in graph.groups}
        limit = options.share * cost.dense
        widths = match_widths(full, least, lambda some: float(cost.value(graph.widths(some))), limit)
        model = with_widths(model, graph, {group.name: widths[group.name] for group in graph.prunable})
    model = trainer.prepared(model)
    if kind == "ecc":
        steps = trainer.steps // 2
        optimizer = EccSolver(model, graph, cost, "47%", steps, optimizer=trainer.optimizer(model), warm_up=0.0)
    optimizer = optimizer or trainer.optimizer(model)
    warm = min(20, trainer.steps // 2)
    model.train()
    backward = trainer.backward(model)
    count = min(PROBE_STEPS, trainer.steps - warm)
    begin = 0.0
    for number in range(warm + count):
        if number == warm:
            synchronize(train.images.device)
            begin = time.perf_counter()
        backward(trainer.next_batch())
        optimizer.step()
    synchronize(train.images.device)
    return 1000 * (time.perf_counter() - begin) / count


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def probe(options: argparse.Namespace, folder: Path) -> None:
    """Print the time of a step of each kind, alone, in several formats."""
    device = set_up(options)
    on_device = read_data(folder, device)
    state = read_weights(options.data / f"cifar10_{options.network}.safetensors")
    recipe = recipe_of(options)
    for precision, channels_last in (("bf16", True), ("bf16", False), ("fp32", True), ("fp32", False)):
        one = replace(recipe, precision=precision, channels_last=channels_last)
        try:
            rows = {
                kind: round(timed_steps(kind, one, on_device, state, options), 3) for kind in ("dense", "slim", "ecc")
            }
        except Exception as error:  # noqa: BLE001 - the other formats go on
            rows = {"error": f"{type(error).__name__}: {error}"}  # type: ignore[dict-item]
        text = "channels_last" if channels_last else "contiguous"
        print(json.dumps({"probe": f"{precision} {text}", "ms_per_step": rows}), flush=True)


def probe_together(options: argparse.Namespace, folder: Path, kind: str, found: Any, barrier: Any) -> None:
    """Time of a step while other processes do the same."""
    device = set_up(options)
    on_device = read_data(folder, device)
    state = read_weights(options.data / f"cifar10_{options.network}.safetensors")
    recipe = recipe_of(options)
    barrier.wait()
    found.put(timed_steps(kind, recipe, on_device, state, options))


def predict(options: argparse.Namespace, folder: Path, images: int) -> None:
    """Print the time of a step with all processes, and what it means for the cells."""
    spawn = torch.multiprocessing.get_context("spawn")
    per_step: dict[str, float] = {}
    for kind in ("slim", "dense"):
        found, barrier = spawn.Queue(), spawn.Barrier(options.processes)
        begin = time.monotonic()
        workers = [
            spawn.Process(target=probe_together, args=(options, folder, kind, found, barrier))
            for _ in range(options.processes)
        ]
        for process in workers:
            process.start()
        times = [found.get(timeout=180) for _ in workers]
        for process in workers:
            process.join()
        per_step[kind] = statistics.fmean(times) / options.processes
        print(
            json.dumps(
                {
                    "probe": f"{options.processes} processes, {kind}",
                    "ms_per_step_of_all": round(per_step[kind], 3),
                    "start_and_steps_seconds": round(time.monotonic() - begin, 1),
                }
            ),
            flush=True,
        )
    steps = recipe_of(options).epochs * (images // options.batch)
    shares = {name: dense_share(name, options.epochs) for name in options.methods}
    seconds = sum(
        steps * (share * per_step["dense"] + (1 - share) * per_step["slim"]) / 1000 for share in shares.values()
    )
    cells = len(options.methods) * len(options.seeds)
    print(
        json.dumps(
            {
                "probe": "prediction",
                "cells": cells,
                "epochs": options.epochs,
                "seconds_of_training": round(seconds * len(options.seeds), 1),
                "seconds_per_cell_and_epoch": round(seconds / len(options.methods) / options.epochs, 3),
            }
        ),
        flush=True,
    )


def dense_share(method: str, epochs: int) -> float:
    """Fraction of the steps that run on the dense network."""
    if method.startswith("dense"):
        return 1.0
    if method in ECC:
        variant = ECC[method]
        return variant.prune if variant.prune_epochs is None else min(1.0, variant.prune_epochs / epochs)
    return 1 / 3 if method == "tp_group_norm" else 0.0


# ---------------------------------------------------------------- record


def known_cells(files: list[Path], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Cells of earlier runs with the same settings, without errors."""
    found: dict[tuple[str, int], dict[str, Any]] = {}
    for file in files:
        record = json.loads(file.read_text(encoding="utf-8"))
        if record["settings"] != dict(settings):
            print(f"{file.name} has other settings; its cells are left out", flush=True)
            continue
        found |= {(cell["method"], cell["seed"]): cell for cell in record["cells"] if "error" not in cell}
    return list(found.values())


def summary(cells: list[dict[str, Any]]) -> str:
    """Mean accuracy by method, for the terminal."""
    lines = []
    for method in METHODS:
        scores = [100 * cell["accuracy"] for cell in cells if cell["method"] == method and "accuracy" in cell]
        if scores:
            spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
            lines.append(f"{method:20} {statistics.fmean(scores):6.2f} +- {spread:.2f}  ({len(scores)} seeds)")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10.npz and the published weights")
    parser.add_argument("--out", type=Path, required=True, help="JSON; cells that it has are kept")
    parser.add_argument("--earlier", type=Path, nargs="*", default=[], help="JSON of earlier runs, to continue")
    parser.add_argument("--vendor", type=Path, help="folder that holds the package torch_pruning")
    parser.add_argument("--network", default="resnet56", choices=("resnet56", "resnet20"))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(DEFAULT_METHODS))
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--share", type=float, default=0.47, help="of the MACs of the dense network")
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--weight-decay", type=float, default=Recipe.weight_decay)
    parser.add_argument("--distill", type=float, default=Recipe.distill)
    parser.add_argument("--ema", type=float, default=Recipe.ema, help="decay of averaged weights; 0 for none")
    parser.add_argument("--precision", default=Recipe.precision, choices=("bf16", "fp32"))
    parser.add_argument("--contiguous", action="store_true", help="not in channels-last memory")
    parser.add_argument("--autotune", action=argparse.BooleanOptionalAction, default=True, help="of cuDNN")
    parser.add_argument("--tune-epochs", type=int, help="train the dense network first; all start from it")
    parser.add_argument("--scratch", action="store_true", help="train it from random weights; --held-out implies it")
    parser.add_argument("--start", type=Path, help="start.pt of an earlier run with the same --tune-epochs")
    parser.add_argument("--held-out", action="store_true", help="score on held-out training images, not on test images")
    parser.add_argument("--limit", type=int, help="images of each split, for a short test")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--mps", action="store_true", help="start CUDA MPS")
    parser.add_argument("--seconds", type=float, default=560.0, help="time limit; cells that are not done are left out")
    parser.add_argument("--probe", action="store_true", help="measure the time of a step, and end")
    parser.add_argument("--device", default="cuda" if torch.cuda.device_count() else "cpu")
    options = parser.parse_args(arguments)
    options.scratch = options.scratch or options.held_out
    if options.tune_epochs is None:
        options.tune_epochs = SCRATCH_EPOCHS if options.scratch else 0
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"unknown method {min(unknown)}; choose from {', '.join(METHODS)}")
    return options


def main(arguments: list[str] | None = None) -> None:
    begin = time.monotonic()
    options = parse(arguments)
    settings = settings_of(options)
    data = load_data(options)
    count, scored = (len(data[name].labels) for name in ("train", "score"))
    print(f"{count} training images, {scored} to score, read after {time.monotonic() - begin:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        torch.save({name: tuple(split) for name, split in data.items()}, folder / "data.pt")
        del data
        if options.probe:
            run_alone(probe, options, folder)
            with sharing(options.mps, folder):
                predict(options, folder, count)
            return
        files = [*options.earlier, *([options.out] if options.out.exists() else [])]
        cells = known_cells(files, settings)
        have = {(cell["method"], cell["seed"]) for cell in cells}
        wanted = [(method, seed) for seed in options.seeds for method in options.methods if (method, seed) not in have]
        wanted.sort(key=lambda one: (one[1], SLOW.index(one[0]) if one[0] in SLOW else len(SLOW)))
        record: dict[str, Any] = {
            "what": "top-1 accuracy after pruning to a share of the MACs and training, by method and seed",
            "environment": machine(),
            "headline": HEADLINE,
            "settings": settings,
            "cells": cells,
        }
        with sharing(options.mps, folder):
            run_alone(prepare, options, folder)
            print(f"prepared after {time.monotonic() - begin:.0f} s", flush=True)
            if options.tune_epochs:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                (options.out.parent / "start.pt").write_bytes((folder / "start.pt").read_bytes())
            for cell in run_cells(options, folder, wanted, begin + options.seconds):
                cell |= {
                    "commit": commit(),
                    "command": record["environment"]["command"],
                    "processes": options.processes,
                }
                record["environment"]["device"] = cell["device"]
                cells.append(cell)
                print(json.dumps(cell), flush=True)
                write_record(record, options.out)
        write_record(record, options.out)
        print(summary(cells), flush=True)
        missing = len(wanted) - sum((cell["method"], cell["seed"]) not in have for cell in cells)
        print(f"{len(cells)} cells, {missing} missing, {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
