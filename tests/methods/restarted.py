"""What each of two processes does under `torchrun --max-restarts`: compresses a toy undisturbed, then one that dies.

The first process dies of SIGKILL while it prunes, and after the restart the second one while it finetunes. A file marks
that a process has died.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecc.methods import Compression
from ecc.training import DistributedContext, find_distributed, save_state
from methods.jobs import noise_batches, wide_job, wide_task

SETTINGS: dict[str, Any] = {
    "pretrain_steps": 4,
    "prune_steps": 16,
    "finetune_steps": 8,
    "log_every": 2,
    "checkpoint_steps": 3,
}
DEATHS = {0: 4 + 11, 1: 4 + 16 + 5}
"""By rank, the step at which it dies, of all phases together: between two checkpoints."""


def deadly_batches(folder: Path, rank: int, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of every toy; the first time that the place of a death is reached, this process dies there."""
    for index, batch in enumerate(noise_batches((3, 4, 4), epoch)):
        marker = folder / f"rank {rank} died"
        if 4 * epoch + index == 2 * (DEATHS[rank] - 1) + rank and not marker.exists():  # each step takes two batches
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        yield batch


def job(distributed: DistributedContext, **fields: Any) -> Compression:
    task = wide_task(evaluate=lambda model: float(next(model.parameters()).detach().sum()), **fields)
    made = wide_job("45%", task=task, **SETTINGS)
    made.device = distributed.device  # as the command line does it
    return made


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed = find_distributed("cpu")
    job(distributed).run(folder / "whole", distributed=distributed)
    result = job(distributed, train_batches=partial(deadly_batches, folder, distributed.rank)).run(
        folder / "parts", distributed=distributed
    )
    save_state(folder / f"parts-{distributed.rank}.safetensors", {"slim": result.model.state_dict()})
    distributed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
