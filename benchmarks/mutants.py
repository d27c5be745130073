"""Which faults the tests notice: small edits of the solver, the slimming and the energy fit, one after the other.

    PYTHONPATH=src python benchmarks/mutants.py --out results/mutants.json
    PYTHONPATH=src python benchmarks/mutants.py --only proximal

For each entry of `mutant_list.py` a copy of the tracked files gets the one edit, and the tests of the package run until
one fails: first the file of the same name, then the others. A mutant is killed if a test fails, survived if all pass,
and a timeout if the tests take longer than `--timeout`. Where the old text does not occur exactly once, the mutant is
not applicable: port it. Before that the tests run once without any edit; those that fail then are left out. Tests
marked slow run too, as in `make test`. The exit status is 1 if a mutant is not applicable or could not be run.

Two mutants run at once, each with one thread, as forks of a process that has imported torch: importing it takes longer
than most mutants live. Results of earlier runs in `--out` are kept for mutants that `--only` leaves out.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from machine import machine, write_record
from mutant_list import MUTANTS, Mutant

ROOT = Path(__file__).resolve().parents[1]
TESTS = {"solver": "tests/methods/ecc", "slimming": "tests/graph", "energy": "tests/energy"}
"""The folder of tests for each list of mutants."""
AT_ONCE = 2
PRELOADED = ("pytest", "torch", "scipy.optimize", "scipy.sparse.csgraph", "sklearn.datasets")
_FAILED = re.compile(r"^(FAILED|ERROR) (\S+)", re.MULTILINE)
_ALL_PASSED, _SOME_FAILED, _INTERRUPTED = 0, 1, 2  # exit codes of pytest; the last one is an error while collecting


class Ended(NamedTuple):
    """How pytest ended."""

    code: int | None
    """None for a timeout."""
    failed: list[str]
    seconds: float


class Job(NamedTuple):
    """One call of pytest, and what is done with its end."""

    files: Callable[[Path], list[str]]
    options: list[str]
    mutant: Mutant | None
    done: Callable[[Ended], None]


def copy_tree(target: Path) -> None:
    """The tracked files of the working tree, as they are now."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def files_of(tree: Path, package: str, first: str = "") -> list[str]:
    """The test files of a package, one of them first if it exists."""
    names = sorted(str(file.relative_to(tree)) for file in (tree / TESTS[package]).rglob("test_*.py"))
    return sorted(names, key=lambda name: name != f"{TESTS[package]}/{first}")


@contextmanager
def edited(tree: Path, mutant: Mutant | None) -> Iterator[None]:
    """A tree with one edit, for as long as the block runs."""
    if mutant is None:
        yield
        return
    file = tree / mutant.file
    text = file.read_text(encoding="utf-8")
    _write(file, text.replace(mutant.old, mutant.new))
    try:
        yield
    finally:
        _write(file, text)


def _write(file: Path, text: str) -> None:
    """Writes a source file and removes its bytecode, which is told apart by time and size alone."""
    file.write_text(text, encoding="utf-8")
    for old in (file.parent / "__pycache__").glob(f"{file.stem}.*.pyc"):
        old.unlink()


