"""E5: a Vision Transformer of the size of ViT-Tiny on Imagenette at measured energy budgets.

    PYTHONPATH=src python3 benchmarks/vit.py --data DATA --out results/vit.json --seconds 560 --mps --processes 8
    PYTHONPATH=src python3 benchmarks/vit.py --data DATA --out results/vit.json --list

192 channels, 12 blocks, 3 heads, patches of 16 pixels of 128: 64 tokens. It is trained here from random weights with strong
augmentation (crops of a tenth of the area and more, flips, brightness, contrast, saturation, mixup or cutmix). Heads, MLP
widths, the residual width and, for `ecc`, whole branches are pruned. All methods have the same energy model, measured
budget, batches, learning rate and distillation. The draws of a batch depend on its epoch only, so all methods of a seed
see the same batches. The test images (the validation split of Imagenette) are scored once, at the end of a cell.

    ecc, ecc_widths   ECC with and without removed branches
    uniform           the same ratio in every group
    isomorphic        the same ratio in every class of groups with the same structure, which are ranked together
    tp_...            Torch-Pruning with the numbers of heads

`--protocol published` gives every method the same number of fine-tuning steps besides its search.

Cells, deadline and the record are those of `cells.py`. The dense network (half precision, 11 MB) and the energy model are
kept beside the JSON. With `--processes` cells run at the same time on one GPU, and the first process, which has trained
the dense network and measured the profile alone, measures for the others while they pause (`evidence_meter.py`). A cell
that has not ended at the deadline is repeated in the next call, so none starts with less time left than the longest took.

Plan for one call of 585 s on an H200, from the steps of `depth.py` (not measured on these images):
    start, images, dense network     100 s, and 20 s in a later call
    profile                           60 s in the first call
    start of the processes            20 s
    a cell                            about 45 s alone: 9 cells in the first call, 12 in a later one, with one process
    eight cells at the same time      at least 16 s of measurements each, for which all pause: 130 s, and their training
The copy of Imagenette is lossy: compare methods with each other.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cells import (
    Cells,
    Deadline,
    Key,
    Pause,
    Supply,
    add_options,
    device_name,
    facts_of,
    print_cells,
    run_in_processes,
    run_in_turn,
    shared_gpu,
)
from depth import ViT, train_dense
from evidence_meter import MeasuringService, SharedMeter, cost_evaluator
from packed import as_packed, packed_data
from torch import Tensor, nn

from ecc.api import compress_task
from ecc.budget import parse_budgets
from ecc.energy import EnergyModel
from ecc.measure import EnergySource
from ecc.profiling import open_meter, profile_and_fit
from ecc.records import to_builtins
from ecc.settings import CompressSettings, make_settings
from ecc.task import Task
from ecc.torch_utils import device_of, eval_mode
from ecc.training import DistributedContext, Interrupted, load_state, save_state
from ecc.zoo.data import ImageData
from ecc.zoo.data.batches import SeededBatches

SIZE, PATCH = 128, 16
DENSE, ENERGY = ".dense.safetensors", ".energy.json"
"""Ends of the names of the files beside the record."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CLASSES = 10
VERIFIED_BATCH = 8
"""Items on which a graph is verified, on the CPU and for every cell; 256 of them take a core ten seconds."""
EXPECTED_SECONDS = 45.0
"""Of a cell on an H200, before one has run."""
METHODS = ("ecc", "uniform", "isomorphic", "tp_taylor", "tp_magnitude", "ecc_widths")
BUDGETS = ("50%", "35%", "65%", "80%", "25%")
FREE = (
    *("out", "earlier", "seconds", "only", "again", "list", "data", "methods", "budgets", "seeds"),
    *("processes", "mps"),
)
"""Options that a cell does not depend on."""
PUBLISHED_SEARCH = {"ecc": 1.0, "ecc_widths": 1.0}
"""Steps of the search relative to those of fine-tuning in the published protocol; 0 for methods that prune at once."""


# ---------------------------------------------------------------- data


