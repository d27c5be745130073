"""Train the toy once without interruption, and once killed with -9 at random moments until it is finished.

A program of its own: it loads torch once and forks a process for every attempt, which takes milliseconds.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ecc.training.checkpoint import save_state
from ecc.training.run_dir import open_run
from training.toys import fit

STEPS = 40


def attempt(folder: Path) -> int:
    """Train in a forked process, which resumes where the last one was killed; returns its id."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        with open_run(folder, {"steps": STEPS}) as run:
            model, outcome = fit(
                STEPS,
                run=run,
                checkpoint_steps=3,
                log_every=2,
                on_step=lambda step, info: time.sleep(0.003),
            )
            save_state(folder / "weights.safetensors", model.state_dict())
            run.finish({"resumed_at": outcome.resumed_at})
        status = 0
    finally:
        os._exit(status)


def main(folder: Path, seed: int) -> None:
    torch.set_num_threads(1)
    weight = torch.zeros(1, requires_grad=True)  # the first step of an optimizer imports much, so it is taken here;
    weight.grad = torch.zeros(1)  # without a backward pass, after which some builds of torch must not fork
    torch.optim.Adam([weight]).step()
    assert os.waitpid(attempt(folder / "whole"), 0)[1] == 0
    chance = random.Random(seed)
    killed: list[int] = []
    while True:
        process = attempt(folder / "killed")
        time.sleep(chance.uniform(0, 0.02 * (len(killed) + 1)))
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            break
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        lines = folder / "killed" / "history.jsonl"
        killed.append(lines.read_bytes().count(b"\n") if lines.exists() else 0)
    print(json.dumps({"killed": killed, "status": status}))  # noqa: T201 - read by the test


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
