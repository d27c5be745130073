from __future__ import annotations

import platform
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import ecc
from ecc.measure.environment import environment


def test_versions_are_told_and_neither_host_nor_user() -> None:
    found = environment("cpu")
    assert found["ecc"] == ecc.__version__
    assert found["torch"] == torch.__version__
    assert found["python"] == platform.python_version()
    assert found["threads"] == str(torch.get_num_threads())
    assert platform.node() not in " ".join(found.values())
    assert set(found) == {"ecc", "python", "torch", "system", "threads"}


def test_arithmetic_has_no_threads() -> None:
    assert set(environment(None)) == {"ecc", "python", "torch", "system"}


def test_a_gpu_comes_with_its_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # as if it were not installed
    folder = tmp_path / "driver" / "nvidia"
    folder.mkdir(parents=True)
    (folder / "version").write_text(
        "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024\nGCC version 12.3.0\n"
    )
    assert environment("cuda", proc=tmp_path)["driver"] == "550.54.15"
    assert {"cuda", "cudnn"} <= set(environment("cuda", proc=tmp_path))
    (folder / "version").write_text("nothing of the kind\n")
    assert environment("cuda", proc=tmp_path)["driver"] == "unknown"
    assert environment("cuda", proc=tmp_path / "elsewhere")["driver"] == "unknown"


@pytest.mark.parametrize("version", ["580.1.2", b"580.1.2"])
def test_where_linux_does_not_tell_the_driver_nvml_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str | bytes
) -> None:
    nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: version)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert environment("cuda", proc=tmp_path)["driver"] == "580.1.2"
