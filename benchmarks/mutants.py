"""Which faults the tests notice: small edits of the solver, the slimming and the energy fit, one after the other.

    PYTHONPATH=src python benchmarks/mutants.py --out results/mutants.json
    PYTHONPATH=src python benchmarks/mutants.py --only proximal

For each entry of `mutant_list.py` a copy of the tracked files gets the one edit, and the tests of the package run until
one fails: first the file of the same name, then the folder. A mutant is killed if a test fails, survived if all pass,
and a timeout if the tests take longer than `--timeout`. Where the old text does not occur exactly once, the mutant is
not applicable: port it. Before that the tests run once without any edit; those that fail then are left out. Tests
marked slow run too, as in `make test`. The exit status is 1 if a mutant is not applicable or could not be run.

Two mutants run at once, each with one thread. Results of earlier runs in `--out` are kept for mutants that `--only`
leaves out.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from machine import machine, write_record
from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
TESTS = {"solver": "tests/methods/ecc", "slimming": "tests/graph", "energy": "tests/energy"}
"""The folder of tests for each list of mutants."""
AT_ONCE = 2
_FAILED = re.compile(r"^(FAILED|ERROR) (\S+)", re.MULTILINE)
_ALL_PASSED, _SOME_FAILED, _INTERRUPTED = 0, 1, 2  # exit codes of pytest; the last one is an error while collecting


def copy_tree(target: Path) -> None:
    """The tracked files of the working tree, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def run_tests(tree: Path, paths: list[str], options: list[str], timeout: float) -> tuple[int | None, list[str], float]:
    """The exit code of pytest (None for a timeout), the tests that failed, and seconds."""
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *options, *paths]
    begin = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that what tests start ends with them
    )
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return None, [], time.monotonic() - begin
    return process.returncode, [name for _, name in _FAILED.findall(output)], time.monotonic() - begin


def run_mutant(mutant: Mutant, package: str, tree: Path, left_out: list[str], timeout: float) -> dict[str, Any]:
    """What became of one mutant; the tree is as before afterwards."""
    found = {"package": package, "file": mutant.file, "description": mutant.description}
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8") if file.is_file() else ""
    count = text.count(mutant.old)
    if count != 1:
        return {**found, "result": "not applicable", "detail": f"the old text occurs {count} times", "seconds": 0.0}
    folder = TESTS[package]
    same_name = f"{folder}/test_{file.stem}.py"
    _write(file, text.replace(mutant.old, mutant.new))
    try:
        code, failed, seconds = run_tests(
            tree,
            [same_name, folder] if (tree / same_name).is_file() else [folder],
            ["-x", *(f"--deselect={name}" for name in left_out)],
            timeout,
        )
    finally:
        _write(file, text)
    found["seconds"] = round(seconds, 1)
    if code is None:
        return {**found, "result": "timeout"}
    if code == _ALL_PASSED:
        return {**found, "result": "survived"}
    if code in (_SOME_FAILED, _INTERRUPTED) and failed:
        return {**found, "result": "killed", "killed_by": failed[0]}
    return {**found, "result": "error", "detail": f"pytest ended with exit code {code}"}


def _write(file: Path, text: str) -> None:
    """Writes a source file and removes its bytecode, which is told apart by time and size alone."""
    file.write_text(text, encoding="utf-8")
    for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        old.unlink()


def chosen(pattern: str) -> list[tuple[str, Mutant]]:
    """Mutants whose id or package contains the pattern, or matches it as a glob."""
    return [
        (package, mutant)
        for package, mutants in MUTANTS.items()
        for mutant in mutants
        if any(pattern in name or fnmatch.fnmatch(name, pattern) for name in (mutant.id, package))
    ]


