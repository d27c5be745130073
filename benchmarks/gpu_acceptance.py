"""Everything that must hold on a CUDA machine, in one command of at most eight minutes on an H200: `make gpu`.

    PYTHONPATH=src python3 benchmarks/gpu_acceptance.py --out results/gpu_acceptance.json
    PYTHONPATH=src python3 benchmarks/gpu_acceptance.py --only settings     # one check; --list names them

Each check is a process of its own. First come the tests, of which some measure energy, alone; then the command line,
which measures energy too, beside work on the CPU; then all others at the same time. The file holds the commit, the
device, versions, and the numbers of each check, and is written after each check. Exit code: 0 if all checks passed,
1 if one failed, 2 if there is no CUDA device.

Packages that this Python lacks are taken from `--vendor` (see `make vendor`); installed ones come first.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENDOR = ROOT / "vendor" / "wheels"
LOGS = ROOT / "build" / "gpu"
TOTAL_LIMIT = 440.0  # seconds; a check that is not finished by then is stopped and has failed
MORE_PROCESSES = 4  # than CPU cores: each waits for the GPU, for files or for others now and then
LIBRARIES = ("torchvision", "timm", "numpy", "scipy", "accelerate", "pytest", "typer", "nvidia-ml-py")

Record = dict[str, Any]


@dataclass
class _Running:
    """A check at work."""

    check: Any
    process: subprocess.Popen[bytes]
    result: Path
    log: Path
    since: float

    def finished(self, deadline: float) -> Record | None:
        """Its record once it has ended or its time is over; None before."""
        late = time.monotonic() > min(self.since + self.check.limit_seconds, deadline)
        if self.process.poll() is None and not late:
            return None
        self.stop()
        seconds = round(time.monotonic() - self.since, 1)
        base = {"title": self.check.title, "seconds": seconds}
        if self.result.exists():
            found: Record = json.loads(self.result.read_text(encoding="utf-8"))
            return base | found
        tail = self.log.read_text(encoding="utf-8", errors="replace").strip()[-1500:]
        code = self.process.returncode
        why = f"stopped after {seconds:.0f} s" if late else f"the process died (exit code {code})"
        return base | failure(why, tail)

    def stop(self) -> None:
        """End the process and those that it started: terminate first, then kill."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(10)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@dataclass
class Suite:
    """Checks, and where they run."""

    checks: Sequence[Any]
    device: str
    small: bool = False
    module: str = "gpu_checks"
    """Where the processes of the checks find them."""
    limit_seconds: float = TOTAL_LIMIT
    on_record: Callable[[dict[str, Record]], None] = lambda _: None
    """Called with all records after each check."""

    def run(self) -> dict[str, Record]:
        """Run each check in its own process, and return their records in the order of the checks."""
        deadline = time.monotonic() + self.limit_seconds
        LOGS.mkdir(parents=True, exist_ok=True)
        found: dict[str, Record] = {}
        capacity = (os.cpu_count() or 1) + MORE_PROCESSES
        with tempfile.TemporaryDirectory(prefix="ecc-gpu-") as folder:
            for phase in sorted({check.phase for check in self.checks}):
                chosen = [check for check in self.checks if check.phase == phase]
                self._run_together(chosen, capacity, Path(folder), deadline, found)
        return found

    def _run_together(
        self, waiting: list[Any], capacity: int, folder: Path, deadline: float, found: dict[str, Record]
    ) -> None:
        """Run checks at the same time while their processes fit into `capacity`."""
        running: list[_Running] = []
        try:
            while waiting or running:
                used = sum(one.check.processes for one in running)
                for check in list(waiting):
                    if not running or used + check.processes <= capacity:
                        waiting.remove(check)
                        running.append(self._start(check, folder))
                        used += check.processes
                for one in list(running):
                    record = one.finished(deadline)
                    if record is not None:
                        running.remove(one)
                        found[one.check.name] = record
                        _show(one.check.name, record)
                        self.on_record({check.name: found[check.name] for check in self.checks if check.name in found})
                time.sleep(0.1)
        finally:
            for one in running:
                one.stop()

    def _start(self, check: Any, folder: Path) -> _Running:
        own = folder / check.name
        own.mkdir()
        result, log = folder / f"{check.name}.json", LOGS / f"{check.name}.log"
        words = ["--worker", check.name, "--result", str(result), "--folder", str(own), "--device", self.device]
        words += ["--checks", self.module, *(["--small"] if self.small else [])]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                [sys.executable, str(Path(__file__).resolve()), *words],
                cwd=own,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return _Running(check, process, result, log, time.monotonic())


