"""Tasks that are installed on the board: networks are built there from widths, with PyTorch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecc.graph import ChannelGraph
from ecc.measure.counter import CounterProbe
from ecc.measure.meter import Analytic
from ecc.measure.profiler import default_device
from ecc.measure.samplers import DeviceProfiler
from ecc.records import to_builtins
from ecc.settings import Design, MeasureSettings


class InstalledTask:
    """Answers the agent's questions about a task on the board."""

    def __init__(
        self,
        model: Any,
        graph: ChannelGraph,
        example_input: Any,
        meter: Any,
        settings: MeasureSettings,
        device: str | None,
    ) -> None:
        self._graph, self._meter = graph, meter
        self._profiler: DeviceProfiler | None = None
        if not isinstance(meter, Analytic):
            place = device or default_device(meter, settings.runner)
            self._profiler = DeviceProfiler(model, graph, example_input, meter, settings, place)

    def summary(self) -> dict[str, Any]:
        """What the header of a profile needs."""
        found: dict[str, Any] = {"fingerprint": self._graph.fingerprint}
        if self._profiler is not None:
            header = self._profiler.header(Design())
            assert header.settings is not None  # of a device
            found |= {
                "device_type": header.device_type,
                "environment": header.environment,
                "runner": header.settings.runner,
                "runner_reason": header.runner_reason,
            }
        return found

    def prepare(self, counter: CounterProbe | None) -> CounterProbe | None:
        """Observe the counter under the dense network."""
        return None if self._profiler is None else self._profiler.prepare(counter)

    def measure(self, widths: Mapping[str, int], counter: CounterProbe) -> Any:
        """Measure one width configuration."""
        assert self._profiler is not None, "an analytic platform computes costs"
        self._profiler.prepare(counter)
        sample = to_builtins(self._profiler.sample(None, 0, 0, widths))
        return {name: value for name, value in sample.items() if name not in ("index", "round", "session", "widths")}

    def cost(self, widths: Mapping[str, int], repeat: int) -> Any:
        """Joules and seconds on an analytic platform."""
        return self._meter.cost(self._graph, widths, repeat=repeat) if repeat else self._meter.cost(self._graph, widths)
