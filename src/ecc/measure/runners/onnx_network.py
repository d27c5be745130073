"""Networks as ONNX files, for the runners `onnxruntime` and `openvino`.

torch's exporter takes seconds per network, and a profile has hundreds of networks that differ only in their widths. So
the first two networks of a kind are exported, and what differs between their files besides the weights tells which
constants depend on the widths. If these are sizes in reshapes, later networks take the file of the first one with
their own weights. Every file is run and compared with its network; one that differs is exported after all.
"""

from __future__ import annotations

import copy
import logging
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import CannotExport, EccError, first_line
from ecc.graph.hooks import without_observer_hooks
from ecc.graph.numerics import outputs_of, relative_error
from ecc.settings import MeasureSettings
from ecc.task import Inputs

from .inputs import by_argument, like_example
from .runtime import Session, import_runtime, open_session

_ALLOWED, _ALLOWED_HALF = 1e-3, 0.1  # difference between a file and its network, relative to the largest output
_MAX_KINDS = 8  # templates that are kept


def onnx_program(program: Any, *, optimize: bool = True) -> Any:
    """The ONNX program of an exported network.

    torch builds the table of its ONNX functions anew at every export, which takes longer than a small network. Here it
    is built once, where this version of torch has it.
    """
    try:
        from torch.onnx._internal.exporter._registration import ONNXRegistry

        original = vars(ONNXRegistry)["from_torchlib"]
    except (ImportError, KeyError):
        return torch.onnx.export(program, dynamo=True, verbose=False, optimize=optimize)
    build = partial(_function_table, ONNXRegistry.from_torchlib)
    try:
        ONNXRegistry.from_torchlib = staticmethod(build)  # type: ignore[method-assign]
        return torch.onnx.export(program, dynamo=True, verbose=False, optimize=optimize)
    finally:
        ONNXRegistry.from_torchlib = original  # type: ignore[method-assign]


@cache
def _function_table(build: Callable[..., Any], **options: Any) -> Any:
    return build(**options)


@contextmanager
def one_line_errors(what: str) -> Iterator[None]:
    """Turn any exception of an exporter into one line, and hide its warnings."""
    registry = logging.getLogger("torch.onnx")  # reports missing torchvision operators at every export
    level = registry.level
    try:
        registry.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            # torch's exporters use names that torch deprecates (copyreg, treespec).
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch|onnx|copyreg")
            yield
    except EccError:
        raise
    except Exception as error:
        reason = first_line(error)
        if "Constraints violated (batch)" in reason:
            reason = "its code fixes the batch size, as len(x) does; use x.shape[0]."
        raise CannotExport(f"{what}: {reason[:300]}") from error
    finally:
        registry.setLevel(level)


# --- the runner --------------------------------------------------------------------------------------


class OnnxRunner:
    """Exports a network, and runs the file by `onnxruntime:PROVIDER` or `openvino:DEVICE`."""

    has_memory_format = False
    is_asynchronous = False

    def __init__(self, spec: str, precisions: Sequence[str], settings: MeasureSettings) -> None:
        self.precisions = tuple(precisions)
        self.device = torch.device("cpu")
        self.calibration: Sequence[Inputs] = ()
        """Batches for the calibration of int8; the example input by default."""
        self._spec, self._settings = spec, settings
        self._session: Session | None = None

    def prepare(self, model: nn.Module, example_input: Inputs) -> None:
        """Export and load the network, and compare its outputs."""
        network = OnnxNetwork.of(model, example_input, self._settings.precision, self.calibration)
        self._names = network.names
        self._session = open_session(
            self._spec,
            network.data,
            network.inputs,
            precision=self._settings.precision,
            threads=torch.get_num_threads(),
        )
        self.device = torch.device(self._session.device_type)
        self._half = self._settings.precision == "fp16" and self._spec.startswith("onnxruntime")

    def run(self) -> object:
        """Run one inference."""
        assert self._session is not None, "prepare() comes first"
        return self._session.run()

    def infer(self, inputs: Inputs) -> list[Tensor]:
        """Outputs for other inputs."""
        assert self._session is not None, "prepare() comes first"
        arrays = _arrays(inputs, self._names, torch.float16 if self._half else None)
        return [torch.from_numpy(array) for array in self._session.infer(arrays)]

    def versions(self) -> dict[str, str]:
        """Version of the runtime."""
        return {} if self._session is None else self._session.versions()

    def close(self) -> None:
        """Free the session."""
        self._session = None


