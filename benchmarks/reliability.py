"""Fault injection: damaged files, decompression bombs, invalid commands and kills.

    python3 benchmarks/reliability.py --out results/reliability.json
    python3 benchmarks/reliability.py --out results/reliability.json --only invocations
    python3 benchmarks/reliability.py --out results/reliability.json --only kills --kills 100

A case passes if there is one clear error (or the damage has no effect), nothing is executed, nothing outside is written,
and nothing that existed is lost. `accepted` counts files that were read without an error: JSON has no checksum, so a
changed digit is another number. A kill (SIGKILL) passes if running the same command again ends as an undisturbed run
does, bit for bit, and leaves no temporary file. Kinds that a call does not test stay in the file as they were.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import torch  # noqa: E402 - the tests' folder must be on the path first
from click.testing import CliRunner  # noqa: E402
from machine import machine, write_record  # noqa: E402

from ecc.cli.app import app  # noqa: E402
from faults import fuzz  # noqa: E402
from faults.bombs import MORE_BYTES  # noqa: E402
from faults.folder import filled  # noqa: E402
from faults.invocations import TABLE  # noqa: E402
from faults.targets import TARGETS, attempt, good_bytes  # noqa: E402


def add(out: Path, kind: str, counts: dict[str, Any]) -> None:
    """Writes one kind of faults into the record, beside those that are there, and sums all up.

    Args:
        out: The record.
        kind: Its name.
        counts: `tried` and `lost`, and whatever else should be known.
    """
    record = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"kinds": {}}
    survived = counts["tried"] - len(counts["lost"])
    facts = {"tried": counts["tried"], "survived": survived, **counts, "environment": machine()}
    kinds = {**record["kinds"], kind: facts}
    record = {
        "what": "faults tried and survived: one clear error, nothing run, nothing lost",
        "environment": machine(),
        "totals": {
            "tried": sum(one["tried"] for one in kinds.values()),
            "survived": sum(one["survived"] for one in kinds.values()),
            "lost": sum(len(one["lost"]) for one in kinds.values()),
        },
        "kinds": kinds,
    }
    write_record(record, out)
    print(f"{kind}: {counts['tried']} tried, {survived} survived, {len(counts['lost'])} lost", flush=True)


def files(count: int) -> dict[str, Any]:
    """Each file that is read, damaged in `count` ways."""
    by_file, lost, slowest = {}, [], 0.0
    with TemporaryDirectory() as folder:
        for name, target in TARGETS.items():
            kinds: Counter[str] = Counter()
            for what, damaged in fuzz.mutations(good_bytes(target), count, change_content=target.change_content):
                outcome = attempt(target, damaged, Path(folder) / "x")
                kinds[outcome.kind] += 1
                slowest = max(slowest, outcome.seconds)
                if outcome.kind == "lost":
                    lost.append(f"{name}, {what}: {outcome.message}")
            by_file[name] = dict(sorted(kinds.items()))
            print(f"  {name}: {by_file[name]}", flush=True)
    return {"tried": count * len(TARGETS), "lost": lost, "slowest_seconds": round(slowest, 3), "by_file": by_file}


def bombs() -> dict[str, Any]:
    """What unfolds into much, in a process with little memory."""
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "faults" / "bombs.py"), folder],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])},
            capture_output=True,
            text=True,
            check=True,
        )
    answers = json.loads(done.stdout)
    lost = [
        f"{name}: {one['said']}"
        for name, one in answers.items()
        if not one["said"].startswith(("BadFile: ", "BadTask: "))
    ]
    slowest = max(one["seconds"] for one in answers.values())
    return {"tried": len(answers), "lost": lost, "slowest_seconds": slowest, "memory_bytes": MORE_BYTES}


def invocations() -> dict[str, Any]:
    """The table of wrong command lines."""
    lost, slowest, here = [], 0.0, Path.cwd()
    with TemporaryDirectory() as folder:
        os.chdir(filled(Path(folder)))
        for number, (name, (words, part)) in enumerate(TABLE.items()):
            started = time.monotonic()
            result = CliRunner().invoke(app, shlex.split(words.replace("-o new", f"-o {number}-new")))
            slowest = max(slowest, time.monotonic() - started)
            errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
            if result.exit_code != 2 or len(errors) != 1 or part not in errors[0]:
                lost.append(f"{name}: exit code {result.exit_code}, {result.exception!r}, {errors}"[:300])
        os.chdir(here)
    return {"tried": len(TABLE), "lost": lost, "slowest_seconds": round(slowest, 3)}


SHARES = {
    "profile": 0.14,
    "fit": 0.14,
    "compress": 0.26,
    "compare": 0.26,
    "export": 0.08,
    "export to ONNX": 0.04,
    "report": 0.08,
}
"""Of the kills. Long work that goes on half-way has the most to lose; ONNX files take long to time."""


def kills(count: int) -> dict[str, Any]:
    """Each verb, killed at random moments and run again; in a process without threads, which forks."""
    counts = {verb: math.ceil(count * share) for verb, share in SHARES.items()}
    with TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, str(ROOT / "tests" / "faults" / "killing.py"), folder, json.dumps(counts), "0.3"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    by_verb = json.loads(done.stdout)
    print(f"{'verb':16}{'kills':>6}{'writing':>9}{'runs':>6}{'lost':>6}")
    for verb, one in by_verb.items():
        print(f"{verb:16}{one['kills']:6}{one['while_writing']:9}{one['runs']:6}{len(one['failures']):6}")
    lost = [line for one in by_verb.values() for line in one.pop("failures")]
    return {"tried": sum(one["kills"] for one in by_verb.values()), "lost": lost, "by_verb": by_verb}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=300, help="ways to damage each file")
    parser.add_argument("--kills", type=int, default=100, help="of all verbs together, at least")
    parser.add_argument("--only", choices=("files", "bombs", "invocations", "kills"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("error")  # as in the tests: a warning that a file brings about is a fault too
    out = options.out.resolve()
    tried: dict[str, Callable[[], dict[str, Any]]] = {
        "files": lambda: files(options.count),
        "bombs": bombs,
        "invocations": invocations,
        "kills": lambda: kills(options.kills),
    }
    for kind in [options.only] if options.only else tried:
        add(out, kind, tried[kind]())
    if json.loads(out.read_text(encoding="utf-8"))["totals"]["lost"]:
        sys.exit("some faults were lost; the file names them")


if __name__ == "__main__":
    main()
