"""Scripts of the tests in two processes, as torchrun starts them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent


def in_two_processes(script: str, folder: Path, *options: str, timeout: float = 180) -> str:
    """Run a script under torchrun; returns its stderr. A failure fails the test.

    Args:
        script: Its path below the tests; it gets the folder as its argument.
        folder: Where it writes its files.
        options: For torchrun.
        timeout: In seconds.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    paths = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [*torchrun, str(TESTS / script), str(folder)],
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr
