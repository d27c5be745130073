from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import BadFile, EccError
from ecc.training.batches import BatchStream
from ecc.training.distill import DistillSettings, Teacher, distillation_loss
from ecc.training.distributed import DistributedContext
from ecc.training.loop import Diverged, train
from ecc.training.run_dir import open_run
from ecc.training.schedules import Cosine
from ecc.training.settings import TrainSettings
from training.toys import Kept, Net, batches, fit, plain_net, same_weights, toy_task

# ---------------------------------------------------------------- what it computes


def test_it_is_the_loop_that_everyone_writes() -> None:
    """Against a twin by hand: loss, backward, clip, step, with the scheduled rate."""
    model = plain_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    stream = BatchStream(toy_task(), seed=3)
    schedule = Cosine(start_lr=0.05)
    losses = []
    for step, (images, labels) in enumerate(islice(stream, 9)):
        optimizer.param_groups[0]["lr"] = schedule.lr(0.01, step, 9)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.detach())
    kept = Kept()
    trained, outcome = fit(9, task=toy_task(model=plain_net()), schedule=schedule, clip_norm=0.5, history=kept)
    assert same_weights(trained, model)
    assert outcome.loss == pytest.approx(float(torch.stack(losses[-3:]).mean()))
    assert [facts["step"] for facts in kept.lines] == [3, 6, 9]
    assert [facts["total"] for facts in kept.lines] == [3, 6, 9]
    assert [facts["lr"] for facts in kept.lines] == [schedule.lr(0.01, step, 9) for step in (2, 5, 8)]
    assert kept.lines[0]["loss"] == pytest.approx(float(torch.stack(losses[:3]).mean()))


def test_it_learns() -> None:
    kept = Kept()
    fit(120, lr=0.03, task=toy_task(model=plain_net()), history=kept, log_every=20)
    assert kept.lines[-1]["loss"] < 0.8 * kept.lines[0]["loss"]


def test_the_student_trains_in_train_mode_and_modes_are_put_back() -> None:
    task = toy_task()
    task.model.eval()
    task.model.head.train()
    seen = []
    model, _ = fit(2, task=task, on_step=lambda step, facts: seen.append(task.model.norm.training))
    assert seen == [True, True]
    assert (model.norm.training, model.head.training) == (False, True)
    assert int(model.norm.num_batches_tracked) == 2
    assert not torch.equal(model.norm.running_mean, torch.zeros(4))


def test_the_random_state_is_left_as_it_was_and_outcomes_do_not_depend_on_it() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    tasks = [toy_task(), toy_task()]
    torch.manual_seed(5)
    first, _ = fit(4, task=tasks[0])
    assert torch.equal(torch.rand(3), expected)
    second, _ = fit(4, task=tasks[1])
    assert same_weights(first, second)
    assert not same_weights(first, fit(4, seed=1)[0])  # the dropout is another


