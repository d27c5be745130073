"""`choose_board_runner`: `--runner auto` with `--target`, among the runners of ONNX files that a board has."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ecc.errors import BadMeasurement, EccError
from ecc.graph.numerics import relative_error
from ecc.measure.runner_search import OUTPUT_TOLERANCE, PRECISIONS, RunnerCandidate, RunnerSearch, with_candidate
from ecc.measure.runners.onnx_network import OnnxNetwork
from ecc.records import to_builtins
from ecc.settings import MeasureSettings
from ecc.task import Inputs

from .client import RemoteMeter, limit_seconds, onnx_request
from .wire import LinkLost

_OUTPUTS = 4096  # numbers of each output that are compared


def choose_board_runner(
    model: nn.Module,
    example_input: Inputs,
    meter: RemoteMeter,
    settings: MeasureSettings,
    *,
    resource: str | None = None,
    report: Callable[[str], object] = lambda _: None,
) -> tuple[MeasureSettings, RunnerSearch]:
    """Find the cheapest way to run the dense network on a board. Scores are not compared, only outputs.

    Of several boards, the first one is asked, and all use the result. The arguments are those of `choose_runner`.
    """
    info = meter.describe()
    settings = replace(settings, channels_last=False)
    search = _BoardSearch(model, example_input, meter, settings)
    candidates: list[RunnerCandidate] = []
    for spec, problem in meter.board.call_again("runners")["runners"].items():
        name, _, argument = spec.partition(":")
        runtime = importlib.import_module(f"ecc.measure.runners.{name}")
        supported = [one for one in PRECISIONS if one in runtime.PRECISIONS]
        if problem or not argument:
            candidates.append(RunnerCandidate(runner=spec, precision="fp32", excluded=problem))
            continue
        if runtime.device_type_of(argument) != "cuda":
            supported = [one for one in supported if one != "tf32"]
        for precision in supported:
            candidates.append(search.candidate(RunnerCandidate(runner=spec, precision=precision)))
            report(f"{candidates[-1].name}: {candidates[-1].excluded or format(candidates[-1].joules, '.4g')}")
    usable = [one for one in candidates if not one.excluded]
    if not usable:
        reasons = "; ".join(f"{one.name}: {one.excluded}" for one in candidates) or "it has none"
        raise BadMeasurement(f"no runner of {meter.board.target} can run this network: {reasons}")
    candidates.sort(key=lambda one: one is not usable[0])  # savings refer to the first one
    made = RunnerSearch(
        candidates=tuple(candidates),
        chosen=0,
        resource=resource or ("energy" if info.has_energy else "latency"),
        label=info.label,
    )
    best = min(usable, key=lambda one: made.cost(one) or float("inf"))
    return with_candidate(settings, best), replace(made, chosen=candidates.index(best))


class _BoardSearch:
    """Measures candidates on a board."""

    def __init__(self, model: nn.Module, example_input: Inputs, meter: RemoteMeter, settings: MeasureSettings) -> None:
        self._model, self._inputs, self._meter = model, example_input, meter
        # Outputs are compared on the example input: int8 is calibrated on it, and not on random numbers.
        self._settings = replace(settings, input_data="example", min_repeats=2, max_repeats=4)
        self._counter: Any = None
        self._wanted: Any = None

    def candidate(self, one: RunnerCandidate) -> RunnerCandidate:
        """Measure a candidate; a failure becomes the reason of its exclusion."""
        try:
            return self._measure(one)
        except LinkLost as lost:
            self._meter.board.reconnect(str(lost))
            return replace(one, excluded=f"the agent ended: {lost}"[:200])
        except EccError as error:
            return replace(one, excluded=str(error).splitlines()[0][:200])

    def _measure(self, one: RunnerCandidate) -> RunnerCandidate:
        settings = with_candidate(self._settings, one)
        network = OnnxNetwork.of(self._model, self._inputs, one.precision)
        request = {**onnx_request(network, settings, self._meter.threads), "settings": to_builtins(settings)}
        limit, board = limit_seconds(settings), self._meter.board
        if self._counter is None:
            self._counter = board.call("prepare", limit_seconds=limit, **request)["counter"]
        found = board.call("sample", counter=self._counter, outputs=_OUTPUTS, limit_seconds=limit, **request)
        outputs = [torch.tensor(values, dtype=torch.float64) for values in found["outputs"]]
        if self._wanted is None and one.precision == "fp32":
            self._wanted = outputs
        if self._wanted is not None:
            one = replace(one, difference=relative_error(self._wanted, outputs))
            if not (one.difference or 0.0) <= OUTPUT_TOLERANCE:
                allowed = f"{OUTPUT_TOLERANCE:.0%} allowed"
                return replace(one, excluded=f"outputs differ by {one.difference:.1%} ({allowed})")
        sample = found["sample"]
        return replace(one, joules=float(sample["joules"]), seconds=float(sample["seconds"]))
