"""Networks are run as deployed, and the caller's model and torch's settings are restored."""

from __future__ import annotations

import copy
import platform
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ecc
from ecc.errors import BadMeasurement, EccError
from ecc.graph.numerics import relative_error
from ecc.measure import MeasureSettings, prepare_runner, runner_search
from ecc.measure.environment import environment
from ecc.measure.meters.cputime import CpuTimeMeter
from ecc.measure.runner_search import RunnerSearch, choose_runner
from ecc.measure.runners import cuda_graph, draw_inputs, resolve_runner
from ecc.measure.runners.onnx_network import OnnxNetwork
from ecc.measure.runners.runtime import open_session
from ecc.profiling import calibration_inputs
from ecc.records import from_json, to_json
from ecc.task import Task
from ecc.torch_utils import NotCapturable

IMAGE, INDEX = torch.ones(2, 3, 8, 8), torch.tensor([3, 1])


class Spy(nn.Module):
    """Keeps its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.drop = nn.Dropout()
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, image: Tensor, index: Tensor | None = None) -> Tensor:
        self.seen.append((image,) if index is None else (image, index))
        y: Tensor = self.drop(self.conv(image))
        return y


def run(model: nn.Module, example: Any, **settings: Any) -> Tensor:
    with prepare_runner(model, example, MeasureSettings(**settings)) as ready:
        output = ready.run()
    assert isinstance(output, Tensor)
    return output


def test_a_model_runs_in_eval_and_inference_mode_and_is_restored() -> None:
    model = Spy().train()
    model.drop.eval()
    before = copy.deepcopy(model.state_dict())
    with suppress(KeyError), prepare_runner(model, IMAGE) as ready:
        assert not model.training
        assert isinstance(output := ready.run(), Tensor)
        assert output.is_inference()
        assert (ready.device.type, ready.batch, ready.runner) == ("cpu", 2, "eager")
        assert ready.reason == "CUDA graphs need a CUDA device, and the network runs on cpu"
        raise KeyError  # restored also after an error
    assert (model.training, model.drop.training) == (True, False)
    assert not torch.is_inference_mode_enabled()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_logging_hooks_are_not_run_and_others_are() -> None:
    model, heard = Spy(), []
    random = torch.randn(2, 3, 8, 8)
    expected = model.eval()(random) * 2
    model.conv.register_forward_hook(lambda *_: heard.append(1))
    model.drop.register_forward_hook(lambda module, args, output: output * 2)
    assert torch.allclose(run(model, random, input_data="example"), expected)
    assert heard == []
    assert len(model.conv._forward_hooks) == 1


def test_inputs_are_equal_random_numbers_or_the_example() -> None:
    model, many = Spy(), torch.ones(64, 3, 8, 8)
    run(model, many)
    run(model, draw_inputs(many, "cpu"), input_data="example")
    run(model, (IMAGE, INDEX), input_data="example")
    run(model, {"index": INDEX, "image": IMAGE})
    (drawn,), (again,), example, named = model.seen
    assert torch.equal(drawn, again)
    assert abs(drawn.mean().item()) < 0.05
    assert drawn.std().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(example[0], IMAGE)
    for index in (example[1], named[1], draw_inputs((IMAGE, INDEX), "cpu")[1]):
        assert torch.equal(index, INDEX)  # integers are kept
    assert list(draw_inputs({"x": IMAGE}, "cpu")) == ["x"]


@pytest.mark.parametrize(
    ("example", "settings", "message"),
    [
        (torch.zeros(1, 3, 8, 8), {}, r"input 0 of shape \(1, 3, 8, 8\) is all zeros.*torch\.randn\(1, 3, 8, 8\)"),
        ((IMAGE, torch.zeros(2, dtype=torch.long)), {}, "input 1"),
        ({"image": torch.zeros(1)}, {}, "input 'image'"),
        (torch.empty(0, 3), {}, "all zeros"),
        ((), {}, "contains no tensor"),
        (IMAGE, {"runner": "cuda-graph"}, "'cuda-graph' needs a CUDA device, and the model is on cpu"),
        (IMAGE, {"precision": "tf32"}, "'tf32' needs a CUDA device, and the model is on cpu"),
    ],
)
def test_an_input_of_zeros_and_settings_for_gpus_are_refused(example: Any, settings: Any, message: str) -> None:
    with pytest.raises(BadMeasurement, match=message):
        run(Spy(), example, **settings)


@pytest.mark.parametrize(
    ("settings", "dtype", "strides"),
    [
        ({"precision": "fp16"}, torch.float16, ((192, 64, 8, 1), (27, 9, 3, 1))),
        ({"precision": "bf16"}, torch.bfloat16, ((192, 64, 8, 1), (27, 9, 3, 1))),
        ({"channels_last": True}, torch.float32, ((192, 1, 24, 3), (27, 1, 9, 3))),
    ],
)
def test_precision_and_memory_format_convert_a_copy(settings: Any, dtype: torch.dtype, strides: Any) -> None:
    seen = []

    class Strides(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - name in the base class
            seen.append((input.stride(), self.weight.stride()))
            return super().forward(input)

    model = Strides(3, 4, 3)
    assert run(model, IMAGE, **settings).dtype == dtype
    assert seen == [strides]
    assert model.weight.dtype == torch.float32
    assert model.weight.is_contiguous()


# --- runners of torch ---------------------------------------------------------------------------------


def test_every_network_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda model, **options: (calls.append(options), model)[1])
    run(Spy(), IMAGE, runner="compile")
    run(Spy(), IMAGE, runner="compile:max-autotune")
    assert calls == ["reset", {"dynamic": False}, "reset", {"dynamic": False, "mode": "max-autotune"}]
    with pytest.raises(BadMeasurement, match=r"no mode 'fast'; choose one of default, reduce-overhead"):
        run(Spy(), IMAGE, runner="compile:fast")


def test_without_a_runner_a_graph_is_used_if_the_network_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_runner(None, "cuda") == (None, "")  # decided by capturing
    assert resolve_runner(None, "mps")[0] == "eager"
    assert resolve_runner("compile", "cuda") == ("compile", "chosen by the user")
    monkeypatch.setattr("ecc.measure.runners.resolve_runner", lambda spec, _: (spec, ""))  # as on CUDA
    graph = SimpleNamespace(replay=lambda: None)
    monkeypatch.setattr(cuda_graph, "capture_cuda_graph", lambda run, warmup: (graph, "replayed"))
    for settings in ({}, {"runner": "cuda-graph"}):
        with prepare_runner(Spy(), IMAGE, MeasureSettings(**settings)) as ready:
            assert (ready.run(), ready.runner) == ("replayed", "cuda-graph")

    def refuse(run: object, warmup: int) -> None:
        raise NotCapturable("called a synchronizing CUDA operation")

    monkeypatch.setattr(cuda_graph, "capture_cuda_graph", refuse)
    with prepare_runner(Spy(), IMAGE) as ready:
        assert isinstance(ready.run(), Tensor)
        assert ready.runner == "eager"
        assert ready.reason == "the network cannot be captured as a CUDA graph (called a synchronizing CUDA operation)"
    with pytest.raises(BadMeasurement, match=r"cannot be captured .*CUDA operation\)\. Use runner 'eager'"):
        run(Spy(), IMAGE, runner="cuda-graph")


class DataDependent(nn.Conv2d):
    """Needs a value on the host in the middle of its forward pass, which no capture allows."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - name in the base class
        y = super().forward(input)
        return y if y.sum().item() > 0 else -y


