from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_results_is_what_the_files_say() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "write_results.py"), "--check"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