@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_micro_batches_add_up_to_the_batch(micro_batch: int) -> None:
    whole, _ = fit(3, task=toy_task(model=plain_net()))
    parts, outcome = fit(3, task=toy_task(model=plain_net()), micro_batch=micro_batch)
    for name, weight in parts.state_dict().items():
        torch.testing.assert_close(weight, whole.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert outcome.loss == pytest.approx(fit(3, task=toy_task(model=plain_net()))[1].loss, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_near_full_precision(precision: Any) -> None:
    model, low = fit(20, task=toy_task(model=plain_net()), precision=precision, clip_norm=1.0)
    _, full = fit(20, task=toy_task(model=plain_net()), clip_norm=1.0)
    assert low.loss == pytest.approx(full.loss, rel=0.05)
    assert low.loss != full.loss
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_gradients_are_clipped_at_their_true_size() -> None:
    """With fp16 they are 65,536 times too large until they are unscaled."""
    models = []
    for precision in ("fp32", "fp16"):
        task = toy_task(model=plain_net())
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)  # Adam does not mind the size of gradients
        settings = TrainSettings(precision=precision, clip_norm=0.1)  # type: ignore[arg-type]
        train(task.model, optimizer, BatchStream(task), steps=5, loss=F.cross_entropy, settings=settings)
        models.append(task.model.head.weight.detach())
    moved = (models[0] - plain_net().head.weight.detach()).norm()
    assert moved > 0.03
    assert (models[0] - models[1]).norm() < 0.05 * moved


def test_channels_last_is_the_same_network() -> None:
    model, _ = fit(3, task=toy_task(model=plain_net()), channels_last=True)
    plain, _ = fit(3, task=toy_task(model=plain_net()))
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, plain.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("temperature", [None, 2.0])
def test_a_teacher_adds_its_term(temperature: float | None) -> None:
    dense = plain_net()
    teacher = Teacher(dense, DistillSettings(weight=0.3, temperature=temperature))
    student = plain_net()
    with torch.no_grad():
        student.head.weight.mul_(0.5)
    images, labels = next(BatchStream(toy_task(), seed=3))
    outputs = student(images)
    with torch.no_grad():
        expected = distillation_loss(
            outputs, dense(images), F.cross_entropy(outputs, labels), weight=0.3, temperature=temperature
        )
    _, outcome = fit(1, task=toy_task(model=student), teacher=teacher)
    assert outcome.loss == pytest.approx(float(expected))


class Signs:
    """The least that the loop asks of an optimizer."""

    def __init__(self, model: nn.Module) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
        self.taken = 0

    @torch.no_grad()
    def step(self) -> None:
        self.taken += 1
        for parameter in self.param_groups[0]["params"]:
            parameter -= 0.01 * parameter.grad.sign()

    def zero_grad(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"taken": self.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.taken = state["taken"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_solver_takes_the_optimizers_place(tmp_path: Path, precision: Any) -> None:
    for steps in (2, 5):
        task = toy_task()
        solver = Signs(task.model)
        settings = TrainSettings(precision=precision, clip_norm=1.0)
        with open_run(tmp_path / "run", {}) as run:
            train(
                task.model,
                solver,
                BatchStream(task),
                steps=steps,
                schedule=Cosine(),
                loss=F.cross_entropy,
                settings=settings,
                run=run,
            )
        assert solver.taken == steps
    assert not same_weights(task.model, toy_task().model)


# ---------------------------------------------------------------- refusals


def exploding(at: int) -> Callable[[Tensor, Tensor], Tensor]:
    calls = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        return F.cross_entropy(outputs, targets) * (float("nan") if len(calls) == at else 1.0)

    return loss


def test_a_loss_that_is_not_finite_stops_and_names_the_last_good_checkpoint(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as run:
        message = r"not finite at step 8; the last good checkpoint is .*checkpoint\.safetensors, at step 6\. Lower"
        with pytest.raises(Diverged, match=message):
            fit(20, run=run, task=toy_task(loss=exploding(8)), checkpoint_steps=2, log_every=5)
        state = run.checkpoint()
        assert state is not None
        assert state["step"] == 6
        assert all(torch.isfinite(tensor).all() for tensor in state["model"].values())


def test_without_checkpoints_divergence_is_seen_at_the_next_look() -> None:
    seen = []
    with pytest.raises(Diverged, match="at step 2; there is no checkpoint before it"):
        fit(20, task=toy_task(loss=exploding(2)), log_every=4, on_step=lambda step, facts: seen.append(step))
    assert seen == [1, 2, 3, 4]


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    task = toy_task()

    def spoil(step: int, facts: Any) -> None:
        with torch.no_grad():
            task.model.head.bias[0] = float("inf")

    with open_run(tmp_path / "run", {}) as run:
        with pytest.raises(Diverged, match="a weight is not finite at step 1"):
            fit(5, run=run, task=task, on_step=spoil, checkpoint_steps=1)
        assert run.checkpoint() is None


def test_a_checkpoint_of_another_network_is_refused_in_one_line(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as run:
        fit(2, run=run)
    with open_run(tmp_path / "run", {}) as run:
        with pytest.raises(BadFile, match="does not fit this run") as caught:
            fit(2, run=run, task=toy_task(model=Net(norm=False)))
        assert "\n" not in str(caught.value)


def test_a_checkpoint_of_more_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(tmp_path / "run", {}) as run:
        fit(2, run=run)
        state = run.checkpoint()
        assert state is not None
        run.save(state | {"world_size": 4})
        with pytest.raises(BadFile, match="was written by 4 processes, and this is one of 1"):
            fit(2, run=run)


def test_a_stream_on_another_device_or_of_another_process_is_refused() -> None:
    task = toy_task()
    optimizer = torch.optim.SGD(task.model.parameters())
    settings = TrainSettings()
    with pytest.raises(EccError, match=r"conv\.weight is on cpu and the batches come on meta"):
        train(task.model, optimizer, BatchStream(task, device="meta"), steps=1, loss=F.cross_entropy, settings=settings)
    stream = BatchStream(task, rank=1, world_size=2)
    with pytest.raises(EccError, match="process 1 of 2, and this is 0 of 1"):
        train(
            task.model,
            optimizer,
            stream,
            steps=1,
            loss=F.cross_entropy,
            settings=settings,
            distributed=DistributedContext("cpu"),
        )


def test_the_device_is_waited_for_only_when_looking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tensor is what waits for a GPU; in between the loop may not."""
    reads = []
    for name in ("item", "__float__", "__int__", "__bool__", "tolist"):
        original = getattr(Tensor, name)

        def noted(self: Tensor, *, _original: Any = original) -> Any:
            reads.append(len(steps))
            return _original(self)

        monkeypatch.setattr(Tensor, name, noted)
    steps: list[int] = []
    optimizer_free = toy_task(train_batches=lambda epoch: list(batches(epoch)))
    solver = Signs(optimizer_free.model)
    train(
        optimizer_free.model,
        solver,
        BatchStream(optimizer_free),
        steps=10,
        loss=F.cross_entropy,
        settings=TrainSettings(log_every=5),
        on_step=lambda step, facts: steps.append(step),
    )
    assert set(reads) - {0} == {5, 10}
