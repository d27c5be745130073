"""Runtimes of ONNX networks. This module and the sessions do not import torch, so that a board can use them alone."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol

from ecc.errors import EccError

INSTALL = {
    "onnxruntime": "pip install onnxruntime onnx onnxscript (or onnxruntime-gpu for CUDA and TensorRT)",
    "openvino": "pip install openvino onnx onnxscript",
}
"""How to install the runtime of a runner."""

SESSIONS = ("onnxruntime", "openvino")
"""Runners that run ONNX files; a board needs no PyTorch for them."""


class Session(Protocol):
    """A loaded ONNX network."""

    device_type: str
    """torch device type on which it computes."""

    def run(self) -> object:
        """Run one inference on the inputs that were given when it was created."""

    def infer(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Output arrays for other inputs by name."""

    def outputs(self) -> list[Any]:
        """Output arrays for the inputs that were given when it was created."""

    def versions(self) -> dict[str, str]:
        """Version of the runtime."""


def import_runtime(name: str) -> Any:
    """Import the runtime of a runner, or a part of it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        install = INSTALL.get(package, f"pip install {package}")
        raise EccError(f"{package} cannot be imported ({error}); run: {install}") from None


def open_session(
    spec: str, data: bytes, inputs: Mapping[str, Any], *, precision: str = "fp32", threads: int | None = None
) -> Session:
    """Load an ONNX network by `onnxruntime:PROVIDER` or `openvino:DEVICE`.

    The precision is that of the runtime; the file already has the weights of fp16 and int8. Without a number of
    threads, the runtime chooses one.
    """
    name, _, argument = spec.partition(":")
    opened: Session = importlib.import_module(f".{name}", __package__).load(data, argument, inputs, precision, threads)
    return opened
