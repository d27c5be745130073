"""Eight-bit integers instead of floats, by onnxruntime, as a further step after an ONNX export.

    dynamic   weights are integers in the file; activations are scaled as they come
    static    activations are scaled as they were on training batches

The outputs are others than before. So nothing is claimed: the error is stated, the score is measured again where the
task can judge, and the latency is measured beside the floats, since integers are not faster on every processor.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from ecc.errors import BadTask, CannotExport
from ecc.graph.forward_pass import as_call
from ecc.task import Inputs, Task, split_batch

from .formats import feed_of, library, onnx_session, run_session

MODES = ("dynamic", "static")
CALIBRATION_BATCHES = 8


def quantise(source: Path, target: Path, mode: str, task: Task) -> None:
    """Writes an ONNX file with eight-bit weights.

    Args:
        source: The ONNX file with floats.
        target: The new file.
        mode: One of `MODES`.
        task: Its training batches calibrate `static`.

    Raises:
        BadTask: If batches are needed and the task has none.
        CannotExport: If onnxruntime cannot do it.
    """
    quantization: Any = library("onnxruntime.quantization")
    ready = target.with_name("ready.onnx")
    root = logging.getLogger()
    level = root.level
    try:
        root.setLevel(logging.ERROR)  # onnxruntime advises through the root logger
        library("onnxruntime.quantization.shape_inference").quant_pre_process(str(source), str(ready))
        if mode == "dynamic":
            # Unsigned weights: onnxruntime has no convolution of signed ones whose scale is found on the way.
            kind = quantization.QuantType.QUInt8
            quantization.quantize_dynamic(str(ready), str(target), weight_type=kind)
        else:
            reader = _reader(quantization, ready, task)
            quantization.quantize_static(str(ready), str(target), reader, per_channel=True)
    except (BadTask, CannotExport):
        raise
    except Exception as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise CannotExport(f"onnxruntime cannot quantise this network: {reason[:300]}") from error
    finally:
        root.setLevel(level)
        ready.unlink(missing_ok=True)


def refuse_uncalibrated(task: Task, mode: str | None) -> None:
    """Static scales come from batches: says so before the long work.

    Raises:
        BadTask: If the task has no training batches.
        CannotExport: If the mode is unknown.
    """
    if mode is not None and mode not in MODES:
        raise CannotExport(f"int8 mode {mode!r} is unknown; there are {' and '.join(MODES)}.")
    if mode == "static" and task.train_batches is None:
        raise BadTask(f"task {task.name!r} has no train_batches to calibrate static int8 with; use --int8 dynamic.")


def _reader(quantization: Any, model: Path, task: Task) -> Any:
    """Training batches one after the other, as onnxruntime asks for them."""
    refuse_uncalibrated(task, "static")
    session = onnx_session(model)
    feeds = _feeds(session, task)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped
        def get_next(self) -> dict[str, Any] | None:
            return next(feeds, None)

    return Reader()


def _feeds(session: Any, task: Task) -> Iterator[dict[str, Any]]:
    for _, batch in zip(range(CALIBRATION_BATCHES), task.epoch_batches(0), strict=False):
        yield feed_of(session, split_batch(batch)[0])


class OnnxNetwork(nn.Module):
    """An ONNX file as a network, so that a task can judge it.

    Args:
        path: The file.
        like: The network that it was made of.
        example_input: Tells how the outputs of `like` are nested.
    """

    def __init__(self, path: Path, like: nn.Module, example_input: Inputs) -> None:
        super().__init__()
        self.session = onnx_session(path)
        args, kwargs = as_call(example_input)
        with torch.no_grad():
            self.nesting: TreeSpec = tree_flatten(like(*args, **kwargs))[1]

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        """What the network would give, computed by onnxruntime."""
        inputs: Inputs = kwargs or tuple(tensor.detach().cpu() for tensor in args)
        return tree_unflatten(run_session(self.session, inputs), self.nesting)


def score_of(task: Task, network: nn.Module) -> float | None:
    """The task's score on its test split; None if it cannot judge this network."""
    if task.evaluate is None:
        return None
    try:
        return float(task.evaluate(network))
    except Exception:  # noqa: BLE001 - user code that looks at parameters, which a file has not; no score is no error
        return None
