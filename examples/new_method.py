"""A method of your own, compared with ECC at the same measured budget.

python examples/new_method.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import ecc
from ecc.energy import parse_budgets
from ecc.methods import Ecc
from ecc.methods.base import OneShotMethod, magnitudes
from ecc.task import with_batch_size
from ecc.zoo import digits


class Tapered(OneShotMethod):
    """Prunes early layers more than late ones: the fraction of channels kept rises from the first group to the last.

    `OneShotMethod` keeps the dense weights and checks whether the targets are met, so only `step` is left to write. If
    a measurement corrects the targets, `step` is called again.
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
        context.keep_channels_(context.model, magnitudes(context), widths(high))


def main() -> None:
    task, meter = digits(), ecc.find_meter("platform:jetson-tx2")
    batch = with_batch_size(task.example_input, 256)
    graph = ecc.trace_channels(task.model, batch)
    settings = ecc.CompressSettings(pretrain_steps=80, pretrain_lr=3e-3, prune_steps=60, finetune_steps=30, lr=1e-3)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        energy = ecc.fit(ecc.profile(task.model, graph, batch, meter, folder / "digits.profile", samples=60))
        for method in (Tapered(), Ecc()):
            job = ecc.Compression(task, parse_budgets("50%"), energy, meter=meter, settings=settings, method=method)
            summary = job.run(folder / method.name).summary
            energy_row, scores = summary.budgets["energy"], summary.scores
            print(
                f"{method.name:8} {energy_row.result / energy_row.limit:.1%} of the budget ({energy_row.label}), "
                f"accuracy {scores['dense']:.1%} -> {scores['finetuned']:.1%}"
            )


if __name__ == "__main__":
    main()