# --- files -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OnnxNetwork:
    """A network as an ONNX file, with its inputs."""

    data: bytes
    """The file."""
    inputs: dict[str, Any]
    """Input arrays by name."""
    names: tuple[str, ...]
    """Input names in the order of the arguments."""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_input: Inputs,
        precision: str = "fp32",
        calibration: Sequence[Inputs] = (),
        float_nodes: Sequence[str] = (),
    ) -> OnnxNetwork:
        """Export a network for the shapes of its example input; the network is not changed.

        fp16 and int8 change the file; other precisions are a matter of the runtime. int8 is calibrated on some batches
        and leaves `float_nodes` in float.
        """
        import_runtime("onnxscript")
        import_runtime("onnxruntime")
        dtype = torch.float16 if precision == "fp16" else None
        cpu = torch.device("cpu")
        tensors = {name: tensor.to(cpu) for name, tensor in by_argument(example_input).items()}
        wanted = outputs_of(copy.deepcopy(model).to(cpu).float(), like_example(example_input, tensors))
        model = copy.deepcopy(model).to(device=cpu, dtype=dtype).eval()
        if dtype is not None:
            tensors = {name: t.to(dtype) if t.is_floating_point() else t for name, t in tensors.items()}
        args = tuple(value for name, value in tensors.items() if isinstance(name, int))
        kwargs = {name: value for name, value in tensors.items() if isinstance(name, str)}
        with without_observer_hooks(model, args, kwargs) as plain:
            plain.eval()
            key = _kind(plain, tensors, precision == "fp16")
            for data in _files(key, plain, args, kwargs):
                names = _input_names(data)
                inputs = _arrays(like_example(example_input, tensors), names, dtype)
                difference = _difference(data, inputs, wanted)
                if difference <= (_ALLOWED if dtype is None else _ALLOWED_HALF):
                    break
            else:
                raise CannotExport(
                    f"the ONNX file of this network differs from it by {difference:.1e} of the largest output."
                )
        if precision == "int8":
            feeds = [_arrays(batch, names, None) for batch in calibration] or [inputs]
            data = quantize(data, feeds, excluded=float_nodes)
        return cls(data, inputs, names)


def _arrays(inputs: Inputs, names: Sequence[str], dtype: torch.dtype | None) -> dict[str, Any]:
    """Input arrays by the names of the file; positional inputs by their order."""
    tensors = by_argument(inputs)
    ready = {}
    for position, name in enumerate(names):
        tensor = tensors[name] if name in tensors else list(tensors.values())[position]
        tensor = tensor.detach().cpu()
        ready[name] = (tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor).numpy()
    return ready


def _kind(model: nn.Module, tensors: Mapping[int | str, Tensor], is_half: bool) -> tuple[Any, ...]:
    shapes = tuple((name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items())
    return type(model), tuple(model.state_dict()), shapes, is_half


def _input_names(data: bytes) -> tuple[str, ...]:
    onnx = import_runtime("onnx")
    graph = onnx.load_model_from_string(data).graph
    weights = {one.name for one in graph.initializer}
    return tuple(entry.name for entry in graph.input if entry.name not in weights)


def _difference(data: bytes, inputs: Mapping[str, Any], wanted: list[Tensor]) -> float:
    """Largest relative difference of outputs; infinity if the file cannot be run."""
    try:
        session = open_session("onnxruntime:CPUExecutionProvider", data, inputs, threads=torch.get_num_threads())
        found = [torch.from_numpy(array) for array in session.infer(inputs)]
    except (EccError, KeyError, IndexError):
        return float("inf")
    if [tuple(one.shape) for one in found] != [tuple(one.shape) for one in wanted]:
        return float("inf")
    return relative_error([one.float() for one in wanted], [one.float() for one in found])


# --- templates ---------------------------------------------------------------------------------------


@dataclass
class _Template:
    """What is known of the files of one kind of network."""

    files: list[Any] = field(default_factory=list)
    """Parsed files of the first networks."""
    is_usable: bool | None = None
    """None before two networks of different widths were exported."""


_templates: dict[tuple[Any, ...], _Template] = {}


def _files(key: tuple[Any, ...], model: nn.Module, args: Any, kwargs: Any) -> Iterator[bytes]:
    """The file of the template with the weights of this network, if there is one; then an exported file."""
    onnx = import_runtime("onnx")
    template = _templates.setdefault(key, _Template())
    while len(_templates) > _MAX_KINDS:
        del _templates[next(iter(_templates))]
    if template.is_usable:
        yield _with_weights(onnx, template.files[0], model)
        template.is_usable = False  # the caller asked for another one: it did not fit
    with one_line_errors("torch cannot export this network to ONNX"):
        program = torch.export.export(model, args, kwargs)
        data: bytes = onnx_program(program, optimize=False).model_proto.SerializeToString()
    if template.is_usable is None:
        template.files.append(onnx.load_model_from_string(data))
        first, last = template.files[0], template.files[-1]
        if _weight_shapes(first) != _weight_shapes(last):
            template.is_usable = _free_sizes(onnx, first, last)
        del template.files[1:]
    yield data


def _weight_shapes(file: Any) -> dict[str, tuple[int, ...]]:
    return {one.name: tuple(one.dims) for one in file.graph.initializer}


def _free_sizes(onnx: Any, first: Any, other: Any) -> bool:
    """Replace sizes that depend on the widths by -1 in the first file, as reshapes allow.

    False if something else depends on the widths. Whether the sizes belong to reshapes shows when the file is run.
    """
    if [node.op_type for node in first.graph.node] != [node.op_type for node in other.graph.node]:
        return False
    if list(_weight_shapes(first)) != list(_weight_shapes(other)):
        return False
    for mine, theirs in zip(first.graph.node, other.graph.node, strict=True):
        for left, right in zip(mine.attribute, theirs.attribute, strict=False):
            if left == right or left.name == "group":  # groups of a convolution come from the network
                continue
            sizes, others = (onnx.numpy_helper.to_array(_as_tensor(onnx, one)) for one in (left, right))
            if mine.op_type != "Constant" or sizes.shape != others.shape or (sizes != others).sum() != 1:
                return False
            freed = sizes.copy()
            freed[sizes != others] = -1
            left.CopyFrom(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(freed)))
    del first.graph.value_info[:]  # shapes of the first network
    return True


