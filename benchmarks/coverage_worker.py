"""One network of `trace_coverage.py`, measured in a process of its own."""

from __future__ import annotations

import copy
import math
import os
import re
import resource
import signal
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import torch
from coverage_networks import TOLERANCE, Network, build, difference, outputs
from coverage_torch_pruning import NeedsAnswer, measure_torch_pruning
from torch import Tensor, nn

import ecc
from ecc.graph.numerics import Decisions, run_without_randomness

T = TypeVar("T")
Result = dict[str, Any]
QUICK = 1.0  # seconds; what takes less is measured three times


@dataclass(frozen=True)
class Settings:
    """What is the same for all networks."""

    ratio: float
    limit_seconds: float
    vendor: str | None
    with_torch_pruning: bool
    verbose: bool
    seed: int = 0


class OutOfTime(BaseException):
    """The time limit of a stage passed. Not an Exception, so that few handlers swallow it."""


class Stages:
    """Announces to the parent what is going on, and ends what takes too long."""

    def __init__(self, channel: Connection, limit_seconds: float) -> None:
        self._channel = channel
        self.limit_seconds = limit_seconds
        self.tool = ""
        self.name = ""
        signal.signal(signal.SIGPROF, self._stop)

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """A named stage under the limit of CPU time."""
        self.name = name
        self._channel.send(("stage", (self.tool, name)))
        # Again every five seconds: a bare `except` in the measured code may swallow the first.
        signal.setitimer(signal.ITIMER_PROF, stage_limit(self.tool, self.limit_seconds), 5.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)

    def _stop(self, *_: object) -> None:
        raise OutOfTime


def stage_limit(tool: str, limit_seconds: float) -> float:
    """CPU seconds for a stage; building the network is no tool's fault and has more time."""
    return 5 * limit_seconds if tool == "network" else limit_seconds


@dataclass
class Timing:
    """Seconds of one call."""

    cpu: float
    wall: float


