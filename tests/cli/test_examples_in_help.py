"""Every example in the help of a verb is taken at its word.

It is run in a folder that has the files it names, with some numbers made smaller (the last of two equal options
counts). What needs hardware, or other machines, is parsed, and the reason stands beside it.
"""

from __future__ import annotations

import inspect
import os
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from click.testing import CliRunner

from ecc.cli.app import app

VERBS = typer.main.get_command(app).commands  # type: ignore[attr-defined]

NET = """
import torch
import torch.nn.functional as F
from torch import nn
from ecc import Task


def build():
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 24, 3), nn.ReLU(), nn.Conv2d(24, 24, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24 * 64, 4)
    )
    def batches(epoch):
        draw = torch.Generator().manual_seed(epoch)
        for _ in range(8):
            labels = torch.randint(4, (8,), generator=draw)
            yield torch.randn(8, 3, 12, 12, generator=draw) + labels[:, None, None, None], labels
    images, targets = next(iter(batches(99)))
    score = lambda model: float((model.eval()(images).argmax(1) == targets).double().mean())
    return Task(name="net", model=net, example_input=torch.randn(64, 3, 12, 12), loss=F.cross_entropy,
                train_batches=batches, evaluate=score, evaluate_held_out=score)
"""
RECIPE = 'task = "mobilenet_v1"\nbudgets = ["60%"]\n'
READ_JOULES = '#!/bin/sh\necho "$(date +%s%N) nJ"\n'  # a device that draws one watt

PARSED = {
    "ecc profile mobilenet_v1 --mode graph --precision tf32 -o mobile.profile": "a CUDA graph needs a GPU",
    "torchrun --nproc-per-node 4 -m ecc compress net.py:build --energy e.json --budget 60% -o run": (
        "four processes; tests/methods/test_compress_processes.py starts two"
    ),
    "ecc compress mobilenet_v1 --data imagenet --energy e.json --budget 60% -o run": (
        "a data set; tests/cli/test_data.py makes a tiny one"
    ),
    "ecc compare recipe.toml --data imagenet --energy e.json -o runs": (
        "a data set; tests/cli/test_recipes.py runs a recipe"
    ),
    "ecc report --live run": "it serves until Ctrl-C; tests/cli/test_reporting.py asks the page",
    "ecc compare net.py:build --energy e.json -o /shared/runs --on ray": (
        "a cluster with a shared folder; tests/methods/test_cluster.py starts two nodes"
    ),
}
"""Lines that are only parsed, and why."""

PLATFORM = "--meter platform:jetson-tx2"
SHORT = "--prune-steps 20 --pretrain-steps 10 --finetune-steps 5 --lr 1e-3"
SMALLER = {
    "ecc doctor --meter 'command:read-joules --port 3' --seconds 30": "--seconds 1",
    "ecc profile net.py:build --rounds 2 --target-error 2% -o net.profile": f"{PLATFORM},noise=0.01 --samples 20",
    "ecc profile alexnet --shard 3/8 -o alexnet-3.profile": f"{PLATFORM} --samples 40",
    "ecc fit mobile.profile --figures figures --paper 10000": "--paper 20",
    "ecc compress digits --energy energy.json --budget 50% -o run --pretrain-steps 300": SHORT,
    "ecc compress digits --granularity weight --meter platform:eyeriss --budget 40% -o fine": SHORT,
    "ecc compress net.py:build --energy energy.json --budget 24mJ --budget params=2M -o run": SHORT,
    "ecc compare digits --energy energy.json --quick -o runs": "--methods ecc,uniform --budgets 65%",
    "ecc compare net.py:build --energy e.json --budgets 65%,35% --methods ecc,netadapt -o runs": (
        f"{SHORT} --seeds 1 --budgets 65% --methods ecc,uniform"
    ),
}
"""What is added to a line: a meter that every machine has, or less work of the same kind."""

OF_NET = ("ecc compress net.py:build", "ecc export run --format onnx --int8 static --task net.py:build")
"""Lines whose energy.json and run are of net.py, where those of other lines are of the digits."""


def examples() -> Iterator[str]:
    for verb in VERBS.values():
        _, _, text = inspect.getdoc(verb.callback).partition("Examples:\n")  # type: ignore[union-attr]
        yield from (line.strip() for line in text.partition("\n\n")[0].splitlines())


LINES = list(examples())


def failure_of(words: list[str]) -> str:
    """What the command line says and raises if it does not exit with 0; nothing if it does."""
    result = CliRunner().invoke(app, words)
    return "" if result.exit_code == 0 else f"ecc {' '.join(words)}: {result.output} {result.exception!r}"


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All files that examples name, each as small as it can be."""
    folder = tmp_path_factory.mktemp("stock")
    before = Path.cwd()
    os.chdir(folder)
    try:
        Path("net.py").write_text(NET)
        Path("bin").mkdir()
        Path("bin/read-joules").write_text(READ_JOULES)
        Path("bin/read-joules").chmod(0o755)
        for line in (
            f"profile digits {PLATFORM} --batch 256 --samples 40 -o digits.profile",
            f"profile net.py:build {PLATFORM} --samples 40 -o mobile.profile",
            f"profile net.py:build {PLATFORM} --samples 20 --shard 1/2 -o alexnet-1.profile",
            f"profile net.py:build {PLATFORM} --samples 20 --shard 2/2 -o alexnet-2.profile",
            "fit digits.profile -o energy.json",
            "fit mobile.profile -o e.json",
            f"compress digits --energy energy.json --budget 60% -o digits-run {SHORT}",
            f"compress net.py:build --energy e.json --budget 60% -o net-run {SHORT}",
            "compare digits --energy energy.json --quick --budgets 65% --methods uniform -o runs",
        ):
            assert failure_of(shlex.split(line)) == ""
    finally:
        os.chdir(before)
    return folder


def test_every_verb_has_examples_that_name_it() -> None:
    assert all(any(f"ecc {verb}" in line for line in LINES) for verb in VERBS)
    assert all(line.startswith(("ecc ", "torchrun ")) for line in LINES)


def test_the_tables_above_name_real_examples() -> None:
    assert {*PARSED, *SMALLER} <= set(LINES)
    assert all(any(line.startswith(start) for line in LINES) for start in OF_NET)


@pytest.mark.parametrize("line", PARSED)
def test_an_example_that_cannot_be_run_here_is_parsed(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    _, _, words = line.partition("ecc ")
    verb, *arguments = shlex.split(words)
    assert VERBS[verb].make_context(verb, arguments).params


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in LINES if line not in PARSED])
def test_an_example_runs(line: str, stock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    shutil.copytree(stock, folder)
    of_net = line.startswith(OF_NET)
    if of_net:
        shutil.copy(folder / "e.json", folder / "energy.json")
    if line.startswith("ecc profile"):  # which makes them
        for profile in folder.glob("*.profile"):
            profile.unlink()
    if line.startswith("ecc compare"):
        shutil.rmtree(folder / "runs")
    if not line.startswith("ecc compress"):  # which makes its run
        (folder / ("net-run" if of_net else "digits-run")).rename(folder / "run")
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PATH", str(folder / "bin"), prepend=os.pathsep)
    words = shlex.split(f"{line} {SMALLER.get(line, '')}")[1:]
    typed = [found for word in words for found in (sorted(map(str, Path().glob(word))) if "*" in word else [word])]
    assert failure_of(typed) == ""
