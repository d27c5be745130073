"""Which networks are traced and pruned exactly, and how fast, compared with Torch-Pruning in the same processes.

    PYTHONPATH=src python3 benchmarks/trace_coverage.py --jobs 14 --out trace_coverage.json

Networks: every classification, segmentation, detection and video network of torchvision and two small networks of each
timm family in `timm_families.json`, with random weights, batch 1, on the CPU. Each runs in a process of its own with one thread,
a limit of CPU seconds for every stage of each tool, and a limit on memory. Both tools are warmed up on a tiny network first.
Where the compiled operators of torchvision do not load, `torchvision_ops.py` has those that its detectors need.

ECC: seconds of `trace_channels` without verification (the best of three where the first takes under a second) and of
the verification; groups, prunable groups, the fraction of parameters that is removed when each of them has width 1; the
most common reasons for the others; seconds of `with_widths` to 60 % of the widths (median of three). Then a random 40 %
of the units of every group is masked in one copy and removed from another, and the outputs are compared.
    exact              largest difference up to 1e-4 of the largest output, if need be in float64; where detectors sort
                       equal scores, with the order of the masked network, and the scores are compared too
    nothing to prune   every group is frozen
    refused            ECC said why it does not handle the network
    WRONG, crash, time limit, outputs not finite, cannot be built here

Torch-Pruning (see `coverage_torch_pruning.py`): seconds to build its graph and list all groups, and of a
step of its pruner to 40 % fewer channels (one-shot, magnitude); then the same comparison of masked and removed.
    exact, nothing pruned, crash, time limit, outputs not finite, forward fails after pruning
    differs by nature (norm)    a pruned group passes a norm over channels: no pruning of it can be exact
    differs, cause unknown   the network mixes channels elsewhere (softmax, attention, sums over channels)
    WRONG                       neither, so the wrong channels were pruned

Seconds are process time of one thread, so that other processes matter little; a trace that hits the time limit counts with
the limit. The file is written after every network; `--resume` continues it, and each row names its commit.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from importlib import metadata
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_HERE = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_HERE, os.environ.get("PYTHONPATH"))))  # the workers' server
for _threads in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_threads, "1")  # before torch and numpy are loaded, here and in the workers
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

from coverage_networks import DETECTION, KINDS, TIMM, VIDEO, Network, all_networks  # noqa: E402 - after the lines above
from coverage_worker import Settings, measure, stage_limit  # noqa: E402
from machine import machine, write_record  # noqa: E402 - as above
from torchvision_ops import define_missing_operators  # noqa: E402

Row = dict[str, Any]
TOOLS = ("ecc", "torch_pruning")
USABLE = ("exact", "differs by nature (norm)", "differs, cause unknown")
"""Results of pruning with which a user can go on; those that differ need fine-tuning."""
GRACE_SECONDS = 15  # after its time limit, before a worker that does not stop is killed
LARGE = 60_000_000
SHARED = 10  # wall seconds per CPU second at which a worker counts as stuck, on a machine that others use


@dataclass
class Job:
    """A worker and what it has sent so far."""

    network: Network
    process: multiprocessing.process.BaseProcess
    channel: Connection
    row: Row
    stage: tuple[str, str] = ("network", "start")
    since: float = field(default_factory=time.monotonic)

    def read(self) -> bool:
        """Take in one message; False when the worker has gone."""
        try:
            kind, content = self.channel.recv()
        except (EOFError, OSError):
            return False
        if kind == "stage":
            self._end_stage()
            self.stage = content
        elif kind == "network":
            self.row.update(content)
        elif kind == "unbuilt":
            self.row.update({tool: {"status": "cannot be built here", "detail": content} for tool in TOOLS})
        else:
            self.row[kind] = content
        return True

    def _end_stage(self) -> None:
        seconds = self.row.setdefault("wall_seconds", {})
        now, name = time.monotonic(), ": ".join(self.stage)
        seconds[name] = seconds.get(name, 0) + now - self.since
        self.since = now

    def close(self, tools: Iterable[str], timed_out: bool) -> Row:
        """The finished row; tools that did not answer get a status."""
        self.process.join()
        self._end_stage()
        self.channel.close()
        for tool in tools:
            if tool not in self.row:
                mine = self.stage[0] in (tool, "network")
                why = f"in {self.stage[1]}" if mine else f"{self.stage[0]} ended the process"
                code = self.process.exitcode
                self.row[tool] = (
                    {"status": "time limit", "detail": why}
                    if timed_out
                    else {"status": "crash", "detail": f"{why}: the process died (exit code {code})"}
                )
        return self.row


def run(networks: list[Network], settings: Settings, rows: dict[str, Row], args: argparse.Namespace) -> None:
    """Measure all networks, as many at a time as cores and memory allow, and start none after `--seconds`.

    One network of each timm family comes first, then the second ones, then detection and video, then the others; small ones
    first, and those of more than `LARGE` parameters last.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["coverage_preload"])  # what all workers import is imported once
    tools = TOOLS if settings.with_torch_pruning else TOOLS[:1]
    waiting = sorted(networks, key=_order)
    running: list[Job] = []
    start = time.monotonic()
    while waiting or running:
        if waiting and args.seconds is not None and time.monotonic() - start > args.seconds:
            args.environment["not_measured"] = sorted(network.key for network in waiting)
            waiting = []
        free = args.memory - sum(job.network.memory_gib for job in running)
        for network in list(waiting):
            if len(running) >= args.jobs or (network.memory_gib > free and running):
                break
            waiting.remove(network)
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(network, settings, theirs), daemon=True)
            process.start()
            theirs.close()
            row = {"kind": network.kind, "name": network.name, "family": network.family}
            row["commit"] = args.environment["commit"]
            running.append(Job(network, process, ours, row))
            free -= network.memory_gib
        wait([job.channel for job in running], timeout=1)
        for job in list(running):
            late = time.monotonic() - job.since > SHARED * stage_limit(job.stage[0], args.limit) + GRACE_SECONDS
            if late:
                job.process.kill()
            gone = late
            while not gone and job.channel.poll():
                gone = not job.read()
            if gone:
                running.remove(job)
                rows[job.network.key] = job.close(tools, late)
                save(args, rows)
                _tell(rows[job.network.key], len(waiting) + len(running))