def timed(function: Callable[[], T]) -> tuple[T, Timing]:
    """The result of a call, and the process time and wall time it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, Timing(time.process_time() - cpu, time.perf_counter() - wall)


def best(function: Callable[[], T]) -> tuple[T, Timing]:
    """The fastest of three calls, or the only one if it is slow."""
    result, timing = timed(function)
    if timing.wall < QUICK:
        timing = min([timing, *(timed(function)[1] for _ in range(2))], key=lambda t: t.cpu)
    return result, timing


def measure(network: Network, settings: Settings, channel: Connection) -> None:
    """Measure both tools on one network; what is found is sent as soon as it is known."""
    if not settings.verbose:
        _silence()
    torch.set_num_threads(1)
    if settings.vendor:
        sys.path.append(settings.vendor)
    stages = Stages(channel, settings.limit_seconds)
    stages.tool = "network"
    try:
        with stages("build"):
            _limit_memory(network.memory_gib)
            model, example = build(network, settings.seed)
            _warm_up(settings)
        with stages("dense forward"):
            dense = outputs(model, example)
    except (Exception, OutOfTime) as error:  # noqa: BLE001 - then no tool is to blame
        channel.send(("unbuilt", f"in {stages.name}: {_first_line(error)}"))
        return
    channel.send(("network", {"parameters": sum(p.numel() for p in model.parameters()), "input": list(example.shape)}))
    measured = _guarded(stages, "ecc", network, lambda out: measure_ours(model, example, dense, settings, stages, out))
    channel.send(("ecc", measured))
    if settings.with_torch_pruning:
        measured = _guarded(
            stages,
            "torch_pruning",
            network,
            lambda out: measure_torch_pruning(model, example, dense, settings.ratio, stages, timed, out),
        )
        channel.send(("torch_pruning", measured))


def measure_ours(
    model: nn.Module, example: Tensor, dense: list[Tensor], settings: Settings, stages: Stages, out: Result
) -> None:
    """Trace, verify, cut, and compare the masked network with the cut one."""
    with stages("trace"):
        traced, seconds = best(lambda: ecc.trace_channels(model, example, verify=False))
    out.update(trace_seconds=seconds.cpu, trace_wall_seconds=seconds.wall)
    with stages("verification"):
        graph, seconds = timed(lambda: ecc.graph.verify_graph(model, traced, example))
    out.update(
        verify_seconds=seconds.cpu,
        groups=len(graph.groups),
        prunable_groups=len(graph.prunable),
        frozen_by_verification=len(traced.prunable) - len(graph.prunable),
        prunable_share=1 - float(graph.parameters({g.name: g.min_width for g in graph.prunable}) / graph.parameters()),
        frozen=_reasons(graph),
        notes=list(graph.notes),
    )
    if not graph.prunable:
        out["status"] = "nothing to prune"
        return
    with stages("cut"):
        widths = {g.name: max(g.min_width, round(g.width * (1 - settings.ratio))) for g in graph.prunable}
        cuts = [timed(lambda: ecc.with_widths(model, graph, widths))[1].cpu for _ in range(3)]
    out.update(cut_seconds=statistics.median(cuts), first_cut_seconds=cuts[0])
    with stages("check"):
        masked = copy.deepcopy(model)
        generator = torch.Generator().manual_seed(settings.seed)
        dead = {
            g.name: torch.randperm(g.width, generator=generator)[: g.width - widths[g.name]] for g in graph.prunable
        }
        ecc.graph.mask_channels_(masked, graph, dead)
        small, seconds = timed(lambda: ecc.slim(masked, graph))
        expected, found = outputs(masked, example), outputs(small, example)
        gap = difference(expected, found)
        if gap > TOLERANCE:  # rounding may select other boxes or tokens, which says nothing about the pruning
            out["difference_float32"] = gap
            gap = difference(*(outputs(one.double(), example.double()) for one in (masked, small)))
            if gap > TOLERANCE:  # equal scores, whose order is one of rounding errors in any precision
                out["difference_float64"] = gap
                gap = _difference_decided(masked, small, example.double())
    out.update(
        slim_seconds=seconds.cpu,
        parameters_left=sum(p.numel() for p in small.parameters()),
        difference=gap,
        effect=difference(dense, expected),  # near zero, and the comparison would say nothing
        status="exact" if gap <= TOLERANCE else "outputs not finite" if gap != gap else "WRONG",
    )


def _difference_decided(masked: nn.Module, small: nn.Module, example: Tensor) -> float:
    """The difference if the slim network selects and sorts as the masked one does.

    The values by which they select and sort are compared too.
    """
    decisions = Decisions()
    wanted = run_without_randomness(masked, example, training=False, decisions=decisions)
    decisions.repeating = True
    found = run_without_randomness(small, example, training=False, decisions=decisions)
    before, after = decisions.compared
    return difference([*wanted.outputs, *before], [*found.outputs, *after]) if before else math.inf


def _reasons(graph: ecc.ChannelGraph) -> dict[str, int]:
    """The three commonest reasons why groups are frozen, without the paths of modules."""
    reasons = Counter(re.sub(r"\S+ \((\w+)\)", r"\1", g.frozen) for g in graph.groups if g.frozen)
    return dict(reasons.most_common(3))


def _guarded(stages: Stages, tool: str, network: Network, run: Callable[[Result], None]) -> Result:
    """What a tool measured, with a status whatever happens in it."""
    out: Result = {}
    stages.tool = tool
    try:
        run(out)
    except OutOfTime:
        out.update(status="time limit", detail=f"in {stages.name}")
        if stages.name in ("trace", "graph") and "trace_seconds" not in out:
            out["trace_seconds_at_least"] = stages.limit_seconds
    except ecc.EccError as error:
        out.update(status="refused", detail=_first_line(error))
    except NeedsAnswer as answer:
        out.update(status=answer.status, detail=answer.detail)
    except Exception as error:  # noqa: BLE001 - a crash of a tool is what is measured
        text = _first_line(error)
        if isinstance(error, MemoryError) or "can't allocate memory" in text:
            text = f"out of memory at {network.memory_gib:.0f} GiB"
        out.update(status="crash", detail=f"in {stages.name}: {text}")
    return out


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:240]


def _warm_up(settings: Settings) -> None:
    """Let each tool import what it imports late, so that no network pays for it."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval()
    image = torch.randn(1, 3, 8, 8)
    ecc.trace_channels(tiny, image)
    if settings.with_torch_pruning:
        import torch_pruning

        torch_pruning.DependencyGraph().build_dependency(tiny, example_inputs=(image,))


def _limit_memory(gib: float) -> None:
    """Bound the address space, so that one network cannot take the machine."""
    mapped = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    limit = mapped + int(gib * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _silence() -> None:
    """What libraries print would drown the progress."""
    warnings.simplefilter("ignore")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