@pytest.mark.gpu
def test_on_a_gpu_auto_captures_what_can_be_captured() -> None:
    for model, runner, reason in [
        (nn.Conv2d(3, 8, 3), "cuda-graph", "can be captured"),
        (DataDependent(3, 8, 3), "eager", "cannot be captured as a CUDA graph"),
    ]:
        with prepare_runner(model.cuda(), IMAGE) as ready:
            assert ready.runner == runner
            assert reason in ready.reason
            ready.run()
    with pytest.raises(BadMeasurement, match="cannot be captured"):
        run(DataDependent(3, 8, 3).cuda(), IMAGE, runner="cuda-graph")
    assert torch.rand(3, device="cuda").sum() > 0  # the random generator still works
    with pytest.raises(RuntimeError, match="expected input"):
        run(nn.Conv2d(3, 8, 3).cuda(), torch.ones(2, 4, 8, 8))


# --- ONNX --------------------------------------------------------------------------------------------


class Small(nn.Module):
    """Reshapes by its width, as classifiers do."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, width, 3), nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 5)

    def forward(self, image: Tensor) -> Tensor:
        y: Tensor = self.head(self.norm(self.conv(image)).relu().mean((2, 3)).flatten(1))
        return y


@pytest.mark.parametrize("runner", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_runtime_computes_what_the_network_computes(runner: str, precision: str) -> None:
    pytest.importorskip(runner)
    model, image = Small().eval(), torch.randn(2, 3, 8, 8)
    settings = MeasureSettings(runner=runner, precision=precision)  # type: ignore[arg-type]
    with prepare_runner(model, image, settings) as ready:
        assert ready.runner in ("onnxruntime:CPUExecutionProvider", "openvino:CPU")
        assert set(ready.versions) == {runner}
        assert (ready.device.type, ready.is_asynchronous) == ("cpu", False)
        ready.run()
        assert ready.infer is not None
        (found,) = ready.infer(image)
    with torch.no_grad():
        error = (found - model(image)).abs().max() / model(image).abs().max()
    assert error < (1e-4 if precision == "fp32" else 0.2)


@pytest.mark.thorough
def test_named_nodes_stay_in_float() -> None:
    onnx = pytest.importorskip("onnx")
    image = torch.randn(2, 3, 8, 8)

    def int8_weights(*excluded: str) -> int:
        data = OnnxNetwork.of(Small().eval(), image, "int8", float_nodes=excluded).data
        weights = onnx.load_model_from_string(data).graph.initializer
        return sum(one.data_type == onnx.TensorProto.INT8 and len(one.dims) > 1 for one in weights)

    (conv,) = (
        node.name
        for node in onnx.load_model_from_string(OnnxNetwork.of(Small().eval(), image).data).graph.node
        if node.op_type == "Conv"
    )
    assert int8_weights() == 2
    assert int8_weights(conv) == 1


def test_networks_that_differ_in_widths_are_exported_twice_and_then_built_from_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torch.onnx._internal.exporter._registration import ONNXRegistry

    exports, real, table = [], torch.onnx.export, vars(ONNXRegistry)["from_torchlib"]
    monkeypatch.setattr(torch.onnx, "export", lambda *args, **kwargs: (exports.append(1), real(*args, **kwargs))[1])
    image = torch.randn(3, 3, 8, 8)
    for width in (12, 8, 7, 6, 12):
        model = Small(width).eval()
        network = OnnxNetwork.of(model, image)
        session = open_session("onnxruntime:CPUExecutionProvider", network.data, network.inputs)
        (found,) = session.infer(network.inputs)
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(found), model(image), atol=1e-5)
    assert len(exports) == 2
    assert vars(ONNXRegistry)["from_torchlib"] is table  # it is replaced only during an export


class Powers(nn.Module):
    """Its width enters a computation, so that no file of another width fits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lift, self.head, self.width = nn.Linear(4, width), nn.Linear(width, 2), width

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.lift(x) * self.width)
        return y