def _order(network: Network) -> tuple[bool, int, int]:
    kinds = {TIMM: 0 if network.is_first else 1, DETECTION: 2, VIDEO: 2}
    return network.parameters > LARGE, kinds.get(network.kind, 3), network.parameters


def _tell(row: Row, left: int) -> None:
    parts = []
    for tool in TOOLS:
        found = row.get(tool, {})
        seconds = found.get("trace_seconds")
        text = f"{found.get('status', '-')}" + (f", {seconds:.2f} s" if seconds is not None else "")
        parts.append(f"{text:34.34}")
    print(f"{left:4d} left  {row['name']:36.36} {' | '.join(parts)}", flush=True)


# --- the file -----------------------------------------------------------------------------------------------------


def save(args: argparse.Namespace, rows: dict[str, Row]) -> None:
    """Write everything known so far; a kill leaves the file before or the file after."""
    ordered = sorted(rows.values(), key=lambda row: (KINDS.index(row["kind"]), row["name"]))
    data = {"environment": args.environment, "totals": totals(ordered), "rows": ordered}
    write_record(_plain(data), args.out)


def _plain(value: Any) -> Any:
    """JSON knows no infinity: such numbers are written as words. Four digits are enough."""
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def environment(args: argparse.Namespace) -> dict[str, Any]:
    libraries = {name: _version(name) for name in ("torchvision", "timm", "torch_pruning")}
    in_python = list(define_missing_operators())
    return machine(**libraries, jobs=args.jobs, limit_cpu_seconds=args.limit, operators_in_python=in_python)


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        try:
            return str(__import__(package).__version__)
        except (ImportError, AttributeError):
            return None


# --- totals and table ---------------------------------------------------------------------------------------------


def totals(rows: list[Row]) -> dict[str, Any]:
    """Counts per status, medians of seconds, medians of the ratios theirs / ours."""
    result: dict[str, Any] = {}
    for kind in (*KINDS, "all"):
        mine = [row for row in rows if kind in (row["kind"], "all")]
        result[kind] = {
            "networks": len(mine),
            **{tool: dict(Counter(row[tool]["status"] for row in mine if tool in row)) for tool in TOOLS},
            "median_removed_share": {t: _median([_removed(r, t) for r in mine]) for t in TOOLS},
            "median_trace_seconds": {t: _median([_get(r, t, "trace_seconds") for r in mine]) for t in TOOLS},
            "median_trace_ratio": _median([_ratio(r, "trace_seconds", "trace_seconds") for r in mine]),
            "median_cut_ratio": _median([_ratio(r, "step_seconds", "cut_seconds") for r in mine]),
            "median_removal_ratio": _median([_ratio(r, "remove_seconds", "cut_seconds") for r in mine]),
        }
    return result


def _get(row: Row, tool: str, key: str) -> float | None:
    found = row.get(tool, {})
    limit: float | None = found.get(f"{key}_at_least")  # what hit the time limit counts with the limit
    seconds: float | None = found.get(key, limit)
    return seconds


