"""Networks are run as deployed, and the caller's model and torch's settings are restored."""

from __future__ import annotations

import copy
import platform
import sys
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


def image(*, batch: int = 2) -> Tensor:
    return torch.ones(batch, 3, 8, 8)


def run(model: nn.Module, example: Any, **settings: Any) -> Tensor:
    with prepare_runner(model, example, MeasureSettings(**settings)) as ready:
        output = ready.run()
    assert isinstance(output, Tensor)
    return output


def test_a_model_runs_in_eval_and_inference_mode_and_is_restored() -> None:
    model = Spy().train()
    model.drop.eval()
    before = copy.deepcopy(model.state_dict())
    with prepare_runner(model, image()) as ready:
        assert not model.training
        assert isinstance(output := ready.run(), Tensor)
        assert output.is_inference()
        assert (ready.device.type, ready.batch, ready.mode) == ("cpu", 2, "eager")
        assert ready.mode_reason == "CUDA graphs need a CUDA device, and the network runs on cpu"
    assert model.training
    assert not model.drop.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    with pytest.raises(RuntimeError, match="boom"), prepare_runner(model, image()):
        raise RuntimeError("boom")
    assert model.training
    assert not torch.is_inference_mode_enabled()


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
    first, second, third = Spy(), Spy(), Spy()
    run(first, image(batch=64))
    run(second, random_inputs(image(batch=64), "cpu"), input_data="example")
    (seen,), (again,) = first.seen[0], second.seen[0]
    assert torch.equal(seen, again)
    assert abs(seen.mean().item()) < 0.05
    assert seen.std().item() == pytest.approx(1, abs=0.05)
    index = torch.tensor([3, 1])
    run(third, (image(), index), input_data="example")
    run(third, {"index": index, "image": image()})
    assert torch.equal(third.seen[0][0], image())
    assert torch.equal(third.seen[0][1], index)
    assert torch.equal(third.seen[1][1], index)  # integers are kept
    pair = random_inputs((image(), index), "cpu")
    assert torch.equal(pair[1], index)
    assert list(random_inputs({"x": image()}, "cpu")) == ["x"]


@pytest.mark.parametrize(
    ("example", "message"),
    [
        (torch.zeros(1, 3, 8, 8), r"input 0 of shape \(1, 3, 8, 8\) is all zeros.*torch\.randn\(1, 3, 8, 8\)"),
        ((image(), torch.zeros(2, dtype=torch.long)), "input 1"),
        ({"image": torch.zeros(1)}, "input 'image'"),
        (torch.empty(0, 3), "all zeros"),
        ((), "contains no tensor"),
    ],
)
def test_an_input_of_zeros_is_refused(example: Any, message: str) -> None:
    with pytest.raises(BadMeasurement, match=message), prepare_runner(Spy(), example):
        pass


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
    assert run(model, image(), **settings).dtype == dtype
    assert seen == [strides]
    assert model.weight.dtype == torch.float32
    assert model.weight.is_contiguous()


# --- execution modes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "what"), [({"mode": "graph"}, "'graph'"), ({"precision": "tf32"}, "'tf32'")])
def test_settings_for_gpus_are_refused_on_the_cpu(settings: dict[str, str], what: str) -> None:
    with pytest.raises(BadMeasurement, match=f"{what} needs a CUDA device, and the model is on cpu"):
        run(Spy(), image(), **settings)


def test_every_network_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda model, **options: (calls.append(options), model)[1])
    run(Spy(), image(), mode="compile")
    assert calls == ["reset", {"dynamic": False}]


def make_run(mode: Mode) -> tuple[object, Mode, str]:
    ready, chosen, reason = runner._make_run(Spy(), (image(),), {}, mode, "given")
    return ready(), chosen, reason


def test_auto_waits_for_a_capture_on_cuda_only() -> None:
    assert runner.resolve_mode("auto", torch.device("cuda", 0)) == ("auto", "")
    assert runner.resolve_mode("auto", torch.device("mps"))[0] == "eager"
    assert runner.resolve_mode("compile", torch.device("cuda", 0)) == ("compile", "chosen by the user")


def test_auto_runs_a_graph_if_the_network_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
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


class DataDependent(nn.Module):
    """Needs a value on the host in the middle of its forward pass, which no capture allows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y if y.sum().item() > 0 else -y


@pytest.mark.gpu
def test_on_a_gpu_auto_captures_what_can_be_captured() -> None:
    with prepare_runner(nn.Conv2d(3, 8, 3).cuda(), image()) as ready:
        assert ready.mode == "graph"
        assert "can be captured" in ready.mode_reason
        ready.run()
    with prepare_runner(DataDependent().cuda(), image()) as ready:
        assert ready.mode == "eager"
        assert "cannot be captured as a CUDA graph" in ready.mode_reason
        ready.run()
    with pytest.raises(BadMeasurement, match="cannot be captured"):
        run(DataDependent().cuda(), image(), mode="graph")
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


def test_the_driver_version_comes_from_linux_or_nvml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    folder = tmp_path / "driver" / "nvidia"
    folder.mkdir(parents=True)
    text = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 2024\nGCC version 12.3.0\n"
    for content, driver in ((text, "550.54.15"), ("something else\n", "unknown")):
        (folder / "version").write_text(content)
        assert environment("cuda", proc=tmp_path)["driver"] == driver
    elsewhere = tmp_path / "elsewhere"
    assert environment("cuda", proc=elsewhere)["driver"] == "unknown"
    for version in ("580.1.2", b"580.1.2"):
        nvml = SimpleNamespace(nvmlInit=lambda: None, nvmlSystemGetDriverVersion=lambda v=version: v)
        monkeypatch.setitem(sys.modules, "pynvml", nvml)
        assert environment("cuda", proc=elsewhere)["driver"] == "580.1.2"
