r"""ResNet-56 on CIFAR-10 at a share of the MACs with a long training: ECC, uniform, greedy, Torch-Pruning, in one loop.

    PYTHONPATH=src python3 benchmarks/resnet56.py --data DATA --vendor VENDOR --out results/resnet56.json --mps
    PYTHONPATH=src python3 benchmarks/resnet56.py --data DATA --out results/resnet56.json --list
    PYTHONPATH=src python3 benchmarks/resnet56.py --data DATA --out choice.json --held-out --epochs 30 --methods ecc,ecc_early
    PYTHONPATH=src python3 benchmarks/resnet56.py --data DATA --out results/resnet56_energy.json --mps --epochs 30 \
        --profile results/depth/resnet56-m4.profile.gz --multiple 4 --shares 0.5 --methods ecc,uniform,greedy_taylor

Every cell is a share of the MACs, a method and a seed. With `--profile` the share is of the energy that a model of that
profile predicts, without a measured loop; results are measured at the end. All start from the same weights and train on
the same total number of batches with the same SGD, cosine, crops and flips, distillation from the dense network, and
recalibration of batch norms (`resnet56_training.py`; the step is in `resnet56_step.py`, the methods are in `resnet56_methods.py`). The
headline of ECC is its default (`ecc`), chosen before any run. The test set is scored once, at the end of a cell. With
`--held-out` a tenth of the training images is left out and scored in place of the test images: choices are made there.
The published weights have seen all training images, so the dense network is then trained here, from random weights.

`--protocol published` gives every method its published search cost (calibration, sparse training, pruning while training)
and then the same number of epochs of fine-tuning; `equal`, the default, gives all the same total.

Cells, deadline, resuming and the record are those of `cells.py`: run the same command again to continue. The dense network
and the states of unfinished cells are beside the JSON, at most 7 MB for each process.

Plan for one call of 585 s on an H200. Recorded: 4.2 ms of the GPU for a step of batch 256, summed over 6 to 12 processes
with MPS (alone 6.6 ms, and 8.1 ms without compiled norms). An epoch has 195 steps.
    start, data, CUDA contexts       20 s; 20 s more if both ways to run a step are timed (without `--compile yes`)
    logits of the teacher            0.25 s an epoch and seed: 15 s for 60 epochs, 50 s for 200
    a cell of 60 epochs              11,700 steps, 50 s: 10 cells
    a cell of 200 epochs             39,000 steps, 165 s: 3 cells
So 60 epochs need two calls for three seeds of the six methods without `dense`. The public table (2.13x and 2.57x: `ecc`,
`tp_group_norm` and `greedy_taylor` at `--shares 0.469,0.389`, and `dense_distilled`, 200 epochs) has seven cells for each seed,
which need three calls, the first of which also trains the dense network (`--tune-epochs 100`, 130 s). Cells are taken in their
order until the time is over, and continue in the next call: keep the states beside the JSON.
The copy of CIFAR-10 is lossy, so the numbers compare methods with each other.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from cells import (
    Cells,
    Deadline,
    Key,
    Pause,
    Paused,
    Supply,
    add_options,
    device_name,
    name_of,
    print_cells,
    run_in_processes,
    shared_gpu,
)
from packed import as_packed, packed_data
from resnet56_methods import DEFAULT_METHODS, HEADLINE, METHODS, build, run_cell
from resnet56_training import FINISHING, Images, Recipe, Trainer, accuracy, padded, teacher_logits

from ecc.energy import fit
from ecc.errors import EccError
from ecc.export.slim_file import load_slim
from ecc.graph import trace_channels, with_widths
from ecc.measure import Meter, close_meter, find_meter
from ecc.measure.profile import Profile
from ecc.measure.window import measure_model
from ecc.settings import PROFILE_SETTINGS
from ecc.training import load_state, save_state
from ecc.zoo.image_task import read_weights

TUNING_SEED = 1000  # of the training of the common dense network
SCRATCH_EPOCHS, SCRATCH_LR = 40, 0.1  # of a dense network from random weights
PROBE_STEPS = 40
MEASURED_BATCH = 1024
MEASURE_SETTINGS = replace(PROFILE_SETTINGS, min_repeats=3, max_repeats=3)  # several, for a confidence interval
MEASURING = 4.0
"""Seconds of one measurement of a network, kept at the end of a call."""


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """What a cell depends on besides its key; the way in which a step runs is left out."""
    recipe = {key: value for key, value in asdict(recipe_of(options)).items() if key not in ("compile", "cuda_graph")}
    keys = ("network", "tune_epochs", "scratch", "held_out", "limit", "protocol")
    if options.profile is not None:
        recipe |= {"profile": options.profile.name, "multiple": options.multiple}
    return {**recipe, **{key: getattr(options, key) for key in keys}}


def recipe_of(options: argparse.Namespace) -> Recipe:
    """The recipe of the training."""
    return Recipe(
        epochs=options.epochs,
        batch=options.batch,
        lr=options.lr,
        weight_decay=options.weight_decay,
        distill=options.distill,
        precision=options.precision,
        channels_last=not options.contiguous,
        compile=options.compile == "yes",
    )


def keys_of(options: argparse.Namespace) -> list[Key]:
    """Cells in the order in which they are run: seed by seed, the first share and the first methods first."""
    return [
        {"method": method, "share": 1.0 if method.startswith("dense") else share, "seed": seed}
        for seed in options.seeds
        for number, share in enumerate(options.shares)
        for method in options.methods
        if not (number and method.startswith("dense"))
    ]


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


def prepare(options: argparse.Namespace, folder: Path, pause: Pause, first_epochs: Mapping[int, int]) -> None:
    """Write the dense network that all methods start from, and its logits as the teacher of each seed."""
    device = set_up(options)
    data, recipe = read_data(folder, device), recipe_of(options)
    start = start_file(options)
    if not start.exists():
        torch.manual_seed(TUNING_SEED)
        published = options.data / f"cifar10_{options.network}.safetensors"
        model = build(options.network, {} if options.scratch else read_weights(published))
        tuning = replace(recipe, epochs=options.tune_epochs, lr=SCRATCH_LR if options.scratch else recipe.lr)
        trainer = Trainer(data["train"], tuning, TUNING_SEED, pause=pause)
        if (saved := trainer.saved(FINISHING)) is not None:
            model.load_state_dict(saved["slim"])
        model = trainer.prepared(model)
        if options.tune_epochs:
            try:
                trainer.train_to_end(model, None if saved is None else saved["momentum"])
            except Paused:
                return
            trainer.recalibrate(model)
        score = accuracy(model.to(device), data["score"])
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
        save_state(start, {"model": state, "accuracy": score, "epochs": options.tune_epochs})
        pause.file.unlink(missing_ok=True)
    found = load_state(start)
    model = Trainer(data["train"], recipe, 0).prepared(build(options.network, found["model"]))
    (folder / "start.json").write_text(json.dumps({"accuracy": found["accuracy"]}), encoding="utf-8")
    if options.compile == "auto":
        (folder / "compile.json").write_text(json.dumps(step_times(options, data, model)), encoding="utf-8")
    for seed, first in first_epochs.items():
        torch.save(teacher_logits(model, data["train"], recipe, seed, first).cpu(), folder / f"logits-{seed}.pt")


def start_file(options: argparse.Namespace) -> Path:
    """The dense network, beside the record."""
    beside: Path = options.out.parent / f"{options.out.stem}.start.safetensors"
    return Path(options.start) if options.start else beside


def step_times(options: argparse.Namespace, data: Mapping[str, Images], model: torch.nn.Module) -> dict[str, Any]:
    """Milliseconds of a step of the dense network alone, without and with compiled norms, and whether that is faster."""
    times: dict[str, Any] = {}
    for name in ("eager", "compiled"):
        try:
            times[name] = time_steps(data["train"], replace(recipe_of(options), compile=name == "compiled"), model)
        except Exception as error:  # noqa: BLE001, PERF203 - such as a missing compiler: the other one is used
            times[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:200]}"
    return {**times, "compile": times.get("compiled", float("inf")) < 0.97 * times.get("eager", float("inf"))}


def time_steps(train: Images, recipe: Recipe, model: torch.nn.Module) -> float:
    """Milliseconds of a training step, after a warm-up; the model is left as it is."""
    trainer = Trainer(train, recipe, 0, torch.zeros(recipe.epochs, len(train.images), 10, device=train.images.device))
    step = trainer.whole_step(copy.deepcopy(model))[0]
    for number in range(2 * PROBE_STEPS):
        if number == PROBE_STEPS:
            synchronize(trainer.device)
            begin = time.perf_counter()
        trainer.step = number % trainer.steps
        step(trainer.next_batch(), 1e-3)
    synchronize(trainer.device)
    return 1000 * (time.perf_counter() - begin) / PROBE_STEPS


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def work(supply: Supply, options: argparse.Namespace, folder: Path) -> None:
    """Run cells until there are none."""
    device = set_up(options)
    on_device = read_data(folder, device)
    model = build(options.network, load_state(start_file(options))["model"])
    recipe = recipe_of(options)
    if (folder / "compile.json").exists():
        choice = json.loads((folder / "compile.json").read_text(encoding="utf-8"))
        recipe = replace(recipe, compile=choice["compile"])

    energy = None if options.profile is None else fit(Profile.load(options.profile))

    def run(key: Key, pause: Pause) -> dict[str, Any]:
        method, seed = key["method"], key["seed"]
        logits = torch.load(folder / f"logits-{seed}.pt", weights_only=True).to(device)
        prepared = Trainer(on_device["train"], recipe, seed).prepared(model)
        found = run_cell(
            method,
            seed,
            recipe,
            key["share"],
            prepared,
            on_device,
            logits,
            options.vendor,
            energy=energy,
            multiple=options.multiple,
            is_published=options.protocol == "published",
            pause=pause,
            result=folder / f"{pause.file.stem}.safetensors",
        )
        return {**found, "device": device_name(device), "processes": options.processes}

    supply.run(run)


def run_alone(function: Any, *arguments: Any) -> None:
    """Run a function in a process of its own, so that this one has no CUDA context."""
    process = torch.multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    if process.exitcode:
        sys.exit(f"{function.__name__} failed with exit code {process.exitcode}")


def measure_cells(options: argparse.Namespace, cells: Cells, folder: Path, deadline: Deadline) -> None:
    """Measure the networks of this call one after the other, on the GPU that is idle now.

    Networks of earlier calls that were not measured are rebuilt: the dense network with their widths.
    """
    made = {path.stem: path for path in folder.glob("*.safetensors")}
    files = {name_of(cell["key"]): made.get(cells.pause(cell["key"], deadline).file.stem) for cell in cells.cells}
    waiting = [
        cell
        for cell in cells.cells
        if "joules" not in cell and (files[name_of(cell["key"])] or "group_widths" in cell or cell["share"] == 1)
    ]
    if options.meter == "none" or not waiting:
        return
    meter = find_meter(options.meter, device_type=torch.device(options.device).type)
    assert isinstance(meter, Meter), "a platform runs nothing"
    example = torch.randn(MEASURED_BATCH if options.limit is None else 4, 3, 32, 32)
    dense = build(options.network, load_state(start_file(options))["model"] if start_file(options).exists() else {})
    graph = trace_channels(dense, example[:2])
    try:
        for cell in waiting:
            if deadline.left < -MEASURING:
                break
            file, widths = files[name_of(cell["key"])], cell.get("group_widths", {})
            model = with_widths(dense, graph, widths) if file is None else load_slim(dense, file)
            try:
                found = measure_model(
                    model.to(options.device).eval(), example.to(options.device), meter, MEASURE_SETTINGS
                )
            except EccError as error:
                cell["measurement_error"] = str(error)[:300]
                continue
            cell |= {"measured_batch": len(example), "measured_seconds": found.seconds, "label": found.meter.label}
            if file is None:
                cell["measured_commit"] = cells.header["environment"]["commit"]
            if found.meter.has_energy:
                cell |= {"joules": found.joules, "relative_ci": found.relative_ci}
            cells.write()
    finally:
        close_meter(meter)


# ---------------------------------------------------------------- record


def summary(cells: list[dict[str, Any]]) -> str:
    """Mean accuracy by method and share, for the terminal."""
    lines = []
    for method, share in dict.fromkeys((cell["method"], cell["share"]) for cell in cells if "accuracy" in cell):
        scores = [
            100 * cell["accuracy"]
            for cell in cells
            if (cell["method"], cell["share"], "accuracy" in cell) == (method, share, True)
        ]
        spread = statistics.stdev(scores) if len(scores) > 1 else 0.0
        lines.append(f"{method:20} {share:.3f} {statistics.fmean(scores):6.2f} +- {spread:.2f}  ({len(scores)} seeds)")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=560.0)
    parser.add_argument("--data", type=Path, required=True, help="folder with cifar10.npz and the published weights")
    parser.add_argument("--vendor", type=Path, help="folder that holds the package torch_pruning")
    parser.add_argument("--network", default="resnet56", choices=("resnet56", "resnet20"))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(DEFAULT_METHODS))
    parser.add_argument("--seeds", type=lambda text: [int(one) for one in text.split(",")], default=[0, 1, 2])
    parser.add_argument(
        "--shares", type=lambda text: [float(one) for one in text.split(",")], default=[0.47], help="of the dense MACs"
    )
    parser.add_argument("--profile", type=Path, help="shares are of the energy that a model of this profile predicts")
    parser.add_argument("--multiple", type=int, default=1, help="of all widths")
    parser.add_argument("--protocol", choices=("equal", "published"), default="equal", help="what is equal for all")
    parser.add_argument("--epochs", type=int, default=Recipe.epochs)
    parser.add_argument("--batch", type=int, default=Recipe.batch)
    parser.add_argument("--lr", type=float, default=Recipe.lr)
    parser.add_argument("--weight-decay", type=float, default=Recipe.weight_decay)
    parser.add_argument("--distill", type=float, default=Recipe.distill)
    parser.add_argument("--precision", default=Recipe.precision, choices=("bf16", "fp32"))
    parser.add_argument("--contiguous", action="store_true", help="not in channels-last memory")
    parser.add_argument("--compile", default="auto", choices=("auto", "yes", "no"), help="norms; auto measures both")
    parser.add_argument("--autotune", action=argparse.BooleanOptionalAction, default=True, help="of cuDNN")
    parser.add_argument("--tune-epochs", type=int, help="train the dense network first; all start from it")
    parser.add_argument("--scratch", action="store_true", help="train it from random weights; --held-out implies it")
    parser.add_argument("--start", type=Path, help="dense network of an earlier call; by default beside --out")
    parser.add_argument("--held-out", action="store_true", help="score on held-out training images, not on test images")
    parser.add_argument("--limit", type=int, help="images of each split, for a short test")
    parser.add_argument("--processes", type=int, default=6)
    parser.add_argument("--mps", action="store_true", help="start CUDA MPS")
    parser.add_argument("--meter", help="measures the results; by default nvml on a GPU, else none")
    parser.add_argument("--device", default="cuda" if torch.cuda.device_count() else "cpu")
    options = parser.parse_args(arguments)
    options.scratch = options.scratch or options.held_out
    options.meter = options.meter or ("nvml" if options.device.startswith("cuda") else "none")
    if options.compile == "auto" and not options.device.startswith("cuda"):
        options.compile = "no"
    if options.tune_epochs is None:
        options.tune_epochs = SCRATCH_EPOCHS if options.scratch else 0
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"unknown method {min(unknown)}; choose from {', '.join(METHODS)}")
    return options


def main(arguments: list[str] | None = None) -> None:
    begin = time.monotonic()
    options = parse(arguments)
    what = "top-1 accuracy after pruning to a share of the MACs and training, by method, share and seed"
    header = {"what": what, "headline": HEADLINE, "settings": settings_of(options)}
    cells = Cells(options.out, header, options.earlier, options.again, options.only)
    keys = keys_of(options)
    if options.list:
        print_cells(cells, keys)
        return
    wanted = cells.wanted(keys)
    measuring = 0.0 if options.meter == "none" else MEASURING * min(len(wanted), 8)
    deadline = Deadline(begin + options.seconds - measuring)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        torch.save({name: tuple(split) for name, split in load_data(options).items()}, folder / "data.pt")
        steps = sum(len(split) for split in torch.load(folder / "data.pt", mmap=True)["train"][1:]) // options.batch
        first = {
            seed: min(
                first_epoch(cells.pause(key, deadline), steps, is_published=options.protocol == "published")
                for key in wanted
                if key["seed"] == seed
            )
            for seed in dict.fromkeys(key["seed"] for key in wanted)
        }
        tuning = Pause(options.out.parent / f"{options.out.stem}.start.state", deadline, cells.header["settings"])
        with shared_gpu(options.mps, folder):
            if wanted:
                run_alone(prepare, options, folder, tuning, first)
            if (folder / "start.json").exists():
                cells.header["dense_network"] = json.loads((folder / "start.json").read_text(encoding="utf-8"))
                if (folder / "compile.json").exists():
                    found = json.loads((folder / "compile.json").read_text(encoding="utf-8"))
                    cells.header["step_milliseconds"] = found
                print(f"prepared after {time.monotonic() - begin:.0f} s: {cells.header['dense_network']}", flush=True)
                run_in_processes(cells, keys, work, [(options, folder)] * options.processes, deadline)
        measure_cells(options, cells, folder, Deadline(begin + options.seconds))
    cells.write()
    print(summary(cells.cells), flush=True)
    print(f"{len(cells.wanted(keys))} of {len(keys)} cells missing, {time.monotonic() - begin:.0f} s", flush=True)


def first_epoch(pause: Pause, epoch_steps: int, *, is_published: bool = False) -> int:
    """The epoch from which a cell needs the logits of the teacher.

    In the published protocol the search is not counted, so the epochs begin again during the cell, and all are needed.
    """
    saved = None if is_published else pause.load()
    return 0 if saved is None else int(saved["step"]) // max(1, epoch_steps)


if __name__ == "__main__":
    main()
