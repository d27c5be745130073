"""How long the command line takes to start: version, help and wrong options, beside Python alone.

    python3 benchmarks/startup_time.py --out results/startup_time.json

Each command is a new process. All commands take turns, `--rounds` times, so that a busy moment concerns all of them.
Seconds are medians, of wall time and of processor time, which a busy machine changes less; ratios are to
`python -c pass` of the same interpreter in the same rounds.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from machine import machine, write_record

from ecc.cli.app import VERBS

ROOT = Path(__file__).resolve().parent.parent
LEAST_ROUNDS = 7
BASE = "python -c pass"
COMMANDS = {
    BASE: ["-c", "pass"],
    "ecc --version": ["-m", "ecc", "--version"],
    "ecc --help": ["-m", "ecc", "--help"],
    **{f"ecc {verb} --help": ["-m", "ecc", verb, "--help"] for verb in VERBS},
    "ecc fit --unknown": ["-m", "ecc", "fit", "--unknown"],
    "python -c 'import ecc'": ["-c", "import ecc"],
    "python -c 'import typer'": ["-c", "import typer"],
    "python -c 'import torch'": ["-c", "import torch"],
}


def timed(words: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of one process, started in the root of the repository."""
    used, before = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, check=False)
    wall, now = time.perf_counter() - before, resource.getrusage(resource.RUSAGE_CHILDREN)
    return wall, now.ru_utime + now.ru_stime - used.ru_utime - used.ru_stime


def commit() -> str:
    """Of the working tree."""
    words = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=11)
    args = parser.parse_args()
    if args.rounds < LEAST_ROUNDS:
        parser.error(f"--rounds {args.rounds} is below {LEAST_ROUNDS}.")
    for words in COMMANDS.values():
        timed(words)  # bytecode is written, files are cached
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(args.rounds):
        for name, words in COMMANDS.items():
            times[name].append(timed(words))
    rows: dict[str, dict[str, float]] = {}
    for name, found in times.items():
        wall, cpu = (statistics.median(values) for values in zip(*found, strict=True))
        rows[name] = {"seconds": wall, "cpu_seconds": cpu}
        rows[name]["ratio"] = wall / rows[BASE]["seconds"]
        rows[name]["cpu_ratio"] = cpu / rows[BASE]["cpu_seconds"]
    for name, row in rows.items():
        print(f"{name:28} {1000 * row['seconds']:8.1f} ms {row['ratio']:8.2f} {row['cpu_ratio']:8.2f}")
    facts = machine(commit=commit(), load_average=round(os.getloadavg()[1], 1))
    write_record({"environment": facts, "rounds": args.rounds, "commands": rows}, args.out)


if __name__ == "__main__":
    main()
