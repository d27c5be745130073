"""How well does a short measuring window know the energy of a network? Three ways, one run, one GPU.

(a) ours: from counter tick to counter tick while the device stays busy (`ecc.measure`);
(b) the way of the paper's published code: a child process runs `nvidia-smi --query-gpu=power.draw` over and over,
    multiplies watts by the time since its last sample, and is stopped when the window is over; the network is
    synchronised after every inference, there is no warm-up;
(c) unaligned, as Zeus does: the NVML energy counter is read before and after, whenever that happens to be.

The truth is one aligned window of 20 seconds before and one after. For each way and length: bias and spread (relative
standard deviation) of joules per inference over the repeats, and the seconds a window really took.

    PYTHONPATH=src python3 benchmarks/window_accuracy.py --out results/window_accuracy.json
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record

from ecc.measure import MeasureSettings, Meter, find_meter, measure, probe_counter
from ecc.measure.runners import prepare_runner
from ecc.records import to_builtins
from ecc.zoo import MobileNetV1

LENGTHS = (0.3, 0.5, 1.0, 2.0)

POLLER = """
import signal, subprocess, sys, time
total = last = 0.0
running = True
def stop(*_):
    global running
    running = False
signal.signal(signal.SIGINT, stop)
last = time.perf_counter()
while running:
    out = subprocess.run(["nvidia-smi", "-i", sys.argv[1], "--query-gpu=power.draw", "--format=csv,noheader,nounits"],
                         capture_output=True, text=True, start_new_session=True).stdout
    now = time.perf_counter()
    total += float(out) * (now - last)
    last = now
    time.sleep(0.001)
print(total)
"""


def busy_for(run: Callable[[], object], seconds: float, *, synchronise_each: bool) -> int:
    """Inferences done in about that time; the device has finished them."""
    count, started = 0, time.perf_counter()
    while time.perf_counter() - started < seconds:
        for _ in range(1 if synchronise_each else 20):
            run()
            count += 1
        torch.cuda.synchronize()
    return count


def polled(run: Callable[[], object], seconds: float, device: str) -> float:
    """(b): joules per inference by a child that polls nvidia-smi."""
    child = subprocess.Popen([sys.executable, "-c", POLLER, device], stdout=subprocess.PIPE, text=True)
    count = busy_for(run, seconds, synchronise_each=True)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=30)
    return float(out.strip() or "0") / count


def unaligned(run: Callable[[], object], seconds: float, meter: Meter) -> float:
    """(c): joules per inference between two readings at any moment."""
    torch.cuda.synchronize()
    before = meter.read()
    count = busy_for(run, seconds, synchronise_each=False)
    return (meter.read() - before) / count


def summary(values: list[float], truth: float, seconds: list[float]) -> dict[str, Any]:
    return {
        "bias": statistics.fmean(values) / truth - 1,
        "spread": statistics.stdev(values) / truth,
        "mean_window_seconds": statistics.fmean(seconds),
        "joules": values,
    }


def timed(job: Callable[[], float], repeats: int) -> tuple[list[float], list[float]]:
    values, seconds = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        values.append(job())
        seconds.append(time.perf_counter() - started)
    return values, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="0", help="the GPU's number for nvidia-smi")
    options = parser.parse_args()
    meter = find_meter("nvml", device_type="cuda")
    assert isinstance(meter, Meter)
    model = MobileNetV1().eval().cuda()
    example = torch.randn(options.batch, 3, 224, 224, device="cuda")
    results: dict[str, dict[str, tuple[list[float], list[float]]]] = {}
    with prepare_runner(model, example, MeasureSettings(runner="cuda-graph", precision="tf32")) as ready:
        counter = probe_counter(meter, None, 2.0)

        def ours(seconds: float, repeats: int) -> tuple[list[float], list[float]]:
            settings = MeasureSettings(
                runner="cuda-graph",
                precision="tf32",
                window_seconds=seconds,
                min_ticks=max(2, int(seconds / 0.1)),
                min_repeats=repeats,
                max_repeats=repeats,
            )
            done = measure(ready.run, meter, settings, device="cuda", batch=options.batch, counter=counter)
            return [w.joules for w in done.windows], [w.window_seconds for w in done.windows]

        before = ours(20.0, 1)[0][0]
        for seconds in LENGTHS:
            results[f"{seconds:g}"] = {
                "ours": ours(seconds, options.repeats),
                "nvidia-smi child": timed(partial(polled, ready.run, seconds, options.device), options.repeats),
                "unaligned counter": timed(partial(unaligned, ready.run, seconds, meter), options.repeats),
            }
        after = ours(20.0, 1)[0][0]
    truth = (before + after) / 2
    table = {
        length: {way: summary(values, truth, seconds) for way, (values, seconds) in ways.items()}
        for length, ways in results.items()
    }
    half = table["0.5"]
    record = {
        "what": "bias and spread of short measuring windows against 20 s references",
        "network": f"MobileNet v1, 224 px, batch {options.batch}, CUDA graph, tf32",
        "environment": machine(),
        "device": torch.cuda.get_device_name(),
        "meter": to_builtins(meter.describe()),
        "tick_seconds": counter.tick_seconds,
        "idle_watts": counter.idle_watts,
        "reference_joules": [before, after],
        "repeats": options.repeats,
        "windows": table,
        "spread_ratio_at_half_a_second": half["ours"]["spread"] / half["nvidia-smi child"]["spread"],
    }
    write_record(record, options.out)
    print(f"reference {before:.5f} and {after:.5f} J a batch of {options.batch}; counter period {counter.tick_seconds}")
    print(f"{'seconds':>8} {'way':<18} {'bias':>8} {'spread':>8} {'took':>7}")
    for length, rows in table.items():
        for way, row in rows.items():
            took = f"{row['mean_window_seconds']:.2f} s"
            print(f"{length:>8} {way:<18} {row['bias']:>8.2%} {row['spread']:>8.2%} {took:>7}")
    print(f"our spread at 0.5 s is {record['spread_ratio_at_half_a_second']:.3f} of nvidia-smi's")


if __name__ == "__main__":
    main()
