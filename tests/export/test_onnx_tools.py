"""Int8 quantization and latency of ONNX files."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import BadTask, CannotExport
from ecc.export import onnx_tools
from ecc.export.formats import FORMATS, verify_export
from ecc.export.onnx_tools import MODES, OnnxNetwork, check_int8, choose_clock, compare_latency, quantize, score_of
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
def test_int8_weights_give_close_outputs(mode: str, floats: Path, tmp_path: Path) -> None:
    import onnx

    task, path = small_task(), tmp_path / "int8.onnx"
    quantize(floats, path, mode, task)
    kinds = {tensor.data_type for tensor in onnx.load(path).graph.initializer if len(tensor.dims) == 4}
    assert kinds <= {onnx.TensorProto.INT8, onnx.TensorProto.UINT8}
    found = verify_export(task.model, FORMATS["onnx"].run(path), task.example_input, is_exact=False)
    assert 0 < found.error < 0.2
    assert [entry.name for entry in tmp_path.iterdir()] == ["int8.onnx"]


def test_a_task_evaluates_a_file_like_its_network(floats: Path) -> None:
    task = small_task()
    network = OnnxNetwork(floats, task.model, task.example_input)
    assert task.evaluate is not None
    assert score_of(task, network) == task.evaluate(task.model)
    assert score_of(small_task(evaluate=None), network) is None
    assert score_of(small_task(evaluate=lambda model: next(model.parameters()).sum()), network) is None

    class Nested(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": x.mean((2, 3))}

    assert list(OnnxNetwork(floats, Nested(), torch.zeros(2, 3, 8, 8))(torch.zeros(2, 3, 8, 8))) == ["scores"]


def test_wrong_modes_tasks_and_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotExport, match="int8 mode 'magic' is unknown; choose dynamic or static"):
        check_int8(small_task(), "magic")
    with pytest.raises(BadTask, match="has no train_batches to calibrate"):
        check_int8(small_task(train_batches=None), "static")
    check_int8(small_task(train_batches=None), "dynamic")
    (tmp_path / "slim.onnx").write_bytes(b"no protobuf")
    with pytest.raises(CannotExport, match="onnxruntime cannot quantize this network: "):
        quantize(tmp_path / "slim.onnx", tmp_path / "int8.onnx", "dynamic", small_task())
    assert not (tmp_path / "int8.onnx").exists()


def test_blocks_alternate_and_neighbours_give_the_ratio(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[str] = []
    drift = iter(range(1, 1000))

    def block(session: str, feed: object, runs: int, clock: object) -> float:
        calls.append(session)
        return (2.0 if session == "dense" else 1.0) * (1 + next(drift) * 1e-9)

    monkeypatch.setattr(onnx_tools, "onnx_session", lambda path: path.name)
    monkeypatch.setattr(onnx_tools, "onnx_inputs", lambda session, inputs: {})
    monkeypatch.setattr(onnx_tools, "_block", block)
    found = compare_latency(tmp_path / "dense", tmp_path / "slim", torch.zeros(7, 1))
    assert calls[4:8] == ["dense", "slim", "slim", "dense"]
    assert len(calls) == 4 + 2 * onnx_tools.PAIRS
    assert (found.ratio, *found.ratio_range) == pytest.approx((2, 2, 2))
    assert (found.dense_seconds, found.slim_seconds) == pytest.approx((2, 1))
    assert (found.batch, found.threads) == (7, torch.get_num_threads())


def test_waiting_is_not_counted_with_one_thread_and_blocks_take_the_median() -> None:
    def wait(names: object, feed: object) -> None:
        time.sleep(0.05)

    name, clock = choose_clock(1)
    assert name == "processor time"
    assert onnx_tools._block(SimpleNamespace(run=wait), {}, 3, clock) < 0.05
    name, clock = choose_clock(2)
    assert name == "wall clock"
    assert onnx_tools._block(SimpleNamespace(run=wait), {}, 3, clock) >= 0.05
    ticks = iter([0.0, 9.0, 10.0, 11.5, 20.0, 22.0])
    assert onnx_tools._block(SimpleNamespace(run=lambda names, feed: None), {}, 3, lambda: next(ticks)) == 2.0


def test_real_files_are_timed(monkeypatch: pytest.MonkeyPatch, floats: Path) -> None:
    monkeypatch.setattr(onnx_tools, "BLOCK_SECONDS", 0.001)
    found = compare_latency(floats, floats, torch.randn(1, 3, 8, 8))
    assert found.dense_seconds > 0
    assert found.ratio_range[0] <= found.ratio <= found.ratio_range[1]