def failure(summary: str, error: str) -> Record:
    """The record of a check that did not report."""
    return {"passed": False, "summary": summary, "numbers": {}, "error": error}


def work(args: argparse.Namespace, checks: Sequence[Any]) -> None:
    """Run one check in this process, and write its outcome."""
    import traceback

    from gpu_checks.common import Context, end_with_parent

    check = next(check for check in checks if check.name == args.worker)
    end_with_parent(signal.SIGTERM)
    try:
        outcome = asdict(check.run(Context(args.device, args.folder, args.small)))
    except Exception as error:  # noqa: BLE001 - recorded as a failure of the check
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        outcome = failure(f"{type(error).__name__}: {first}"[:300], str(error)[-1500:])
    partial = args.result.with_suffix(".partial")
    partial.write_text(json.dumps(_plain(outcome)), encoding="utf-8")
    partial.rename(args.result)


def _plain(value: Any) -> Any:
    """Values that JSON has: five digits of numbers; infinity and NaN become text."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if abs(value) < float("inf") else str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


def _show(name: str, record: Record) -> None:
    print(
        f"{'passed' if record['passed'] else 'FAILED'}  {name:14} {record['seconds']:6.1f} s  {record['summary']}",
        flush=True,
    )
    if error := record.get("error"):
        print("    " + "\n    ".join(error.splitlines()[-12:]), flush=True)


# ---------------------------------------------------------------- environment


def environment(device: str) -> Record:
    """Commit, code, device and versions."""
    import torch
    from machine import machine, source_digest

    facts: Record = {}
    if device == "cuda":
        facts |= {
            "gpu": torch.cuda.get_device_name(),
            "gpu_memory_gib": round(torch.cuda.get_device_properties(0).total_memory / 2**30),
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "driver": _driver(),
        }
    facts["source"] = {name: source_digest(name) for name in ("graph", "measure", "training", "methods")}
    return machine(**facts, **{name: _version(name) for name in LIBRARIES})


def _driver() -> str:
    try:
        import pynvml

        pynvml.nvmlInit()
        return str(pynvml.nvmlSystemGetDriverVersion())
    except Exception as error:  # noqa: BLE001 - a fact that is only noted
        return f"unknown ({type(error).__name__})"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def unpack_missing(vendor: Path, into: Path) -> list[str]:
    """Unpack those wheels of `vendor` whose package this Python lacks into the folder `into`; their names.

    A folder in PYTHONPATH comes before the installed packages, so it may only hold what is not installed.
    """
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    missing = [wheel for wheel in sorted(vendor.glob("*.whl")) if _version(wheel.name.partition("-")[0]) is None]
    for wheel in missing:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(into)
    return [wheel.name.partition("-")[0] for wheel in missing]


# ---------------------------------------------------------------- command line


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file to write; results/gpu_acceptance.json is the committed one")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="checks to run; all by default")
    parser.add_argument("--keep", action="store_true", help="with --only: keep the other checks of the file")
    parser.add_argument("--list", action="store_true", help="list the checks")
    parser.add_argument(
        "--changed", action="store_true", help="list the packages that changed since the file was written"
    )
    parser.add_argument("--vendor", type=Path, default=VENDOR, help="folder of wheels for a Python that lacks them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"), help=argparse.SUPPRESS)
    parser.add_argument("--small", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--checks", default="gpu_checks", help=argparse.SUPPRESS)  # the module that has CHECKS
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Run the requested checks and return the exit code."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that what was started is ended on the way out
    args = arguments(words)
    if args.worker:
        work(args, import_module(args.checks).CHECKS)
        return 0
    if args.changed:
        return report_changes(args.out or ROOT / "results" / "gpu_acceptance.json")
    import torch

    if args.device == "cuda" and not args.list and not torch.cuda.is_available():
        print("make gpu needs a CUDA device, and torch finds none here; run it on a machine with one.", file=sys.stderr)
        return 2
    unpacked = prepare_path(args.vendor)
    checks = import_module(args.checks).CHECKS
    if args.list:
        print("\n".join(f"{check.name:14} {check.title}" for check in checks))
        return 0
    if unknown := sorted(set(args.only or ()) - {check.name for check in checks}):
        names = ", ".join(check.name for check in checks)
        print(f"--only {' '.join(unknown)}: no such check; there are {names}.", file=sys.stderr)
        return 2
    wanted = set(args.only or ()) | {check.needs for check in checks if check.name in (args.only or ())}
    chosen = [check for check in checks if not args.only or check.name in wanted]
    return accept(chosen, args, unpacked)


def accept(checks: Sequence[Any], args: argparse.Namespace, unpacked: Sequence[str] = ()) -> int:
    """Run the checks, write the file, and return the exit code."""
    from machine import write_record

    started = time.monotonic()
    facts = environment(args.device)
    print(f"{facts.get('gpu', args.device)}, torch {facts['torch']}, commit {facts['commit']}", flush=True)
    if unpacked:
        print(f"from {args.vendor}: {', '.join(unpacked)}", flush=True)

    earlier = earlier_checks(args.out) if args.keep else {}

    def keep(found: dict[str, Record]) -> None:
        """Write what is known after each check, so that nothing is lost when this is stopped."""
        passed = len(found) == len(checks) and all(one["passed"] for one in {**earlier, **found}.values())
        seconds = round(time.monotonic() - started, 1)
        every = {**earlier, **{name: {**one, "commit": facts["commit"]} for name, one in found.items()}}
        record = {"environment": facts, "passed": passed, "seconds": seconds, "checks": every}
        if args.out is not None:
            write_record(record, args.out)

    found = Suite(checks, args.device, args.small, args.checks, on_record=keep).run()
    count = sum(one["passed"] for one in found.values())
    print(f"{count} of {len(checks)} checks passed in {time.monotonic() - started:.0f} s", flush=True)
    return 0 if count == len(checks) else 1


def report_changes(file: Path) -> int:
    """Say which packages differ from those that a record was made with; 1 if there are any."""
    from machine import source_digest

    facts = json.loads(file.read_text(encoding="utf-8"))["environment"]
    changed = [name for name, digest in facts["source"].items() if source_digest(name) != digest]
    since = f"since the record of {facts['date']} (commit {facts['commit']})"
    print(f"changed {since}: {', '.join(changed)}" if changed else f"no package changed {since}")
    return 1 if changed else 0


def earlier_checks(file: Path | None) -> dict[str, Record]:
    """Checks of an earlier run, each with its commit."""
    if file is None or not file.exists():
        return {}
    before = json.loads(file.read_text(encoding="utf-8"))
    commit = before["environment"]["commit"]
    return {name: {"commit": commit, **one} for name, one in before["checks"].items()}


def prepare_path(vendor: Path) -> list[str]:
    """Let this process and those it starts import the package and what `vendor` adds; what it added."""
    folders = [str(ROOT / "src")]
    unpacked: list[str] = []
    if vendor.is_dir():
        unpacked = unpack_missing(vendor, LOGS / "site")
        folders.append(str(LOGS / "site"))
    before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([*folders, *filter(None, before)]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # many processes run at the same time
    sys.path[1:1] = [folder for folder in folders if folder not in sys.path]
    return unpacked


if __name__ == "__main__":
    sys.exit(main())
