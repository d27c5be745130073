"""Versions of the software under which a network is measured; they influence its energy as the device does."""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any

import torch


def environment(device_type: str | None, *, proc: Path = Path("/proc")) -> dict[str, str]:
    """Versions of the software, without host and user names; with those of a torch device type, if networks run."""
    from ecc import __version__

    found = {
        "ecc": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device_type == "cpu":
        found["threads"] = str(torch.get_num_threads())
    if device_type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["driver"] = _nvidia_driver(proc)
    return found


def _nvidia_driver(proc: Path) -> str:
    """Driver version from `NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar ...`, or from NVML."""
    try:
        words = (proc / "driver" / "nvidia" / "version").read_text(encoding="utf-8").split()
    except OSError:
        words = [_nvml_driver()]
    versions = (word for word in words if "." in word and word.replace(".", "").isdecimal())
    return next(versions, "unknown")


def _nvml_driver() -> str:
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # noqa: BLE001 - no library, no driver or no permission
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)
