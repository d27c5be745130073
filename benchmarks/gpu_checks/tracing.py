"""Channel groups of public networks: on CUDA with default settings they must be those found on the CPU.

Networks: every classification, segmentation and detection network of torchvision, and the smallest network of each of
60 timm families (those with the fewest parameters), with random weights. Each is traced and verified on the CPU with
one thread, then moved to CUDA and traced and verified again, in the same process; several processes share the GPU.
Classification networks are also timed: those slower on CUDA are timed again with fewer processes at the same time, and
the least of two times counts.
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

from coverage_networks import CLASSIFICATION, TIMM, Network, all_networks

from gpu_checks.common import ROOT, Context, Outcome
from gpu_checks.tracing_worker import DETECTION, READY, serve

FAMILIES = 60
PROCESSES = 13
NETWORK_LIMIT = 150.0  # seconds for one network, on both devices together
TOTAL_LIMIT = 210.0  # seconds for all networks; what is not reached by then is a failure
AGAIN_LIMIT = 60.0  # seconds to time again what was slower on CUDA
AGAIN_PROCESSES, AGAIN_REPEATS = 4, 2
TIMING_TOLERANCE = 1.1  # repeated timings of one network on one device differ by this much
TINY = ("resnet18", "squeezenet1_1", "timm/mobileone_s1", "ssdlite320*", "lraspp*")

Row = dict[str, Any]


def trace_networks(context: Context) -> Outcome:
    """Passed when all groups agree, and tracing classification networks takes no longer on CUDA than on the CPU."""
    networks = chosen_networks()
    if context.small:
        networks = [one for one in networks if any(fnmatch(one.name, p) or fnmatch(one.key, p) for p in TINY)]
    rows = trace_all(networks, context.device, 2 if context.small else PROCESSES, TOTAL_LIMIT)
    slower = [n for n in networks if n.kind == CLASSIFICATION and _ratio(rows[n.key]) > 1]
    slower.sort(key=lambda network: network.parameters)
    again = trace_all(slower, context.device, AGAIN_PROCESSES, AGAIN_LIMIT, AGAIN_REPEATS)
    for key, row in again.items():
        if "cuda_seconds" in row:
            rows[key].update(
                parallel_seconds={name: rows[key][name] for name in ("cpu_seconds", "cuda_seconds")},
                cpu_seconds=row["cpu_seconds"],
                cuda_seconds=row["cuda_seconds"],
            )
    outcome = judge(list(rows.values()))
    outcome.passed &= context.small or outcome.numbers["timm_families"] == FAMILIES
    return outcome


def chosen_networks() -> list[Network]:
    """The networks of this check, the largest first."""
    from torchvision import models

    known, _ = all_networks()
    families = sorted((one for one in known if one.kind == TIMM), key=lambda one: one.parameters)[:FAMILIES]
    found = [one for one in known if one.kind != TIMM] + families
    found += [Network(DETECTION, name, 40_000_000) for name in models.list_models(module=models.detection)]
    return sorted(found, key=lambda network: network.parameters, reverse=True)


def judge(rows: Sequence[Row]) -> Outcome:
    """The numbers of all rows, and whether they are as they must be."""
    different = [row for row in rows if row["status"] != "same"]
    counts = {kind: dict(Counter(row["status"] for row in rows if row["kind"] == kind)) for kind in _kinds(rows)}
    timed = [row for row in rows if row["kind"] == CLASSIFICATION and "cuda_seconds" in row]
    cpu, cuda = (sum(row[f"{name}_seconds"] for row in timed) for name in ("cpu", "cuda"))
    committed = committed_seconds()
    before = {row["name"]: committed[row["name"]] for row in timed if row["name"] in committed}
    slower = [row["name"] for row in timed if row["cuda_seconds"] > TIMING_TOLERANCE * row["cpu_seconds"]]
    families = sum(row["kind"] == TIMM for row in rows)
    summary = f"{len(rows) - len(different)} of {len(rows)} networks have the same groups"
    if timed:
        summary += f"; {len(timed)} classifiers in {cuda:.0f} s on CUDA, {cpu:.0f} s on the CPU, {len(slower)} slower"
    return Outcome(
        bool(rows) and not different and cuda <= cpu and not slower,
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
        name: one["trace_seconds"] + one["proof_seconds"]
        for name, one in found.items()
        if "trace_seconds" in one and "proof_seconds" in one
    }


def _kinds(rows: Sequence[Row]) -> list[str]:
    return sorted({row["kind"] for row in rows})


def _ratio(row: Row) -> float:
    return row["cuda_seconds"] / row["cpu_seconds"] if "cuda_seconds" in row else 0.0


# ---------------------------------------------------------------- worker processes


@dataclass
class _Worker:
    """A process that traces one network after another."""

    device: str
    repeats: int
    process: Any = None
    channel: Connection | None = None
    network: Network | None = None
    since: float = field(default_factory=time.monotonic)

    def start(self, network: Network) -> None:
        if self.process is None or not self.process.is_alive():
            spawn = multiprocessing.get_context("spawn")
            self.channel, theirs = spawn.Pipe()
            self.process = spawn.Process(target=serve, args=(theirs, self.device, self.repeats), daemon=True)
            self.process.start()
            theirs.close()
        self.network, self.since = network, time.monotonic()
        assert self.channel is not None
        self.channel.send(network)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
        self.process = self.network = None


def trace_all(
    networks: Sequence[Network], device: str, processes: int, limit_seconds: float, repeats: int = 1
) -> dict[str, Row]:
    """One row for each network, whatever happens to it."""
    rows: dict[str, Row] = {}
    waiting = list(networks)
    workers = [_Worker(device, repeats) for _ in range(processes)]
    deadline = time.monotonic() + limit_seconds
    memory = 0.8 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    while waiting or any(worker.network for worker in workers):
        if time.monotonic() > deadline:
            break
        _hand_out(waiting, workers, memory)
        busy = [worker for worker in workers if worker.network is not None]
        ready = wait([worker.channel for worker in busy if worker.channel], timeout=0.5)
        for worker in busy:
            assert worker.network is not None
            key = worker.network.key
            if worker.channel in ready:
                found = _received(worker)
                if found is None:
                    continue
                rows[key] = found
                _show(rows[key], len(rows), len(networks))
                worker.network = None
            elif time.monotonic() - worker.since > NETWORK_LIMIT:
                rows[key] = _failed(worker.network, f"took more than {NETWORK_LIMIT:.0f} s")
                _show(rows[key], len(rows), len(networks))
                worker.stop()
    for worker in workers:
        worker.stop()
    for network in networks:
        rows.setdefault(network.key, _failed(network, f"not finished within {limit_seconds:.0f} s for all networks"))
    return rows


def _hand_out(waiting: list[Network], workers: Sequence[_Worker], memory_gib: float) -> None:
    """Give each idle process the largest network that fits into the memory that is left."""
    for worker in workers:
        if worker.network is not None:
            continue
        used = sum(other.network.memory_gib for other in workers if other.network is not None)
        fits = next((one for one in waiting if used + one.memory_gib <= memory_gib or not used), None)
        if fits is not None:
            waiting.remove(fits)
            worker.start(fits)


def _received(worker: _Worker) -> Row | None:
    """The row that a process sent, or None when it has only started."""
    assert worker.network is not None
    assert worker.channel is not None
    try:
        row: Row | str = worker.channel.recv()
    except (EOFError, OSError):
        worker.process.join(10)
        code = worker.process.exitcode
        return _failed(worker.network, f"the process died (exit code {code})")
    if isinstance(row, str):
        assert row == READY
        worker.since = time.monotonic()
        return None
    return row


def _failed(network: Network, why: str) -> Row:
    return {"kind": network.kind, "name": network.name, "status": "failed", "detail": why}


def _show(row: Row, done: int, total: int) -> None:
    seconds = f"CPU {row['cpu_seconds']:.1f} s, CUDA {row['cuda_seconds']:.1f} s" if "cuda_seconds" in row else ""
    print(f"{done:4d}/{total} {row['name']:40.40} {row['status']:10} {seconds} {row.get('detail', '')}", flush=True)
