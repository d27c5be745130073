from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.errors import EccError
from ecc.training import BatchStream, DistributedContext, Teacher, TrainSettings, train
from ecc.training.cuda_graph import CALLS_BEFORE_CAPTURE, MIN_STEPS, CudaGraphFunction, CudaGraphPass
from training.toys import Net, fit, same_weights, toy_task


def test_without_a_gpu_the_setting_changes_nothing() -> None:
    assert same_weights(fit(MIN_STEPS + 2, cuda_graph=True)[0], fit(MIN_STEPS + 2)[0])


def test_several_processes_and_other_values_in_batches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = DistributedContext(torch.device("cpu"))
    monkeypatch.setattr(distributed, "size", 2)
    task, settings = toy_task(), TrainSettings(cuda_graph=True)
    stream, optimizer = BatchStream(task, world_size=2), torch.optim.Adam(task.model.parameters())
    with pytest.raises(EccError, match="cuda_graph works with one process, and there are 2"):
        train(task.model, optimizer, stream, steps=1, loss=task.loss, settings=settings, distributed=distributed)
    batch = ({"image": torch.zeros(2, 3), "scale": 0.5}, torch.zeros(2))
    with pytest.raises(EccError, match="needs batches of tensors only, and this batch holds a float"):
        CudaGraphPass(Net(), lambda _: torch.zeros(()))(batch)


def on_gpu(cuda_graph: bool, loss: Any = F.cross_entropy, **settings: Any) -> tuple[Net, list[float]]:
    torch.manual_seed(0)
    model = Net(norm=True, dropout=0.0).cuda()
    losses: list[float] = []
    train(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        BatchStream(toy_task(model=model), device="cuda"),
        steps=40,
        loss=loss,
        settings=TrainSettings(cuda_graph=cuda_graph, log_every=10, **settings),
        teacher=Teacher(model),
        on_step=lambda _, info: losses.append(float(info.loss)),
    )
    return model, losses


def model_loss(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"precision": "bf16", "channels_last": True}, {"micro_batch": 3}, {"loss": model_loss}],
)
def test_a_graph_trains_as_the_plain_loop_does(settings: dict[str, Any]) -> None:
    """Also statistics of batch norm: the effect of the warm-up passes is undone."""
    with_graph, losses = on_gpu(True, **settings)
    without, plain_losses = on_gpu(False, **settings)
    tolerance = 0.05 if "precision" in settings else 1e-3
    assert losses == pytest.approx(plain_losses, rel=tolerance, abs=tolerance)
    for name, tensor in with_graph.state_dict().items():
        torch.testing.assert_close(tensor, without.state_dict()[name], rtol=tolerance, atol=tolerance)


def run_pass(model: Net, batch: Any) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


@pytest.mark.gpu
def test_dropout_differs_from_replay_to_replay() -> None:
    model = Net(norm=False, dropout=0.5).cuda().train()
    batch = next(BatchStream(toy_task(model=model), device="cuda"))
    graph_pass = CudaGraphPass(model, lambda found: run_pass(model, found))
    assert len({float(graph_pass(batch)) for _ in range(6)}) > 1


@pytest.mark.gpu
def test_a_batch_of_another_shape_runs_without_the_graph() -> None:
    model = Net(norm=False, dropout=0.0).cuda().train()
    images, labels = next(BatchStream(toy_task(model=model), device="cuda"))
    graph_pass = CudaGraphPass(model, lambda found: run_pass(model, found))
    first = graph_pass((images, labels))
    short = (images[:2], labels[:2])
    assert float(graph_pass(short)) == pytest.approx(float(run_pass(model, short)))
    assert float(graph_pass((images, labels))) == pytest.approx(float(first))
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    run_pass(model, (images, labels))
    for expected, parameter in zip(gradients, model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(expected, parameter.grad)


@pytest.mark.gpu
def test_a_network_that_reads_values_is_refused() -> None:
    model = Net(norm=False, dropout=0.0).cuda().train()
    batch = next(BatchStream(toy_task(model=model), device="cuda"))

    def reading(found: Any) -> Tensor:
        loss = run_pass(model, found)
        return loss if float(loss) > 0 else -loss

    with pytest.raises(EccError, match=r"cannot be captured as a CUDA graph .*leave out cuda_graph"):
        CudaGraphPass(model, reading)(batch)


def called(device: str, calls: int) -> tuple[list[Any], int]:
    """Outputs of a captured function, and how often the function itself ran."""
    runs = []

    def double(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        runs.append(one)
        return 2 * one, other.flip(0)

    function = CudaGraphFunction(double)
    arguments = [(torch.full((2,), float(n), device=device), torch.tensor([n, 0], device=device)) for n in range(calls)]
    kept = [function(*pair) for pair in arguments]
    assert function(torch.ones(3, device=device), torch.zeros(1, device=device))[0].tolist() == [2.0] * 3
    return [[tensor.tolist() for tensor in pair] for pair in kept], len(runs) - 1


def test_a_function_of_tensors_is_called_directly_without_a_gpu() -> None:
    outputs, runs = called("cpu", CALLS_BEFORE_CAPTURE + 4)
    assert outputs == [[[2 * n] * 2, [0, n]] for n in range(CALLS_BEFORE_CAPTURE + 4)]
    assert runs == CALLS_BEFORE_CAPTURE + 4


@pytest.mark.gpu
def test_a_function_of_tensors_is_replayed_on_a_gpu() -> None:
    outputs, runs = called("cuda", CALLS_BEFORE_CAPTURE + 4)
    assert outputs == [[[2 * n] * 2, [0, n]] for n in range(CALLS_BEFORE_CAPTURE + 4)]
    assert runs == CALLS_BEFORE_CAPTURE + 1, "the calls before the capture, and the capture"


@pytest.mark.gpu
def test_a_function_that_reads_values_is_called_directly() -> None:
    function = CudaGraphFunction(lambda one: (one + 1,) if float(one) > 2 else (one - 1,))
    for number in range(CALLS_BEFORE_CAPTURE + 3):
        (found,) = function(torch.tensor(float(number)).cuda())
        assert float(found) == (number + 1 if number > 2 else number - 1)
    assert torch.rand(2, device="cuda").shape == (2,), "the generator still works"
