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
from ecc.errors import BadMeasurement
from ecc.measure import MeasureSettings, prepare_runner, runner
from ecc.measure.environment import environment
from ecc.measure.runner import random_inputs
from ecc.settings import Mode
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
        assert (ready.device.type, ready.batch, ready.mode) == ("cpu", 2, "eager")
        assert ready.mode_reason == "CUDA graphs need a CUDA device, and the network runs on cpu"
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
    run(model, random_inputs(many, "cpu"), input_data="example")
    run(model, (IMAGE, INDEX), input_data="example")
    run(model, {"index": INDEX, "image": IMAGE})
    (drawn,), (again,), example, named = model.seen
    assert torch.equal(drawn, again)
    assert abs(drawn.mean().item()) < 0.05
    assert drawn.std().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(example[0], IMAGE)
    for index in (example[1], named[1], random_inputs((IMAGE, INDEX), "cpu")[1]):
        assert torch.equal(index, INDEX)  # integers are kept
    assert list(random_inputs({"x": IMAGE}, "cpu")) == ["x"]


@pytest.mark.parametrize(
    ("example", "settings", "message"),
    [
        (torch.zeros(1, 3, 8, 8), {}, r"input 0 of shape \(1, 3, 8, 8\) is all zeros.*torch\.randn\(1, 3, 8, 8\)"),
        ((IMAGE, torch.zeros(2, dtype=torch.long)), {}, "input 1"),
        ({"image": torch.zeros(1)}, {}, "input 'image'"),
        (torch.empty(0, 3), {}, "all zeros"),
        ((), {}, "contains no tensor"),
        (IMAGE, {"mode": "graph"}, "'graph' needs a CUDA device, and the model is on cpu"),
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
        ({"memory_format": "channels_last"}, torch.float32, ((192, 1, 24, 3), (27, 1, 9, 3))),
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


# --- execution modes ---------------------------------------------------------------------------------


def test_every_network_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda model, **options: (calls.append(options), model)[1])
    run(Spy(), IMAGE, mode="compile")
    assert calls == ["reset", {"dynamic": False}]


def make_run(mode: Mode) -> tuple[object, Mode, str]:
    ready, chosen, reason = runner._make_run(Spy(), (IMAGE,), {}, mode, "given")
    return ready(), chosen, reason


def test_auto_runs_a_graph_if_the_network_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    assert runner.resolve_mode("auto", torch.device("cuda", 0)) == ("auto", "")  # decided by capturing
    assert runner.resolve_mode("auto", torch.device("mps"))[0] == "eager"
    assert runner.resolve_mode("compile", torch.device("cuda", 0)) == ("compile", "chosen by the user")
    graph = SimpleNamespace(replay=lambda: "replayed")
    monkeypatch.setattr(runner, "capture_cuda_graph", lambda run, warmup: (graph, None))
    assert make_run("auto")[:2] == ("replayed", "graph")
    assert make_run("graph") == ("replayed", "graph", "given")

    def refuse(run: object, warmup: int) -> None:
        raise NotCapturable("called a synchronizing CUDA operation")

    monkeypatch.setattr(runner, "capture_cuda_graph", refuse)
    output, mode, reason = make_run("auto")
    assert isinstance(output, Tensor)
    assert mode == "eager"
    assert reason == "the network cannot be captured as a CUDA graph (called a synchronizing CUDA operation)"
    with pytest.raises(BadMeasurement, match=r"cannot be captured .*synchronizing CUDA operation\)\. Use mode 'eager'"):
        make_run("graph")


class DataDependent(nn.Conv2d):
    """Needs a value on the host in the middle of its forward pass, which no capture allows."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - name in the base class
        y = super().forward(input)
        return y if y.sum().item() > 0 else -y


@pytest.mark.gpu
def test_on_a_gpu_auto_captures_what_can_be_captured() -> None:
    for model, mode, reason in [
        (nn.Conv2d(3, 8, 3), "graph", "can be captured"),
        (DataDependent(3, 8, 3), "eager", "cannot be captured as a CUDA graph"),
    ]:
        with prepare_runner(model.cuda(), IMAGE) as ready:
            assert ready.mode == mode
            assert reason in ready.mode_reason
            ready.run()
    with pytest.raises(BadMeasurement, match="cannot be captured"):
        run(DataDependent(3, 8, 3).cuda(), IMAGE, mode="graph")
    assert torch.rand(3, device="cuda").sum() > 0  # the random generator still works
    with pytest.raises(RuntimeError, match="expected input"):
        run(nn.Conv2d(3, 8, 3).cuda(), torch.ones(2, 4, 8, 8))


# --- environment -------------------------------------------------------------------------------------


def test_versions_are_recorded_without_host_and_user() -> None:
    found = environment("cpu")
    assert (found["ecc"], found["torch"]) == (ecc.__version__, torch.__version__)
    assert set(found) == {"ecc", "python", "torch", "system", "threads"}
    assert platform.node() not in " ".join(found.values())
    assert set(environment(None)) == {"ecc", "python", "torch", "system"}


@pytest.mark.parametrize(
    ("file", "nvml", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\nGCC version 12\n", None, "550.54.15"),
        (None, None, "unknown"),
        (None, "580.1.2", "580.1.2"),
    ],
)
def test_the_driver_version_comes_from_linux_or_nvml(
    file: str | None, nvml: str | bytes | None, driver: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda: nvml)
    monkeypatch.setitem(sys.modules, "pynvml", None if nvml is None else library)  # None: not installed
    if file is not None:
        (tmp_path / "driver" / "nvidia").mkdir(parents=True)
        (tmp_path / "driver" / "nvidia" / "version").write_text(file)
    assert environment("cuda", proc=tmp_path)["driver"] == driver
