"""What an experiment of evidence.py is to run: data, energy model, and the comparison with its variants of ECC."""

from __future__ import annotations

import argparse
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from packed import as_packed, packed_task
from profile_networks import profiled

from ecc.energy import EnergyModel, fit
from ecc.measure import EnergySource
from ecc.methods.grid import Cell, Comparison
from ecc.task import Task
from ecc.zoo.data import ImageData, Packed
from ecc.zoo.recipe import Recipe

RECIPES = Path(__file__).resolve().parent.parent / "recipes"
DATA = {"mobilenet-imagenette": "imagenette", "alexnet-imagenette": "imagenette", "erfnet-camvid": "camvid",
        "resnet56-cifar10": "cifar10"}  # fmt: skip
MEASURED_BATCH = {"mobilenet-imagenette": 64, "alexnet-imagenette": 128, "erfnet-camvid": 32, "resnet56-cifar10": 1024}
"""Items of one measured inference: many, so that the floor of the device lies low."""
MULTIPLE_OF = {"resnet56-cifar10": 4}
"""Of which widths are multiples; 8 for the others, with which ResNet-56 cannot go down to half of its joules."""
JUDGED = {"imagenette": 512, "cifar10": 2048, "camvid": 24}
"""Held-out images, evenly spread, by which all methods judge candidates: searches judge hundreds of these."""


@dataclass(frozen=True)
class Form:
    """ECC with other settings than the recipe's, from the same dense networks."""

    settings: dict[str, Any]
    budgets: tuple[str, ...] | None = None
    """Of the recipe's; None for all."""
    seeds: int | None = None
    """Likewise."""
    freeze: tuple[str, ...] = ()
    """Modules whose outputs are kept whole."""


def form_facts(variant: Form) -> dict[str, Any]:
    """For the record."""
    return variant.settings | ({"freeze": ", ".join(variant.freeze)} if variant.freeze else {})


def paper(
    width_lr: float,
    penalty: float,
    budgets: tuple[str, ...] = ("65%", "50%", "35%"),
    freeze: tuple[str, ...] = (),
) -> Form:
    """Algorithm 1 with its own metric, and a teacher by its logits; beta and rho let it arrive within so few steps."""
    walk = {"solver": "admm", "width_lr": width_lr, "penalty": penalty, "falling": False}
    return Form(walk | {"width_multiple": 1, "temperature": None}, budgets, freeze=freeze)


def steady(budgets: tuple[str, ...] | None, seeds: int) -> Form:
    """With the same rate in the whole solve, after which tuning starts anew with it: as without a recipe."""
    return Form({"falling": False}, budgets, seeds)


EVEN = Form({"uniform_floor": 0.8}, seeds=2)
"""No group far below the even cut, which was ahead of all methods that choose where budgets are mild."""


def soon(steps: int, finetune_steps: int, seeds: int = 2) -> Form:
    """As many batches, most of them after the budget is met: as with the even cut, which is trained as it will be."""
    return Form({"steps": steps, "finetune_steps": finetune_steps}, ("80%",), seeds)


INNER = ("encoder.initial_block.*", "*.layers.*.conv", "*.conv1x3_2")
"""Of ERFNet the paper cuts the inner widths of its blocks alone, with which tight budgets cannot be met."""
FORMS = {
    "mobilenet-imagenette": {
        "paper": paper(30.0, 5000.0),
        "steady": steady(None, 2),
        "even": EVEN,
        "soon": soon(160, 480, 3),
    },
    "alexnet-imagenette": {
        "paper": paper(60.0, 30000.0),
        "steady": steady(None, 1),
        "even": EVEN,
        "soon": soon(160, 500),
    },
    "erfnet-camvid": {
        "paper": paper(1.5, 300.0, ("80%", "65%"), INNER),
        "steady": steady(("50%", "35%"), 2),
        "even": EVEN,
        "soon": soon(90, 270),
    },
    "resnet56-cifar10": {
        "paper": paper(3.0, 100.0),
        "steady": steady(("80%", "65%", "50%"), 1),
        "even": EVEN,
        "soon": soon(200, 600),
        "long": Form({"steps": 1200, "finetune_steps": 1200}, ("50%",), 1),
    },
}


def the_task(options: argparse.Namespace, recipe: Recipe, data: ImageData) -> Task:
    height, width = recipe.size or (None, None)
    size = None if height is None or width is None else (height, width)
    return packed_task(
        recipe.task, DATA[options.name], options.data, device=options.device, size=size, batch=recipe.batch_size,
        data=data, tell=lambda _: None,
    )  # fmt: skip


