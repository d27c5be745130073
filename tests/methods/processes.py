"""What each of two processes does under torchrun: compresses a toy, is interrupted, and goes on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from ecc.methods.landing import CostCheck, Landing
from torch import Tensor

from ecc.methods.cost_evaluator import CostEvaluator, MeasuredCost
from ecc.training import DistributedContext, Interrupted, find_distributed, save_state
from methods.jobs import noise_batches, wide_job, wide_task

SETTINGS: dict[str, Any] = {"pretrain_steps": 2, "prune_steps": 16, "finetune_steps": 3, "log_every": 4}
STOP = 9  # the step of the solve at which the second process is asked to stop


def only_the_first_knows(distributed: DistributedContext) -> None:
    """Its scales scatter, and those of the others have only the word of the model."""
    weigh = CostEvaluator.__call__

    def scattered(self: CostEvaluator, widths: Mapping[str, int]) -> MeasuredCost:
        found = weigh(self, widths)
        return replace(found, relative_ci=0.012) if distributed.is_main else found

    CostEvaluator.__call__ = scattered  # type: ignore[method-assign]


def watched(seen: dict[str, Any]) -> None:
    """Notes widths, duals and masks after every step."""
    after_step = Landing.after_step

    def noted(self: Landing, step: int) -> CostCheck | None:
        found = after_step(self, step)
        solver = self._solver
        duals = [*solver.duals.width.values(), solver.duals.energy]
        seen[str(step)] = {
            "widths": torch.tensor(list(solver.widths.values())),
            "duals": torch.tensor(duals, dtype=torch.float64),
            "alive": solver._solver.alive.clone(),
            "limits": torch.tensor(solver.limits, dtype=torch.float64),
        }
        return found

    Landing.after_step = noted  # type: ignore[method-assign]


def stopping(epoch: int, asked: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in noise_batches((3, 4, 4), epoch):
        asked[0] += 1
        if asked[0] == asked[1]:
            os.kill(os.getpid(), signal.SIGTERM)
        yield batch


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    distributed = find_distributed("cpu")
    seen: dict[str, Any] = {}
    only_the_first_knows(distributed)
    watched(seen)

    # Each has a folder of its own name, so that one that writes is found out.
    result = wide_job("50%", **SETTINGS).run(folder / f"whole-{distributed.rank}", distributed=distributed)
    label, widths = result.summary["label"], torch.tensor(list(result.widths.values()))
    save_state(
        folder / f"{distributed.rank}.safetensors",
        {"steps": dict(seen), "label": label, "widths": widths, "slim": result.model.state_dict()},
    )

    # The second process draws both processes' batches too: it is asked to stop in the midst of the solve.
    asked = [0, 2 * (SETTINGS["pretrain_steps"] + STOP) if distributed.rank else -1]
    task = wide_task(train_batches=lambda epoch: stopping(epoch, asked))
    stopped = 0
    try:
        wide_job("50%", task=task, **SETTINGS).run(folder / "parted", distributed=distributed)
    except Interrupted:
        stopped = 1
    assert distributed.max([stopped, -stopped]) == [1, -1], "both stopped"
    again = wide_job("50%", **SETTINGS).run(folder / "parted", distributed=distributed)
    save_state(folder / f"parted-{distributed.rank}.safetensors", {"slim": again.model.state_dict()})
    distributed.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
