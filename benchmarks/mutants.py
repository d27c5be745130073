"""Which faults the tests notice: small edits of the solver, the slimming and the energy fit, one after the other.

    PYTHONPATH=src python benchmarks/mutants.py --out results/mutants.json
    PYTHONPATH=src python benchmarks/mutants.py --only proximal

For each entry of `mutant_list.py` a copy of the tracked files gets the one edit, and the tests of the package run until
one fails: first the file of the same name, then the others. A mutant is killed if a test fails, survived if all pass,
and a timeout if the tests take longer than `--timeout`. Where the old text does not occur exactly once, the mutant is
not applicable: port it. Before that the tests run once without any edit; those that fail then are left out. Tests
marked slow run too, as in `make test`. The exit status is 1 if a mutant is not applicable or could not be run.

Two mutants run at once (more with `--jobs`), each with one thread, as forks of a process that has imported torch:
importing it takes longer than most mutants live. `--out` is written after each mutant, and results of others in it are kept. `--resume` goes on
after an interruption: mutants that have a result for the present commit are not run again.
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
CHANGED = ", changed"
PRELOADED = ("pytest", "torch", "scipy.optimize", "scipy.sparse.csgraph", "sklearn.datasets")
QUIET = "ignore:mypy_extensions.TypedDict:DeprecationWarning"
"""Hypothesis imports libcst, where it is installed, to report a failure; that import may raise this warning."""
_FAILED = re.compile(r"^(FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)  # a name may contain spaces
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
    """Writes a source file and removes its bytecode, which Python compares by time and size only."""
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

        code = int(pytest.main(["-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", "-W", QUIET, *words]))
        sys.stdout.flush()
    except BaseException:  # noqa: BLE001 - logged; the process ends
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


class Record:
    """Results by id, in memory and in a file."""

    def __init__(self, out: Path | None, at: str) -> None:
        self._out, self._at = out, at
        self._is_exact = not at.endswith(CHANGED)
        found = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.is_file() else {}
        self._plain: dict[str, dict[str, Any]] = found.get("without_mutant", {})
        self._mutants: dict[str, dict[str, Any]] = found.get("mutants", {})

    def has(self, mutant: Mutant) -> bool:
        """Whether a mutant has a result for this commit."""
        return self._is_exact and self._mutants.get(mutant.id, {}).get("commit") == self._at

    def has_plain(self, package: str) -> bool:
        """Whether the tests of a package ran at this commit without an edit."""
        return self._is_exact and self._plain.get(package, {}).get("commit") == self._at

    def left_out(self, package: str) -> list[str]:
        """Tests that fail without a mutant."""
        return list(self._plain[package]["failed"])

    def keep_plain(self, package: str, ended: Ended) -> None:
        """Takes in how the tests of a package end without an edit."""
        if ended.code not in (_ALL_PASSED, _SOME_FAILED):
            raise SystemExit(f"the tests in {TESTS[package]} cannot run: pytest ended with exit code {ended.code}.")
        about = {"tests": TESTS[package], "seconds": round(ended.seconds, 1), "failed": ended.failed}
        self._plain[package] = {**about, "commit": self._at}
        print(f"{package}: {len(ended.failed)} tests fail without a mutant, {ended.seconds:.0f} s", flush=True)
        self._write()

    def keep(self, package: str, mutant: Mutant, result: dict[str, Any]) -> None:
        """Takes in what became of a mutant."""
        about = {"package": package, "file": mutant.file, "description": mutant.description}
        self._mutants[mutant.id] = {**about, **result, "commit": self._at}
        print(f"{mutant.id}: {result['result']}, {result['seconds']:.0f} s", flush=True)
        self._write()

    def results(self, todo: list[tuple[str, Mutant]]) -> dict[str, dict[str, Any]]:
        """Of these mutants, in their order, as far as there are any."""
        return {mutant.id: self._mutants[mutant.id] for _, mutant in todo if mutant.id in self._mutants}

    def _write(self) -> None:
        if self._out is None:
            return
        mutants = self.results(chosen("*"))
        record = {
            "what": "mutants of the solver, the slimming and the energy fit, and the tests that kill them",
            "environment": machine(commit=self._at),
            "counts": tally(mutants),
            "without_mutant": self._plain,
            "mutants": mutants,
        }
        write_record(record, self._out)


def run_all(todo: list[tuple[str, Mutant]], record: Record, jobs: int, timeout: float) -> None:
    """The tests without an edit where there is no result for them yet, then all mutants."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        trees = [Path(folder) / str(number) for number in range(jobs)]
        for tree in trees:
            copy_tree(tree)
        plain = [package for package in dict.fromkeys(package for package, _ in todo) if not record.has_plain(package)]
        run_jobs([_plain_job(package, record) for package in plain], trees, timeout)
        found = [_mutant_job(package, mutant, trees[0], record) for package, mutant in todo]
        run_jobs([job for job in found if job is not None], trees, timeout)


def _plain_job(package: str, record: Record) -> Job:
    return Job(lambda tree: files_of(tree, package), [], None, lambda ended: record.keep_plain(package, ended))


def _mutant_job(package: str, mutant: Mutant, tree: Path, record: Record) -> Job | None:
    """None if it cannot be applied, which is kept."""
    file = tree / mutant.file
    count = file.read_text(encoding="utf-8").count(mutant.old) if file.is_file() else 0
    if count != 1:
        detail = f"the old text occurs {count} times" if file.is_file() else "there is no such file"
        record.keep(package, mutant, {"result": "not applicable", "detail": detail, "seconds": 0.0})
        return None
    return Job(
        lambda tree: files_of(tree, package, f"test_{file.stem}.py"),
        ["-x", *(f"--deselect={name}" for name in record.left_out(package))],
        mutant,
        lambda ended: record.keep(package, mutant, result_of(ended)),
    )


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
    return head + (CHANGED if status else "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", metavar="PATTERN", help="part of an id or package, or a glob")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds for one mutant (default: 900)")
    parser.add_argument("--jobs", type=int, default=AT_ONCE, help="mutants at once (default: 2)")
    parser.add_argument("--resume", action="store_true", help="keep results in --out that are of this commit")
    parser.add_argument("--list", action="store_true", help="list the mutants and exit")
    given = parser.parse_args()
    todo = chosen(given.only)
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}; give at least 1.")
    if not todo:
        parser.error(f"no mutant or package matches {given.only!r}; --list shows them.")
    if given.list:
        for package, mutant in todo:
            print(f"{package:<9} {mutant.id:<28} {mutant.description}")
        return 0
    for name in PRELOADED:
        importlib.import_module(name)
    record = Record(given.out, commit())
    run_all([each for each in todo if not (given.resume and record.has(each[1]))], record, given.jobs, given.timeout)
    results = record.results(todo)
    show(results)
    return int(any(result["result"] in ("not applicable", "error") for result in results.values()))


if __name__ == "__main__":
    sys.exit(main())