def for_all(data: ImageData) -> ImageData:
    """The same in memory that processes share, with as much held out as is evaluated by."""
    held, evaluated = as_packed(data.held_out), JUDGED[data.name]
    if len(held) > evaluated:
        rows = torch.linspace(0, len(held) - 1, evaluated).long()
        held = Packed(held.images[rows], held.labels[rows])
    splits = [Packed(s.images.share_memory_(), s.labels) for s in (as_packed(data.train), held, as_packed(data.test))]
    return replace(data, train=splits[0], held_out=splits[1], test=splits[2])


def fitted(task: Task, source: EnergySource, options: argparse.Namespace) -> EnergyModel:
    """The energy model of this machine, fitted once."""
    file, batch, step = options.root / "energy.json", MEASURED_BATCH[options.name], MULTIPLE_OF.get(options.name, 8)
    if not file.exists():
        path = options.root / "network.profile"
        found = profiled(task, batch, source, path, options.samples, options.device, step)
        found.save(options.root / "profile.gz")
        fit(found).save(file)
    if (options.root / "profile.gz").exists():  # not where the model was brought along
        options.out.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(options.root / "profile.gz", options.out.with_suffix(".profile.gz"))
    return EnergyModel.load(file)


@dataclass(frozen=True)
class Grid:
    """The comparison, or a variant of ECC beside it."""

    variant: str
    """Empty for the comparison itself."""
    asked: Comparison
    runs: Path

    def failure(self, cell: Cell) -> str | None:
        """Why a cell will never be finished, if so: it failed, or that which it builds on."""
        first = self.asked.built_on(cell)
        for one in (cell, first):
            if one is not None and (file := failure_of(one, self.runs)).exists():
                reason = str(json.loads(file.read_text(encoding="utf-8"))["error"])
                return reason if one is cell else f"builds on {one.method}, which failed: {reason}"
        return None

    def finished(self) -> list[Cell]:
        """Cells that have a result."""
        missing = self.asked.missing(self.runs)
        return [cell for cell in self.asked.cells if cell not in missing]

    def read(self, cell: Cell, name: str) -> dict[str, Any] | None:
        """A file of JSON in the folder of a cell, if it is there."""
        file = cell.folder(self.runs) / name
        return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None

    def can_begin(self, cell: Cell) -> bool:
        """Whether there is what it builds on."""
        first = self.asked.built_on(cell)
        ready = first is None or first not in self.asked.missing(self.runs)
        return ready and not self.asked.needs_dense(cell.seed, self.runs)


def the_grids(options: argparse.Namespace, recipe: Recipe, task: Task) -> list[Grid]:
    """The variants come after the comparison."""
    energy = EnergyModel.load(options.root / "energy.json")
    settings = replace(recipe.settings, **json.loads(options.settings))
    methods, budgets = options.methods or recipe.methods or [], options.budgets or recipe.budgets or []
    seeds = options.seeds or recipe.seeds or 1
    asked = {"": (methods, budgets, settings, seeds, tuple(recipe.freeze or ()))}
    for name, variant in FORMS[options.name].items():
        some = [budget for budget in budgets if variant.budgets is None or budget in variant.budgets]
        if some and "ecc" in methods:
            own = replace(settings, **variant.settings)
            asked[name] = (["ecc"], some, own, min(seeds, variant.seeds or seeds), variant.freeze)
    return [
        Grid(
            variant,
            Comparison(
                task,
                energy,
                methods=methods,
                budgets=budgets,
                seeds=seeds,
                settings=settings,
                device=options.device,
                freeze=freeze,
            ),
            options.root / (f"runs-{variant}" if variant else "runs"),
        )
        for variant, (methods, budgets, settings, seeds, freeze) in asked.items()
    ]


def failure_of(cell: Cell, runs: Path) -> Path:
    folder = cell.folder(runs)
    return folder.with_name(f"{folder.name}.failed.json")


def train_dense(grids: list[Grid], seed: int) -> None:
    """The dense network of one seed, trained in the comparison's folder and copied for the variants that have the seed."""
    first = grids[0]
    first.asked.train_dense(seed, first.runs)
    for grid in grids[1:]:
        if seed < grid.asked.seeds and grid.asked.needs_dense(seed, grid.runs):
            folder = grid.runs / f"seed-{seed}"
            shutil.copytree(first.runs / folder.name / "dense", folder / "copy", dirs_exist_ok=True)
            (folder / "copy").rename(folder / "dense")  # whole, or not there: workers wait for it
