"""`CostEvaluator`: what a network of given widths really costs, asked while it is being compressed.

The optimiser seeks out the errors of its energy model, so what counts is weighed: by the meter that the model was
profiled with, or by the analytic platform. With neither there is only the model's own word, and it is called that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ecc.energy import EnergyModel
from ecc.errors import BadMeasurement
from ecc.graph import ChannelGraph
from ecc.measure import Analytic, Clock, EnergySource, Meter
from ecc.measure.profilers import DeviceProfiler
from ecc.task import Inputs
from ecc.training import DistributedContext

REPEATS = (3, 8)
"""Least and most windows: what decides about a budget is measured more carefully than one sample of a profile."""

TARGET_CI = 0.005
"""Half the 95 % interval to be reached; it makes windows as long as their edges must be sharp."""


@dataclass(frozen=True)
class MeasuredCost:
    """Amounts by resource, and where they come from."""

    amounts: dict[str, float]
    """energy in J and latency in s, of one inference of the whole batch."""
    label: str
    """Measured, estimated, declared, or predicted: by the energy model itself."""
    relative_ci: float | None = None
    """Half the 95 % interval of the energy; None where it was computed."""

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> MeasuredCost:
        """As a checkpoint has it, which may have been changed.

        Raises:
            ValueError: If an amount is none; other errors that are no `EccError` if nothing fits.
        """
        amounts, ci = {str(name): float(amount) for name, amount in state["amounts"].items()}, state["relative_ci"]
        if not all(0 < amount < float("inf") for amount in amounts.values()):
            raise ValueError(f"amounts {amounts}")
        return cls(amounts, str(state["label"]), None if ci is None else float(ci))


_LABEL_BYTES = 64  # of a label on its way to the other processes


def check_source(source: EnergySource | None, energies: Iterable[EnergyModel]) -> None:
    """Refuses scales that cannot weigh what the models predict.

    Raises:
        BadMeasurement: If the source is another device than that of a model, or measures where one was computed.
    """
    if source is None:
        return
    info = source.describe()
    for energy in energies:
        origin = energy.origin
        if info.device != origin.meter.device:
            raise BadMeasurement(
                f"the {energy.resource} model was fitted on {origin.meter.device}, and the meter reads {info.device}. "
                "Profile and fit this device, or choose the meter of that one."
            )
        if origin.settings is None and not isinstance(source, Analytic):
            raise BadMeasurement(
                f"the {energy.resource} model is computed, and {info.name} measures. Give its platform as the meter."
            )


class CostEvaluator:
    """Weighs networks of one graph.

    Args:
        model: The dense network; weights do not matter for what it costs.
        graph: Its channels.
        example_input: One batch, as large as that of the profile.
        energies: Energy models of the graph, by resource; the first one's origin says how networks are run.
        source: The meter or platform; None trusts the models.
        device: Where networks are run; by default where the profile ran them.
        clock: The time.
        repeats: Least and most windows of one weighing.
        target_ci: Half the 95 % interval of the joules to be reached; wider ones take shorter windows.

    Raises:
        BadMeasurement: If the source is another device than that of the profile.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: ChannelGraph,
        example_input: Inputs,
        energies: Mapping[str, EnergyModel],
        source: EnergySource | None,
        device: torch.device | str | None = None,
        clock: Clock | None = None,
        repeats: tuple[int, int] = REPEATS,
        target_ci: float = TARGET_CI,
    ) -> None:
        self._repeats, self._target_ci = repeats, target_ci
        self._graph, self._energies, self._source = graph, dict(energies), source
        self._bench: DeviceProfiler | None = None
        check_source(source, self._energies.values())
        origin = next(iter(self._energies.values())).origin
        if source is not None and not isinstance(source, Analytic):
            self._bench = self._made_ready(model, example_input, source, device or origin.device_type, clock)

    def _made_ready(
        self,
        model: nn.Module,
        example_input: Inputs,
        meter: Meter,
        device: torch.device | str | None,
        clock: Clock | None,
    ) -> DeviceProfiler:
        settings = next(iter(self._energies.values())).origin.settings
        assert settings is not None  # check_source
        least, most = self._repeats
        careful = replace(settings, min_repeats=least, max_repeats=most, target_relative_ci=self._target_ci)
        bench = DeviceProfiler(model, self._graph, example_input, meter, careful, device, clock or Clock())
        bench.ready(None)
        return bench

    def __call__(self, widths: Mapping[str, int]) -> MeasuredCost:
        """Weighs one network.

        Args:
            widths: By group; groups not named keep their full width.

        Raises:
            BadMeasurement: If the measurement must not be trusted.
        """
        if self._bench is not None:
            kept = {group.name: int(widths.get(group.name, group.width)) for group in self._graph.prunable}
            row = self._bench.sample(None, 0, 0, kept)
            label = next(iter(self._energies.values())).label
            return MeasuredCost({"energy": row.joules, "latency": row.seconds}, label, row.relative_ci)
        if isinstance(self._source, Analytic):
            cost = self._source.cost(self._graph, {name: int(width) for name, width in widths.items()})
            return MeasuredCost({"energy": cost.joules, "latency": cost.seconds}, self._source.describe().label)
        if all(widths.get(group.name, group.width) == group.width for group in self._graph.prunable):
            return MeasuredCost({name: energy.dense_profiled for name, energy in self._energies.items()}, "predicted")
        return MeasuredCost({name: energy.at(widths) for name, energy in self._energies.items()}, "predicted")


class SharedCostEvaluator:
    """CostEvaluator that the first process reads and all believe.

    Args:
        scales: Of this process; where it is not the first, they may know nothing.
        distributed: All processes.
    """

    def __init__(self, scales: CostEvaluator, distributed: DistributedContext) -> None:
        self._scales, self._distributed = scales, distributed

    def __call__(self, widths: Mapping[str, int]) -> MeasuredCost:
        """Weighs one network."""
        found = self._scales(widths)
        if self._distributed.size == 1:
            return found
        known = [found.amounts.get(name, 0.0) for name in ("energy", "latency")]
        ci = (
            -1.0 if found.relative_ci is None else found.relative_ci
        )  # decides about targets, so all must have the same
        label = found.label.encode()[:_LABEL_BYTES].ljust(_LABEL_BYTES)
        mine = torch.tensor([*known, ci, *label], dtype=torch.float64)
        energy, latency, ci, *letters = self._distributed.gather(mine)[0].tolist()
        amounts = {name: amount for name, amount in (("energy", energy), ("latency", latency)) if amount}
        text = bytes(map(int, letters)).decode(errors="ignore").rstrip()
        return MeasuredCost(amounts, text, None if ci < 0 else ci)
