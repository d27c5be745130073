"""File formats for deployment: how a network is written, run again by its own runtime, and verified.

    pt2          `torch.export`: a graph as JSON and the weights. `torch.export.load` may unpickle parts of a file, so
                 load only files that you trust.
    onnx         for onnxruntime and many others: protobuf, no Python code
    torchscript  `torch.jit.trace`: for C++ and older programs; deprecated by PyTorch. The file contains the paths of
                 the source files.

All three accept any batch size. Language models of transformers are written without a KV cache; pt2 and onnx files of
them accept any number of tokens.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import CannotExport, first_line
from ecc.graph.forward_pass import as_call
from ecc.graph.numerics import ALLOWED_FLOAT32, allowed_difference, outputs_of, relative_error
from ecc.measure.runners.onnx_network import one_line_errors, onnx_program
from ecc.measure.runners.runtime import import_runtime
from ecc.task import Inputs, batch_size_of, with_batch_size
from ecc.torch_utils import tensors_in

TOKEN_INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
"""Inputs of models of transformers of the shape (batch, tokens)."""

TOLERANCE = ALLOWED_FLOAT32
"""Allowed difference between the outputs of a file and of its network, relative to the largest output."""

Runner = Callable[[Inputs], list[Tensor]]
"""Runs a file: maps inputs to all output tensors."""


@dataclass(frozen=True)
class Format:
    """How a network is written to a file, and how the file is run."""

    file: str
    """File name."""
    write: Callable[[nn.Module, Inputs, Path], None]
    run: Callable[[Path], Runner]
    needs: tuple[str, ...] = ()
    """Required packages besides torch; the extra `export` installs them."""


# ---------------------------------------------------------------- torch.export


def export_program(model: nn.Module, example_input: Inputs) -> torch.export.ExportedProgram:
    """Export a network with a dynamic batch size and, for a model of transformers, any number of tokens."""
    several = _several_items(example_input)
    args, kwargs = as_call(several)
    batch, size = torch.export.Dim("batch"), batch_size_of(several)

    def axes(tensor: Tensor, name: str = "") -> dict[int, Any] | None:
        if not tensor.dim() or len(tensor) != size:
            return None
        if name not in TOKEN_INPUTS or tensor.dim() != 2:
            return {0: batch}
        return {0: batch, 1: torch.export.Dim.DYNAMIC}  # torch finds its range, which position embeddings limit

    shapes: Any = tuple(map(axes, args)) if args else {name: axes(tensor, name) for name, tensor in kwargs.items()}
    with one_line_errors("torch.export cannot export this network"), warnings.catch_warnings():
        # torch sets these attributes of its own LSTM again when it replaces parameters
        warnings.filterwarnings("ignore", r"The tensor attributes? self\..*_flat_weights")
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # files would contain source lines and local paths
    return program


def _several_items(example_input: Inputs) -> Inputs:
    """At least two items: an exporter would take a batch size of 1 as a constant."""
    return with_batch_size(example_input, max(2, batch_size_of(example_input)))


@contextmanager
def without_cache(model: nn.Module) -> Iterator[None]:
    """A block in which a model of transformers does not return a KV cache, which is no tensor."""
    config = getattr(model, "config", None)
    before = getattr(config, "use_cache", None)
    try:
        if before is not None:
            config.use_cache = False  # type: ignore[union-attr]  # it has this attribute
        yield
    finally:
        if before is not None:
            config.use_cache = before  # type: ignore[union-attr]


def _write_pt2(model: nn.Module, example_input: Inputs, path: Path) -> None:
    program = export_program(model, example_input)
    with one_line_errors("torch.export cannot save this network"):
        torch.export.save(program, path)


def _run_pt2(path: Path) -> Runner:
    return partial(_run_module, torch.export.load(path).module())


@torch.no_grad()
def _run_module(module: nn.Module, inputs: Inputs) -> list[Tensor]:
    args, kwargs = as_call(inputs)
    return list(tensors_in(module(*args, **kwargs)))


# ---------------------------------------------------------------- ONNX


def _write_onnx(model: nn.Module, example_input: Inputs, path: Path) -> None:
    import_runtime("onnxscript")
    program = export_program(model, example_input)
    with one_line_errors("torch.onnx cannot write this network"):
        written = onnx_program(program)
        _name_axes(written)
        written.save(path, external_data=False)  # one file


def _name_axes(program: Any) -> None:
    """Name the dynamic axes of the inputs, which are symbols such as s77 otherwise, where torch can do it."""
    names: dict[str, str] = {}
    for value in program.model.graph.inputs:
        axes = ("batch", "length") if value.name in TOKEN_INPUTS else ("batch",)
        for size, name in zip(value.shape or (), axes, strict=False):
            if not isinstance(size, int) and size.value is not None:
                names.setdefault(size.value, name)
    if hasattr(program, "rename_axes"):
        program.rename_axes(names)


def _run_onnx(path: Path) -> Runner:
    return partial(run_session, onnx_session(path))


def onnx_session(path: Path) -> Any:
    """An onnxruntime session on the CPU with as many threads as torch uses."""
    runtime = import_runtime("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(session: Any, inputs: Inputs) -> list[Tensor]:
    """Every output of an onnxruntime session."""
    return [torch.from_numpy(array) for array in session.run(None, onnx_inputs(session, inputs))]


def onnx_inputs(session: Any, inputs: Inputs) -> dict[str, Any]:
    """Inputs by name, as onnxruntime expects them; inputs that the graph does not use are left out."""
    names = [entry.name for entry in session.get_inputs()]
    if isinstance(inputs, dict):
        return {name: inputs[name].numpy() for name in names}
    args, _ = as_call(inputs)
    return {name: tensor.numpy() for name, tensor in zip(names, args, strict=True)}


# ---------------------------------------------------------------- TorchScript


def _write_torchscript(model: nn.Module, example_input: Inputs, path: Path) -> None:
    args, kwargs = as_call(_several_items(example_input))
    given: dict[str, Any] = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    with one_line_errors("torch.jit cannot trace this network"), _deprecated():
        # The file is verified below, so torch need not check it; strict=True would refuse dicts as outputs.
        torch.jit.trace(model, **given, check_trace=False, strict=False).save(str(path))


def _run_torchscript(path: Path) -> Runner:
    with _deprecated():
        return partial(_run_module, torch.jit.load(str(path)))


FORMATS: Mapping[str, Format] = {
    "pt2": Format("slim.pt2", _write_pt2, _run_pt2),
    "onnx": Format("slim.onnx", _write_onnx, _run_onnx, needs=("onnx", "onnxscript", "onnxruntime")),
    "torchscript": Format("slim.torchscript", _write_torchscript, _run_torchscript),
}


def open_file(name: str, path: Path) -> Runner:
    """Open a file with the runtime of its format."""
    with one_line_errors(f"{path.name} cannot be opened by the runtime of {name}"):
        return FORMATS[name].run(path)


# ---------------------------------------------------------------- verification


@dataclass(frozen=True)
class ExportVerification:
    """Largest difference between the outputs of a file and of its network."""

    error: float
    """Relative to the largest output; for integer outputs, the fraction that differs."""
    batches: tuple[int, ...]
    """Batch sizes that were compared."""
    tolerance: float | None = TOLERANCE
    """Allowed error: `TOLERANCE`, or more for half precision; None if no equality is required."""


def verified_batches(example_input: Inputs) -> tuple[int, ...]:
    """One item, the example's batch size, and a batch size that was not used for the export."""
    example = batch_size_of(example_input)
    return tuple(sorted({1, example, example + 3}))


