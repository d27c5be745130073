"""`onnxruntime:PROVIDER`: an ONNX file run by onnxruntime, with one of its execution providers.

The session does not import torch, so that a board can use it alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ecc.errors import BadMeasurement, EccError, first_line

from .runtime import import_runtime

PRECISIONS = ("fp32", "tf32", "fp16", "int8")
_DEVICES = {"CUDAExecutionProvider": "cuda", "TensorrtExecutionProvider": "cuda", "ROCMExecutionProvider": "cuda"}


def device_type_of(provider: str) -> str:
    """torch device type on which a provider computes."""
    return _DEVICES.get(provider, "cpu")


def default_argument(device_type: str) -> str:
    """The provider for a device."""
    provider = "CUDAExecutionProvider" if device_type == "cuda" else "CPUExecutionProvider"
    _check_provider(import_runtime("onnxruntime"), provider)
    return provider


def available_arguments() -> list[str]:
    """Execution providers of this machine that can be measured."""
    available = import_runtime("onnxruntime").get_available_providers()
    return [name for name in ("CPUExecutionProvider", *_DEVICES) if name in available]


def _check_provider(runtime: Any, provider: str) -> None:
    available = runtime.get_available_providers()
    if provider not in available:
        hint = " Run: pip install onnxruntime-gpu." if device_type_of(provider) == "cuda" else ""
        raise EccError(
            f"onnxruntime {runtime.__version__} has no execution provider {provider!r} here; it has "
            f"{', '.join(available)}.{hint}"
        )


class OnnxruntimeSession:
    """A loaded network. Inputs and outputs stay on the device of the provider, so that copies are not measured.

    fp32 turns TF32 off on CUDA; tf32 turns it on.
    """

    def __init__(
        self, data: bytes, provider: str, inputs: Mapping[str, Any], precision: str, threads: int | None
    ) -> None:
        self._runtime = import_runtime("onnxruntime")
        _check_provider(self._runtime, provider)
        self.device_type = device_type_of(provider)
        options = self._runtime.SessionOptions()
        options.log_severity_level = 3
        options.inter_op_num_threads = 1
        if threads is not None:
            options.intra_op_num_threads = threads
        chosen: Any = provider
        if provider == "CUDAExecutionProvider":
            chosen = (provider, {"use_tf32": int(precision == "tf32")})
        elif precision == "tf32":
            raise BadMeasurement("precision 'tf32' needs the CUDAExecutionProvider; use precision 'fp32'.")
        try:
            self._session = self._runtime.InferenceSession(data, options, providers=[chosen])
            used = self._session.get_providers()[0]
            if used != provider:  # onnxruntime falls back to the CPU silently
                raise BadMeasurement(f"onnxruntime could not start {provider} and would use {used}; see its log.")
            self._names = [entry.name for entry in self._session.get_inputs()]
            self._inputs = {name: inputs[name] for name in self._names}
            self._bind()
            self.run()
        except EccError:
            raise
        except Exception as error:  # noqa: BLE001 - onnxruntime has exceptions of its own
            raise BadMeasurement(
                f"onnxruntime ({provider}) cannot run this network: {first_line(error)[:300]}"
            ) from None

    def _bind(self) -> None:
        self._binding: Any = None
        if self.device_type == "cuda":
            self._binding = self._session.io_binding()
            value = self._runtime.OrtValue
            self._on_device = {
                name: value.ortvalue_from_numpy(array, "cuda", 0) for name, array in self._inputs.items()
            }
            for name, array in self._on_device.items():
                self._binding.bind_ortvalue_input(name, array)
            for output in self._session.get_outputs():
                self._binding.bind_output(output.name, "cuda")

    def run(self) -> object:
        """Run one inference."""
        if self._binding is not None:
            return self._session.run_with_iobinding(self._binding)
        return self._session.run(None, self._inputs)

    def infer(self, inputs: Mapping[str, Any]) -> list[Any]:
        """Output arrays for other inputs."""
        return list(self._session.run(None, {name: inputs[name] for name in self._names}))

    def outputs(self) -> list[Any]:
        """Output arrays for the inputs that were given when it was created."""
        return self.infer(self._inputs)

    def versions(self) -> dict[str, str]:
        """Version of onnxruntime."""
        return {"onnxruntime": str(self._runtime.__version__)}


load = OnnxruntimeSession


def open_runner(argument: str, settings: Any) -> Any:
    """The runner; it needs torch to export the network."""
    from .onnx_network import OnnxRunner

    return OnnxRunner(f"onnxruntime:{argument}", PRECISIONS, settings)
