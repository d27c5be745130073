from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from ecc.errors import EccError
from ecc.training.batches import BatchStream
from ecc.training.cuda_graph import CALLS, WORTH_IT, CudaGraphFunction, CudaGraphPass
from ecc.training.distill import Teacher
from ecc.training.distributed import DistributedContext
from ecc.training.loop import TrainResult, train
from ecc.training.settings import TrainSettings
from training.toys import Net, fit, same_weights, toy_task


def test_elsewhere_than_on_a_gpu_it_changes_nothing() -> None:
    graphed, _ = fit(WORTH_IT + 2, cuda_graph=True)
    plain, _ = fit(WORTH_IT + 2)
    assert same_weights(graphed, plain)


def test_a_scaled_loss_is_refused() -> None:
    with pytest.raises(EccError, match="precision fp16"):
        TrainSettings(precision="fp16", cuda_graph=True)


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = DistributedContext(torch.device("cpu"))
    monkeypatch.setattr(distributed, "size", 2)
    task = toy_task()
    stream = BatchStream(task, rank=distributed.rank, world_size=2)
    optimizer = torch.optim.Adam(task.model.parameters())
    settings = TrainSettings(cuda_graph=True)
    with pytest.raises(EccError, match="for one process, and this is one of 2"):
        train(task.model, optimizer, stream, steps=1, loss=F.cross_entropy, settings=settings, distributed=distributed)


def test_what_a_replay_could_not_follow_is_refused() -> None:
    batch = ({"image": torch.zeros(2, 3), "scale": 0.5}, torch.zeros(2))
    with pytest.raises(EccError, match="a batch holds a float beside its tensors"):
        CudaGraphPass(Net(), lambda _: torch.zeros(()))(batch)


def on_gpu(cuda_graph: bool, steps: int = 40, **settings: Any) -> tuple[Net, TrainResult, list[float]]:
    torch.manual_seed(0)
    model = Net(norm=True, dropout=settings.pop("dropout", 0.0)).cuda()
    task = toy_task(model=model)
    losses: list[float] = []
    outcome = train(
        model,
        torch.optim.Adam(model.parameters(), lr=0.01),
        BatchStream(task, device="cuda"),
        steps=steps,
        loss=F.cross_entropy,
        settings=TrainSettings(cuda_graph=cuda_graph, log_every=10, **settings),
        teacher=Teacher(model),
        on_step=lambda _, facts: losses.append(float(facts["loss"])),
    )
    return model, outcome, losses


@pytest.mark.gpu
@pytest.mark.parametrize("settings", [{}, {"precision": "bf16", "channels_last": True}, {"micro_batch": 3}])
def test_a_graph_trains_as_the_plain_loop_does(settings: dict[str, Any]) -> None:
    """Statistics of batch norm among it: what the capture's own passes did to them is undone."""
    graphed, _, losses = on_gpu(True, **settings)
    plain, _, plain_losses = on_gpu(False, **settings)
    tolerance = 0.05 if "precision" in settings else 1e-3
    assert losses == pytest.approx(plain_losses, rel=tolerance, abs=tolerance)
    for (name, mine), theirs in zip(graphed.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(
            mine, theirs, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.gpu
def test_dropout_is_drawn_anew_at_every_replay() -> None:
    model = Net(norm=False, dropout=0.5).cuda().train()
    batch = next(BatchStream(toy_task(model=model), device="cuda"))
    graphed = CudaGraphPass(model, lambda found: _pass(model, found))
    assert len({float(graphed(batch)) for _ in range(6)}) > 1


@pytest.mark.gpu
def test_a_batch_of_another_shape_runs_without() -> None:
    model = Net(norm=False, dropout=0.0).cuda().train()
    images, labels = next(BatchStream(toy_task(model=model), device="cuda"))
    graphed = CudaGraphPass(model, lambda found: _pass(model, found))
    first = graphed((images, labels))
    short = (images[:2], labels[:2])
    assert float(graphed(short)) == pytest.approx(float(_pass(model, short)))
    assert float(graphed((images, labels))) == pytest.approx(float(first))
    gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    _pass(model, (images, labels))
    for mine, parameter in zip(gradients, model.parameters(), strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(mine, parameter.grad)


@pytest.mark.gpu
def test_a_network_that_looks_at_values_is_refused() -> None:
    model = Net(norm=False, dropout=0.0).cuda().train()
    batch = next(BatchStream(toy_task(model=model), device="cuda"))

    def nosy(found: Any) -> Tensor:
        loss = _pass(model, found)
        return loss if float(loss) > 0 else -loss

    with pytest.raises(EccError, match=r"cannot be captured as a CUDA graph .*leave out cuda_graph"):
        CudaGraphPass(model, nosy)(batch)


def _pass(model: Net, batch: Any) -> Tensor:
    model.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    return loss.detach()


def test_a_function_of_tensors_is_called_as_it_is_off_the_gpu() -> None:
    seen = []

    def double(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(one)
        return 2 * one, other.clone()

    graphed = CudaGraphFunction(double)
    for number in range(CALLS + 2):
        twice, same = graphed(torch.full((2,), float(number)), torch.ones(1))
        assert twice.tolist() == [2 * number] * 2
        assert same.tolist() == [1.0]
    assert len(seen) == CALLS + 2


@pytest.mark.gpu
def test_a_function_of_tensors_is_replayed_on_a_gpu() -> None:
    seen = []

    def double(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(one)
        return 2 * one, other.flip(0)

    graphed, kept = CudaGraphFunction(double), []
    for number in range(CALLS + 4):
        twice, turned = graphed(torch.full((2,), float(number)).cuda(), torch.tensor([number, 0]).cuda())
        kept.append((twice, turned))
    assert len(seen) == CALLS + 1, "the calls before, and the capture"
    for number, (twice, turned) in enumerate(kept):
        assert twice.tolist() == [2 * number] * 2
        assert turned.tolist() == [0, number]
    elsewhere, _ = graphed(torch.ones(2), torch.zeros(2))
    assert elsewhere.tolist() == [2.0] * 2
    longer, _ = graphed(torch.ones(3).cuda(), torch.zeros(1).cuda())
    assert longer.tolist() == [2.0] * 3


@pytest.mark.gpu
def test_a_function_that_looks_at_values_is_called_as_it_is() -> None:
    def nosy(one: Tensor) -> tuple[Tensor]:
        return (one + 1,) if float(one) > 2 else (one - 1,)

    graphed = CudaGraphFunction(nosy)
    for number in range(CALLS + 3):
        (found,) = graphed(torch.tensor(float(number)).cuda())
        assert float(found) == (number + 1 if number > 2 else number - 1)
    assert torch.rand(2, device="cuda").shape == (2,), "the generator is as it was"
