"""What a step of `EccSolver` costs beside a plain step of Adam, in one run, on whatever device is here.

    PYTHONPATH=src python3 benchmarks/step_time.py --out results/step_time.json

For each network: forward, backward and step with (a) torch's fused Adam, (b) `EccSolver` around the same Adam, in the
ramp of a solve of 20,000 steps, updates included (plans, one in 360 steps, are timed apart), (c) a literal
implementation: after Adam, each layer by itself gets its channel norms, sorts them on the host and zeroes channels, every
step. Blocks of steps follow in the order Adam, other, other, Adam, so that a drift of the device's clock and what ran
before are the same for both; the ratio of such a round is that of the sums, and the median of the rounds is reported.
What the solver does beside Adam's step is also timed part by part: masks (every step), a sample of the importance, an
update, and a plan of the final widths.

The first steps are not timed. On a GPU these are all in which CUDA graphs are captured, once in a solve: a capture waits
for the device and empties the cache of its memory.

On a GPU, seconds are those of the clock on the wall. On a CPU one thread computes, and seconds are those that the
process spent computing: what others do on the machine meanwhile does not count, other than by the caches they share.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from machine import commit, machine, write_record
from torch import Tensor, nn

from ecc.energy import counted_cost
from ecc.graph import ChannelGraph, trace_channels
from ecc.methods import EccSolver
from ecc.methods.ecc.importance import taylor_interval
from ecc.zoo import ERFNet, MobileNetV1

SOLVE_STEPS = 20_000
STEPS_WITH_CAPTURES = 100
"""The last capture is that of the third update, at step 90."""


class MlpStack(nn.Module):
    """The feed-forward half of a transformer: 300 M parameters at the default size."""

    def __init__(self, width: int = 1536, hidden: int = 6144, depth: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, 100)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of tokens."""
        for block in self.blocks:
            x = x + block(x)
        scores: Tensor = self.head(x)
        return scores


def networks(device: str) -> dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]]:
    big = device == "cuda"
    found: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
        "MLP stack": (MlpStack if big else lambda: MlpStack(256, 1024, 8), (4096, 1536) if big else (64, 256)),
        "MobileNet v1": (MobileNetV1, (128, 3, 224, 224) if big else (8, 3, 128, 128)),
        "ERFNet": (ERFNet, (4, 3, 512, 1024) if big else (1, 3, 128, 256)),
    }
    if big:
        import torchvision

        found["ResNet-50"] = (torchvision.models.resnet50, (64, 3, 224, 224))
    return found


