"""A folder with a task file, profiles, energy models, runs, data sets, and files of other kinds."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import torch
from click.testing import CliRunner

from ecc.cli.app import app
from ecc.training import save_state
from methods.jobs import digits_model, digits_profile
from zoo.data import trees

NET = """
import torch
import torch.nn.functional as F
from torch import nn
from ecc import Task


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 1), nn.ReLU(), nn.Conv2d(12, 4, 1),
                         nn.AdaptiveAvgPool2d(1), nn.Flatten())


def batches(epoch):
    for _ in range(3):
        yield torch.randn(4, 3, 6, 6), torch.randint(0, 4, (4,))


def task(**fields):
    values = dict(name="toy", model=net(), example_input=torch.ones(1, 3, 6, 6), loss=F.cross_entropy)
    values |= dict(train_batches=batches, evaluate=lambda model: 0.5)
    return Task(**values | fields)


def build(): return net(), torch.ones(1, 3, 6, 6)
def raises(): raise ValueError("the first line\\nand a second one")
def wrong(): return 3
def misfit(): return nn.Conv2d(3, 8, 3), torch.randn(1, 5, 8, 8)
def no_pairs(): return task(train_batches=lambda epoch: [torch.ones(4, 3, 6, 6)])
def labels(): return task(train_batches=lambda epoch: [(torch.ones(4, 3, 6, 6), torch.full((4,), 9))])
def infinite(): return task(loss=lambda outputs, targets: F.cross_entropy(outputs, targets) * float("inf"))
def unjudged(): return task()
def judge(): return task(evaluate=lambda model: 1 / 0)
def other(): return task(model=nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 4), nn.Flatten()))


def nan():
    model = net()
    model[2].weight.data[0] = float("nan")
    return task(model=model)

"""
"""The file `net.py` of `invocations.TABLE`: a good task, and several bad ones."""


def filled(folder: Path) -> Path:
    """The folder with every file that `invocations.TABLE` names."""
    add_network(folder)
    (folder / "broken.py").write_text("def build(:\n")
    digits_profile().save(folder / "digits.profile")
    digits_model().save(folder / "digits.json")
    digits_model().save(folder / "energy.json")
    text = (folder / "digits.profile").read_text()
    (folder / "torn.profile.gz").write_bytes(gzip.compress(text.encode())[:-20])
    trees.folders(folder / "photos", classes=2, train=2, test=1)
    save_state(folder / "other.safetensors", {"weight": torch.ones(3)})
    _add_recipes(folder)
    _add_runs(folder)
    os.mkfifo(folder / "pipe")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return folder


def add_network(folder: Path) -> None:
    """`net.py`, its profile, energy model and a finished run."""
    (folder / "net.py").write_text(NET)
    profile = f"profile {folder}/net.py:task --batch 256 --meter platform:jetson-tx2 --samples 40"
    run(f"{profile} -o {folder}/net.profile")
    run(f"fit {folder}/net.profile -o {folder}/net.json")
    options = "--meter none --budget 80% --prune-steps 3 --finetune-steps 0 --device cpu --quiet"
    run(f"compress {folder}/net.py:task --energy {folder}/net.json -o {folder}/run {options}")


def _add_recipes(folder: Path) -> None:
    texts = {
        "text": "these are words",
        "slip": 'task = "resnet20"\n[settings]\nprune_step = 3',
        "code": 'task = "net.py:task"',
        "program": 'task = "digits"\nmeter = "command:touch hacked"',
    }
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    os.mkfifo(folder / "pipe.toml")


def _add_runs(folder: Path) -> None:
    """A damaged run, and a folder with another file."""
    shutil.copytree(folder / "run", folder / "damaged")
    (folder / "damaged" / "summary.json").write_text('{"task": "toy", "budgets": 3}')
    (folder / "taken").mkdir()
    (folder / "taken" / "slim.safetensors").write_text("mine")


def run(words: str) -> None:
    result = CliRunner().invoke(app, words.split())
    assert result.exit_code == 0, result.output
