"""`CostEvaluator`: the cost of a network at given widths, measured while it is being compressed.

An optimizer exploits the errors of its energy model, so the cost that decides about a budget is measured: by the meter
that the model was profiled with, or by the analytic platform. Without a meter it is predicted, and labelled so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from ecc.energy import EnergyModel
from ecc.errors import BadMeasurement
from ecc.graph import ChannelGraph
from ecc.measure import Analytic, Clock, DeviceProfiler, EnergySource
from ecc.measure.profile import Sample
from ecc.measure.remote.client import RemoteProfiler, SessionRestarted
from ecc.measure.samplers import open_profiler
from ecc.settings import deployment, refuse_runner_of_file
from ecc.task import Inputs, TokenWorkload
from ecc.training import DistributedContext

REPEATS = (3, 6)
"""Smallest and largest number of windows. A cost check is measured more carefully than one sample of a profile: as many
windows as a sample of the profile has, and at most three times as many, where that is more."""

TARGET_CI = 0.005
"""Half width of the 95 % confidence interval to reach, relative to the mean."""


@dataclass(frozen=True)
class MeasuredCost:
    """Costs of one inference of the whole batch, and where they come from."""

    amounts: dict[str, float]
    """Energy in J and latency in s; empty if nothing is measured or predicted."""
    label: str
    """measured, estimated, declared, predicted or counted."""
    relative_ci: float | None = None
    """Half width of the 95 % confidence interval of the energy; None if it was computed."""

    def __post_init__(self) -> None:
        if not all(0 < amount < float("inf") for amount in self.amounts.values()):
            raise ValueError(f"costs must be positive and finite: {self.amounts}")


_MAX_RESTARTS = 10

RUNTIMES = ("torch", "onnxruntime", "openvino")
"""Software whose version must be that of the profile."""


def check_meter(meter: EnergySource | None, energy_models: Iterable[EnergyModel], runner: str | None = None) -> None:
    """Check that the meter measures what the models predict.

    Args:
        meter: Meter or platform; None if nothing is measured.
        energy_models: The models.
        runner: Runner that the user chose. A runner in a Python file is executed only if it is this one.

    Raises:
        BadMeasurement: If the meter reads another device, or measures where the model was computed, or the models were
            measured with different runners.
        EccError: If a model was measured with a runner in a Python file that the user did not choose.
    """
    energy_models = list(energy_models)
    if meter is None:
        return
    for model in energy_models:
        found = None if model.origin.settings is None else model.origin.settings.runner
        refuse_runner_of_file(found, runner, f"the {model.resource} model")
    info = meter.describe()
    ways = {model.resource: (model.origin.settings and deployment(model.origin.settings)) for model in energy_models}
    if len(set(ways.values())) > 1:
        said = " and ".join(
            f"the {resource} model with {way or 'an analytic platform'}" for resource, way in ways.items()
        )
        raise BadMeasurement(
            f"energy models must be measured in one way, but {said} were mixed. Profile both in one way."
        )
    for model in energy_models:
        origin = model.origin
        if info.device != origin.meter.device:
            raise BadMeasurement(
                f"the {model.resource} model was fitted on {origin.meter.device}, but the meter reads {info.device}. "
                "Profile and fit this device, or use the meter of the other one."
            )
        if origin.settings is None and not isinstance(meter, Analytic):
            raise BadMeasurement(
                f"the {model.resource} model comes from an analytic platform, but {info.name} measures a device. "
                "Use the platform as the meter."
            )


class WorkloadEvaluator:
    """Measures networks on several workloads of a language model.

    Args:
        evaluators: One for each workload.
    """

    def __init__(self, evaluators: Mapping[TokenWorkload, CostEvaluator]) -> None:
        self._evaluators = dict(evaluators)

    def __call__(self, widths: Mapping[str, int]) -> MeasuredCost:
        """Costs of one network on all workloads; see `CostEvaluator`."""
        amounts: dict[str, float] = {}
        found = {workload: evaluate(widths) for workload, evaluate in self._evaluators.items()}
        for workload, cost in found.items():
            amounts.update({workload.resources[name]: amount for name, amount in cost.amounts.items()})
        intervals = [cost.relative_ci for cost in found.values() if cost.relative_ci is not None]
        label = next(iter(found.values())).label
        return MeasuredCost(amounts, label, max(intervals, default=None))


class CostEvaluator:
    """Measures networks of one graph.

    Args:
        model: The dense network. Its weights do not matter for the cost.
        graph: Its channels.
        example_input: One batch, as large as that of the profile.
        energy_models: By resource. The first one tells how networks are run; without any, nothing is measured.
        meter: Meter or platform; None predicts with the models.
        distributed: With several processes, the first one measures for all.
        device: Where networks are run; by default where the profile ran them.
        clock: Source of time.
        repeats: Smallest and largest number of windows per measurement.
        target_ci: Half width of the 95 % confidence interval to reach; wider ones take shorter windows.
        runner: Runner that the user chose, as for `check_meter`.

    Raises:
        BadMeasurement: If the meter reads another device than that of the profile.
        EccError: If a model was measured with a runner in a Python file that the user did not choose.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        example_input: Inputs,
        energy_models: Mapping[str, EnergyModel],
        meter: EnergySource | None,
        *,
        distributed: DistributedContext | None = None,
        device: torch.device | str | None = None,
        clock: Clock | None = None,
        repeats: tuple[int, int] = REPEATS,
        target_ci: float = TARGET_CI,
        runner: str | None = None,
    ) -> None:
        check_meter(meter, energy_models.values(), runner)
        self._graph, self._energy_models, self._meter = graph, dict(energy_models), meter
        self._distributed = distributed or DistributedContext("cpu")
        self._profiler: DeviceProfiler | RemoteProfiler | None = None
        if not self._energy_models or meter is None or isinstance(meter, Analytic) or not self._distributed.is_main:
            return
        origin = next(iter(self._energy_models.values())).origin
        assert origin.settings is not None  # check_meter
        profiled = origin.settings
        least, most = max(repeats[0], profiled.min_repeats), max(repeats[1], 3 * profiled.min_repeats)
        settings = replace(profiled, min_repeats=least, max_repeats=most, target_relative_ci=target_ci)
        place = device or origin.device_type
        self._profiler = open_profiler(model, graph, example_input, meter, settings, device=place, clock=clock)
        now = self._profiler.versions
        for name in RUNTIMES:
            if name in origin.environment and name in now and origin.environment[name] != now[name]:
                raise BadMeasurement(
                    f"the energy model was measured with {name} {origin.environment[name]}, and this is {name} "
                    f"{now[name]}. Profile and fit again, or use the other version."
                )
        self._profiler.prepare()

    def refer_to(self, dense: MeasuredCost) -> None:
        """Scale networks that are measured in turns with the dense one to its cost in an earlier session."""
        if isinstance(self._profiler, DeviceProfiler) and "latency" in dense.amounts:
            seconds = dense.amounts["latency"]
            self._profiler.refer_to(dense.amounts.get("energy", seconds), seconds)  # a clock counts seconds

    @property
    def label(self) -> str:
        """Where the costs come from."""
        if not self._energy_models:
            return "counted"
        if self._meter is None:
            return "predicted"
        if isinstance(self._meter, Analytic):
            return self._meter.describe().label
        return next(iter(self._energy_models.values())).label

    def __call__(self, widths: Mapping[str, int]) -> MeasuredCost:
        """Cost of one network.

        Raises:
            BadMeasurement: If the measurement must not be trusted.
        """
        if self._distributed.size == 1:
            return self._evaluate(widths)
        # Decisions depend on these numbers, so all processes use those of the first one. 0 and -1 stand for None.
        numbers = torch.tensor([0.0, 0.0, -1.0], dtype=torch.float64)
        if self._distributed.is_main:
            found = self._evaluate(widths)
            ci = -1.0 if found.relative_ci is None else found.relative_ci
            amounts = [found.amounts.get(name, 0.0) for name in ("energy", "latency")]
            numbers = torch.tensor([*amounts, ci], dtype=torch.float64)
        energy, latency, ci = self._distributed.gather(numbers)[0].tolist()
        shared = {name: amount for name, amount in (("energy", energy), ("latency", latency)) if amount}
        return MeasuredCost(shared, self.label, None if ci < 0 else ci)

    def _sample(self, widths: Mapping[str, int]) -> Sample:
        """Measure widths; a board that was lost and came back measures them again."""
        assert self._profiler is not None
        for _ in range(_MAX_RESTARTS):
            try:
                return self._profiler.sample(None, 0, 0, widths)
            except SessionRestarted:  # noqa: PERF203 - short beside a measurement
                continue
        raise BadMeasurement(f"the link to the board was lost {_MAX_RESTARTS} times at one network; run it again.")

    def _evaluate(self, widths: Mapping[str, int]) -> MeasuredCost:
        models = self._energy_models
        if self._profiler is not None:
            kept = {group.name: int(widths.get(group.name, group.width)) for group in self._graph.variable}
            sample = self._sample(kept)
            amounts = {"energy": sample.joules, "latency": sample.seconds}
            if self._meter is not None and not self._meter.describe().has_energy:
                del amounts["energy"]  # the meter is a clock
            return MeasuredCost(amounts, self.label, sample.relative_ci)
        if models and isinstance(self._meter, Analytic):
            cost = self._meter.cost(self._graph, {name: int(width) for name, width in widths.items()})
            return MeasuredCost({"energy": cost.joules, "latency": cost.seconds}, self.label, cost.relative_ci)
        if all(widths.get(group.name, group.width) == group.width for group in self._graph.variable):
            return MeasuredCost({name: model.dense_profiled for name, model in models.items()}, self.label)
        return MeasuredCost({name: model.at(widths) for name, model in models.items()}, self.label)
