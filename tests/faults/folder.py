"""A folder as a user has it: a file with tasks, profiles, energy models, and some files that are none."""

from __future__ import annotations

import gzip
import os
import shutil
from pathlib import Path

import torch
from click.testing import CliRunner

from ecc.cli.app import app
from ecc.training import save_state
from faults.tasks import NET
from methods.jobs import digits_model, digits_profile
from zoo.data import trees


def filled(folder: Path) -> Path:
    """The folder with everything that `invocations.TABLE` names."""
    net = folder / "net.py"
    net.write_text(NET)
    (folder / "broken.py").write_text("def build(:\n")
    (folder / "binary.py").write_bytes(b"\xff\xfe\x00def")
    (folder / "folder.py").mkdir()
    (folder / "empty").write_text("")
    for name, words in {"net": "--shard 1/2", "net2": "--shard 2/2"}.items():
        run(
            "profile",
            f"{net}:task",
            "--batch",
            "256",
            "--meter",
            "platform:jetson-tx2",
            *words.split(),
            "--samples",
            "40",
            "-o",
            f"{folder / name}.profile",
        )
    run("fit", f"{folder / 'net.profile'}", "-o", f"{folder / 'net.json'}")
    digits_profile().save(folder / "digits.profile")
    digits_model().save(folder / "digits.json")
    digits_model().save(folder / "energy.json")
    text = (folder / "digits.profile").read_text()
    (folder / "header.profile").write_text(text.splitlines(keepends=True)[0])
    (folder / "torn.profile.gz").write_bytes(gzip.compress(text.encode())[:-20])
    _add_data(folder)
    _add_recipes(folder)
    _add_runs(folder)
    os.mkfifo(folder / "pipe")
    (folder / "link").symlink_to("pipe")
    shutil.rmtree(folder / "__pycache__", ignore_errors=True)
    return folder


def _add_data(folder: Path) -> None:
    """Data sets, each with something wrong but the first three, and weights that fit none of the networks."""
    trees.folders(folder / "photos", classes=2, train=2, test=1)
    trees.camvid(folder / "scenes")
    trees.cifar10(folder / "cifar", each=4)
    for name in ("differing", "vacant", "unjudged"):
        shutil.copytree(folder / "photos", folder / name)
    shutil.rmtree(folder / "differing" / "val" / "n00000001")
    shutil.rmtree(folder / "vacant" / "train" / "n00000001")
    (folder / "vacant" / "train" / "n00000001").mkdir()
    shutil.rmtree(folder / "unjudged" / "val")
    for name in ("unlabelled", "garbled", "piped"):
        shutil.copytree(folder / "scenes", folder / name)
    (folder / "unlabelled" / "valannot" / "0001TP_000001.png").unlink()
    (folder / "garbled" / "val" / "0001TP_000001.png").write_bytes(b"no photo")
    (folder / "piped" / "val" / "0001TP_000001.png").unlink()
    os.mkfifo(folder / "piped" / "val" / "0001TP_000001.png")
    trees.cifar10(folder / "short", each=4)
    with (folder / "short" / "cifar-10-batches-bin" / "data_batch_3.bin").open("ab") as file:
        file.write(b"x")
    save_state(folder / "other.safetensors", {"weight": torch.ones(3)})


def _add_recipes(folder: Path) -> None:
    texts = {
        "text": "these are words",
        "idle": "seeds = 1",
        "unknown": 'task = "resnet21"',
        "slip": 'task = "resnet20"\n[settings]\nprune_step = 3',
        "lacking": 'task = "resnet20"\ndata = "none"',
        "code": 'task = "net.py:task"',
        "program": 'task = "digits"\nmeter = "command:touch hacked"',
        "many": f'task = "digits"\nseeds = {10**30}',
    }
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "bytes.toml").write_bytes(b"\xff\xfe")
    (folder / "folder.toml").mkdir()
    os.mkfifo(folder / "pipe.toml")


def _add_runs(folder: Path) -> None:
    """A finished run of `net.py:task`, one that is damaged, one that is only begun, and folders that others use."""
    words = "--meter none --budget 80% --prune-steps 3 --finetune-steps 0 --device cpu --quiet"
    run(
        "compress",
        f"{folder / 'net.py'}:task",
        "--energy",
        f"{folder / 'net.json'}",
        "-o",
        f"{folder / 'run'}",
        *words.split(),
    )
    for name in ("damaged", "begun"):
        shutil.copytree(folder / "run", folder / name)
    (folder / "damaged" / "summary.json").write_text('{"task": "toy", "budgets": 3}')
    (folder / "begun" / "summary.json").unlink()
    (folder / "blank").mkdir()
    (folder / "blank" / "grid.json").write_text("{}")
    (folder / "taken").mkdir()
    (folder / "taken" / "slim.safetensors").write_text("mine")
    (folder / "blocked" / "slim.safetensors").mkdir(parents=True)
    (folder / "blocked" / "slim.safetensors" / "mine").write_text("mine")


def run(*words: str) -> None:
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, result.output