def _removed(row: Row, tool: str) -> float | None:
    """Share of the parameters that pruning 40 % of the channels removes; 0 where a tool fails."""
    found = row.get(tool, {})
    if found.get("status") == "cannot be built here":
        return None
    left = found.get("parameters_left") if found.get("status") in USABLE else None
    return 0.0 if left is None else 1 - left / row["parameters"]


def _ratio(row: Row, theirs: str, ours: str) -> float | None:
    over, under = _get(row, "torch_pruning", theirs), _get(row, "ecc", ours)
    return over / under if over and under else None


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def print_table(rows: list[Row], missing: list[str]) -> None:
    found = totals(rows)
    print(f"\n{'':45}" + "".join(f"{kind.removeprefix('torchvision '):>16}" for kind in found))
    _print_line("networks", [kind["networks"] for kind in found.values()])
    for tool in TOOLS:
        for status in dict.fromkeys(status for kind in found.values() for status in kind[tool]):
            _print_line(f"{tool}: {status}", [kind[tool].get(status, 0) for kind in found.values()])
    for tool in TOOLS:
        _print_line(f"{tool}: median removed share", [k["median_removed_share"][tool] for k in found.values()])
    for tool in TOOLS:
        _print_line(f"{tool}: median trace seconds", [k["median_trace_seconds"][tool] for k in found.values()])
    for key, title in (
        ("median_trace_ratio", "trace, theirs / ours, median"),
        ("median_cut_ratio", "cut, their step / ours, median"),
        ("median_removal_ratio", "cut, their removal alone / ours, median"),
    ):
        _print_line(title, [kind[key] for kind in found.values()])
    if missing:
        print(f"not in this timm: {', '.join(missing)}")
    for row in rows:
        ours = row.get("ecc", {})
        if ours.get("status") != "exact":
            print(f"not exact with ecc: {row['name']}: {ours.get('status')} {ours.get('detail', '')}")


def _print_line(title: str, values: Iterable[float | None]) -> None:
    print(f"{title:45}" + "".join(f"{_text(value):>16}" for value in values))


def _text(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


# --- command line -------------------------------------------------------------------------------------------------


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--vendor", help="folder that holds the package torch_pruning")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="workers")
    parser.add_argument(
        "--limit",
        type=float,
        default=60,
        help="CPU seconds for each stage of each tool",
    )
    parser.add_argument("--memory", type=float, default=_memory_gib(), help="GiB for all workers together")
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names, such as 'resnet*' or 'timm/*'")
    parser.add_argument(
        "--largest", type=float, default=float("inf"), help="millions of parameters; larger ones are left out"
    )
    parser.add_argument("--seconds", type=float, help="start no network after this time")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the file has")
    parser.add_argument("--again", action="store_true", help="measure the networks of --only again")
    parser.add_argument("--verbose", action="store_true", help="show what the libraries print")
    return parser.parse_args()


def _memory_gib() -> float:
    """Four fifths of what this machine, or the container it pretends to be, has."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with suppress(OSError, ValueError):  # no such file, or the word max
            sizes.append(int(Path(file).read_text(encoding="ascii")))
    return 0.8 * min(sizes) / 2**30


def main() -> None:
    args = arguments()
    if args.vendor:
        args.vendor = str(Path(args.vendor).resolve())
        sys.path.append(args.vendor)
    args.environment = environment(args)
    with_torch_pruning = args.environment["torch_pruning"] is not None
    if not with_torch_pruning:
        print("torch_pruning is not here (see --vendor): only ecc is measured", flush=True)
    networks, missing = all_networks()
    args.environment["not_in_this_timm"] = missing
    rows: dict[str, Row] = {}
    if args.resume and args.out.exists():
        before = json.loads(args.out.read_text(encoding="utf-8"))["rows"]
        known = {(network.kind, network.name): network.key for network in networks}
        rows = {known[row["kind"], row["name"]]: row for row in before if (row["kind"], row["name"]) in known}
    wanted = [n for n in networks if any(fnmatch(n.name, p) or fnmatch(n.key, p) for p in args.only)]
    too_large = [n for n in wanted if n.parameters > args.largest * 1e6]
    args.environment["too_large"] = sorted(n.name for n in too_large)
    wanted = [n for n in wanted if n not in too_large and (args.again or n.key not in rows)]
    settings = Settings(0.4, args.limit, args.vendor, with_torch_pruning, args.verbose)
    run(wanted, settings, rows, args)
    save(args, rows)
    print_table(sorted(rows.values(), key=lambda row: (KINDS.index(row["kind"]), row["name"])), missing)


if __name__ == "__main__":
    main()
