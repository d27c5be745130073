"""What each of two processes does under torchrun: trains and compresses toys, is stopped by a signal, and resumes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ecc.methods import CostEvaluator, Ecc, MeasuredCost
from ecc.training import Interrupted, find_distributed, save_state
from methods.jobs import noise_batches, wide_job, wide_task
from training.toys import Net, fit, toy_task

SETTINGS: dict[str, Any] = {"pretrain_steps": 2, "prune_steps": 16, "finetune_steps": 3, "log_every": 4}
STOP = 9  # pruning step at which the second process gets a signal
TRAIN_STEPS = 6
TRAININGS: dict[str, dict[str, Any]] = {"joint": {}, "micro": {"micro_batch": 2}}


def add_noise() -> None:
    """Only the first process measures, and with noise."""
    evaluate = CostEvaluator._evaluate

    def noisy(self: CostEvaluator, widths: Mapping[str, int]) -> MeasuredCost:
        return replace(evaluate(self, widths), relative_ci=0.012)

    CostEvaluator._evaluate = noisy  # type: ignore[method-assign]


class Watched(Ecc):
    """Records the decisions of every step."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self.seen = seen

    def step(self) -> None:
        super().step()
        solver = self.solver
        self.seen[str(self._step)] = {
            "widths": torch.tensor(list(solver.widths.values())),
            "duals": torch.tensor([*solver.duals.width.values(), solver.duals.energy], dtype=torch.float64),
            "targets": torch.tensor(solver.limits, dtype=torch.float64),
        }


def stopping(epoch: int, drawn: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in noise_batches((3, 4, 4), epoch):
        drawn[0] += 1
        if drawn[0] == drawn[1]:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed = find_distributed("cpu")
    seen: dict[str, Any] = {}
    add_noise()

    for name, options in TRAININGS.items():
        torch.manual_seed(0)
        task = toy_task(model=Net(norm=False, dropout=0.0))
        model, _ = fit(TRAIN_STEPS, task=task, distributed=distributed, **options)
        save_state(folder / f"{name}-{distributed.rank}.safetensors", model.state_dict())

    # Each process has a folder of its own name, so that one that must not write is found out.
    job = wide_job("50%", **SETTINGS)
    job.method = Watched(seen)
    result = job.run(folder / f"whole-{distributed.rank}", distributed=distributed)
    save_state(
        folder / f"{distributed.rank}.safetensors",
        {"steps": seen, "label": result.summary.label, "slim": result.model.state_dict()},
    )

    # Every process draws the batches of both.
    drawn = [0, 2 * (SETTINGS["pretrain_steps"] + STOP) if distributed.rank else -1]
    task = wide_task(train_batches=lambda epoch: stopping(epoch, drawn))
    stopped = 0
    try:
        wide_job("50%", task=task, **SETTINGS).run(folder / "parts", distributed=distributed)
    except Interrupted:
        stopped = 1
    assert distributed.max([stopped, -stopped]) == [1, -1], "both stopped"
    wide_job("50%", **SETTINGS).run(folder / "parts", distributed=distributed)
    distributed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