class PerLayerSolver:
    """Adam, then each reading layer by itself: norms, a sort on the host, zeroes."""

    def __init__(self, model: nn.Module, graph: ChannelGraph, optimizer: torch.optim.Optimizer) -> None:
        parameters = dict(model.named_parameters())
        self._readers = [
            (parameters[place.tensor], place.axis)
            for group in graph.prunable
            for place in group.slices
            if place.is_consumer and place.tensor in parameters
        ]
        self._optimizer = optimizer

    @torch.no_grad()
    def step(self) -> None:
        """Adam, and the layers one by one."""
        self._optimizer.step()
        for weight, axis in self._readers:
            second = self._optimizer.state[weight]["exp_avg_sq"]
            metric = second.sqrt().add_(1e-8)
            others = [k for k in range(weight.dim()) if k != axis]
            norms = (weight * weight * metric).sum(others)
            threshold = sorted(norms.tolist())[len(norms) // 10]
            keep = (norms >= threshold).to(weight.dtype)
            weight.mul_(keep.view([-1 if k == axis else 1 for k in range(weight.dim())]))

    def zero_grad(self) -> None:
        """Forgets the gradients."""
        self._optimizer.zero_grad()


def loop(model: nn.Module, inputs: Tensor, optimizer: Any, precision: str | None) -> Callable[[int], float]:
    """A function that takes some training steps and returns the seconds of one."""
    with torch.no_grad():
        shape = model(inputs).shape
    targets = torch.randint(shape[1], (shape[0], *shape[2:]), device=inputs.device)

    def run(steps: int) -> float:
        started = _now(inputs)
        for _ in range(steps):
            with torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16"):
                loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return (_now(inputs) - started) / steps

    return run


def parts(model: nn.Module, solver: EccSolver) -> dict[str, dict[str, float]]:
    """Milliseconds of each part of a step, and the steps from one to the next. The solver is of no use afterwards."""
    schedule = solver._schedule
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    taylor, exits = solver._taylor, solver._exits
    assert taylor is not None

    def sample() -> None:
        products = solver._parts.products()
        taylor.add(products if exits is None else torch.cat([products, exits.products()]))

    def update() -> None:
        solver._solver.update(taylor.values, schedule, 2 * schedule.every, 1e-5)
        solver._set_masks(masked=True)

    calls: dict[str, tuple[Callable[[], object], int]] = {
        "mask": (solver._parts.apply_mask_, 1),
        "sample": (sample, taylor_interval(schedule.steps)),
        "update": (update, schedule.every),
        "plan": (lambda: solver.propose(solver.limits), schedule.every * schedule._updates_of_a_plan),
    }
    found = {}
    for name, (call, every) in calls.items():
        number = 3 if name == "plan" else 20
        call()
        started = _now(next(model.parameters()))
        for _ in range(number):
            call()
        taken = _now(next(model.parameters())) - started
        found[name] = {"milliseconds": 1e3 * taken / number, "every": float(every)}
    return found


def _now(tensor: Tensor) -> float:
    if not tensor.is_cuda:
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def compared(
    build: Callable[[], nn.Module], shape: tuple[int, ...], device: str, blocks: int, steps: int
) -> dict[str, Any]:
    inputs = torch.randn(shape, device=device)
    runs: dict[str, Callable[[int], float]] = {}
    for way in ("adam", "ecc", "admm"):
        torch.manual_seed(0)
        model = build().to(device).train()
        graph = trace_channels(model, inputs[:1], verify=False)
        adam = torch.optim.Adam(model.parameters(), lr=1e-5, fused=True)
        optimizer: Any = adam
        if way == "ecc":
            optimizer = solver = EccSolver(
                model, graph, counted_cost(graph, "macs"), "60%", SOLVE_STEPS, optimizer=adam, warm_up=0.0
            )
            pruned = model
        elif way == "admm":
            optimizer = PerLayerSolver(model, graph, adam)
        runs[way] = loop(model, inputs, optimizer, "bf16" if device == "cuda" else None)
    for run in runs.values():
        run(STEPS_WITH_CAPTURES if device == "cuda" else max(3, steps // 3))
    times: dict[str, list[float]] = {way: [] for way in runs}
    ratios: dict[str, list[float]] = {"ecc": [], "admm": []}
    for other, rounds in (("ecc", blocks), ("admm", max(1, blocks // 3))):
        for _ in range(rounds):
            sums = dict.fromkeys(("adam", other), 0.0)
            for way in ("adam", other, other, "adam"):
                runs[way](steps // 6)  # not timed
                taken = runs[way](steps)
                times[way].append(taken)
                sums[way] += taken
            ratios[other].append(sums[other] / sums["adam"])
    return {
        "shape": list(shape),
        "groups": len(graph.prunable),
        "parameters": float(graph.parameters()),
        "milliseconds": {way: 1e3 * statistics.median(found) for way, found in times.items()},
        "ratio_to_adam": {way: statistics.median(found) for way, found in ratios.items()},
        "rounds_to_adam": ratios,
        "parts": parts(pruned, solver),
        "blocks": blocks,
        "steps_of_a_block": steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--blocks", type=int, default=5, help="rounds of four blocks; a third of them for admm")
    parser.add_argument("--steps", type=int, default=30, help="of a block; 30 holds one update of the solve")
    parser.add_argument("--only", help="one network; the others of the earlier record are kept")
    parser.add_argument("--earlier", type=Path, help="record whose other networks are kept; --out if it exists")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no network starts that would end later")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1 if device == "cpu" else torch.get_num_threads())
    torch.set_float32_matmul_precision("high")
    rows: dict[str, Any] = {}
    earlier = options.earlier or options.out
    if earlier.exists():
        old = json.loads(earlier.read_text())
        before = old["environment"].get("commit") or f"version {old['environment']['ecc']}"
        rows = {name: {"commit": before, **row} for name, row in old["networks"].items()}
    begin, took = time.monotonic(), 0.0
    for name, (build, shape) in networks(device).items():
        started = time.monotonic()
        if options.only not in (None, name) or started - begin + took > options.seconds:
            continue
        rows[name] = {"commit": commit(), **compared(build, shape, device, options.blocks, options.steps)}
        took = max(took, time.monotonic() - started)
        ms, ratio = rows[name]["milliseconds"], rows[name]["ratio_to_adam"]
        print(
            f"{name:14} adam {ms['adam']:8.2f} ms  ecc {ratio['ecc']:.3f}x  admm {ratio['admm']:.3f}x",
            *(f"{part} {one['milliseconds']:.3f} ms/{one['every']:g}" for part, one in rows[name]["parts"].items()),
            flush=True,
        )
        record = {
            "what": "training step with EccSolver, and with a per-layer ADMM step, relative to fused Adam",
            "environment": machine(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "clock": "wall" if device == "cuda" else "of the process, one thread",
            "networks": rows,
        }
        write_record(record, options.out)


if __name__ == "__main__":
    main()
