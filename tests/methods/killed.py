"""Compresses a toy once undisturbed, and once killed with -9 at random moments until it gets through.

A program of its own: it traces the toy once and forks a process for every attempt, which takes milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor, nn

from ecc.errors import BadFile
from ecc.methods import Compression
from ecc.training import load_state
from methods.jobs import noise_batches, wide_job, wide_task
from methods.small import SMALL

PRETRAIN, PRUNE, FINETUNE = 6, 20, 6
PAUSE = 0.004  # time enough to be killed in


def slow_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in noise_batches((3, 4, 4), epoch):
        time.sleep(PAUSE)
        yield batch


def score(model: nn.Module) -> float:
    return float(next(model.parameters()).detach().sum())


def slow_score(model: nn.Module) -> float:
    time.sleep(PAUSE)
    return -sum(float(parameter.detach().square().sum()) for parameter in model.parameters())


def attempt(job: Compression, folder: Path) -> int:
    """Compresses in a process of its own, from wherever the last one was killed; its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        job.run(folder)
        status = 0
    finally:
        os._exit(status)


def place(folder: Path) -> list[object]:
    """Where a run is: the phase, the steps of its method, and the lines of its history."""
    file, lines = folder / "checkpoint.safetensors", folder / "history.jsonl"
    state = load_state(file)["state"] if file.exists() else {"phase": None, "extra": {}}
    controller = state["extra"].get("controller") or {}
    return [state["phase"], controller.get("steps"), lines.read_bytes().count(b"\n") if lines.exists() else 0]


def wait_for_pruning(folder: Path) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        with suppress(BadFile):  # replaced while it was read: torch opens the file a second time
            if place(folder)[0] == "prune":
                return
        time.sleep(0.001)


def main(folder: Path, method: str, seed: int) -> None:
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo for seconds: once, and in no attempt
    task = wide_task(train_batches=slow_batches, evaluate=score, evaluate_held_out=slow_score)
    job = wide_job(
        "45%",
        task=task,
        pretrain_steps=PRETRAIN,
        prune_steps=PRUNE,
        finetune_steps=FINETUNE,
        log_every=2,
        checkpoint_steps=3,
    )
    job.method = SMALL[method]()
    assert os.waitpid(attempt(job, folder / "whole"), 0)[1] == 0
    parts = folder / "parts"
    chance = random.Random(seed)
    killed: list[list[object]] = []
    while True:
        process = attempt(job, parts)
        if not killed:
            wait_for_pruning(parts)
        time.sleep(chance.uniform(0.0, 0.04 * 2 ** len(killed)))
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        killed.append(place(parts))
    print(json.dumps({"killed": killed, "status": status}))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
