"""Experiments of evidence.py: data, energy model, comparison and variants of ECC."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from evidence_data import DENSE
from packed import as_packed, packed_task
from profile_networks import profiled

from ecc.energy import EnergyModel, fit
from ecc.measure import EnergySource
from ecc.methods import CompressSettings
from ecc.methods.grid import Comparison, GridRun
from ecc.options import flat_values, settings_from
from ecc.task import Task
from ecc.zoo.data import ImageData, Packed
from ecc.zoo.recipe import Recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
DATA = {"mobilenet-imagenette": "imagenette", "alexnet-imagenette": "imagenette", "erfnet-camvid": "camvid",
        "resnet56-cifar10": "cifar10"}  # fmt: skip
MEASURED_BATCH = {"mobilenet-imagenette": 64, "alexnet-imagenette": 128, "erfnet-camvid": 32, "resnet56-cifar10": 1024}
"""Batch size of the measured inference; large, so that the constant part of the energy is small."""
MULTIPLE_OF = {"resnet56-cifar10": 4}
"""Width multiple; 8 for the others, with which ResNet-56 cannot reach half of its energy."""
HELD_OUT_IMAGES = {"imagenette": 512, "cifar10": 2048, "camvid": 24}
"""Number of held-out images on which all methods compare candidates."""
CHECKPOINT = "checkpoint.safetensors"
"""In the folder of a run: weights and state of the optimizer, for a run that is interrupted."""


@dataclass(frozen=True)
class Variant:
    """A method with settings that differ from the recipe, from the same dense networks."""

    settings: dict[str, Any]
    budgets: tuple[str, ...] | None = None
    """Budgets; None for all of the recipe. Those that are not asked for are left out, unless `method` is not ECC."""
    seeds: int | None = None
    """Number of seeds; None for all."""
    freeze: tuple[str, ...] = ()
    """Modules whose output channels are not pruned."""
    method: str = "ecc"


def variant_settings(variant: Variant) -> dict[str, Any]:
    """The settings as they appear in the record."""
    return variant.settings | ({"freeze": ", ".join(variant.freeze)} if variant.freeze else {})


def paper(
    width_lr: float,
    penalty: float,
    budgets: tuple[str, ...] = ("65%", "50%", "35%"),
    freeze: tuple[str, ...] = (),
) -> Variant:
    """Algorithm 1 with the paper's importance and logit distillation; beta and rho are set to converge in few steps."""
    constants = {"paper_width_lr": width_lr, "paper_width_penalty": penalty, "paper_energy_penalty": penalty}
    settings = {"solver": "paper", "lr_schedule": "constant", "importance": "adam_norm", "depth": False, **constants}
    return Variant(settings | {"width_multiple": 1, "kd_temperature": None}, budgets, freeze=freeze)


def constant_lr(budgets: tuple[str, ...] | None, seeds: int) -> Variant:
    """Constant learning rate during pruning, which is the default without a recipe."""
    return Variant({"lr_schedule": "constant"}, budgets, seeds)


UNIFORM_FLOOR = Variant({"uniform_floor": 0.8}, seeds=2)
"""Keeps every group near its width under uniform pruning."""


def early(steps: int, finetune_steps: int, seeds: int = 2) -> Variant:
    """The same number of batches with an early end of pruning."""
    return Variant({"prune_steps": steps, "finetune_steps": finetune_steps}, ("80%",), seeds)


INNER = ("encoder.initial_block.*", "*.layers.*.conv", "*.conv1x3_2")
"""The paper prunes only the inner widths of the ERFNet blocks, with which tight budgets cannot be met."""
VARIANTS = {
    "mobilenet-imagenette": {
        "paper": paper(30.0, 5000.0),
        "constant LR": constant_lr(None, 2),
        "uniform floor": UNIFORM_FLOOR,
        "early": early(160, 480, 3),
    },
    "alexnet-imagenette": {
        "paper": paper(60.0, 30000.0),
        "constant LR": constant_lr(None, 1),
        "uniform floor": UNIFORM_FLOOR,
        "early": early(160, 500),
    },
    "erfnet-camvid": {
        "paper": paper(1.5, 300.0, ("80%", "65%"), INNER),
        "constant LR": constant_lr(("50%", "35%"), 2),
        "uniform floor": UNIFORM_FLOOR,
        "early": early(90, 270),
    },
    "resnet56-cifar10": {
        "paper": paper(3.0, 100.0),
        "constant LR": constant_lr(("80%", "65%", "50%"), 1),
        "uniform floor": UNIFORM_FLOOR,
        "early": early(200, 600),
        "long": Variant({"prune_steps": 1200, "finetune_steps": 1200}, ("50%",), 1),
    },
}


SOLVER_VARIANTS = {
    "scheduled, adam_norm": Variant({"importance": "adam_norm"}),
    "admm, taylor": Variant({"solver": "admm", "importance": "taylor"}),
    "admm, adam_norm": Variant({"solver": "admm", "importance": "adam_norm"}),
}
"""The other solver and criterion, for all experiments; see solvers.py."""


DENSE_TRAINED = {DENSE: Variant({}, ("100%",), method="uniform")}
"""The dense network with the same training: a budget of all of its energy prunes nothing."""

WIDTHS_ONLY = {"widths only": Variant({"depth": False}), **DENSE_TRAINED}
"""For networks with residual branches, which other methods do not remove."""


def variants_of(options: argparse.Namespace) -> dict[str, Variant]:
    """The variants that are run besides the recipe itself."""
    known = {"recipe": VARIANTS[options.name], "solvers": SOLVER_VARIANTS, "depth": WIDTHS_ONLY, "none": DENSE_TRAINED}
    return known[options.variants]


