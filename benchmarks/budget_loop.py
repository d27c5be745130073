"""How well the measured loop uses up a budget, on simulated devices.

    PYTHONPATH=src python3 benchmarks/budget_loop.py --out results/budget_loop.json

A run is a device, a network and a budget. The network is that of a recorded profile. The energy model is fitted to the
profile; the device differs from it: all costs are off by a common factor (drift), every reading has noise, and the model's
error depends on the widths in one of two ways. `independent`: each width of each group costs up to some per cent more or
less. `kernels`: blocks of 8 channels have errors, widths that are no multiple of 8 cost more, and odd ones most, as on GPUs.
Channels have random
importance that changes while the network is pruned. `BudgetController` and the scheduled solver are those of the package;
only the training is simulated.

Reported: the number of readings, with that of the dense network, and the energy of the result on the device, without
noise, as a fraction of the budget. `prediction only` is the same without measuring. With `--shared`, the runs of a profile
are a comparison on one device, one after the other, and each knows the readings of those before it.

On some devices the network costs more than the budget with every group at its minimum width, although the model predicts
less. These runs are counted apart (`not_reachable`): they have to end with a message.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import commit, machine, write_record
from numpy.typing import NDArray

from ecc.energy import EnergyModel, fit
from ecc.measure import Profile
from ecc.methods import BudgetController, MeasuredCost
from ecc.methods.ecc.constraints import PruningProblem, ResourceConstraints
from ecc.methods.ecc.planner import WidthPlanner
from ecc.methods.ecc.ranking import ChannelRanking
from ecc.methods.ecc.scheduled import Schedule, ScheduledSolver
from ecc.run_records import CostCheck

ROOT = Path(__file__).resolve().parent.parent
STEPS = 60
DEVICES = ("independent", "kernels")
MIN_WIDTH_RATIO = 0.1


class Device:
    """A simulated device: the model, times errors of single widths, times a drift; readings have noise."""

    def __init__(self, model: EnergyModel, rng: np.random.Generator, error: float, noise: float, kind: str) -> None:
        self._model, self._rng, self._noise = model, rng, noise
        prunable = sum(a < b for a, b in zip(model.min_widths, model.full_widths, strict=True))
        # Errors of many groups average out, so each is scaled for the total to have this standard deviation.
        scale = 2 * error / np.sqrt(max(prunable, 1))
        self._errors = {
            name: scale * (kernel_errors(full, rng) if kind == "kernels" else rng.normal(0, 1, full + 1))
            for name, full in zip(model.groups, model.full_widths, strict=True)
        }
        self._drift = 1 + rng.normal(0, error)
        self.readings = 0

    def energy(self, widths: Mapping[str, int]) -> float:
        """Energy without noise."""
        off = sum(float(self._errors[name][width]) for name, width in widths.items())
        return self._model.at(widths) * self._drift * float(np.exp(off))

    def measure(self, widths: Mapping[str, int]) -> MeasuredCost:
        """One reading."""
        self.readings += 1
        value = self.energy(widths) * (1 + self._rng.normal(0, self._noise))
        return MeasuredCost({"energy": value}, "measured", relative_ci=2 * self._noise)


def kernel_errors(full: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Errors of all widths of a group by blocks of 8 and alignment, with a spread of about 1."""
    widths = np.arange(full + 1)
    block = rng.normal(0, 1, full // 8 + 2)[-(-widths // 8)]
    even, odd = rng.uniform(1 / 3, 4 / 3), rng.uniform(1, 10 / 3)
    return block + np.where(widths % 8 == 0, 0.0, np.where(widths % 2 == 0, even, odd)) + rng.normal(0, 1 / 6, full + 1)


class Grouped:
    """The groups of a model, in place of a graph."""

    def __init__(self, model: EnergyModel) -> None:
        self.full_widths = dict(zip(model.groups, model.full_widths, strict=True))
        self.groups, self.branches = model.groups, ()

    @property
    def structure(self) -> Grouped:
        """What the controller needs of a `StructureSpec`."""
        return self

    def width_steps(self, multiple: int) -> list[int]:
        """Every unit is one channel."""
        return [multiple] * len(self.groups)


class SimulatedMethod:
    """The scheduled solver without a network: importance is a random walk."""

    name = "ecc"

    def __init__(self, context: Context, rng: np.random.Generator) -> None:
        self._context, self._rng, self._step = context, rng, 0
        full = list(context.graph.full_widths.values())
        ranking = ChannelRanking(full)
        constraints = ResourceConstraints([context.model], context.graph, "cpu")
        least = torch.tensor(context.min_widths())
        multiple = context.width_multiple
        problem = PruningProblem(ranking, constraints, least, multiple)
        planner = WidthPlanner(problem, per_remaining_share=True)
        alive = torch.ones(sum(full), dtype=torch.bool)
        self.ranking, self._dense = ranking, constraints.dense[0]
        self.solver = ScheduledSolver(problem, alive, planner=planner)
        scale = np.repeat(rng.normal(0, 1, len(full)), full)
        self._log = rng.normal(0, 1, sum(full)) + scale
        self._targets = list(context.targets)
        self._schedule = Schedule((1.0,), self._ends(context.targets), STEPS)

    def _ends(self, targets: Sequence[float]) -> tuple[float, ...]:
        return tuple(target / self._dense for target in targets)

    @property
    def importance(self) -> torch.Tensor:
        """Present importance."""
        return torch.from_numpy(np.exp(self._log)).float()

    @property
    def progress(self) -> float:
        """Share of the ramp that is done."""
        return min(max(self._step - self._schedule.ramp_start, 0) / self._schedule.ramp_steps, 1.0)

    @property
    def is_done(self) -> bool:
        """Whether all steps were taken."""
        return self._step >= self._schedule.steps

    def step(self) -> None:
        """One step."""
        if self._context.targets != self._targets:
            self._targets = list(self._context.targets)
            ends = self._ends(self._targets)
            if self.progress < 1:
                self._schedule = Schedule((1.0,), ends, STEPS)
            else:  # a short ramp to the corrected target
                start = self._schedule.fractions(self._step)
                self._schedule, self._step = Schedule(start, ends, STEPS - self._step, 0.0, 0.2), 0
                self.solver.fix_plan(None)
        self._step += 1
        self._log += self._rng.normal(0, 0.05, len(self._log))
        if self.solver.is_due(self._schedule, self._step):
            self.solver.update(self.importance, self._schedule, self._step, 1e-3)

    def propose(self, targets: Sequence[float]) -> dict[str, int] | None:
        """As `Ecc`."""
        widths = self.solver.propose(self.importance, self._ends(targets))
        return None if widths is None else dict(zip(self._context.graph.full_widths, widths, strict=True))

    def fix_widths(self, widths: Mapping[str, int]) -> None:
        """As `Ecc`."""
        self.solver.fix_plan([widths[name] for name in self._context.graph.full_widths])


@dataclass
class Context:
    """What the controller needs of a `PruningContext`."""

    model: EnergyModel
    targets: list[float]
    width_multiple: int
    method: SimulatedMethod | None = None

    @property
    def graph(self) -> Grouped:
        """Names and full widths of the groups."""
        return Grouped(self.model)

    @property
    def costs(self) -> tuple[EnergyModel, ...]:
        """The model."""
        return (self.model,)

    def constraint_violation(self, widths: Sequence[int]) -> float:
        """Cost / target - 1."""
        return self.model.at(dict(zip(self.graph.full_widths, widths, strict=True))) / self.targets[0] - 1

    def min_widths(self) -> list[int]:
        """Minimum width of each group."""
        found = []
        for full, least in zip(self.model.full_widths, self.model.min_widths, strict=True):
            smallest = -(-max(least, int(MIN_WIDTH_RATIO * full)) // self.width_multiple) * self.width_multiple
            found.append(full if least == full else min(full, smallest))
        return found

    smallest_widths = min_widths

    def named_widths(self) -> dict[str, int]:
        """Present widths."""
        assert self.method is not None
        widths = self.method.ranking.widths(self.method.solver.alive).tolist()
        return dict(zip(self.graph.full_widths, widths, strict=True))

    def predicted(self, widths: Mapping[str, int]) -> dict[str, float]:
        """By the model."""
        return {"energy": self.model.at(widths)}


def run(
    model: EnergyModel,
    multiple: int,
    fraction: float,
    rng: np.random.Generator,
    device: Device,
    known: list[CostCheck] | None = None,
) -> dict[str, Any]:
    """One run: the energy of the result as a fraction of the budget, with and without measuring.

    Args:
        model: Of the energy.
        multiple: Of the widths.
        fraction: The budget.
        rng: Of importance.
        device: Counts the readings.
        known: Readings of earlier runs, to which those of this run are added; None shares nothing.
    """
    before = device.readings
    full = dict(zip(model.groups, model.full_widths, strict=True))
    limit = fraction * device.energy(full)
    # The drift is known from the measured dense network, as in a real run.
    start = limit * model.dense / device.measure(full).amounts["energy"]
    found: dict[str, Any] = {"budget": fraction}
    context = Context(model, [start], multiple)
    smallest = dict(zip(full, context.min_widths(), strict=True))
    if context.model.at(smallest) > 0.98 * start:
        return {}
    found["smallest"] = device.energy(smallest) / limit
    context.method = SimulatedMethod(context, rng)
    found["prediction_only"] = device.energy(context.method.propose([start]) or full) / limit
    simulated: Any = context
    controller = BudgetController(simulated.method, simulated, [limit], device.measure, known or ())
    controller.run(lambda _: None)
    found["result"] = device.energy(context.named_widths()) / limit
    found["reading"] = controller.checks[-1].measured["energy"] / limit
    found["is_met"] = controller.is_met
    found["note"] = controller.note
    found["readings"] = device.readings - before
    if known is not None:
        known += controller.checks
    return found


def reachable(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs whose budget the minimum widths meet on the device."""
    return [row for row in rows if row["smallest"] <= 1]


def summary(values: list[float]) -> dict[str, float]:
    """How many results are where."""
    found = np.array(values)
    return {
        "runs": len(values),
        "within_98_to_100": float(((found >= 0.98) & (found <= 1.0)).mean()),
        "above_100": float((found > 1.0).mean()),
        "below_98": float((found < 0.98).mean()),
        "median": float(np.median(found)),
        "smallest": float(found.min()),
        "largest": float(found.max()),
    }


def readings_summary(values: list[int]) -> dict[str, float]:
    """How many readings a run takes, with that of the dense network."""
    return {"mean": float(np.mean(values)), "p90": float(np.percentile(values, 90)), "max": float(max(values))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--runs", type=int, default=25, help="Runs for each profile and budget.")
    parser.add_argument("--budgets", type=float, nargs="*", default=[0.8, 0.65, 0.5])
    parser.add_argument("--profiles", nargs="*", default=["e1", "e2", "e3", "e4"])
    parser.add_argument("--error", type=float, default=0.03, help="Standard deviation of the model's error.")
    parser.add_argument("--devices", nargs="*", default=list(DEVICES), choices=DEVICES)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shared", action="store_true", help="Runs of a profile share a device and their readings.")
    parser.add_argument("--noise", type=float, default=0.003, help="Standard deviation of one reading.")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    for name in options.profiles:
        profile = Profile.load(ROOT / "results" / "evidence" / f"{name}.profile.gz")
        model = fit(profile, "physical", allow_drift=True)
        multiple = profile.header.design.width_multiple or 1
        for kind in options.devices:
            common = Device(model, np.random.default_rng(options.seed), options.error, options.noise, kind)
            known: list[CostCheck] = []
            for fraction in options.budgets:
                begin, rng = time.perf_counter(), np.random.default_rng(options.seed)
                rows = []
                for _ in range(options.runs):
                    if options.shared:
                        rows.append(run(model, multiple, fraction, rng, common, known))
                    else:
                        device = Device(model, rng, options.error, options.noise, kind)
                        rows.append(run(model, multiple, fraction, rng, device))
                if not (rows := [row for row in rows if row]):
                    continue
                label = f"{name} {fraction:.0%} {kind}"
                results[label] = rows
                print(
                    label, {k: round(v, 4) for k, v in summary([r["result"] for r in rows]).items()}, "readings",
                    np.mean([row["readings"] for row in rows]), f"{time.perf_counter() - begin:.0f} s", flush=True,
                )  # fmt: skip
    all_rows = [row for rows in results.values() for row in rows]
    every, beyond = reachable(all_rows), [row for row in all_rows if row["smallest"] > 1]
    of_kind = {
        kind: reachable(row for label, rows in results.items() if label.endswith(kind) for row in rows)
        for kind in options.devices
    }
    record = {
        "what": "energy of the result on a simulated device as a fraction of the budget",
        "environment": machine(commit=commit()),
        "error": options.error,
        "noise": options.noise,
        "shared": options.shared,
        "result": summary([row["result"] for row in every]),
        "reading": summary([row["reading"] for row in every]),
        "prediction_only": summary([row["prediction_only"] for row in every]),
        "readings": readings_summary([row["readings"] for row in every]),
        "by_device": {
            kind: {key: summary([row[key] for row in rows]) for key in ("result", "reading")}
            for kind, rows in of_kind.items()
        },
        "not_reachable": {
            "runs": len(beyond),
            "met": sum(row["result"] <= 1 for row in beyond),
            "with_message": sum(bool(row["note"]) for row in beyond if row["result"] > 1),
        },
        "runs": results,
    }
    print({key: record[key] for key in ("result", "reading", "prediction_only", "readings", "not_reachable")})
    write_record(record, options.out)


if __name__ == "__main__":
    main()
