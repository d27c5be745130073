"""The output of the first example of the README.

    python3 benchmarks/readme_output.py --out results/readme_output.json

Runs the first two blocks of Python as they stand in the README, with one thread, and records what they print. A test
compares the record with the README.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from machine import machine, write_record

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    net, example, *_ = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        for name, code in (("net.py", net), ("example.py", example)):
            Path(folder, name).write_text(code, encoding="utf-8")
        settings = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "example.py"], cwd=folder, env=settings, capture_output=True, text=True, check=True
        )
    write_record({"machine": machine(), "output": done.stdout.splitlines()}, args.out)
    print(done.stdout)


if __name__ == "__main__":
    main()