def the_task(
    options: argparse.Namespace, recipe: Recipe, data: ImageData, weights: Mapping[str, torch.Tensor] | None = None
) -> Task:
    """The network and its data; with `weights` of another process, which spares preparing them."""
    height, width = recipe.image_size or (None, None)
    size = None if height is None or width is None else (height, width)
    return packed_task(
        recipe.task, DATA[options.name], options.data, device=options.device, size=size, batch=recipe.batch_size,
        data=data, tell=lambda _: None, state=weights,
    )  # fmt: skip


def for_all(data: ImageData) -> ImageData:
    """The data in shared memory, with the held-out images reduced to those that are used."""
    held, evaluated = as_packed(data.held_out), HELD_OUT_IMAGES[data.name]
    if len(held) > evaluated:
        rows = torch.linspace(0, len(held) - 1, evaluated).long()
        held = Packed(held.images[rows], held.labels[rows])
    splits = [Packed(s.images.share_memory_(), s.labels) for s in (as_packed(data.train), held, as_packed(data.test))]
    return replace(data, train=splits[0], held_out=splits[1], test=splits[2])


def fitted(task: Task, source: EnergySource, options: argparse.Namespace) -> EnergyModel:
    """The energy model of this machine; fitted in the first call."""
    file, batch, step = options.root / "energy.json", MEASURED_BATCH[options.name], MULTIPLE_OF.get(options.name, 8)
    if not file.exists():
        path = options.root / "network.profile"
        found = profiled(task, batch, source, path, options.samples, options.device, step)
        found.save(options.root / "profile.gz")
        fit(found).save(file)
    if (options.root / "profile.gz").exists():  # missing if the model came from a record
        options.out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(options.root / "profile.gz", options.out.with_suffix(".profile.gz"))
    return EnergyModel.load(file)


@dataclass(frozen=True)
class Grid:
    """The comparison, or a variant of ECC."""

    variant: str
    """Empty for the comparison itself."""
    comparison: Comparison
    runs: Path

    def failure(self, cell: GridRun) -> str | None:
        """Why a run cannot be finished: it failed, or the run that it depends on failed; None otherwise."""
        first = self.comparison.prerequisite(cell)
        for one in (cell, first):
            if one is not None and (file := failure_of(one, self.runs)).exists():
                reason = str(json.loads(file.read_text(encoding="utf-8"))["error"])
                return reason if one is cell else f"depends on {one.method}, which failed: {reason}"
        return None

    def finished(self) -> list[GridRun]:
        """Runs that have a result."""
        missing = self.comparison.unfinished(self.runs)
        return [cell for cell in self.comparison.runs if cell not in missing]

    def read(self, cell: GridRun, name: str) -> dict[str, Any] | None:
        """A JSON file in the folder of a run, if it exists."""
        file = cell.folder(self.runs) / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def can_begin(self, cell: GridRun) -> bool:
        """Whether the runs that it depends on are finished."""
        first = self.comparison.prerequisite(cell)
        ready = first is None or first not in self.comparison.unfinished(self.runs)
        return ready and not self.comparison.needs_pretraining(cell.seed, self.runs)


def changed(settings: CompressSettings, changes: dict[str, Any]) -> CompressSettings:
    """The settings with other values of some options."""
    return settings_from(CompressSettings, {**flat_values(settings), **changes})


def the_grids(options: argparse.Namespace, recipe: Recipe, task: Task, meter: EnergySource | None = None) -> list[Grid]:
    """The comparison, followed by the variants; with a meter, runs meet their budgets on it."""
    energy = EnergyModel.load(options.root / "energy.json")
    settings = changed(recipe.settings, json.loads(options.settings))
    methods, budgets = options.methods or recipe.methods or [], options.budgets or recipe.budgets or []
    seeds = options.seeds or recipe.seeds or 1
    grids = {"": (methods, budgets, settings, seeds, tuple(recipe.freeze or ()))}
    for name, variant in variants_of(options).items():
        is_ours, own = variant.method == "ecc", changed(settings, variant.settings)
        some = [one for one in variant.budgets or budgets if one in budgets or not is_ours]
        if some and (not is_ours or "ecc" in methods):
            grids[name] = ([variant.method], some, own, min(seeds, variant.seeds or seeds), variant.freeze)
    return [
        Grid(
            variant,
            Comparison(
                task,
                energy,
                methods=methods,
                budgets=budgets,
                seeds=seeds,
                meter=meter,
                settings=settings,
                device=options.device,
                freeze=freeze,
                protocol=options.protocol,
            ),
            options.root / (f"runs-{variant}" if variant else "runs"),
        )
        for variant, (methods, budgets, settings, seeds, freeze) in grids.items()
    ]


def failure_of(cell: GridRun, runs: Path) -> Path:
    folder = cell.folder(runs)
    return folder.with_name(f"{folder.name}.failed.json")


def train_dense(grids: list[Grid], seed: int) -> None:
    """The dense network of one seed, trained in the comparison's folder and copied for the variants that have the seed."""
    first = grids[0]
    first.comparison.pretrain(seed, first.runs)
    (first.runs / f"seed-{seed}" / "dense" / CHECKPOINT).unlink(missing_ok=True)
    for grid in grids[1:]:
        if seed < grid.comparison.seeds and grid.comparison.needs_pretraining(seed, grid.runs):
            folder = grid.runs / f"seed-{seed}"
            shutil.copytree(first.runs / folder.name / "dense", folder / "copy", dirs_exist_ok=True)
            (folder / "copy").rename(folder / "dense")  # atomic: workers wait for it
