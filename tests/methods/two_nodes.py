"""A Ray cluster of two nodes on this machine, and a comparison during which one of them is killed.

A program of its own, so that no process of Ray and no warning of it reaches the tests. With it a node is one raylet,
and the workers of a node are the children of its raylet.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster

from ecc.cli.compare import GridSpec
from ecc.methods import CompressSettings
from ecc.methods.cluster import open_cluster, run_on_cluster
from ecc.options import settings_from

SETTINGS = settings_from(
    CompressSettings,
    {"pretrain_steps": 6, "prune_steps": 24, "finetune_steps": 4, "lr": 1e-3, "log_every": 5, "checkpoint_steps": 4},
)

QUICK_TO_NOTICE = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_failure_threshold": 3,
}
"""That a node is dead: within seconds, not half a minute."""

NET = """
import os, time
from dataclasses import replace
from pathlib import Path
from ecc.zoo.digits import digits

def build():
    task, drawn = digits(), []

    def batches(epoch):
        for batch in task.train_batches(epoch):
            drawn.append(1)
            if len(drawn) == 10:
                meet(str(os.getppid()))
            yield batch

    return replace(task, train_batches=batches)

def meet(node):
    (Path("met") / node).touch()
    while len(list(Path("met").iterdir())) < 2 or Path("stalled").read_text() == node:
        time.sleep(0.02)
"""
"""Digits whose first runs wait for each other, so that both nodes work; one can be stalled."""


def spec_of(energy: Path, task: str) -> GridSpec:
    return GridSpec(
        task=task,
        energy=(energy,),
        methods=("scratch", "uniform", "ecc"),
        budgets=("65%",),
        seeds=2,
        settings=SETTINGS,
        device="cpu",
    )


def run(spec: GridSpec, root: Path, messages: list[str]) -> None:
    with spec.opened() as grid, open_cluster("cpu") as cluster:
        run_on_cluster(grid, spec.opened, root, cluster, messages.append)


def sessions(run_folder: Path) -> list[int]:
    """The processes that worked on a run_folder."""
    file = run_folder / "environment.json"
    return [session["pid"] for session in json.loads(file.read_text())["sessions"]] if file.exists() else []


def parent(process: int) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return None


def doomed(root: Path, raylet: int) -> Path | None:
    """The run_folder that a node is at, once it has a checkpoint and another run_folder is finished."""
    if not list(root.glob("seed-*/*/cell.json")):
        return None
    for run_folder in root.glob("seed-*/*-65"):
        begun = (run_folder / "checkpoint.safetensors").exists() and not (run_folder / "summary.json").exists()
        if begun and parent(sessions(run_folder)[-1]) == raylet:
            return run_folder
    return None


def main(folder: Path, energy: Path) -> None:
    (folder / "net.py").write_text(NET)
    (folder / "met").mkdir()
    (folder / "stalled").touch()
    os.chdir(folder)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "_system_config": QUICK_TO_NOTICE})
    ray.init(
        address=cluster.address, log_to_driver=False, logging_level=logging.ERROR
    )  # to the head: there is no other yet
    second = cluster.add_node(num_cpus=1)
    cluster.wait_for_nodes()
    head: Any = cluster.head_node  # None by its annotation
    raylets = [node.all_processes["raylet"][0].process.pid for node in (head, second)]
    (folder / "stalled").write_text(str(raylets[1]))
    try:
        messages: list[str] = []
        grid = threading.Thread(target=run, args=(spec_of(energy, "net.py:build"), folder / "killed", messages))
        grid.start()
        victim, killed = None, folder / "killed"
        while victim is None and grid.is_alive():
            victim = doomed(killed, raylets[1])
            time.sleep(0.02)
        assert victim is not None, "the second node was never seen at work"
        finished = {
            str(file.relative_to(killed)): file.stat().st_mtime_ns for file in killed.glob("seed-*/*/summary.json")
        }
        cluster.remove_node(second, allow_graceful=False)
        grid.join()
    finally:
        ray.shutdown()
        cluster.shutdown()
    outcome = {
        "messages": messages,
        "victim": str(victim.relative_to(killed)),
        "tries": len(sessions(victim)),
        "finished": finished,
    }
    (folder / "outcome.json").write_text(json.dumps(outcome))


if __name__ == "__main__":
    signal.alarm(200)  # whatever hangs
    main(Path(sys.argv[1]), Path(sys.argv[2]))