def tally(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many mutants of each package ended in which way, and of all."""
    totals = {
        package: dict(Counter(r["result"] for r in results.values() if r["package"] == package)) for package in TESTS
    }
    return {**totals, "all": dict(Counter(r["result"] for r in results.values()))}


def show(results: dict[str, dict[str, Any]]) -> None:
    width = max(map(len, results))
    for name, result in results.items():
        detail = result.get("killed_by") or result.get("detail") or ""
        print(f"{name:<{width}}  {result['result']:<14} {result['seconds']:6.1f} s  {detail}")
    for package, counts in tally(results).items():
        print(f"{package}: {', '.join(f'{number} {word}' for word, number in sorted(counts.items())) or 'none'}")


def commit() -> str:
    """Of the working tree, with a word if tracked files were changed since."""
    head, status = (
        subprocess.run(["git", *words], cwd=ROOT, capture_output=True, check=True, text=True).stdout.strip()
        for words in (["rev-parse", "--short=12", "HEAD"], ["status", "--porcelain", "-uno", "src", "tests"])
    )
    return head + (", changed" if status else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="part of an id or package, or a glob")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one mutant (default: 900)")
    parser.add_argument("--jobs", type=int, choices=range(1, AT_ONCE + 1), default=AT_ONCE, help="mutants at once")
    parser.add_argument("--list", action="store_true", help="list the mutants and exit")
    given = parser.parse_args()
    todo = chosen(given.only)
    if not todo:
        parser.error(f"no mutant or package matches {given.only!r}; --list shows them.")
    if given.list:
        for package, mutant in todo:
            print(f"{package:<9} {mutant.id:<28} {mutant.description}")
        return 0
    results: dict[str, dict[str, Any]] = {}
    at = commit()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(given.jobs) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for number in range(given.jobs):
            tree = Path(folder) / str(number)
            copy_tree(tree)
            trees.put(tree)

        def without_mutant(package: str) -> tuple[list[str], float]:
            tree = trees.get()
            try:
                code, failed, seconds = run_tests(tree, [TESTS[package]], [], given.timeout)
            finally:
                trees.put(tree)
            if code not in (_ALL_PASSED, _SOME_FAILED):
                raise SystemExit(f"the tests in {TESTS[package]} cannot be run: pytest ended with exit code {code}.")
            print(f"{package}: {len(failed)} tests fail without a mutant, {seconds:.0f} s", flush=True)
            return failed, seconds

        def with_mutant(package: str, mutant: Mutant) -> None:
            tree = trees.get()
            try:
                result = run_mutant(mutant, package, tree, plain[package][0], given.timeout)
            finally:
                trees.put(tree)
            results[mutant.id] = result
            print(f"{mutant.id}: {result['result']}, {result['seconds']:.0f} s", flush=True)

        packages = list(dict.fromkeys(package for package, _ in todo))
        plain = dict(zip(packages, pool.map(without_mutant, packages), strict=True))
        for done in [pool.submit(with_mutant, *each) for each in todo]:
            done.result()
    results = {mutant.id: results[mutant.id] for _, mutant in todo}
    show(results)
    if given.out:
        write_record(_record(results, plain, at, given.out), given.out)
    return int(any(result["result"] in ("not applicable", "error") for result in results.values()))


def _record(
    results: dict[str, dict[str, Any]], plain: dict[str, tuple[list[str], float]], at: str, out: Path
) -> dict[str, Any]:
    """What is written, with earlier results of mutants that were not run now; each tells its commit."""
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"mutants": {}, "without_mutant": {}}
    merged = earlier["mutants"] | {name: {**result, "commit": at} for name, result in results.items()}
    known = [mutant.id for _, mutant in chosen("*")]
    merged = {name: merged[name] for name in known if name in merged}
    without = {
        package: {"tests": TESTS[package], "seconds": round(seconds, 1), "failed": failed}
        for package, (failed, seconds) in plain.items()
    }
    return {
        "what": "mutants of the solver, the slimming and the energy fit, and the tests that kill them",
        "environment": machine(commit=at),
        "without_mutant": {**earlier["without_mutant"], **without},
        "counts": tally(merged),
        "mutants": merged,
    }


if __name__ == "__main__":
    sys.exit(main())
