"""One network in the formats of other programs, each read back in the program that will run it.

    pt2          `torch.export`: a graph as JSON, the weights as bytes. torch.export.load may unpickle parts of a
                 file that someone else made, so load only what you trust.
    onnx         for onnxruntime and many others: protobuf, nothing in it is run as Python
    torchscript  `torch.jit.trace`: for C++ and older programs; torch calls it deprecated. The file tells the paths
                 of the source that it was made of.

All three take any batch size: the axis that `with_batch_size` repeats along is left open.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ecc.errors import CannotExport, EccError
from ecc.graph.forward_pass import as_call
from ecc.task import Inputs, batch_size_of, with_batch_size
from ecc.torch_utils import tensors_in

Runner = Callable[[Inputs], list[Tensor]]
"""A program that runs a file: inputs to every tensor that comes out."""


@dataclass(frozen=True)
class Format:
    """How a network is written to a file, and how that file is run."""

    file: str
    """What the file is called."""
    write: Callable[[nn.Module, Inputs, Path], None]
    run: Callable[[Path], Runner]
    needs: tuple[str, ...] = ()
    """Modules that are not torch's; the extra `export` has them."""


def library(name: str) -> ModuleType:
    """A module of the extra `export`.

    Raises:
        EccError: If it cannot be imported.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise EccError(f"{name} cannot be imported ({error}); pip install {name}.") from None


# ---------------------------------------------------------------- torch.export


def program_of(model: nn.Module, example_input: Inputs) -> torch.export.ExportedProgram:
    """The network as a graph whose batch size is open.

    Raises:
        CannotExport: If torch cannot follow it, or its code fixes the batch size.
    """
    several = with_batch_size(example_input, max(2, batch_size_of(example_input)))  # torch takes a size of 1 for a constant
    args, kwargs = as_call(several)
    batch = torch.export.Dim("batch")
    size = batch_size_of(several)

    def axes(tensor: Tensor) -> dict[int, Any] | None:
        return {0: batch} if tensor.dim() and len(tensor) == size else None

    shapes: Any = tuple(map(axes, args)) if args else {name: axes(tensor) for name, tensor in kwargs.items()}
    with _one_line("torch.export cannot follow this network"):
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # lines of your code and paths of your machine, which files would hold
    return program


def _write_pt2(model: nn.Module, example_input: Inputs, path: Path) -> None:
    program = program_of(model, example_input)
    with _one_line("torch.export cannot save this network"):
        torch.export.save(program, path)


def _run_pt2(path: Path) -> Runner:
    module = torch.export.load(path).module()

    @torch.no_grad()
    def run(inputs: Inputs) -> list[Tensor]:
        args, kwargs = as_call(inputs)
        return list(tensors_in(module(*args, **kwargs)))

    return run


# ---------------------------------------------------------------- ONNX


def _write_onnx(model: nn.Module, example_input: Inputs, path: Path) -> None:
    library("onnxscript")
    program = program_of(model, example_input)
    with _one_line("torch.onnx cannot write this network"):
        found = torch.onnx.export(program, dynamo=True, verbose=False)
        assert found is not None  # dynamo=True
        found.save(path, external_data=False)  # one file, which is whole or not there


def _run_onnx(path: Path) -> Runner:
    session = onnx_session(path)
    return lambda inputs: run_session(session, inputs)


def onnx_session(path: Path) -> Any:
    """The file in onnxruntime, on the CPU, with as many threads as torch uses."""
    runtime = library("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def run_session(session: Any, inputs: Inputs) -> list[Tensor]:
    """Every output of an onnxruntime session."""
    return [torch.from_numpy(array) for array in session.run(None, feed_of(session, inputs))]


def feed_of(session: Any, inputs: Inputs) -> dict[str, Any]:
    """Inputs as onnxruntime wants them: by name, those that the graph uses."""
    names = [entry.name for entry in session.get_inputs()]
    if isinstance(inputs, dict):
        return {name: inputs[name].numpy() for name in names}
    args, _ = as_call(inputs)
    return {name: tensor.numpy() for name, tensor in zip(names, args, strict=True)}


# ---------------------------------------------------------------- TorchScript


def _write_torchscript(model: nn.Module, example_input: Inputs, path: Path) -> None:
    args, kwargs = as_call(with_batch_size(example_input, max(2, batch_size_of(example_input))))
    given: dict[str, Any] = {"example_kwarg_inputs": kwargs} if kwargs else {"example_inputs": args}
    with _one_line("torch.jit cannot trace this network"), _deprecated():
        # We compare the file itself, at other batch sizes, so torch need not; strict refuses a dict as the result.
        torch.jit.trace(model, **given, check_trace=False, strict=False).save(str(path))


def _run_torchscript(path: Path) -> Runner:
    with _deprecated():
        module = torch.jit.load(str(path))

    @torch.no_grad()
    def run(inputs: Inputs) -> list[Tensor]:
        args, kwargs = as_call(inputs)
        return list(tensors_in(module(*args, **kwargs)))

    return run


FORMATS: Mapping[str, Format] = {
    "pt2": Format("slim.pt2", _write_pt2, _run_pt2),
    "onnx": Format("slim.onnx", _write_onnx, _run_onnx, needs=("onnx", "onnxscript", "onnxruntime")),
    "torchscript": Format("slim.torchscript", _write_torchscript, _run_torchscript),
}


def opened(name: str, path: Path) -> Runner:
    """A file of a format, in the program that runs it.

    Raises:
        CannotExport: If that program cannot read it, as onnxruntime cannot where it lacks an operator for a type.
    """
    with _one_line(f"{path.name} cannot be opened by the program that runs {name}"):
        return FORMATS[name].run(path)


# ---------------------------------------------------------------- torch's many words


@contextmanager
def _one_line(what: str) -> Iterator[None]:
    """Exporters raise whatever their inside raises, over pages; the first line of it is for the user."""
    registry = logging.getLogger("torch.onnx")  # says that torchvision's operators are missing, at every export
    level = registry.level
    try:
        registry.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            # torch's own exporters call each other by names that torch deprecates (copyreg, treespec).
            warnings.filterwarnings("ignore", category=FutureWarning)
            warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch|onnx|copyreg")
            yield
    except EccError:
        raise
    except Exception as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if reason.startswith("Constraints violated (batch)"):
            reason = "its code fixes the batch size, as len(x) does; write x.shape[0]."
        raise CannotExport(f"{what}: {reason[:300]}") from error
    finally:
        registry.setLevel(level)


@contextmanager
def _deprecated() -> Iterator[None]:
    """TorchScript is deprecated; our help says so once, torch says so at every call."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", category=torch.jit._trace.TracerWarning)
        yield