@pytest.mark.thorough
def test_a_network_that_does_not_fit_the_file_of_another_is_exported() -> None:
    x = torch.randn(2, 4)
    for width in (6, 5, 4):
        model = Powers(width).eval()
        network = OnnxNetwork.of(model, x)
        (found,) = open_session("onnxruntime:CPUExecutionProvider", network.data, network.inputs).infer(network.inputs)
        with torch.no_grad():
            assert torch.allclose(torch.from_numpy(found), model(x), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"runner": "onnxruntime:FastExecutionProvider"}, "has no execution provider 'FastExecutionProvider' here"),
        ({"runner": "onnxruntime:CUDAExecutionProvider"}, "pip install onnxruntime-gpu"),
        ({"runner": "onnxruntime", "precision": "bf16"}, "does not support precision 'bf16'; it supports fp32, tf32"),
        ({"runner": "eager", "precision": "int8"}, "'eager' does not support precision 'int8'"),
        ({"runner": "onnxruntime", "channels_last": True}, "channels_last has no effect with runner 'onnxruntime"),
        ({"runner": "onnxruntime", "precision": "tf32"}, "'tf32' needs the CUDAExecutionProvider"),
        ({"runner": "openvino:NPU"}, "has no device 'NPU' here"),
        ({"runner": "auto"}, "has to be resolved by measuring"),
        ({"runner": "no.py:Mine"}, r"the file no\.py does not exist"),
    ],
)
def test_what_a_runtime_does_not_have_is_refused(settings: Any, message: str) -> None:
    with pytest.raises(EccError, match=message):
        run(Small(), IMAGE, **settings)


