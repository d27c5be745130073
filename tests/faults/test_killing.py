from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from faults.killing import RECIPES, can_run

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs fork and SIGKILL")
ROOT = Path(__file__).parents[2]


@pytest.mark.thorough
def test_a_killed_command_that_is_repeated_has_the_same_result(tmp_path: Path) -> None:
    """A few kills; `benchmarks/reliability.py --only kills` has more than a hundred."""
    counts = {verb: 2 for verb in RECIPES if can_run(verb) and verb not in ("export to ONNX", "report")}  # slow ones
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "faults" / "killing.py"), str(tmp_path), json.dumps(counts), "1"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    tallies = json.loads(done.stdout)
    assert [failure for tally in tallies.values() for failure in tally["failures"]] == []
    assert set(tallies) == set(counts) >= {"profile", "fit", "compress", "compare", "export"}
    assert all(tally["kills"] == 2 and tally["while_writing"] == 1 for tally in tallies.values())