def run_jobs(jobs: list[Job], trees: list[Path], timeout: float) -> None:
    """Runs all jobs, one at a time in each tree."""
    waiting, free = list(jobs), list(trees)
    running: dict[int, tuple[Job, Path, float, Any]] = {}
    while waiting or running:
        while waiting and free:
            job, tree = waiting.pop(0), free.pop()
            edit = edited(tree, job.mutant)
            edit.__enter__()
            running[_fork(tree, [*job.options, *job.files(tree)])] = (job, tree, time.monotonic(), edit)
        time.sleep(0.1)
        for pid, (job, tree, begin, edit) in list(running.items()):
            seconds = time.monotonic() - begin
            ended, status = os.waitpid(pid, os.WNOHANG)
            code: int | None = os.waitstatus_to_exitcode(status) if ended else None
            if not ended:
                if seconds <= timeout:
                    continue
                os.killpg(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            del running[pid]
            edit.__exit__(None, None, None)
            free.append(tree)
            output = _log(tree).read_text(encoding="utf-8", errors="replace")
            job.done(Ended(code, [name for _, name in _FAILED.findall(output)], seconds))


def _log(tree: Path) -> Path:
    return tree.with_suffix(".log")


def _fork(tree: Path, words: list[str]) -> int:
    """Starts pytest in a tree; the number of the process."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    code = 3  # what pytest has for an error of its own
    try:
        os.setsid()  # so that what tests start ends with them
        out = os.open(_log(tree), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(out, stream)
        os.chdir(tree)
        os.environ["PYTHONPATH"] = str(tree / "src")
        sys.path[:0] = [str(tree / "src")]
        for name in [name for name in sys.modules if name.partition(".")[0] == "ecc"]:
            del sys.modules[name]
        import pytest

        code = int(pytest.main(["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *words]))
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - told in the log, and the process ends
        traceback.print_exc()
    finally:
        os._exit(code)


def chosen(pattern: str) -> list[tuple[str, Mutant]]:
    """Mutants whose id or package contains the pattern, or matches it as a glob."""
    return [
        (package, mutant)
        for package, mutants in MUTANTS.items()
        for mutant in mutants
        if any(pattern in name or fnmatch.fnmatch(name, pattern) for name in (mutant.id, package))
    ]


def result_of(ended: Ended) -> dict[str, Any]:
    """What became of a mutant."""
    seconds = {"seconds": round(ended.seconds, 1)}
    if ended.code is None:
        return {"result": "timeout", **seconds}
    if ended.code == _ALL_PASSED:
        return {"result": "survived", **seconds}
    if ended.code in (_SOME_FAILED, _INTERRUPTED) and ended.failed:
        return {"result": "killed", "killed_by": ended.failed[0], **seconds}
    return {"result": "error", "detail": f"pytest ended with exit code {ended.code}", **seconds}


def check_without_mutants(packages: list[str], trees: list[Path], timeout: float) -> dict[str, Ended]:
    """How the tests end without any edit."""
    plain: dict[str, Ended] = {}

    def job(package: str) -> Job:
        def done(ended: Ended) -> None:
            if ended.code not in (_ALL_PASSED, _SOME_FAILED):
                raise SystemExit(f"the tests in {TESTS[package]} cannot run: pytest ended with exit code {ended.code}.")
            print(f"{package}: {len(ended.failed)} tests fail without a mutant, {ended.seconds:.0f} s", flush=True)
            plain[package] = ended

        return Job(lambda tree: files_of(tree, package), [], None, done)

    run_jobs([job(package) for package in packages], trees, timeout)
    return plain


def run_mutants(
    todo: list[tuple[str, Mutant]], plain: dict[str, Ended], trees: list[Path], timeout: float
) -> dict[str, dict[str, Any]]:
    """What became of each mutant, by id."""
    results: dict[str, dict[str, Any]] = {}

    def keep(package: str, mutant: Mutant, result: dict[str, Any]) -> None:
        about = {"package": package, "file": mutant.file, "description": mutant.description}
        results[mutant.id] = {**about, **result}
        print(f"{mutant.id}: {result['result']}, {result['seconds']:.0f} s", flush=True)

    jobs = []
    for package, mutant in todo:
        file = trees[0] / mutant.file
        count = file.read_text(encoding="utf-8").count(mutant.old) if file.is_file() else 0
        if count != 1:
            detail = f"the old text occurs {count} times" if file.is_file() else "there is no such file"
            keep(package, mutant, {"result": "not applicable", "detail": detail, "seconds": 0.0})
            continue

        def done(ended: Ended, package: str = package, mutant: Mutant = mutant) -> None:
            keep(package, mutant, result_of(ended))

        def files(tree: Path, package: str = package, first: str = f"test_{file.stem}.py") -> list[str]:
            return files_of(tree, package, first)

        jobs.append(Job(files, ["-x", *(f"--deselect={name}" for name in plain[package].failed)], mutant, done))
    run_jobs(jobs, trees, timeout)
    return {mutant.id: results[mutant.id] for _, mutant in todo}


def tally(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, int]]:
    """How many mutants of each package ended in which way, and of all."""
    counts = {name: Counter(r["result"] for r in results.values() if r["package"] == name) for name in TESTS}
    return {name: dict(count) for name, count in {**counts, "all": sum(counts.values(), Counter())}.items()}


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
    for name in PRELOADED:
        importlib.import_module(name)
    at = commit()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(given.jobs)]
        for tree in trees:
            copy_tree(tree)
        plain = check_without_mutants(list(dict.fromkeys(package for package, _ in todo)), trees, given.timeout)
        results = run_mutants(todo, plain, trees, given.timeout)
    show(results)
    if given.out:
        write_record(record(results, plain, at, given.out), given.out)
    return int(any(result["result"] in ("not applicable", "error") for result in results.values()))


def record(results: dict[str, dict[str, Any]], plain: dict[str, Ended], at: str, out: Path) -> dict[str, Any]:
    """What is written, with earlier results of mutants that were not run now; each tells its commit."""
    earlier = json.loads(out.read_text(encoding="utf-8")) if out.is_file() else {"mutants": {}, "without_mutant": {}}
    merged = earlier["mutants"] | {name: {**result, "commit": at} for name, result in results.items()}
    merged = {mutant.id: merged[mutant.id] for _, mutant in chosen("*") if mutant.id in merged}
    without = {
        package: {"tests": TESTS[package], "seconds": round(ended.seconds, 1), "failed": ended.failed}
        for package, ended in plain.items()
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
