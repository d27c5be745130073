"""Measured budgets of runs in parallel processes: one process measures while the others pause.

The workers of `evidence.py` and `vit.py` share a GPU, so none of them can measure. The first process measures for all:

    worker     SharedMeter.cost: send the widths and wait; the other workers keep the GPU busy meanwhile
    first      MeasuringService.serve: when enough workers wait, ask the others to pause
    worker     SharedMeter.gate, before each batch: finish what is on the GPU and pause
    first      measure the networks one after the other, answer, and let all continue

Answers are scaled to the first measurement of the dense network, so that they do not depend on the temperature of the GPU.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from ecc.energy import EnergyModel
from ecc.errors import BadMeasurement, EccError
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import PROFILE_SETTINGS, DeviceState, EnergySource, Meter, MeterInfo, Reading
from ecc.measure.meter import HasState
from ecc.methods.budget_controller import CONFIRMED_CI
from ecc.methods.cost_evaluator import CostEvaluator, MeasuredCost
from ecc.task import Task, with_batch_size
from ecc.training import Interrupted
from ecc.zoo.data.batches import SeededBatches

MEASURE_SETTINGS: dict[str, Any] = {"repeats": (3, 3), "target_ci": PROFILE_SETTINGS.target_relative_ci}
"""Three windows as short as those of the profile: there are hundreds of networks to measure."""
QUIET, ACTIVE, PAUSED, WAITING, ANSWERED = range(5)
"""What a worker does: nothing on the GPU, training, pausing, waiting for a measurement, going on after one."""
WAITING_SHARE = 0.34
"""Fraction of the workers that have to wait before networks are measured."""
LONGEST_WAIT = 8.0
"""Seconds after which a worker is served although few wait."""
PAUSE_LIMIT = 6.0
"""Seconds in which workers have to pause. One that builds a network on the CPU takes longer, and pauses at its next batch."""
ANSWER_LIMIT = 2.0
"""Seconds in which a worker with an answer asks for the next measurement, or goes on."""
DENSE_SECONDS = 45.0
"""Age from which the dense network is measured again."""
POLL = 0.005


@dataclass(frozen=True)
class Signals:
    """What the processes share. Each worker writes its own entry of `states`, and the first process `ANSWERED`."""

    pause: Any
    stop: Any
    states: Any

    @classmethod
    def of(cls, context: Any, count: int) -> Signals:
        """New ones.

        Args:
            context: Of multiprocessing.
            count: Number of workers.
        """
        return cls(context.Event(), context.Event(), context.Array("b", count, lock=False))


class SharedMeter:
    """The meter of one worker: an `Analytic` source that asks the first process.

    Args:
        number: Of the worker.
        signals: Shared by all processes.
        connection: To the first process.
        info: Description of the meter of the first process.
    """

    def __init__(self, number: int, signals: Signals, connection: Any, info: MeterInfo) -> None:
        self._number, self._signals, self._connection, self._info = number, signals, connection, info

    def describe(self) -> MeterInfo:
        """The meter of the first process."""
        return self._info

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        """Measured cost of one inference.

        Raises:
            BadMeasurement: If the network cannot be measured.
            Interrupted: If the time is over.
        """
        self._finish_kernels()
        self._enter(WAITING)
        kept = {group.name: int(widths.get(group.name, group.width)) for group in graph.variable}
        is_dense = all(kept[group.name] == group.width for group in graph.variable)
        self._connection.send({} if is_dense else kept)
        while not self._connection.poll(0.05):
            self._check_stop()
        found = self._connection.recv()
        if isinstance(found, str):
            raise BadMeasurement(found)
        joules, seconds, relative_ci = found
        return Reading(joules, seconds, relative_ci=relative_ci)

    def gate(self) -> None:
        """Pause here if a network is being measured. To be called before work on the GPU."""
        self._enter(ACTIVE)  # before the check: either this process sees the request, or the other one sees this state
        while self._signals.pause.is_set():
            self._finish_kernels()
            self._enter(PAUSED)
            while self._signals.pause.is_set():
                self._check_stop()
                time.sleep(POLL)
            self._enter(ACTIVE)

    def rest(self) -> None:
        """Nothing of this process is on the GPU until the next `gate`."""
        self._finish_kernels()
        self._enter(QUIET)

    def guarded(self, task: Task) -> Task:
        """The task with a `gate` before each batch and each evaluation."""

        def batches(epoch: int) -> Any:
            inner = task.epoch_batches(epoch)

            def make(number: int) -> Any:
                self.gate()
                return inner[number]  # type: ignore[index]  # a sequence for all data sets of the benchmarks

            return SeededBatches(len(inner), make)  # type: ignore[arg-type]

        def evaluate(score: Callable[[nn.Module], float], model: nn.Module) -> float:
            self.gate()
            found = score(model)
            self.rest()
            return found

        scores = [
            None if score is None else partial(evaluate, score) for score in (task.evaluate, task.evaluate_held_out)
        ]
        return replace(task, train_batches=batches, evaluate=scores[0], evaluate_held_out=scores[1])

    def _enter(self, state: int) -> None:
        self._signals.states[self._number] = state

    def _finish_kernels(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()

    def _check_stop(self) -> None:
        if self._signals.stop.is_set():
            raise Interrupted("stopped while it waited for a measurement.", signal.SIGTERM)


class PausedProcesses:
    """The meter of a device whose other processes pause: they are not counted as users of the device."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def read(self) -> float:
        """Cumulative joules."""
        return self._meter.read()

    def describe(self) -> MeterInfo:
        """The meter itself."""
        return self._meter.describe()

    def state(self) -> DeviceState:
        """State of the device."""
        return replace(self._meter.state(), other_processes=()) if isinstance(self._meter, HasState) else DeviceState()


