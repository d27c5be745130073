"""Compresses a toy once in peace, and once killed with -9 at random moments until it gets through.

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
from pathlib import Path

import torch
from torch import Tensor

from ecc.methods import Compression
from methods.jobs import noise_batches, wide_job, wide_task

TRAIN, SOLVE, TUNE = 6, 20, 6


def slow_batches(epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Time enough to be killed in."""
    for batch in noise_batches((3, 4, 4), epoch):
        time.sleep(0.004)
        yield batch


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


def main(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    task = wide_task(train_batches=slow_batches, evaluate=lambda model: float(next(model.parameters()).detach().sum()))
    job = wide_job("45%", task=task, train_steps=TRAIN, steps=SOLVE, tune_steps=TUNE, log_every=2, checkpoint_steps=3)
    assert os.waitpid(attempt(job, folder / "peace"), 0)[1] == 0
    chance = random.Random(seed)
    killed = []
    while True:
        process = attempt(job, folder / "war")
        time.sleep(chance.uniform(0.02, 0.08 + 0.04 * len(killed)))
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        lines = folder / "war" / "history.jsonl"
        last = lines.read_text().splitlines()[-1:] if lines.exists() else []
        try:
            facts = json.loads(last[0]) if last else {}
        except ValueError:  # torn
            facts = {}
        killed.append([facts.get("phase"), facts.get("step")])
    print(json.dumps({"killed": killed, "status": status}))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
