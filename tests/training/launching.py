"""Scripts of the tests in two processes."""

from __future__ import annotations

import os
import runpy
import socket
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def in_two_processes(script: str, folder: Path, timeout: float = 180) -> None:
    """Run a script, which gets the folder as its argument, with the variables that torchrun sets. A failure fails."""
    command = [sys.executable, str(Path(__file__).resolve()), str(TESTS / script), str(folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def fork_ranks(script: str, folder: str) -> int:
    """Run a script in two forks of a process that has imported torch, which takes longer than most scripts."""
    import torch

    import ecc.methods

    del ecc.methods
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports torch._dynamo
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    sys.argv[:] = [script, folder]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    processes = []
    for rank in ("0", "1"):
        os.environ.update(RANK=rank, LOCAL_RANK=rank)
        process = os.fork()
        if not process:
            runpy.run_path(script, run_name="__main__")
            return 0
        processes.append(process)
    return max(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) != 0 for process in processes)


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


if __name__ == "__main__":
    sys.exit(fork_ranks(*sys.argv[1:]))
