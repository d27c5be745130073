"""All methods on small networks at equal numbers of batches and equal estimated energy, on a CPU.

    PYTHONPATH=src python3 benchmarks/small_grid.py --data DATA --out results/small_grid.json
    PYTHONPATH=src python3 benchmarks/small_grid.py --data DATA --out results/small_grid.json --list
    PYTHONPATH=src python3 benchmarks/small_grid.py --data DATA --out results/small_published.json --protocol published
    PYTHONPATH=src python3 benchmarks/small_grid.py --data DATA --out results/small_long.json --tasks resnet8,vit \
        --images 45000 --pretrain 3000 --prune 2000 --finetune 4000

Tasks: the bundled digits, and a ResNet with three blocks and a ViT with four on 16x16 pixels of CIFAR-10 (`ablation.py`). The
dense network of each seed starts from random weights of its own and is the same for all methods. Every method meets the budget
on the same analytic platform, with the same batches, learning rate and distillation; what its search does not use is added to
its fine-tuning. `uniform` at 100 % is the dense network with the same training. The test images are scored once, at the end of
a cell.

With `--protocol published` the batches of a search are not limited, and all results have the same fine-tuning. NetAdapt then
trains every candidate, and energy-aware pruning and HALP train after every pass (docs/baselines.md).

The last call has ten times as many batches. Anyone can repeat this grid without a GPU. It has more seeds and more methods than
those on a GPU, and shows whether a baseline is below uniform pruning, which would point to a fault. It says nothing of large
networks.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
from ablation import batches_of, build, train
from cells import Cells, Deadline, Key, add_options, facts_of, print_cells, run_in_turn

from ecc.constants import PROTOCOLS
from ecc.energy import EnergyModel, fit, parse_budgets
from ecc.graph import trace_channels
from ecc.measure import find_meter, profile
from ecc.methods import Compression
from ecc.methods.registry import find_method
from ecc.settings import make_settings
from ecc.task import Task, with_batch_size

METHODS = (
    "ecc", "ecc_widths", "ecc_early", "greedy_taylor", "halp", "uniform", "greedy", "isomorphic", "tp_taylor", "tp_magnitude",
    "tp_group_norm", "netadapt", "eap", "lcp", "legr", "amc",
)  # fmt: skip
"""`ecc_widths` removes no residual branches, as all others. `ecc_early` prunes in a tenth of the steps."""
EARLY = 10
BUDGETS = {"digits": ("60%", "45%"), "resnet8": ("45%", "30%"), "vit": ("60%", "35%")}
"""By task; widths alone reach 42 % on digits."""
IMAGES = 12_000
"""Training images of the tasks on CIFAR-10."""
EXCLUDED = {("vit", "tp_group_norm"), ("vit", "amc"), ("published", "ecc_early")}
"""Methods that are left out for a task or a protocol. Torch-Pruning's global ranking removes all heads of a block, and then leaves the block as it is. AMC evaluates 400 networks,
which takes longer than all other methods together where layer norms are masked. `ecc_early` has other fine-tuning."""
DENSE_BUDGET = "100%"
OLD_SETTINGS = {"protocol": PROTOCOLS[0], "images": IMAGES}
"""Records with these values do not name them."""


@cache
def dense_task(name: str, seed: int, data: Path | None, images: int, steps: int, lr: float) -> Task:
    """The task with the trained dense network of a seed."""
    task = build(SimpleNamespace(task=name, data=data, limit=images), seed)
    optimizer = torch.optim.Adam(task.model.parameters(), lr=lr)
    train(task.model, task, optimizer, batches_of(task, 1000 * (seed + 1)), steps, lr, cosine=True)
    return replace(task, model=task.model.eval())


@cache
def energy_model(name: str, data: Path | None, meter: str, samples: int, batch: int) -> EnergyModel:
    """The fitted energy of the network; weights do not matter."""
    task = build(SimpleNamespace(task=name, data=data, limit=None), 0)
    example = with_batch_size(task.example_input, batch)
    graph = trace_channels(task.model, example)
    with tempfile.TemporaryDirectory() as folder:
        found = profile(
            task.model, graph, example, find_meter(meter), Path(folder) / "network.profile", samples=samples
        )
    return fit(found)


def run(options: argparse.Namespace, key: Key) -> dict[str, object]:
    """One compression."""
    name, method = key["task"], key["method"]
    task = dense_task(name, key["seed"], options.data, options.images, options.pretrain, options.lr)
    energy = energy_model(name, options.data, options.meter, options.samples, options.batch)
    method, variant = ("ecc", method.removeprefix("ecc_")) if method.startswith("ecc_") else (method, "")
    prune_steps = options.prune // EARLY if variant == "early" else options.prune
    settings = make_settings(
        "default",
        {
            "prune_steps": prune_steps,
            "finetune_steps": options.prune + options.finetune - prune_steps,
            "lr": options.lr,
            "lr_schedule": "cosine",
            "kd_temperature": 4.0,
            "depth": variant != "widths",
            "checkpoint_every": None,
            "seed": key["seed"],
        },
    )
    is_published = options.protocol == "published"
    job = Compression(
        task, parse_budgets(key["budget"]), [energy], meter=find_meter(options.meter), settings=settings,
        method=find_method(method, published=is_published),
    )  # fmt: skip
    job.finetunes_unused = not is_published
    with tempfile.TemporaryDirectory() as folder:
        result = job.run(Path(folder) / "run")
    return facts_of(result.summary)


def keys_of(options: argparse.Namespace) -> list[Key]:
    """All cells, seed by seed; the dense network with the same training comes first."""
    found: list[Key] = []
    for seed in range(options.seeds):
        for task in options.tasks:
            found.append({"task": task, "method": "uniform", "budget": DENSE_BUDGET, "seed": seed})
            found += [
                {"task": task, "method": method, "budget": budget, "seed": seed}
                for budget in options.budgets or BUDGETS[task]
                for method in options.methods
                if (task, method) not in EXCLUDED and (options.protocol, method) not in EXCLUDED
            ]
    return found


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_options(parser, seconds=float("inf"))
    parser.add_argument("--data", type=Path, help="folder with cifar10.npz, for resnet8 and vit")
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=list(BUDGETS))
    parser.add_argument("--methods", type=lambda text: text.split(","), default=list(METHODS))
    parser.add_argument("--budgets", type=lambda text: text.split(","), help="by default those of the task")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--protocol", choices=PROTOCOLS, default=PROTOCOLS[0], help="what is equal for all methods")
    parser.add_argument("--images", type=int, default=IMAGES, help="training images of resnet8 and vit")
    parser.add_argument("--pretrain", type=int, default=500, help="batches of the dense network")
    parser.add_argument("--prune", type=int, default=300)
    parser.add_argument("--finetune", type=int, default=300)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--batch", type=int, default=64, help="images of an inference")
    parser.add_argument("--samples", type=int, default=80, help="of the profile")
    parser.add_argument("--meter", default="platform:jetson-tx2")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    torch.set_num_threads(1)
    free = ["out", "earlier", "seconds", "only", "again", "list", "data", "methods", "tasks", "budgets", "seeds"]
    free += [name for name, value in OLD_SETTINGS.items() if getattr(options, name) == value]
    settings = {name: value for name, value in vars(options).items() if name not in free}
    equal = "batches" if options.protocol == "equal" else "fine-tuning"
    header = {"what": f"all methods on small networks at equal {equal} and estimated energy", "settings": settings}
    cells, keys = Cells(options.out, header, options.earlier, options.again, options.only), keys_of(options)
    if options.list:
        print_cells(cells, keys)
        return
    run_in_turn(
        cells,
        keys,
        lambda key: run(options, key),
        Deadline.after(options.seconds),
        show=("of_budget", "scores", "batches"),
    )


if __name__ == "__main__":
    main()