def _as_tensor(onnx: Any, attribute: Any) -> Any:
    """The value of a constant, which may be a tensor or whole numbers."""
    import numpy as np

    if attribute.HasField("t"):
        return attribute.t
    return onnx.numpy_helper.from_array(np.asarray(onnx.helper.get_attribute_value(attribute)))


def _with_weights(onnx: Any, file: Any, model: nn.Module) -> bytes:
    """The file with the weights of a network, and the groups of its convolutions."""
    made, weights = onnx.ModelProto(), model.state_dict()
    made.CopyFrom(file)
    for one in made.graph.initializer:
        if one.name in weights:
            one.CopyFrom(onnx.numpy_helper.from_array(weights[one.name].detach().contiguous().numpy(), one.name))
    modules = dict(model.named_modules())
    for node in made.graph.node:
        if node.op_type in ("Conv", "ConvTranspose"):
            module = modules.get(node.input[1].rpartition(".")[0])
            for attribute in node.attribute:
                if attribute.name == "group" and isinstance(getattr(module, "groups", None), int):
                    attribute.i = module.groups  # type: ignore[union-attr]  # checked
    data: bytes = made.SerializeToString()
    return data


# --- int8 --------------------------------------------------------------------------------------------


def quantize(
    data: bytes,
    feeds: Iterable[Mapping[str, Any]] | None,
    *,
    excluded: Sequence[str] = (),
    has_fixed_shapes: bool = True,
) -> bytes:
    """An ONNX file with int8 weights, by onnxruntime.

    Activations are int8 too if there are batches to calibrate with (`feeds`, arrays by input name); otherwise they are
    scaled at run time. Nodes in `excluded` stay in float.
    """
    quantization: Any = import_runtime("onnxruntime.quantization")
    left = iter(feeds or ())

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped
        def get_next(self) -> Any:
            return next(left, None)

    root = logging.getLogger()
    level = root.level
    with tempfile.TemporaryDirectory() as folder:
        source, ready, target = (str(Path(folder) / name) for name in ("float.onnx", "ready.onnx", "int8.onnx"))
        Path(source).write_bytes(data)
        try:
            root.setLevel(logging.ERROR)  # onnxruntime logs advice to the root logger
            prepare = import_runtime("onnxruntime.quantization.shape_inference").quant_pre_process
            prepare(source, ready, skip_symbolic_shape=has_fixed_shapes)
            in_float = [*excluded, *_additions_of_zeros(Path(ready).read_bytes())]
            if feeds is None:
                # Unsigned weights: onnxruntime has no dynamic convolution with signed ones.
                kind = quantization.QuantType.QUInt8
                quantization.quantize_dynamic(ready, target, weight_type=kind, nodes_to_exclude=in_float)
            else:
                quantization.quantize_static(ready, target, Reader(), per_channel=True, nodes_to_exclude=in_float)
            return Path(target).read_bytes()
        except EccError:
            raise
        except Exception as error:
            raise CannotExport(f"onnxruntime cannot quantize this network: {first_line(error)[:300]}") from error
        finally:
            root.setLevel(level)


def _additions_of_zeros(data: bytes) -> list[str]:
    """Names of nodes that add the zeros of a removed branch. OpenVINO cannot compile them in int8."""
    onnx = import_runtime("onnx")
    graph = onnx.load_model_from_string(data).graph
    zeros = {one.name for one in graph.initializer if not onnx.numpy_helper.to_array(one).any()}
    found = []
    for node in graph.node:
        if node.op_type == "Add" and zeros.intersection(node.input):
            found.append(node.name)
        is_zero = node.op_type in ("Cast", "CastLike", "Expand") and node.input[0] in zeros
        if is_zero or (node.op_type == "ConstantOfShape" and not node.attribute):
            zeros.update(node.output)
    return found
