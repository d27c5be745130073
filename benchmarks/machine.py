"""What a result was measured on, and the JSON that it is kept in."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import ecc
from ecc.io import write_text


def machine(**more: Any) -> dict[str, Any]:
    """CPU, versions, date and command; folders of this machine are left out of the command."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ecc": ecc.__version__,
        "commit": commit(),
        "threads": 1,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        **more,
    }


def commit(folder: Path | None = None) -> str:
    """What git says of a folder: the commit, with "+" if tracked files differ from it; empty without git.

    Without a folder, ECC_COMMIT if it is set, and otherwise the commit of this file.
    """
    if folder is None and (given := os.environ.get("ECC_COMMIT")):
        return given
    words = ("git", "-C", str(folder or Path(__file__).resolve().parent))
    try:
        head = subprocess.run([*words, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        changed = subprocess.run([*words, "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head + ("+" if changed.stdout.strip() else "")


def source_digest(package: str) -> str:
    """Hash of the Python files of a package of ECC: equal for equal code, whatever the commit."""
    folder = Path(ecc.__file__).parent / package
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(f"{file.relative_to(folder).as_posix()}\n".encode())
        digest.update(hashlib.sha256(file.read_bytes()).digest())
    return digest.hexdigest()[:16]


def cpu_name() -> str:
    """Name of the processor, if the system reports it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def write_record(record: dict[str, Any], out: Path, indent: int | None = 1) -> None:
    """The result as JSON; a file that was there before is replaced as a whole, or left."""
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, json.dumps(record, indent=indent) + "\n")
