"""`openvino:DEVICE`: an ONNX file run by OpenVINO.

The session does not import torch, so that a board can use it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecc.errors import BadMeasurement, EccError, first_line

from .runtime import import_runtime

PRECISIONS = ("fp32", "bf16", "fp16", "int8")
_HINTS = {"fp32": "f32", "bf16": "bf16", "fp16": "f16", "int8": "f32"}
_TYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16"}


def device_type_of(device: str) -> str:
    """torch device type on which an OpenVINO device computes."""
    return "xpu" if device.startswith("GPU") else "cpu"


def default_argument(device_type: str) -> str:
    """The OpenVINO device for a torch device."""
    import_runtime("openvino")
    if device_type == "cuda":
        raise EccError("OpenVINO has no CUDA device; use openvino:CPU with device 'cpu'.")
    return "GPU" if device_type == "xpu" else "CPU"


def available_arguments() -> list[str]:
    """OpenVINO devices of this machine."""
    return [str(name) for name in import_runtime("openvino").Core().available_devices]


class OpenVinoSession:
    """A loaded network. The precision is checked after loading, since OpenVINO treats it as a hint."""

    def __init__(
        self, data: bytes, device: str, inputs: Mapping[str, Any], precision: str, threads: int | None
    ) -> None:
        self._runtime = import_runtime("openvino")
        self.device_type = device_type_of(device)
        core = self._runtime.Core()
        if not any(name == device or name.startswith(f"{device}.") for name in core.available_devices):
            raise EccError(
                f"OpenVINO {self._version} has no device {device!r} here; it has {', '.join(core.available_devices)}."
            )
        hint = _HINTS[precision]
        config: dict[str, Any] = {"INFERENCE_PRECISION_HINT": hint, "PERFORMANCE_HINT": "LATENCY"}
        if threads is not None and device == "CPU":
            config |= {"INFERENCE_NUM_THREADS": threads}
        try:
            compiled = core.compile_model(core.read_model(data, b""), device, config)
            used = compiled.get_property("INFERENCE_PRECISION_HINT").to_string()
            if used not in (hint, _TYPES[hint]):
                raise BadMeasurement(
                    f"OpenVINO computes in {used} on this {device}, not in {precision}; choose another precision."
                )
            self._request = compiled.create_infer_request()
            self._names = [port.get_any_name() for port in compiled.inputs]
            self._inputs = {name: inputs[name] for name in self._names}
            self._request.infer(self._inputs)
        except EccError:
            raise
        except Exception as error:
            raise BadMeasurement(f"OpenVINO ({device}) cannot run this network: {_reason(error)[:300]}") from error

    @property
    def _version(self) -> str:
        return str(self._runtime.__version__).partition("-")[0]

    def run(self) -> object:
        """Run one inference on the inputs of the request, in this thread: waking another one takes CPU time."""
        return self._request.infer(share_outputs=True)

    def infer(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Output arrays for other inputs."""
        found = self._request.infer({name: inputs[name] for name in self._names})
        outputs = [value.copy() for value in found.values()]
        self._request.infer(self._inputs)
        return outputs

    def outputs(self) -> list[Any]:
        """Output arrays for the inputs that were given when it was created."""
        return self.infer(self._inputs)

    def versions(self) -> dict[str, str]:
        """Version of OpenVINO."""
        return {"openvino": self._version}


def _reason(error: Exception) -> str:
    """What OpenVINO says behind the lines that only name its source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception from ")]
    return said[-1] if said else first_line(error)


load = OpenVinoSession


def open_runner(argument: str, settings: Any) -> Any:
    """The runner; it needs torch to export the network."""
    from .onnx_network import OnnxRunner

    return OnnxRunner(f"openvino:{argument}", PRECISIONS, settings)
