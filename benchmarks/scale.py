"""How time and memory grow: rows of a profile, groups of a network, cells of a grid, lines of a history, and for long.

    python3 benchmarks/scale.py --out results/scale.json
    python3 benchmarks/scale.py --out scale.json --share 0.01           small, to see that it works
    python3 benchmarks/scale.py --out results/scale.json --only cells   the others stay as they were

Each size of each case has a process of its own, with one thread. Seconds are those that the process spent computing;
bytes are how far its resident memory grew at its peak beyond what was there before. A straight line through the last
decade in log-log gives the exponent of the growth (1 is linear).

    rows         a profile, measured row by row on a simulated board that warms up; read; fitted, with a learning curve
    groups       a chain of convolutions of 16 channels: trace, graph file, energy model, solver, slim
    cells        `ecc report` over a grid of runs, written by the project's own writers with made-up numbers
    lines        a run's history: logged, resumed, sent to loggers, reported, and followed live by one more line
    parameters   the trace of a network on the meta device, up to 3 GB of weights that are not there
    steps        a solver's training steps: does memory grow, do files stay open?
    windows      measuring windows on a simulated board: the same
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

from machine import machine, write_record
from scale_cases import CASES, Point, in_own_process
from trace_scaling import slope

SIZES = {
    "rows": (1_000, 2_000, 5_000, 10_000),
    "groups": (100, 200, 500, 1_000),
    "cells": (100, 200, 500, 1_000),
    "lines": (60_000, 120_000, 300_000, 600_000),
    "parameters": (80_000_000, 200_000_000, 400_000_000, 800_000_000),
    "steps": (10_000,),
    "windows": (10_000,),
}
LEAST = {"rows": 40, "groups": 5, "cells": 20, "lines": 100, "parameters": 30_000, "steps": 50, "windows": 50}


def exponents(points: list[Point]) -> dict[str, dict[str, float | None]]:
    """Of seconds and of bytes, for each part."""
    sizes = [point["size"] for point in points]
    return {
        part: {
            unit: slope(sizes, [point["parts"][part].get(unit) for point in points])
            for unit in ("seconds", "peak_bytes")
        }
        for part in points[0].get("parts", {})
    }


def show(case: str, point: Point) -> None:
    for part, found in point.get("parts", {}).items():
        size = f"{found['peak_bytes'] / 1e6:10.1f} MB" if "peak_bytes" in found else ""
        print(f"{case:11}{point['size']:>11}  {part:28}{found['seconds']:11.4f} s{size}", flush=True)
    rest = {name: value for name, value in point.items() if name not in ("size", "parts", "looks")}
    print(f"{case:11}{point['size']:>11}  {rest}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--only", choices=CASES, help="one case; the others in the file stay as they were")
    parser.add_argument("--share", type=float, default=1.0, help="of the sizes, for a quick look")
    options = parser.parse_args()
    cases: dict[str, Any] = {}
    if options.only and options.out.exists():
        cases = json.loads(options.out.read_text(encoding="utf-8"))["cases"]
    for case in [options.only] if options.only else CASES:
        sizes = sorted({max(LEAST[case], round(options.share * size)) for size in SIZES[case]})
        points = []
        with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
            for size in sizes:
                points.append(pool.apply(in_own_process, (case, size)))
                show(case, points[-1])
        cases[case] = {"environment": machine(), "points": points, "exponents": exponents(points)}
        record = {
            "what": "time and memory of a process as sizes grow, and over long runs",
            "environment": machine(),
            "cases": {name: cases[name] for name in CASES if name in cases},
        }
        write_record(record, options.out)


if __name__ == "__main__":
    main()
