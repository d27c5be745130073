"""Int8 quantization and latency of ONNX files, by onnxruntime.

    dynamic   int8 weights; activations are scaled at run time
    static    int8 weights and activations, calibrated on training batches

Quantization changes the outputs, so equality is not required: the error is reported, the score is measured again if the
task has one, and the latency is measured, because int8 is not faster on every processor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ecc.errors import BadTask, CannotExport, option_hint
from ecc.graph.forward_pass import as_call
from ecc.measure.runners import onnx_network
from ecc.task import Inputs, Task, batch_size_of, split_batch

from .formats import onnx_inputs, onnx_session, run_session

MODES = ("dynamic", "static")
CALIBRATION_BATCHES = 8


def quantize(source: Path, target: Path, mode: str, task: Task) -> None:
    """Write an ONNX file with int8 weights."""
    feeds = _feeds(onnx_session(source), task) if mode == "static" else None
    target.write_bytes(onnx_network.quantize(source.read_bytes(), feeds, has_fixed_shapes=False))


def check_int8(task: Task, mode: str | None) -> None:
    """Refuse an unknown mode, or static quantization without batches, before the export starts."""
    if mode is not None and mode not in MODES:
        raise CannotExport(f"int8 mode {mode!r} is unknown; choose {' or '.join(MODES)}.")
    if mode == "static" and task.train_batches is None:
        raise BadTask(
            f"task {task.name!r} has no train_batches to calibrate static int8; use {option_hint('int8', 'dynamic')}."
        )


def _feeds(session: Any, task: Task) -> Iterator[dict[str, Any]]:
    for _, batch in zip(range(CALIBRATION_BATCHES), task.epoch_batches(0), strict=False):
        yield onnx_inputs(session, split_batch(batch)[0])


class OnnxNetwork(nn.Module):
    """An ONNX file as a module, so that a task can evaluate it. Outputs are nested like those of the network `like`."""

    def __init__(self, path: Path, like: nn.Module, example_input: Inputs) -> None:
        super().__init__()
        self.session = onnx_session(path)
        args, kwargs = as_call(example_input)
        with torch.no_grad():
            self.nesting: TreeSpec = tree_flatten(like(*args, **kwargs))[1]

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """The outputs of onnxruntime, nested like those of the network."""
        inputs: Inputs = kwargs or tuple(tensor.detach().cpu() for tensor in args)
        return tree_unflatten(run_session(self.session, inputs), self.nesting)


def score_of(task: Task, network: nn.Module) -> float | None:
    """The score on the test split; None if the task cannot evaluate this module."""
    if task.evaluate is None:
        return None
    try:
        return float(task.evaluate(network))
    except Exception:  # noqa: BLE001 - user code may look at parameters, which a file does not have
        return None


# ---------------------------------------------------------------- latency

PAIRS = 11
BLOCK_SECONDS = 0.1
MIN_RUNS = 3
_MAX_CLOCK_RESOLUTION = 1e-5  # seconds; Windows counts in milliseconds

Clock = Callable[[], float]


@dataclass(frozen=True)
class Latency:
    """Latency of two ONNX files, measured here on this CPU."""

    dense_seconds: float
    """Median over blocks, for one batch."""
    slim_seconds: float
    ratio: float
    """Dense over slim, median over pairs of blocks: above 1 means that the slim one is faster."""
    ratio_range: tuple[float, float]
    """Second lowest and second highest ratio of the pairs."""
    batch: int
    threads: int
    clock: str
    """`processor time` with one thread, `wall clock` with several."""
    label: str = "measured on this CPU by onnxruntime"


def compare_latency(dense: Path, slim: Path, example_input: Inputs) -> Latency:
    """Time two ONNX files on the same inputs.

    Blocks of both files alternate, and each pair of neighbours gives one ratio, so a machine that slows down slows
    both. Other programs still disturb the wall clock: on a machine with four times as many busy threads as cores,
    ratios of one pair of files varied from 3.1 to 4.3. So a single thread is timed by its own processor time, which
    does not count waiting (3.0 to 3.1). Several threads have no such clock. Trust the ratio more than the seconds.
    """
    sessions = [onnx_session(path) for path in (dense, slim)]
    feeds = [onnx_inputs(session, example_input) for session in sessions]
    clock_name, clock = choose_clock(torch.get_num_threads())
    counts = []
    for session, feed in zip(sessions, feeds, strict=True):
        _block(session, feed, MIN_RUNS, clock)  # the first runs allocate
        counts.append(max(MIN_RUNS, round(BLOCK_SECONDS / _block(session, feed, MIN_RUNS, clock))))
    times: list[tuple[float, float]] = []
    for number in range(PAIRS):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        found = {which: _block(sessions[which], feeds[which], counts[which], clock) for which in order}
        times.append((found[0], found[1]))
    ratios = sorted(first / second for first, second in times)
    return Latency(
        dense_seconds=statistics.median(first for first, _ in times),
        slim_seconds=statistics.median(second for _, second in times),
        ratio=statistics.median(ratios),
        ratio_range=(ratios[1], ratios[-2]),
        batch=batch_size_of(example_input),
        threads=torch.get_num_threads(),
        clock=clock_name,
    )


def choose_clock(threads: int) -> tuple[str, Clock]:
    """Processor time for one thread if its resolution is fine enough, else the wall clock."""
    if threads == 1 and time.get_clock_info("thread_time").resolution <= _MAX_CLOCK_RESOLUTION:
        return "processor time", time.thread_time
    return "wall clock", time.perf_counter


def _block(session: Any, feed: dict[str, Any], runs: int, clock: Clock) -> float:
    """Median seconds of one run."""
    seconds = []
    for _ in range(runs):
        start = clock()
        session.run(None, feed)
        seconds.append(clock() - start)
    return statistics.median(seconds)
