"""Channel groups of public networks: on CUDA with default settings they must be those found on the CPU.

Networks: the classification and segmentation networks of torchvision with at most 100 M parameters, and 20 timm networks
of the fewest parameters, with random weights; `trace_coverage.py` has more of them, on the CPU. Each is traced and verified on the CPU with
one thread, and then on CUDA, by several processes at the same time. Classification networks are also timed: those
slower on CUDA are timed again on both devices by fewer processes, and the least of two times counts.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from multiprocessing.connection import Connection, wait
from typing import Any

from coverage_networks import CLASSIFICATION, SEGMENTATION, TIMM, Network, all_networks

from gpu_checks.common import ROOT, Context, Outcome
from gpu_checks.tracing_worker import READY, Row, compared, serve

FAMILIES = 20
MAX_PARAMETERS = 100_000_000
CPU_PROCESSES, CUDA_PROCESSES = 12, 13
NETWORK_LIMIT = 120.0  # seconds for one network on one device
CPU_LIMIT, CUDA_LIMIT = 150.0, 120.0  # seconds for all networks; what is not finished by then is a failure
AGAIN_PROCESSES, AGAIN_REPEATS, AGAIN_LIMIT = 6, 2, 40.0  # to time again what was slower on CUDA
TIMING_TOLERANCE = 1.1  # repeated timings of one network on one device differ by this much
TINY = ("resnet18", "squeezenet1_1", "timm/mobileone_s1", "ssdlite320*", "lraspp*")

Job = tuple[Network, str]


def trace_on_cpu(context: Context) -> Outcome:
    """Passed when every network is traced on the CPU; the rows are kept for `trace_networks`."""
    networks = chosen_networks(context)
    rows = trace_all([(one, "cpu") for one in networks], 2 if context.small else CPU_PROCESSES, CPU_LIMIT)
    kept: list[Row] = [{"key": key} | row for (key, _), row in rows.items()]
    context.shared("groups_on_cpu.json").write_text(json.dumps(kept), encoding="utf-8")
    failed = {row["name"]: row["error"] for row in kept if "error" in row}
    seconds = sum(row.get("seconds", 0.0) for row in kept)
    summary = f"{len(kept) - len(failed)} of {len(kept)} networks traced and verified in {seconds:.0f} s of one thread"
    return Outcome(bool(kept) and not failed, summary, {"networks": len(kept), "seconds": seconds, "failed": failed})


def trace_networks(context: Context) -> Outcome:
    """Passed when all groups agree, and all classification networks together take no longer on CUDA than on the CPU."""
    networks, device = chosen_networks(context), context.device
    kept = json.loads(context.shared("groups_on_cpu.json").read_text(encoding="utf-8"))
    on_cpu = {row.pop("key"): row for row in kept}
    on_cuda = trace_all([(one, device) for one in networks], 2 if context.small else CUDA_PROCESSES, CUDA_LIMIT)
    rows = {one.key: compared(on_cpu[one.key], on_cuda[one.key, device]) for one in networks}
    slower = [one for one in networks if one.kind == CLASSIFICATION and _ratio(rows[one.key]) > 1]
    jobs = [(one, place) for one in slower for place in ("cpu", device)]
    again = trace_all(jobs, AGAIN_PROCESSES, AGAIN_LIMIT, AGAIN_REPEATS) if jobs else {}
    for one in slower:
        cpu, cuda = again[one.key, "cpu"].get("seconds"), again[one.key, device].get("seconds")
        if cpu and cuda:
            row = rows[one.key]
            before = {name: row[name] for name in ("cpu_seconds", "cuda_seconds")}
            row.update(first_seconds=before, cpu_seconds=cpu, cuda_seconds=cuda)
    outcome = judge(list(rows.values()))
    outcome.passed &= context.small or outcome.numbers["timm_families"] == FAMILIES
    return outcome


def chosen_networks(context: Context) -> list[Network]:
    """The networks of this check, the largest first."""
    known, _ = all_networks()
    families = sorted((one for one in known if one.kind == TIMM), key=lambda one: one.parameters)[:FAMILIES]
    known = [one for one in known if one.kind in (CLASSIFICATION, SEGMENTATION) and one.parameters <= MAX_PARAMETERS]
    found = known + families
    if context.small:
        found = [one for one in found if any(fnmatch(one.name, p) or fnmatch(one.key, p) for p in TINY)]
    return sorted(found, key=lambda network: network.parameters, reverse=True)


def judge(rows: Sequence[Row]) -> Outcome:
    """The numbers of all rows, and whether they are as they must be."""
    different = [row for row in rows if row["status"] != "same"]
    counts = {kind: dict(Counter(row["status"] for row in rows if row["kind"] == kind)) for kind in _kinds(rows)}
    timed = [row for row in rows if row["kind"] == CLASSIFICATION and "cuda_seconds" in row and "cpu_seconds" in row]
    cpu, cuda = (sum(row[f"{name}_seconds"] for row in timed) for name in ("cpu", "cuda"))
    committed = committed_seconds()
    before = {row["name"]: committed[row["name"]] for row in timed if row["name"] in committed}
    slower = [row["name"] for row in timed if row["cuda_seconds"] > TIMING_TOLERANCE * row["cpu_seconds"]]
    families = sum(row["kind"] == TIMM for row in rows)
    summary = f"{len(rows) - len(different)} of {len(rows)} networks have the same groups"
    if timed:
        summary += f"; {len(timed)} classifiers in {cuda:.0f} s on CUDA, {cpu:.0f} s on the CPU, {len(slower)} slower"
    return Outcome(
        bool(rows) and not different and cuda <= cpu,  # the slower ones, small ones bound by launches, are listed
        summary,
        {
            "networks": len(rows),
            "timm_families": families,
            "same": len(rows) - len(different),
            "status": counts,
            "prunable_groups": sum(row.get("prunable", 0) for row in rows),
            "groups": sum(row.get("groups", 0) for row in rows),
            "classifiers": {
                "networks": len(timed),
                "cpu_seconds": cpu,
                "cuda_seconds": cuda,
                "slower_on_cuda": slower,
                "tolerance": TIMING_TOLERANCE,
                "cpu_threads": 1,
                "committed": {
                    "networks": len(before),
                    "cpu_seconds": sum(before.values()),
                    "cuda_slower": [row["name"] for row in timed if row["cuda_seconds"] > before.get(row["name"], 1e9)],
                },
            },
            "rows": sorted(rows, key=lambda row: (row["kind"], row["name"])),
        },
    )


def committed_seconds() -> dict[str, float]:
    """Seconds of trace and verification in results/trace_coverage.json by classification network: CPU, one thread."""
    file = ROOT / "results" / "trace_coverage.json"
    if not file.exists():
        return {}
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    found = {row["name"]: row["ecc"] for row in rows if row["kind"] == CLASSIFICATION}
    return {
        name: one["trace_seconds"] + one["verify_seconds"]
        for name, one in found.items()
        if "trace_seconds" in one and "verify_seconds" in one
    }


def _kinds(rows: Sequence[Row]) -> list[str]:
    return sorted({row["kind"] for row in rows})


def _ratio(row: Row) -> float:
    return row["cuda_seconds"] / row["cpu_seconds"] if "cuda_seconds" in row and "cpu_seconds" in row else 0.0


# ---------------------------------------------------------------- worker processes


@dataclass
class _Worker:
    """A process that traces one network after another."""

    places: Sequence[str]
    repeats: int
    process: Any = None
    channel: Connection | None = None
    job: Job | None = None
    since: float = field(default_factory=time.monotonic)

    def start(self, job: Job) -> None:
        if self.process is None or not self.process.is_alive():
            spawn = multiprocessing.get_context("spawn")
            self.channel, theirs = spawn.Pipe()
            arguments = (theirs, self.places, self.repeats)
            self.process = spawn.Process(target=serve, args=arguments, daemon=True)
            self.process.start()
            theirs.close()
        self.job, self.since = job, time.monotonic()
        assert self.channel is not None
        self.channel.send(job)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = self.job = None

    def received(self) -> Row | None:
        """The row that the process sent, or None when it has only started."""
        assert self.job is not None
        assert self.channel is not None
        try:
            found: Row | str = self.channel.recv()
        except (EOFError, OSError):
            self.process.join(10)
            return _failed(self.job[0], f"the process died (exit code {self.process.exitcode})")
        if isinstance(found, str):
            assert found == READY
            self.since = time.monotonic()
            return None
        return found


def trace_all(
    jobs: Sequence[Job], processes: int, limit_seconds: float, repeats: int = 1
) -> dict[tuple[str, str], Row]:
    """One row for each network and place, whatever happens to it."""
    rows: dict[tuple[str, str], Row] = {}
    waiting = list(jobs)
    places = sorted({place for _, place in jobs})
    workers = [_Worker(places, repeats) for _ in range(processes)]
    deadline = time.monotonic() + limit_seconds
    memory = 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    while (waiting or any(worker.job for worker in workers)) and time.monotonic() < deadline:
        _hand_out(waiting, workers, memory)
        busy = [worker for worker in workers if worker.job is not None]
        ready = wait([worker.channel for worker in busy if worker.channel], timeout=0.5)
        for worker in busy:
            assert worker.job is not None
            network, place = worker.job
            if worker.channel in ready:
                found = worker.received()
            elif time.monotonic() - worker.since > NETWORK_LIMIT:
                found = _failed(network, f"took more than {NETWORK_LIMIT:.0f} s")
                worker.stop()
            else:
                found = None
            if found is not None:
                rows[network.key, place] = found
                worker.job = None
                text = found.get("error", f"{found.get('seconds', 0):.1f} s")
                print(f"{len(rows):4d}/{len(jobs)} {place:5} {network.key:45.45} {text}", flush=True)
    for worker in workers:
        worker.stop()
    for network, place in jobs:
        late = f"not finished within {limit_seconds:.0f} s for all networks"
        rows.setdefault((network.key, place), _failed(network, late))
    return rows


def _hand_out(waiting: list[Job], workers: Sequence[_Worker], memory_gib: float) -> None:
    """Give each idle process the largest network that fits into the memory that is left."""
    for worker in workers:
        if worker.job is not None:
            continue
        used = sum(other.job[0].memory_gib for other in workers if other.job is not None)
        fits = next((job for job in waiting if used + job[0].memory_gib <= memory_gib or not used), None)
        if fits is not None:
            waiting.remove(fits)
            worker.start(fits)


def _failed(network: Network, why: str) -> Row:
    return {"kind": network.kind, "name": network.name, "error": why}