@pytest.mark.parametrize("runner", ["onnxruntime", "openvino"])
def test_a_missing_runtime_says_what_to_install(runner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, runner, None)
    with pytest.raises(EccError, match=rf"^{runner} cannot be imported .*; run: pip install {runner}"):
        run(Small(), IMAGE, runner=runner)


def test_a_runner_of_a_user_is_loaded_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n"
        "    def __init__(self, argument, settings): self.argument = argument\n"
        "    def prepare(self, model, example_input): self.call = lambda: model(example_input)\n"
        "    def run(self): return self.call()\n"
        "    def close(self): pass\n"
        "    def versions(self): return {'mine': self.argument}\n"
        "class Wrong:\n"
        "    def __init__(self, argument, settings): pass\n"
    )
    with prepare_runner(Small(), IMAGE, MeasureSettings(runner=f"{tmp_path}/mine.py:Mine:7")) as ready:
        assert isinstance(ready.run(), Tensor)
        assert (ready.versions, ready.infer) == ({"mine": "7"}, None)
    with pytest.raises(EccError, match=r"has no method prepare\(\)"):
        run(Small(), IMAGE, runner=f"{tmp_path}/mine.py:Wrong")
    with pytest.raises(EccError, match="cannot be created"):
        run(Small(), IMAGE, runner=f"{tmp_path}/mine.py:Missing")


