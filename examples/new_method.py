"""A method of your own, beside ECC on the same scales: later groups keep more of their channels than earlier ones.

python examples/new_method.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import ecc
from ecc.methods.base import OneShotMethod, magnitudes
from ecc.task import with_batch_size
from ecc.zoo import digits


class Tapered(OneShotMethod):
    """Keeps more channels in later groups than in earlier ones.

    `OneShotMethod` keeps the dense weights and checks the targets, so only `step` is left to write. A measurement may
    lower the targets: then `step` is called again, and prunes the dense network again.
    """

    name = "tapered"

    def step(self) -> None:
        """Find the smallest taper whose widths meet the targets, and mask the other channels."""
        context = self.context
        count = len(context.graph.groups)

        def widths(taper: float) -> list[int]:
            ratios = (1 - taper * (1 - 0.5 * number / count) for number in range(count))
            full = (group.width for group in context.graph.groups)
            return context.round_widths([max(0.0, ratio) * width for ratio, width in zip(ratios, full, strict=True)])

        low, high = 0.0, 2.0
        for _ in range(40):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if context.constraint_violation(widths(middle)) <= 0 else (middle, high)
        context.model.load_state_dict(self.dense_state)
        context.keep_channels_(context.model, magnitudes(context), widths(high))  # keeps the largest magnitudes


def main() -> None:
    task, meter = digits(), ecc.find_meter("platform:jetson-tx2")
    batch = with_batch_size(task.example_input, 256)
    graph = ecc.trace_channels(task.model, batch)
    settings = ecc.CompressSettings(pretrain_steps=80, pretrain_lr=3e-3, prune_steps=60, finetune_steps=30, lr=1e-3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        energy = ecc.fit(ecc.profile(task.model, graph, batch, meter, folder / "digits.profile", samples=60))
        for method in (Tapered(), None):  # None is ECC
            job = ecc.Compression(
                task, ecc.energy.parse_budgets(["50%"]), energy, meter=meter, settings=settings, method=method
            )
            result = job.run(folder / (method.name if method else "ecc"))
            spent, scores = result.summary["budgets"]["energy"], result.summary["scores"]
            print(
                f"{result.summary['method']:8} {spent['result'] / spent['limit']:.1%} of the budget "
                f"({spent['label']}), accuracy {scores['dense']:.1%} -> {scores['after tuning']:.1%}, "
                f"{result.summary['batches']['total']} batches"
            )


if __name__ == "__main__":
    main()