def verify_export(
    model: nn.Module, run: Runner, example_input: Inputs, *, is_exact: bool = True, what: str = "the file"
) -> ExportVerification:
    """Compare a file with its network at the batch sizes of `verified_batches` that the network itself accepts."""
    worst, allowed, batches = 0.0, TOLERANCE, list[int]()
    for batch in verified_batches(example_input):
        inputs = with_batch_size(example_input, batch)
        try:
            wanted = outputs_of(model, inputs)
        except Exception as error:
            if batch != batch_size_of(example_input):
                continue  # as after `squeeze()`, or with a batch size in the code
            raise CannotExport(f"the network cannot be run on the example input: {first_line(error)[:300]}") from error
        batches.append(batch)
        allowed = _allowed(wanted)
        try:
            found = run(inputs)
        except Exception as error:
            raise CannotExport(f"{what} cannot be run at batch size {batch}: {first_line(error)[:300]}") from error
        worst = max(worst, _difference(wanted, found))
    if is_exact and not worst <= allowed:
        raise CannotExport(
            f"verification failed: the outputs of {what} differ from the network by {worst:.2g} of the largest output "
            f"(allowed {allowed:g}); the file was removed."
        )
    return ExportVerification(worst, tuple(batches), allowed if is_exact else None)


def _allowed(outputs: list[Tensor]) -> float:
    """`TOLERANCE`, or more if outputs have a lower precision than float32."""
    single = torch.finfo(torch.float32).eps
    return allowed_difference(single, *(torch.finfo(o.dtype).eps for o in outputs if o.is_floating_point()))


def _difference(wanted: list[Tensor], found: list[Tensor]) -> float:
    if len(wanted) != len(found):
        return float("inf")
    integers = [(left, right) for left, right in zip(wanted, found, strict=True) if not left.is_floating_point()]
    fractions = [
        float((left != right).double().mean()) if left.shape == right.shape else float("inf")
        for left, right in integers
        if left.numel()
    ]
    return max(relative_error(wanted, found), *fractions, 0.0)


# ---------------------------------------------------------------- warnings of the exporters


@contextmanager
def _deprecated() -> Iterator[None]:
    """Hide the deprecation warning of TorchScript; the help of `ecc export` mentions it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", category=torch.jit._trace.TracerWarning)
        yield
