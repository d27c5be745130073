"""Integers instead of floats: other outputs, said so, and close enough to be the same network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import BadTask, CannotExport
from ecc.export.formats import FORMATS
from ecc.export.int8 import MODES, OnnxNetwork, quantise, refuse_uncalibrated, score_of
from ecc.export.verification import verify_export
from export.runs import small_task

pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")


@pytest.fixture(scope="module")
def floats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    task = small_task()
    path = tmp_path_factory.mktemp("onnx") / "slim.onnx"
    FORMATS["onnx"].write(task.model.eval(), task.example_input, path)
    return path


@pytest.mark.parametrize("mode", MODES)
def test_weights_become_integers_and_outputs_stay_near(mode: str, floats: Path, tmp_path: Path) -> None:
    import onnx

    task = small_task()
    path = tmp_path / "int8.onnx"
    quantise(floats, path, mode, task)
    kinds = {tensor.data_type for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 4}
    assert kinds <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    proof = verify_export(task.model, FORMATS["onnx"].run(path), task.example_input, is_exact=False)
    assert 0 < proof.error < 0.2
    assert [entry.name for entry in tmp_path.iterdir()] == ["int8.onnx"]


def test_a_task_judges_a_file_as_it_judges_a_network(floats: Path) -> None:
    task = small_task()
    network = OnnxNetwork(floats, task.model, task.example_input)
    assert task.evaluate is not None
    assert score_of(task, network) == task.evaluate(task.model)


def test_outputs_are_nested_as_the_networks(floats: Path) -> None:
    class Nested(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": x.mean((2, 3))}

    network = OnnxNetwork(floats, Nested(), torch.zeros(2, 3, 8, 8))
    assert list(network(torch.zeros(2, 3, 8, 8))) == ["scores"]


def test_a_task_that_cannot_judge_gives_no_score(floats: Path) -> None:
    task = small_task()
    network = OnnxNetwork(floats, task.model, task.example_input)
    assert score_of(small_task(evaluate=None), network) is None
    assert score_of(small_task(evaluate=lambda model: next(model.parameters()).sum()), network) is None


def test_what_cannot_be_done_is_said_first() -> None:
    with pytest.raises(CannotExport, match="int8 mode 'magic' is unknown; there are dynamic and static"):
        refuse_uncalibrated(small_task(), "magic")
    with pytest.raises(BadTask, match="has no train_batches to calibrate"):
        refuse_uncalibrated(small_task(train_batches=None), "static")
    refuse_uncalibrated(small_task(train_batches=None), "dynamic")


def test_a_file_that_onnxruntime_cannot_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "slim.onnx").write_bytes(b"no protobuf")
    with pytest.raises(CannotExport, match="onnxruntime cannot quantise this network: "):
        quantise(tmp_path / "slim.onnx", tmp_path / "int8.onnx", "dynamic", small_task())
    assert not (tmp_path / "int8.onnx").exists()
