"""Run by each of two processes under torchrun: train the toy, be interrupted, and resume."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from ecc.training.checkpoint import save_state
from ecc.training.distributed import find_distributed
from ecc.training.run_dir import open_run
from ecc.training.signals import Interrupted
from training.toys import Net, fit, toy_task

STEPS = 6


def stop_one(rank: int, step: int, info: Any) -> None:
    """Only the second process gets the signal; both must stop."""
    if rank == 1 and step == 2:
        os.kill(os.getpid(), signal.SIGTERM)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed = find_distributed("cpu")

    def weights(name: str, model: torch.nn.Module) -> None:
        save_state(folder / f"{name}-{distributed.rank}.safetensors", model.state_dict())

    torch.manual_seed(0)
    plain = toy_task(model=Net(norm=False, dropout=0.0))
    weights("joint", fit(STEPS, task=plain, distributed=distributed)[0])
    torch.manual_seed(0)
    plain = toy_task(model=Net(norm=False, dropout=0.0))
    weights("micro", fit(STEPS, task=plain, distributed=distributed, micro_batch=2)[0])

    weights("whole", fit(STEPS, distributed=distributed, log_every=3)[0])
    stopped = 0
    with open_run(folder / "run", {}, writes=distributed.is_main) as run:
        try:
            fit(
                STEPS,
                distributed=distributed,
                run=run,
                log_every=3,
                on_step=lambda *info: stop_one(distributed.rank, *info),
            )
        except Interrupted:
            stopped = 1
    assert distributed.max([stopped, -stopped]) == [1, -1], "both stopped"
    with open_run(folder / "run", {}, writes=distributed.is_main) as run:
        model, outcome = fit(STEPS, distributed=distributed, run=run, log_every=3)
    assert outcome.resumed_at == 3, outcome
    weights("resumed", model)
    save_state(folder / f"context-{distributed.rank}.safetensors", {"rank": distributed.rank, "size": distributed.size})
    distributed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
