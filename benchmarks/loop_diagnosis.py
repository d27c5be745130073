"""Where the time of a training step of `ecc compress` goes; see `loop_overhead.py --diagnose`."""

from __future__ import annotations

import cProfile
import io
import pstats
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from loop_networks import wait
from torch.profiler import ProfilerActivity

from ecc.methods.budget_controller import BudgetController
from ecc.methods.ecc import importance, method, optimizer_wrapper, scheduled
from ecc.training import batches, cuda_graph, loop

PARTS: tuple[tuple[Any, str, str], ...] = (
    (batches.BatchStream, "__next__", "data"),
    (loop._Loop, "_compute_gradients", "forward and backward"),
    (cuda_graph.CudaGraphPass, "__call__", "graph replay"),
    (torch.nn.utils, "clip_grad_norm_", "clip"),
    (torch.optim.Adam, "step", "Adam"),
    (optimizer_wrapper.PruningOptimizer, "step", "solver, rest"),
    (importance.ConsumerSlices, "products", "solver, gradients of channels"),
    (importance.TaylorImportance, "add", "solver, gradients of channels"),
    (scheduled.ScheduledSolver, "update", "solver, removal"),
    (importance.ConsumerSlices, "set_mask", "solver, new masks"),
    (importance.ConsumerSlices, "apply_mask_", "solver, masks"),
    (loop._Loop, "_after_step", "log and checkpoint"),
    (BudgetController, "after_step", "budget"),
    (method.Ecc, "_line", "log of the solver"),
)
"""What is timed: owner, function, and the part that its own time counts for."""


class Parts:
    """Times the parts of steps, first as the host sees them, then with the device waited for after each.

    Args:
        device: Where the network trains.
        warm_up: Steps before.
        steps: Of each stretch.
    """

    def __init__(self, device: torch.device, warm_up: int, steps: int) -> None:
        self._device, self._warm_up, self._steps = device, warm_up, steps
        self._waits = False
        self._open: list[list[Any]] = []  # part, when it began or went on
        self._seconds: dict[str, float] = defaultdict(float)
        self._began = 0.0
        self._profile = cProfile.Profile()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._kernels = torch.profiler.profile(activities=kinds)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """A block in which the parts are timed."""
        with ExitStack() as stack:
            for owner, name, part in PARTS:
                stack.enter_context(mock.patch.object(owner, name, self._timed(getattr(owner, name), part)))
            yield

    def after(self, step: int) -> bool:
        """To be called after each step; True when all was seen."""
        done, steps = step - self._warm_up, self._steps
        few = max(2, steps // 8)
        if done == 0:
            self._restart()
        elif done == steps:
            self._report("as the host sees it")
            self._waits = True
            self._restart()
        elif done == 2 * steps:
            self._report("the device waited for after each part")
            self._waits = False
            self._profile.enable()
        elif done == 3 * steps:
            wait(self._device)
            self._profile.disable()
            self._print_profile()
            self._kernels.__enter__()
        elif done == 3 * steps + few:
            wait(self._device)
            self._kernels.__exit__(None, None, None)
            self._print_kernels(few)
            return True
        return False

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            now = time.perf_counter()
            if self._open:
                self._seconds[self._open[-1][0]] += now - self._open[-1][1]
            self._open.append([part, now])
            try:
                return function(*args, **kwargs)
            finally:
                if self._waits:
                    wait(self._device)
                now = time.perf_counter()
                name, began = self._open.pop()
                self._seconds[name] += now - began
                if self._open:
                    self._open[-1][1] = now

        return timed

    def _restart(self) -> None:
        wait(self._device)
        self._seconds.clear()
        self._began = time.perf_counter()

    def _report(self, how: str) -> None:
        wait(self._device)
        whole = time.perf_counter() - self._began
        rows = {**self._seconds, "rest": whole - sum(self._seconds.values())}
        print(f"  {1e3 * whole / self._steps:.2f} ms a step, {how}:")
        for part, seconds in sorted(rows.items(), key=lambda row: -row[1]):
            print(f"    {1e3 * seconds / self._steps:8.3f} ms  {part}")

    def _print_profile(self) -> None:
        for order in ("cumulative", "tottime"):
            text = io.StringIO()
            pstats.Stats(self._profile, stream=text).strip_dirs().sort_stats(order).print_stats(24)
            lines = [line for line in text.getvalue().splitlines() if line.strip()]
            print(f"  cProfile of {self._steps} steps by {order} time:")
            print("\n".join(f"    {line[:130]}" for line in lines[3:]))

    def _print_kernels(self, steps: int) -> None:
        found = self._kernels.key_averages()
        calls = {row.key: row.count / steps for row in found if row.key.startswith("cuda")}
        print(f"  calls of CUDA a step: {', '.join(f'{key} {count:g}' for key, count in sorted(calls.items()))}")
        orders = ["self_cpu_time_total", *(["self_cuda_time_total"] if self._device.type == "cuda" else [])]
        for order in orders:
            print(found.table(sort_by=order, row_limit=14, max_name_column_width=60, max_src_column_width=1))
