"""What networks with equal blocks cost: measured workloads of a language model at given widths, for `llm.py`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ecc.graph import ChannelGraph
from ecc.measure import Analytic, DeviceProfiler
from ecc.measure.tokens import workload_graph, workload_input, workload_model
from ecc.settings import PROFILE_SETTINGS, Design, MeasureSettings
from ecc.task import TokenWorkload
from ecc.torch_utils import device_of

MLP_SHARE = 0.5
"""Width of all MLPs at which the cost is measured, as a fraction; between it, the dense and no MLP it is interpolated."""


@dataclass(frozen=True)
class BlockCost:
    """Cost of a network whose blocks have equal shapes: that of the dense one minus what each block saves.

    A few networks are measured in which all blocks are changed alike. Since blocks of equal shapes cost the same, a
    block saves an equal part of the difference.
    """

    resource: str
    label: str
    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    branches: tuple[str, ...]
    dense_profiled: float
    savings: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]
    """For attention and mlp: widths in ascending order, and what one block saves at each."""
    unit: str = "J"

    def value(self, widths: Tensor) -> Tensor:
        """The cost at one vector of widths."""
        saved = 0.0
        for name, width in zip(self.groups, widths.tolist(), strict=True):
            kind = kind_of(name)
            if kind:
                saved += float(np.interp(width, *self.savings[kind]))
        return torch.tensor(self.dense_profiled - saved, dtype=torch.float64)

    def gradient(self, widths: Tensor) -> Tensor:
        """Not needed by methods that do not train."""
        raise NotImplementedError

    def form(self, budget: float) -> Any:
        """Not needed by methods that do not train."""
        raise NotImplementedError

    def to(self, device: torch.device | str) -> BlockCost:
        """Itself: it computes on the CPU."""
        del device
        return self


def kind_of(name: str) -> str:
    """Whether a group is of attention, of an MLP or of neither."""
    return "attention" if "attn" in name else "mlp" if "mlp" in name else ""


class Bench:
    """Measures workloads of the dense network at given widths. A workload is prepared when it is first needed."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, meter: Any, workloads: Sequence[TokenWorkload]) -> None:
        self.model, self.graph, self.meter = model, graph, meter
        self.workloads = {one.name: one for one in workloads}
        self.label = meter.describe().label
        self._graphs: dict[str, ChannelGraph] = {}
        self._profilers: dict[str, tuple[DeviceProfiler, DeviceProfiler]] = {}
        self._known: dict[tuple[str, tuple[int, ...]], tuple[float, float, float | None]] = {}

    def _open(self, workload: TokenWorkload) -> tuple[DeviceProfiler, DeviceProfiler]:
        """A quick and a careful profiler of a workload; the counter is probed once."""
        device = device_of(self.model)
        settings: MeasureSettings = replace(PROFILE_SETTINGS, precision="bf16" if device.type == "cuda" else "fp32")
        kinds = ((2, 3, 0.01), (2, 6, 0.006))  # windows, and their confidence interval
        model, inputs = workload_model(self.model, workload), workload_input(self.model, workload)
        quick, careful = (
            DeviceProfiler(
                model,
                self.graph,
                inputs,
                self.meter,
                replace(settings, min_repeats=least, max_repeats=most, target_relative_ci=interval),
                device,
            )
            for least, most, interval in kinds
        )
        careful.prepare(quick.prepare())
        return quick, careful

    def runner(self, name: str) -> dict[str, Any]:
        """How the networks of a workload are run."""
        if name not in self._profilers:
            return {}
        header = self._profilers[name][0].header(Design(kind="uniform", samples=1))
        assert header.settings is not None
        return {"runner": header.settings.runner, "precision": header.settings.precision, "why": header.runner_reason}

    def measure(
        self, name: str, widths: Mapping[str, int], *, careful: bool = False
    ) -> tuple[float, float, float | None]:
        """Joules and seconds of one run, and the relative confidence interval. Careful readings are kept."""
        workload, all_widths = self.workloads[name], {**self.graph.full_widths, **widths}
        if isinstance(self.meter, Analytic):
            if name not in self._graphs:  # only formulas need the layers of a workload
                self._graphs[name] = workload_graph(self.model, self.graph, workload)
            cost = self.meter.cost(self._graphs[name], all_widths)
            return cost.joules, cost.seconds, None
        key = name, tuple(all_widths.values())
        if careful and key in self._known:
            return self._known[key]
        if name not in self._profilers:
            self._profilers[name] = self._open(workload)
        sample = self._profilers[name][int(careful)].sample(None, 0, 0, all_widths)
        found = sample.joules, sample.seconds, sample.relative_ci
        if careful:
            self._known[key] = found
        return found

    def fit(self, name: str, earlier: Mapping[str, Any] | None = None) -> BlockCost:
        """The cost of a workload, from networks in which all blocks are changed alike.

        Args:
            name: Of the workload.
            earlier: What an earlier call found: joules of a token, and what blocks save, which is scaled.
        """
        full = self.graph.full_widths
        by_kind = {kind: [one for one in full if kind_of(one) == kind] for kind in ("attention", "mlp")}
        dense = self.measure(name, {}, careful=True)[0]
        savings = {}
        if earlier is not None:
            scale = dense / (earlier["joules_per_token"] * self.workloads[name].tokens)
            for kind, points in earlier["savings"].items():
                savings[kind] = (tuple(width for width, _ in points), tuple(scale * saved for _, saved in points))
            by_kind = {}
        for kind, names in by_kind.items():
            width = full[names[0]]
            points = {width: 0.0}
            wanted = range(1, width) if kind == "attention" else [round(width * MLP_SHARE)]
            for less in wanted:
                points[less] = max(0.0, dense - self.measure(name, dict.fromkeys(names, less))[0]) / len(names)
            some = names[1 : max(2, len(names) // 2)]  # without any block nothing would be left to run
            removed = self.measure(name, dict.fromkeys(some, 0))[0]
            points[0] = max(*points.values(), (dense - removed) / len(some))
            ordered = sorted(points)
            saved = np.maximum.accumulate([points[one] for one in ordered][::-1])[::-1]  # less width never costs more
            savings[kind] = (tuple(map(float, ordered)), tuple(map(float, saved)))
        branches = tuple(branch.name for branch in self.graph.branches)
        return BlockCost(name, self.label, tuple(full), tuple(full.values()), branches, dense, savings)
