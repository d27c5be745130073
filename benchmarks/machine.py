"""What a result was measured on, for the JSON beside it."""

from __future__ import annotations

import os
import platform
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import ecc


def machine(**more: Any) -> dict[str, Any]:
    """CPU, versions, date and command; folders of this machine are left out of the command."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "ecc": ecc.__version__,
        "threads": 1,
        "date": datetime.now(timezone.utc).date().isoformat(),
        "command": " ".join([f"benchmarks/{Path(sys.argv[0]).name}", *words]),
        **more,
    }


def cpu_name() -> str:
    """The processor's own name for itself, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")
