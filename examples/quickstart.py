"""The whole job on the bundled digits: profile, fit, compress to half the energy, and what came of it.

    python examples/quickstart.py [FOLDER]

Joules are estimates for a Jetson TX2 from published constants. On a machine with a meter, take `ecc.find_meter()`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import ecc
from ecc.task import with_batch_size
from ecc.zoo import digits


def main(folder: Path) -> None:
    task = digits()
    meter = ecc.find_meter("platform:jetson-tx2")
    batch = with_batch_size(task.example_input, 256)  # what one inference is, in every number below

    graph = ecc.trace_channels(task.model, batch)
    profile = ecc.profile(task.model, graph, batch, meter, folder / "digits.profile", samples=60)
    energy = ecc.fit(profile)
    print(f"the energy model errs by {energy.errors.mean:.1%} on networks it has not seen")

    settings = ecc.CompressSettings(pretrain_steps=100, pretrain_lr=3e-3, prune_steps=100, finetune_steps=50, lr=1e-3)
    job = ecc.Compression(task, ecc.energy.parse_budgets(["50%"]), energy, meter=meter, settings=settings)
    result = job.run(folder / "run", progress=print)

    row, scores = result.summary.budgets["energy"], result.summary.scores
    print(f"energy   {row.dense:.5f} J -> {row.result:.5f} J, budget {row.limit:.5f} J ({row.label})")
    print(f"accuracy {scores['dense']:.1%} -> {scores['finetuned']:.1%}")
    print("widths   " + ", ".join(f"{name} {width}" for name, width in result.widths.items()))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as scratch:
            main(Path(scratch))
