from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import BadMeasurement
from ecc.measure import deploy
from ecc.measure.runner import prepare_runner, random_inputs


class Spy(nn.Module):
    """Keeps what it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.drop = nn.Dropout()
        self.seen: list[tuple[Tensor, ...]] = []

    def forward(self, image: Tensor, index: Tensor | None = None) -> Tensor:
        self.seen.append((image,) if index is None else (image, index))
        return self.drop(self.conv(image))


def image(*, batch: int = 2) -> Tensor:
    return torch.ones(batch, 3, 8, 8)


def test_a_model_runs_in_eval_and_inference_mode_and_is_left_as_it_was() -> None:
    model = Spy().train()
    model.drop.eval()
    before = copy.deepcopy(model.state_dict())
    with prepare_runner(model, image()) as ready:
        assert not model.training
        output = ready.run()
        assert isinstance(output, Tensor)
        assert output.is_inference()
        assert (ready.device.type, ready.batch) == ("cpu", 2)
        assert (ready.mode, ready.mode_reason) == (
            "eager",
            "CUDA graphs need a CUDA device, and the network runs on cpu",
        )
    assert model.training
    assert not model.drop.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_hooks_that_observe_are_not_run_and_others_are() -> None:
    model, heard = Spy(), []
    wanted = model.eval()(random := torch.randn(2, 3, 8, 8)) * 2
    model.conv.register_forward_hook(lambda *_: heard.append(1))
    model.drop.register_forward_hook(lambda module, args, output: output * 2)
    with prepare_runner(model, random, input_data="example") as ready:
        for _ in range(3):
            output = ready.run()
        assert isinstance(output, Tensor)
        assert torch.allclose(output, wanted)
    assert heard == []
    assert len(model.seen) == 1
    assert len(model.conv._forward_hooks) == 1


def test_training_is_restored_after_a_failure() -> None:
    model = Spy().train()
    with pytest.raises(RuntimeError, match="boom"), prepare_runner(model, image()):
        raise RuntimeError("boom")
    assert model.training
    assert not torch.is_inference_mode_enabled()


def test_inputs_are_normal_random_numbers_the_same_for_every_network() -> None:
    first, second = Spy(), Spy()
    for model in (first, second):
        with prepare_runner(model, image(batch=64)) as ready:
            ready.run()
    (seen,), (again,) = first.seen[0], second.seen[0]
    assert abs(seen.mean().item()) < 0.05
    assert seen.std().item() == pytest.approx(1, abs=0.05)
    assert torch.equal(seen, again)


def test_the_example_itself_can_be_measured() -> None:
    model = Spy()
    with prepare_runner(model, image(), input_data="example") as ready:
        ready.run()
    assert torch.equal(model.seen[0][0], image())


def test_integer_inputs_are_kept() -> None:
    model, index = Spy(), torch.tensor([3, 1])
    with prepare_runner(model, (image(), index)) as ready:
        ready.run()
    assert torch.equal(model.seen[0][1], index)


def test_inputs_by_name_are_passed_by_name() -> None:
    model = Spy()
    with prepare_runner(model, {"index": torch.tensor([1]), "image": image()}) as ready:
        ready.run()
        assert ready.batch == 1  # of the first tensor
    assert model.seen[0][0].shape == (2, 3, 8, 8)


@pytest.mark.parametrize(
    ("example", "said"),
    [
        (
            torch.zeros(1, 3, 8, 8),
            r"input 0 of shape \(1, 3, 8, 8\) is all zeros.*torch\.randn\(1, 3, 8, 8\)",
        ),
        ((image(), torch.zeros(2, dtype=torch.long)), "input 1"),
        ({"image": torch.zeros(1)}, "input 'image'"),
        (torch.empty(0, 3), "all zeros"),
        ((), "holds no tensor"),
    ],
)
def test_an_input_of_zeros_is_refused(example: object, said: str) -> None:
    with pytest.raises(BadMeasurement, match=said), prepare_runner(Spy(), example):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(("precision", "dtype"), [("fp16", torch.float16), ("bf16", torch.bfloat16)])
def test_half_precision_converts_a_copy(precision: deploy.Precision, dtype: torch.dtype) -> None:
    model = nn.Linear(4, 4)
    with prepare_runner(model, torch.ones(2, 4), precision=precision) as ready:
        output = ready.run()
    assert isinstance(output, Tensor)
    assert output.dtype == dtype
    assert model.weight.dtype == torch.float32


def test_channels_last_converts_a_copy_and_the_input() -> None:
    strides = []

    class Strides(nn.Conv2d):
        def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name in the base class
            strides.append((input.stride(), self.weight.stride()))
            return super().forward(input)

    model = Strides(3, 4, 3)
    with prepare_runner(model, image(), memory_format="channels_last") as ready:
        ready.run()
    assert strides == [((192, 1, 24, 3), (27, 1, 9, 3))]
    assert model.weight.is_contiguous()


@pytest.mark.parametrize(("option", "said"), [({"mode": "graph"}, "'graph'"), ({"precision": "tf32"}, "'tf32'")])
def test_what_needs_a_gpu_is_refused_on_the_cpu(option: dict[str, str], said: str) -> None:
    with (
        pytest.raises(BadMeasurement, match=f"{said} needs a CUDA device, and the model is on cpu"),
        prepare_runner(Spy(), image(), **option),  # type: ignore[arg-type]
    ):
        pass


def test_inputs_drawn_once_are_those_that_would_be_drawn_each_time() -> None:
    model = Spy()
    with prepare_runner(model, image()) as ready:
        ready.run()
    with prepare_runner(model, random_inputs(image(), "cpu"), input_data="example") as ready:
        ready.run()
    assert torch.equal(model.seen[0][0], model.seen[1][0])
    pair = random_inputs((image(), torch.tensor([3])), "cpu")
    assert isinstance(pair, tuple)
    assert pair[1].tolist() == [3]
    named = random_inputs({"x": image()}, "cpu")
    assert isinstance(named, dict)
    assert torch.equal(named["x"], model.seen[0][0])
    with pytest.raises(BadMeasurement, match="all zeros"):
        random_inputs(torch.zeros(1, 3), "cpu")


def test_compiling_starts_afresh_for_every_network(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[object] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: calls.append("reset"))
    monkeypatch.setattr(torch, "compile", lambda model, **options: (calls.append(options), model)[1])
    model = Spy()
    with prepare_runner(model, image(), mode="compile") as ready:
        ready.run()
    assert calls == ["reset", {"dynamic": False}]
    assert len(model.seen) == 1


# ---------------------------------------------------------------- modes


def runner_in(mode: deploy.Mode) -> tuple[object, deploy.Mode, str]:
    run, chosen, reason = deploy._runner(Spy(), (image(),), {}, mode, deploy.AS_ASKED)
    return run(), chosen, reason


def test_a_mode_that_was_asked_for_is_told_as_asked_for() -> None:
    with prepare_runner(Spy(), image(), mode="eager") as ready:
        assert (ready.mode, ready.mode_reason) == ("eager", deploy.AS_ASKED)


def test_auto_waits_for_a_capture_on_cuda_only() -> None:
    assert deploy.mode_on("auto", torch.device("cuda", 0)) == ("auto", "")
    assert deploy.mode_on("auto", torch.device("mps"))[0] == "eager"
    assert deploy.mode_on("compile", torch.device("cuda", 0)) == ("compile", deploy.AS_ASKED)


def test_a_network_that_can_be_captured_runs_as_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deploy, "_captured", lambda run: lambda: "replayed")
    assert runner_in("auto") == ("replayed", "graph", deploy.CAPTURED)
    assert runner_in("graph") == ("replayed", "graph", deploy.AS_ASKED)


def test_a_network_that_cannot_be_captured_runs_eagerly_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(run: object) -> None:
        raise deploy._NotCapturable("called a synchronizing CUDA operation")

    monkeypatch.setattr(deploy, "_captured", refuse)
    output, mode, reason = runner_in("auto")
    assert isinstance(output, Tensor)
    assert mode == "eager"
    assert reason == "the network cannot be captured as a CUDA graph (called a synchronizing CUDA operation)"
    with pytest.raises(
        BadMeasurement, match=r"'graph' was asked for.*synchronizing CUDA operation\)\. Measure in mode"
    ):
        runner_in("graph")


class Choosy(nn.Module):
    """Asks for a value in the middle of its forward pass, which no capture allows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y if y.sum().item() > 0 else -y


@pytest.mark.gpu
def test_on_a_gpu_auto_captures_what_can_be_captured_and_nothing_else() -> None:
    with prepare_runner(nn.Conv2d(3, 8, 3).cuda(), image()) as ready:
        assert (ready.mode, ready.mode_reason) == ("graph", deploy.CAPTURED)
        ready.run()
    with prepare_runner(Choosy().cuda(), image()) as ready:
        assert ready.mode == "eager"
        assert "cannot be captured as a CUDA graph" in ready.mode_reason
        ready.run()
    with (
        pytest.raises(BadMeasurement, match="cannot be captured"),
        prepare_runner(Choosy().cuda(), image(), mode="graph"),
    ):
        pass
    assert torch.rand(3, device="cuda").sum() > 0  # the random generator is as usable as before
    wrong = torch.ones(2, 4, 8, 8)
    with pytest.raises(RuntimeError, match="expected input"), prepare_runner(nn.Conv2d(3, 8, 3).cuda(), wrong):
        pass  # a network that does not run is not taken for one that cannot be captured
