"""Scripts of the tests in two processes."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def in_two_processes(script: str, folder: Path, timeout: float = 180) -> None:
    """Run a script, which gets the folder as its argument, with the variables that torchrun sets. A failure fails."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    sizes = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    command = [sys.executable, str(TESTS / script), str(folder)]
    logs = [folder / f"log-{rank}" for rank in (0, 1)]
    processes = []
    for rank, log in enumerate(logs):
        ranks = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(command, env=environment(**address, **sizes, **ranks), stdout=file, stderr=file)
            )
    try:
        codes = [process.wait(timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0], "\n".join(log.read_text() for log in logs)


def under_torchrun(script: str, folder: Path, *options: str, timeout: float = 180) -> str:
    """Run a script in two processes that torchrun starts; returns its stderr."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    done = subprocess.run(
        [*torchrun, str(TESTS / script), str(folder)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def environment(**more: str) -> dict[str, str]:
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **more}
