"""Train one network in several processes that prune the same channels.

    torchrun --nproc-per-node 2 examples/multi_gpu.py [FOLDER]      # with GPUs, one each; without, on the CPU
    python examples/multi_gpu.py                                    # one process

Each process draws its own batches. Gradients are averaged, so all processes make the same decisions. Process 0 measures
and writes files.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist

import ecc
from ecc.task import with_batch_size
from ecc.training import find_distributed
from ecc.zoo import digits


def main(folder: Path) -> None:
    distributed = find_distributed("cuda" if torch.cuda.is_available() else "cpu")
    task, meter = digits(), ecc.find_meter("platform:jetson-tx2")
    batch = with_batch_size(task.example_input, 256)
    graph = ecc.trace_channels(task.model, batch)
    # An estimate takes a moment, so each process makes its own. A measured profile is made once, before.
    with tempfile.TemporaryDirectory() as own:
        energy = ecc.fit(ecc.profile(task.model, graph, batch, meter, Path(own) / "digits.profile", samples=60))
    settings = ecc.CompressSettings(pretrain_steps=50, pretrain_lr=3e-3, prune_steps=60, finetune_steps=20, lr=1e-3)
    job = ecc.Compression(
        task, ecc.energy.parse_budgets(["50%"]), energy, meter=meter, settings=settings, device=distributed.device
    )
    result = job.run(folder, distributed=distributed)

    widths = list(result.widths.values())
    everyone = [widths]
    if distributed.size > 1:
        everyone = [[] for _ in range(distributed.size)]
        dist.all_gather_object(everyone, widths)
    if distributed.is_main:
        row, batches = result.summary.budgets["energy"], result.summary.batches
        assert batches is not None
        print(f"{distributed.size} processes, {batches.total} batches in all")
        print(f"energy {row.result / row.limit:.1%} of the budget ({row.label})")
        print(f"widths {widths}, the same in all processes: {all(other == widths for other in everyone)}")
    distributed.close()


if __name__ == "__main__":
    # All processes must name the same folder; alone, any will do.
    given = nullcontext(sys.argv[1]) if len(sys.argv) > 1 else tempfile.TemporaryDirectory()
    with given as chosen:
        main(Path(chosen))