def cost_evaluator(task: Task, batch: int, energy: EnergyModel, source: EnergySource) -> CostEvaluator:
    """Measures networks of the task, also while other processes pause."""
    example = with_batch_size(task.example_input, batch)
    graph = trace_channels(task.model, example, verify=False)
    meter = PausedProcesses(source) if isinstance(source, Meter) else source
    return CostEvaluator(task.model, graph, example, {energy.resource: energy}, meter, **MEASURE_SETTINGS)


class MeasuringService:
    """Measures for the workers.

    Args:
        evaluate: Measures a network of these widths; without widths, the dense one.
        info: Description of the meter.
        context: Of multiprocessing.
        count: Number of workers.
    """

    def __init__(
        self, evaluate: Callable[[Mapping[str, int]], MeasuredCost], info: MeterInfo, context: Any, count: int
    ) -> None:
        self._evaluate = evaluate
        self.signals = Signals.of(context, count)
        pairs = [context.Pipe() for _ in range(count)]
        self.connections = [own for own, _ in pairs]
        self.meters = [SharedMeter(number, self.signals, theirs, info) for number, (_, theirs) in enumerate(pairs)]
        """One for each worker."""
        self.seconds = 0.0
        """Time for which workers paused."""
        self.readings = 0
        self._requests: dict[int, tuple[dict[str, int], float]] = {}
        self._known: dict[str, MeasuredCost] = {}
        self._first: MeasuredCost | None = None
        self._dense: MeasuredCost | None = None
        self._dense_at = 0.0

    def serve(self, alive: Sequence[bool], end: float = math.inf) -> None:
        """Measure if enough workers wait, or one of them for long.

        Args:
            alive: Whether each worker still runs.
            end: Time of the monotonic clock after which no measurement begins.
        """
        self._collect()
        waiting = [number for number in self._requests if alive[number]]
        if not waiting:
            return
        others = sum(alive) - len(waiting)
        oldest = min(self._requests[number][1] for number in waiting)
        if others and len(waiting) < WAITING_SHARE * sum(alive) and time.monotonic() - oldest < LONGEST_WAIT:
            return
        started = time.monotonic()
        self.signals.pause.set()
        try:
            self._wait(alive, (ACTIVE,), PAUSE_LIMIT)
            while self._requests and time.monotonic() < end:
                answers = {
                    number: self._answer(self._requests.pop(number)[0])
                    for number in list(self._requests)
                    if time.monotonic() < end
                }
                for number, answer in answers.items():
                    self.signals.states[number] = ANSWERED
                    if alive[number]:
                        self.connections[number].send(answer)
                self._wait(alive, (ANSWERED,), ANSWER_LIMIT)
                self._collect()
        finally:
            self.signals.pause.clear()
            self.seconds += time.monotonic() - started

    def stop(self) -> None:
        """Let workers that pause or wait for a measurement end."""
        self.signals.stop.set()

    def _collect(self) -> None:
        """Read the requests that came."""
        for number, connection in enumerate(self.connections):
            if connection.poll():
                self._requests[number] = connection.recv(), time.monotonic()

    def _wait(self, alive: Sequence[bool], states: Sequence[int], limit: float) -> None:
        """Wait until no worker is in one of the states, or the limit in seconds is over."""
        end = time.monotonic() + limit
        while time.monotonic() < end and any(
            self.signals.states[number] in states for number, lives in enumerate(alive) if lives
        ):
            time.sleep(POLL)

    def _answer(self, widths: dict[str, int]) -> tuple[float, float, float | None] | str:
        """Joules, seconds and confidence interval, as on the device at the first measurement; or why there are none."""
        try:
            return self._measured(widths)
        except (EccError, RuntimeError, MemoryError) as error:
            return str(error) or type(error).__name__

    def _measured(self, widths: dict[str, int]) -> tuple[float, float, float | None]:
        if self._dense is None or time.monotonic() - self._dense_at > DENSE_SECONDS:
            self._dense, self._dense_at = self._read({}), time.monotonic()
            self._first = self._first or self._dense
        assert self._first is not None  # since the first reading
        if not widths:
            return _values(self._first)  # all answers are relative to it
        key = json.dumps(widths, sort_keys=True)
        if key not in self._known:
            found = self._read(widths)
            drift = {name: self._first.amounts[name] / self._dense.amounts[name] for name in found.amounts}
            scaled = {name: drift[name] * amount for name, amount in found.amounts.items()}
            found = replace(found, amounts=scaled)
            if (found.relative_ci or 0.0) > CONFIRMED_CI:  # the controller averages several readings
                return _values(found)
            self._known[key] = found
        return _values(self._known[key])

    def _read(self, widths: Mapping[str, int]) -> MeasuredCost:
        self.readings += 1
        return self._evaluate(widths)


def _values(cost: MeasuredCost) -> tuple[float, float, float | None]:
    return cost.amounts["energy"], cost.amounts["latency"], cost.relative_ci