class RemovedBranch(nn.Module):
    """Adds the zeros that a removed residual branch leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, image: Tensor) -> Tensor:
        x = self.a(image).relu()
        y: Tensor = self.c((self.b(x) + x.new_zeros(x.shape)).relu())
        return y


@pytest.mark.parametrize("runner", ["onnxruntime", "openvino"])
def test_a_network_without_a_branch_runs_in_int8(runner: str) -> None:
    torch.manual_seed(0)
    model, image = RemovedBranch().eval(), torch.randn(2, 3, 8, 8)
    settings = MeasureSettings(runner=runner, precision="int8", input_data="example")
    with prepare_runner(model, image, settings) as ready, torch.no_grad():
        assert ready.infer is not None
        assert 0 < relative_error([model(image)], ready.infer(image)) < 0.1


# --- choose_runner -----------------------------------------------------------------------------------

QUICK = MeasureSettings(window_seconds=0.01, probe_seconds=0.02, warmup_seconds=0.0, warmup_runs=1)


def test_runners_of_about_the_lowest_cost_are_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """One window says that bf16 is cheapest; more windows say fp16. fp32 is far from both."""
    windows: list[tuple[str, int]] = []
    costs = {("fp32", 1): 4.0, ("bf16", 1): 2.0, ("fp16", 1): 2.1, ("bf16", 4): 2.2, ("fp16", 4): 2.1}

    def measure(run: object, meter: object, settings: MeasureSettings, **_: object) -> Any:
        windows.append((settings.precision, settings.max_repeats))
        return SimpleNamespace(joules=costs[windows[-1]], seconds=costs[windows[-1]])

    monkeypatch.setattr(runner_search, "measure", measure)
    settings, search = choose_runner(
        nn.Linear(3, 3).eval(), torch.randn(2, 3), CpuTimeMeter(), QUICK, runners=["eager"]
    )
    assert windows == [("fp32", 1), ("bf16", 1), ("fp16", 1), ("bf16", 4), ("fp16", 4)]
    assert settings.precision == "fp16"
    assert [one.seconds for one in search.candidates] == [4.0, 2.2, 2.1]


def test_the_cheapest_runner_that_keeps_outputs_and_score_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = {"eager fp32 False": 4.0, "eager bf16 True": 2.0, "eager fp16 False": 1.0}

    def measure(run: object, meter: object, settings: MeasureSettings, **_: object) -> Any:
        if settings.precision == "fp16" and settings.channels_last:
            raise TypeError("the runtime fails in its own way")
        cost = costs.get(f"{settings.runner or 'eager'} {settings.precision} {settings.channels_last}", 3.0)
        return SimpleNamespace(joules=cost, seconds=cost / 10)

    monkeypatch.setattr(runner_search, "measure", measure)
    torch.manual_seed(0)
    model, lines = Small().eval(), []
    seen: list[torch.dtype] = []

    def evaluate(module: nn.Module) -> float:
        output = module(torch.randn(5, 3, 8, 8))  # another batch size than the example
        assert output.shape == (5, 5)
        seen.append(output.dtype)
        return 0.9 if len(seen) not in bad else 0.8

    bad = {5}  # fp32, fp32 channels last, bf16, bf16 channels last, fp16
    settings, search = choose_runner(
        model, torch.randn(2, 3, 8, 8), CpuTimeMeter(), QUICK, evaluate=evaluate, runners=["eager"], report=lines.append
    )
    assert (settings.runner, settings.precision, settings.channels_last) == ("eager", "bf16", True)
    assert search.resource == "latency"
    assert [one.precision for one in search.candidates] == ["fp32", "fp32", "bf16", "bf16", "fp16", "fp16"]
    assert search.candidates[4].excluded == "the score is 0.1000 lower"
    assert search.candidates[5].excluded == "TypeError: the runtime fails in its own way"
    assert search.saving(search.best) == pytest.approx(0.5)
    table = search.table()
    assert "eager, bf16, channels last" in table.splitlines()[1]
    assert "-50%" in table.splitlines()[1]
    assert len(lines) == 6
    assert from_json(to_json(search), RunnerSearch, "search") == search


def test_a_runner_that_changes_the_outputs_is_not_chosen() -> None:
    model = Small().eval()
    settings, search = choose_runner(
        model, torch.randn(2, 3, 8, 8), CpuTimeMeter(), QUICK, runners=["onnxruntime", "gone.py:X"],
        precisions=["fp32", "int8"], output_tolerance=1e-4,
    )  # fmt: skip
    named = {(one.runner, one.precision): one for one in search.candidates}
    assert "outputs differ by" in named["onnxruntime:CPUExecutionProvider", "int8"].excluded
    assert named["onnxruntime:CPUExecutionProvider", "fp32"].difference < 1e-4
    assert settings.precision == "fp32"
    assert not any(runner.startswith("gone") for runner, _ in named)


# --- environment -------------------------------------------------------------------------------------


def test_versions_are_recorded_without_host_and_user() -> None:
    found = environment("cpu")
    assert (found["ecc"], found["torch"]) == (ecc.__version__, torch.__version__)
    assert set(found) == {"ecc", "python", "torch", "system", "threads"}
    assert platform.node() not in " ".join(found.values())
    assert set(environment(None)) == {"ecc", "python", "torch", "system"}


def test_int8_is_compared_on_the_data_it_was_calibrated_on() -> None:
    """Images from 0 to 1: on random numbers from -4 to 4, most activations of the int8 file would be clipped."""
    torch.manual_seed(0)
    images = torch.rand(4, 3, 8, 8)
    _, search = choose_runner(
        Small().eval(), images, CpuTimeMeter(), QUICK, runners=["onnxruntime"], precisions=["fp32", "int8"]
    )
    assert [one.excluded for one in search.candidates] == ["", "", ""]
    assert search.table().splitlines()[-1] == "allowed: outputs that differ by 5% of the largest output"


def test_calibration_batches_have_the_batch_size_of_the_network() -> None:
    batches = [(torch.arange(10.0).reshape(5, 2), torch.zeros(5)), (torch.ones(5, 2), torch.zeros(5))]
    task = Task(name="task", model=nn.Linear(2, 2), example_input=torch.ones(3, 2), train_batches=batches)
    found = calibration_inputs(task, 3)
    assert [tuple(one.shape) for one in found if isinstance(one, Tensor)] == [(3, 2)] * 4
    assert isinstance(found[1], Tensor)
    assert found[1].tolist() == [[6.0, 7.0], [8.0, 9.0], [0.0, 1.0]]