@dataclass(frozen=True)
class StrongBatches:
    """Augmented batches of an epoch, with probabilities as targets.

    Args:
        images: (N, 3, SIZE, SIZE) bytes, on the device.
        labels: (N,).
        batch: Images in a batch; the rest of an epoch is left out.
    """

    images: Tensor
    labels: Tensor
    batch: int

    def __call__(self, epoch: int) -> Sequence[tuple[Tensor, Tensor]]:
        """The batches, always the same for an epoch, and each made when it is taken."""
        random = torch.Generator().manual_seed(7919 * epoch + 1)
        count, device = len(self.labels), self.images.device
        order = torch.randperm(count, generator=random)
        draws = torch.rand(count, 9, generator=random)
        mixes = torch.rand(count // self.batch + 1, 4, generator=random).tolist()
        order, draws = order.to(device), draws.to(device)

        def make(number: int) -> tuple[Tensor, Tensor]:
            part = slice(number * self.batch, (number + 1) * self.batch)
            images = augmented(self.images[order[part]], draws[part])
            targets = F.one_hot(self.labels[order[part]], CLASSES).float()
            return mixed(images, targets, mixes[number])

        return SeededBatches(count // self.batch, make)


def augmented(images: Tensor, draws: Tensor) -> Tensor:
    """Crops, flips and changed colours of images in bytes; each row of `draws` has nine numbers in [0, 1)."""
    area, ratio, left, top, flip, bright, contrast, colour, _ = draws.unbind(1)
    aspect = torch.exp(0.575 * (ratio - 0.5))  # 3/4 to 4/3
    area = 0.1 + 0.9 * area
    wide, high = (area * aspect).sqrt().clamp(max=1), (area / aspect).sqrt().clamp(max=1)
    zero = torch.zeros_like(wide)
    across = torch.stack([wide * torch.where(flip < 0.5, -1.0, 1.0), zero, (1 - wide) * (2 * left - 1)], 1)
    down = torch.stack([zero, high, (1 - high) * (2 * top - 1)], 1)
    grid = F.affine_grid(torch.stack([across, down], 1), list(images.shape), align_corners=False)
    x = F.grid_sample(images.float() / 255, grid, padding_mode="reflection", align_corners=False)

    def scale(draw: Tensor) -> Tensor:
        return (0.6 + 0.8 * draw)[:, None, None, None]

    x = x * scale(bright)
    mean = x.mean((1, 2, 3), keepdim=True)
    x = mean + (x - mean) * scale(contrast)
    grey = x.mean(1, keepdim=True)
    return normalised((grey + (x - grey) * scale(colour)).clamp(0, 1))


def mixed(images: Tensor, targets: Tensor, draws: list[float]) -> tuple[Tensor, Tensor]:
    """Mixup or cutmix of a batch with itself in reverse order; half of the batches each."""
    kind, share, left, top = draws
    others, other_targets = images.flip(0), targets.flip(0)
    if kind < 0.5:
        kept = 0.5 + 0.5 * share
        return kept * images + (1 - kept) * others, kept * targets + (1 - kept) * other_targets
    side = int(SIZE * (0.5 * share) ** 0.5)
    x, y = int(left * (SIZE - side)), int(top * (SIZE - side))
    images = images.clone()
    images[:, :, y : y + side, x : x + side] = others[:, :, y : y + side, x : x + side]
    kept = 1 - (side / SIZE) ** 2
    return images, kept * targets + (1 - kept) * other_targets


def normalised(images: Tensor) -> Tensor:
    """Images in [0, 1] as the network takes them."""
    mean, std = colours(images.device)
    return (images - mean) / std


@lru_cache
def colours(device: torch.device) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the colours, copied to the device once: a copy waits for the device."""
    mean, std = (torch.tensor(one, device=device)[:, None, None] for one in (MEAN, STD))
    return mean, std


@torch.no_grad()
def accuracy(images: Tensor, labels: Tensor, model: nn.Module) -> float:
    """Top-1 accuracy on images in bytes."""
    device, right = device_of(model), 0
    with eval_mode(model):
        for some, those in zip(images.split(512), labels.split(512), strict=True):
            outputs = model(normalised(some.to(device).float() / 255))
            right += int((outputs.argmax(1) == those.to(device)).sum())
    return right / len(labels)


def make_task(options: argparse.Namespace, data: ImageData) -> Task:
    """The network with random weights, and the data."""
    train, held, test = (as_packed(one) for one in (data.train, data.held_out, data.test))
    torch.manual_seed(0)
    return Task(
        name="vit_tiny",
        model=ViT(options.width, options.blocks, 3, PATCH, CLASSES, SIZE),
        example_input=normalised(train.images[:VERIFIED_BATCH].float() / 255),
        loss=F.cross_entropy,
        train_batches=StrongBatches(train.images.to(options.device), train.labels.to(options.device), options.batch),
        evaluate=partial(accuracy, test.images, test.labels),
        evaluate_held_out=partial(accuracy, held.images, held.labels),
    )


# ---------------------------------------------------------------- cells


def beside(options: argparse.Namespace, suffix: str) -> Path:
    """A file beside the record."""
    file: Path = options.out.parent / f"{options.out.stem}{suffix}"
    return file


def with_dense(task: Task, options: argparse.Namespace) -> Task:
    """The task with the weights of the trained dense network."""
    found = load_state(beside(options, DENSE))["model"]
    task.model.load_state_dict({name: one.float() for name, one in found.items()})
    return replace(task, model=task.model.cpu().eval())


def prepare(
    options: argparse.Namespace, data: ImageData, deadline: Deadline
) -> tuple[Task, EnergyModel, dict[str, Any]]:
    """The trained task, the energy model, and what the record says about them; both are kept beside the record."""
    task, dense, energy = make_task(options, data), beside(options, DENSE), beside(options, ENERGY)
    if not dense.is_file():
        model = train_dense(task, options.dense_steps, options.dense_lr, options.device)
        state = {name: tensor.half() for name, tensor in model.state_dict().items()}
        save_state(dense, {"model": state, "steps": options.dense_steps})
        print(f"{deadline.left:5.0f} s left  dense network trained", flush=True)
    task = with_dense(task, options)
    assert task.evaluate is not None
    score = task.evaluate(task.model.to(options.device))
    task.model.cpu()
    if not energy.is_file():
        with tempfile.TemporaryDirectory() as name, open_meter(options.meter, torch.device(options.device)) as source:
            assert source is not None
            (fitted,) = profile_and_fit(
                task, ["energy"], source, Path(name), samples=options.samples, batch=options.measured_batch,
                width_multiple=options.width_multiple, distributed=DistributedContext(torch.device(options.device)),
                inference=settings_of(options, "ecc", 0).inference,
            )  # fmt: skip
            fitted.save(energy)
            shutil.copy(Path(name) / "network.profile", beside(options, ".profile"))
    known = EnergyModel.load(energy)
    error = float("nan") if known.errors is None else known.errors.mean
    print(f"{deadline.left:5.0f} s left  dense accuracy {score:.4f}, error of the fit {error:.2%}", flush=True)
    return task, known, {"dense_accuracy": score, "fit": to_builtins(known.errors)}


def settings_of(options: argparse.Namespace, method: str, seed: int) -> CompressSettings:
    """Settings of a compression: equal numbers of batches, or equal fine-tuning besides the search."""
    total, is_gpu = options.steps, options.device == "cuda"
    prune = total // 3
    if options.protocol == "published":
        prune = round(PUBLISHED_SEARCH.get(method, 0.0) * total)
        total += prune
    return make_settings(
        "default",
        {
            "prune_steps": prune,
            "finetune_steps": total - prune,
            "lr": options.lr,
            "kd_temperature": 4.0,
            "precision": "bf16" if is_gpu else "fp32",
            "cuda_graph": is_gpu,
            "checkpoint_every": None,
            "width_multiple": options.width_multiple,
            "depth": method != "ecc_widths",
            "seed": seed,
        },
    )


def run(
    options: argparse.Namespace, task: Task, energy: EnergyModel, meter: str | EnergySource, key: Key
) -> dict[str, Any]:
    """One compression."""
    with tempfile.TemporaryDirectory() as folder:
        result = compress_task(
            task, parse_budgets(key["budget"]), folder=Path(folder) / "run", meter=meter, energy_models=[energy],
            settings=settings_of(options, key["method"], key["seed"]), batch=options.measured_batch,
            method=key["method"].removesuffix("_widths"), device=options.device,
        )  # fmt: skip
    summary = result.summary
    return {
        **facts_of(summary),
        "cost_checks": summary.cost_checks,
        "macs": to_builtins(summary.macs),
        "removed_branches": sum(summary.branches.values()),
        "processes": options.processes,
    }


def work(supply: Supply, options: argparse.Namespace, data: ImageData, meter: SharedMeter) -> None:
    """Run cells in one of several processes until there are none."""
    torch.set_num_threads(1)
    with suppress(Interrupted):
        meter.gate()
        task = meter.guarded(with_dense(make_task(options, data), options))
        energy = EnergyModel.load(beside(options, ENERGY))
        meter.rest()

        def run_one(key: Key, pause: Pause) -> dict[str, Any]:
            del pause  # a cell is not continued later
            try:
                return run(options, task, energy, meter, key)
            finally:
                meter.rest()

        supply.run(run_one)


def run_together(
    options: argparse.Namespace,
    cells: Cells,
    keys: Sequence[Key],
    data: ImageData,
    task: Task,
    energy: EnergyModel,
    deadline: Deadline,
) -> None:
    """Run cells in several processes, and measure for them."""
    with (
        open_meter(options.meter, torch.device(options.device), [energy]) as source,
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
    ):
        assert source is not None
        evaluate = cost_evaluator(task, options.measured_batch, energy, source)
        spawn = torch.multiprocessing.get_context("spawn")
        service = MeasuringService(evaluate, source.describe(), spawn, options.processes)
        with shared_gpu(options.mps, Path(folder)):
            run_in_processes(
                cells,
                keys,
                work,
                [(options, data, meter) for meter in service.meters],
                deadline,
                service=service,
                estimate=lambda: expected(options, cells),
                saving=0.0,
            )
        print(f"{service.readings} measurements, for which processes paused {service.seconds:.0f} s", flush=True)


def expected(options: argparse.Namespace, cells: Cells) -> float:
    """Seconds that a cell takes on a GPU."""
    return longest(cells) if options.device == "cuda" else 0.0


def longest(cells: Cells) -> float:
    """Seconds of the longest cell so far, which a cell of a method that has not run in this call may need."""
    return max((float(one["seconds"]) for one in cells.cells if "error" not in one), default=EXPECTED_SECONDS)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=560.0)
    parser.add_argument("--data", type=Path, required=True, help="folder with imagenette128.npz")
    parser.add_argument("--meter", default="nvml")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--processes", type=int, default=1, help="that run cells at the same time, on one device")
    parser.add_argument("--mps", action="store_true", help="start CUDA MPS, so that their kernels run concurrently")
    parser.add_argument("--protocol", choices=("equal", "published"), default="equal")
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--budgets", type=lambda text: text.split(","), default=list(BUDGETS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3000, help="of pruning and fine-tuning together")
    parser.add_argument("--lr", type=float, default=5e-4)
    parser.add_argument("--dense-steps", type=int, default=7000)
    parser.add_argument("--dense-lr", type=float, default=1e-3)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--measured-batch", type=int, default=256)
    parser.add_argument("--samples", type=int, default=90)
    parser.add_argument("--width-multiple", type=int, default=8)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--limit", type=int, help="images of each split, for a short test")
    options = parser.parse_args(arguments)
    if unknown := set(options.methods) - set(METHODS):
        parser.error(f"unknown method {min(unknown)}; choose from {', '.join(METHODS)}")
    return options


def main() -> None:
    """Run cells until the time is over."""
    options = parse()
    deadline = Deadline.after(options.seconds)
    settings = {name: value for name, value in vars(options).items() if name not in FREE}
    keys: list[Key] = [
        {"method": method, "budget": budget, "seed": seed}
        for seed in range(options.seeds)
        for budget in options.budgets
        for method in options.methods
    ]
    header = {
        "what": "accuracy of a ViT-Tiny on Imagenette (a lossy copy) at measured energy budgets",
        "device": device_name(options.device),
        "settings": settings,
    }
    cells = Cells(options.out, header, options.earlier, options.again, options.only)
    if options.list:
        print_cells(cells, keys)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    data = packed_data("imagenette", options.data, options.limit)
    task, energy, facts = prepare(options, data, deadline)
    cells.header |= facts
    if options.processes > 1:
        run_together(options, cells, keys, data, task, energy, deadline)
        return
    run_in_turn(
        cells,
        keys,
        lambda key: run(options, task, energy, options.meter, key),
        deadline,
        estimate=lambda _: expected(options, cells),
        show=("of_budget", "scores", "removed_branches"),
    )


if __name__ == "__main__":
    main()
