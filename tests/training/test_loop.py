from __future__ import annotations

import signal
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ecc.errors import BadFile, BadTask, EccError, OutOfMemory
from ecc.task import Task
from ecc.training import (
    BatchStream,
    Cosine,
    DistillSettings,
    Diverged,
    Interrupted,
    Teacher,
    Training,
    TrainSettings,
    fused_on_gpu,
    open_run,
    train,
)
from ecc.training import loop as loop_module
from ecc.training.loop import _LossSum, all_finite
from training.toys import KeptLines, Net, batches, data, fit, plain_net, same_weights, toy_task, two_convs, without_wall


def stop_at(step: int, number: int = signal.SIGTERM) -> Callable[..., None]:
    def stop(at: int, info: Any) -> None:
        if at == step:
            signal.raise_signal(number)

    return stop


# ---------------------------------------------------------------- what it computes


def test_it_equals_a_loop_written_by_hand() -> None:
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
    kept = KeptLines()
    trained, result = fit(9, task=toy_task(model=plain_net()), schedule=schedule, clip_norm=0.5, history=kept)
    assert same_weights(trained, model)
    assert result.loss == pytest.approx(float(torch.stack(losses[-3:]).mean()))
    assert [(line["step"], line["total"], line["lr"]) for line in kept.lines] == [
        (step, step, schedule.lr(0.01, step - 1, 9)) for step in (3, 6, 9)
    ]
    assert kept.lines[0]["loss"] == pytest.approx(float(torch.stack(losses[:3]).mean()))


def test_modes_and_random_states_are_restored() -> None:
    task, seen = toy_task(), []
    task.model.eval()
    task.model.head.train()
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    model, _ = fit(2, task=task, on_step=lambda step, info: seen.append((step, info.lineage, task.model.norm.training)))
    assert torch.equal(torch.rand(3), expected)
    assert seen == [(1, 1, True), (2, 2, True)]
    assert (model.norm.training, model.head.training) == (False, True)
    assert int(model.norm.num_batches_tracked) == 2


@pytest.mark.parametrize("options", [{"micro_batch": 1}, {"micro_batch": 3}, {"channels_last": True}])
def test_settings_that_keep_the_result(options: dict[str, Any]) -> None:
    expected, whole = fit(3, task=toy_task(model=plain_net()))
    model, result = fit(3, task=toy_task(model=plain_net()), **options)
    for name, weight in model.state_dict().items():
        torch.testing.assert_close(weight, expected.state_dict()[name], rtol=1e-4, atol=1e-6)
    assert result.loss == pytest.approx(whole.loss, rel=1e-5)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mixed_precision_is_near_full_precision(precision: str) -> None:
    model, low = fit(20, task=toy_task(model=plain_net()), precision=precision, clip_norm=1.0)
    _, full = fit(20, task=toy_task(model=plain_net()), clip_norm=1.0)
    assert low.loss == pytest.approx(full.loss, rel=0.05)
    assert low.loss != full.loss
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_gradients_are_clipped_after_unscaling() -> None:
    """With fp16 they are 65,536 times too large before."""
    heads = []
    for precision in ("fp32", "fp16"):
        task = toy_task(model=plain_net())
        optimizer = torch.optim.SGD(task.model.parameters(), lr=0.5)  # Adam does not depend on the size of gradients
        settings = TrainSettings(precision=precision, clip_norm=0.1)
        train(task.model, optimizer, BatchStream(task), steps=5, loss=F.cross_entropy, settings=settings)
        heads.append(task.model.head.weight.detach())
    change = (heads[0] - plain_net().head.weight.detach()).norm()
    assert change > 0.03
    assert (heads[0] - heads[1]).norm() < 0.05 * change


@pytest.mark.parametrize("options", [{}, {"micro_batch": 2}, {"precision": "bf16", "channels_last": True}])
def test_losses_inside_the_model_train_like_others(options: dict[str, Any]) -> None:
    """With a DataLoader, dict batches and distillation."""

    def as_dict(items: list[Any]) -> dict[str, Tensor]:
        return {"images": torch.stack([item[0] for item in items]), "labels": torch.tensor([item[1] for item in items])}

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(images=batch["images"]), batch["labels"])

    def result(loss: Callable[..., Tensor], collate: Any) -> nn.Module:
        loader = DataLoader(TensorDataset(*data()), batch_size=4, shuffle=True, collate_fn=collate)
        task = toy_task(model=plain_net(), train_batches=loader, loss=loss)
        teacher = Teacher(Net(norm=False, dropout=0.0), DistillSettings(weight=0.3))
        return fit(9, task=task, teacher=teacher, **options)[0]

    torch.manual_seed(1)
    inside = result(loss, as_dict)
    torch.manual_seed(1)
    outside = result(F.cross_entropy, None)
    assert same_weights(inside, outside)


def test_the_state_of_the_optimizer_has_the_strides_of_the_weights_after_a_resume(tmp_path: Path) -> None:
    """Files do not keep strides, and fused optimizers need equal ones."""
    settings, weights = TrainSettings(channels_last=True), []
    for folder, parts in (("resumed", (4, 9)), ("whole", (9,))):
        for steps in parts:
            task = toy_task(model=two_convs())
            optimizer = torch.optim.Adam(task.model.parameters(), lr=0.02, fused=True)
            with open_run(tmp_path / folder, {}) as run:
                train(task.model, optimizer, BatchStream(task), steps=steps, loss=task.loss, settings=settings, run=run)
        weights.append(task.model)
        for parameter, state in optimizer.state.items():
            assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == parameter.stride()
    assert any(not one.is_contiguous() for one in optimizer.state)
    assert same_weights(*weights)


class SignDescent:
    """An optimizer with no more than `OptimizerLike`."""

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
def test_a_solver_replaces_the_optimizer(tmp_path: Path, precision: str) -> None:
    settings = TrainSettings(precision=precision, clip_norm=1.0)
    for steps in (2, 5):
        task = toy_task()
        solver, stream = SignDescent(task.model), BatchStream(task)
        with open_run(tmp_path / "run", {}) as run:
            train(
                task.model, solver, stream, steps=steps, schedule=Cosine(), loss=task.loss, settings=settings, run=run
            )
        assert solver.taken == steps
    assert not same_weights(task.model, toy_task().model)


def test_the_generator_takes_the_same_steps_and_saves_when_it_continues(tmp_path: Path) -> None:
    whole, _ = fit(6)
    for taken, expected in ((3, [1, 2, 3]), (9, [3, 4, 5, 6])):
        task = toy_task()
        optimizer, stream = torch.optim.Adam(task.model.parameters(), lr=0.01), BatchStream(task, seed=3)
        settings = TrainSettings(log_every=3, checkpoint_steps=1)
        with open_run(tmp_path / "run", {}) as run:
            made = Training(task.model, optimizer, stream, steps=6, loss=task.loss, settings=settings, run=run)
            steps = made.each_step()
            assert [made.step for _ in islice(steps, taken)] == expected
            steps.close()
    assert same_weights(task.model, whole)


def test_the_device_is_waited_for_only_when_logging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading a tensor waits for a GPU."""
    reads, steps = [], []
    for name in ("item", "__float__", "__int__", "__bool__", "tolist"):
        original = getattr(Tensor, name)

        def noted(self: Tensor, *, _original: Any = original) -> Any:
            reads.append(len(steps))
            return _original(self)

        monkeypatch.setattr(Tensor, name, noted)
    task = toy_task(train_batches=lambda epoch: list(batches(epoch)))
    solver, settings = SignDescent(task.model), TrainSettings(log_every=5)
    stream = BatchStream(task)
    train(
        task.model, solver, stream, steps=10, loss=task.loss, settings=settings, on_step=lambda *info: steps.append(1)
    )
    assert set(reads) - {0} == {5, 10}


# ---------------------------------------------------------------- errors


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
    seen = []
    with pytest.raises(Diverged, match="at step 2; there is no checkpoint"):
        fit(20, task=toy_task(loss=exploding(2)), log_every=4, on_step=lambda step, info: seen.append(step))
    assert seen == [1, 2, 3, 4]


def test_weights_that_are_not_finite_are_never_saved(tmp_path: Path) -> None:
    task = toy_task()

    def spoil(step: int, info: Any) -> None:
        with torch.no_grad():
            task.model.head.bias[0] = float("inf")

    with open_run(tmp_path / "run", {}) as run:
        with pytest.raises(Diverged, match="a weight is not finite at step 1"):
            fit(5, run=run, task=task, on_step=spoil, checkpoint_steps=1)
        assert run.checkpoint() is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_losses_are_summed_and_the_first_bad_step_is_found(monkeypatch: pytest.MonkeyPatch, bad: float) -> None:
    monkeypatch.setattr(loop_module, "MAX_PENDING_LOSSES", 7)
    often, once = _LossSum(), _LossSum()
    values = torch.rand(40, generator=torch.Generator().manual_seed(0))
    for step, loss in enumerate(values, start=1):
        often.append(loss, step)
        once.append(loss, step)
        if step % 3 == 0:
            often.sum_up()
    once.sum_up()
    often.sum_up()
    assert (often.total, often.count) == (once.total, once.count) == (sum(values.tolist()), 40)
    for step, value in enumerate([1.0, bad, 3.0, float("nan")], start=41):
        once.append(torch.tensor(value), step)
    once.sum_up()
    assert once.first_bad == 42
    tensors = [torch.randn(3, 4), torch.zeros(0), torch.randn(5, 2).bfloat16(), torch.full((9,), 3e38)]
    assert all_finite(tensors)
    tensors[2][3, 1] = bad
    assert not all_finite(tensors)


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        (
            {"loss": lambda outputs, targets: outputs[9, 9]},
            BadTask,
            "at step 1 the network or its loss raised IndexError",
        ),
        ({"loss": lambda outputs, targets: torch.empty(1 << 60)}, OutOfMemory, "step 1 ran out .* --micro-batch N"),
    ],
)
def test_errors_of_the_users_code_are_named(fields: dict[str, Any], error: type[EccError], message: str) -> None:
    with pytest.raises(error, match=message):
        fit(3, task=toy_task(**fields))


def test_batches_that_fail_leave_a_checkpoint_before_the_step(tmp_path: Path) -> None:
    whole, _ = fit(6)

    def failing(epoch: int) -> Any:
        yield from islice(batches(epoch), 4)
        raise OSError("disk gone")

    with open_run(tmp_path / "run", {}) as run:
        with pytest.raises(BadTask, match=r"disk gone\. It is step 5; the last good checkpoint is .*, at step 4"):
            fit(6, run=run, task=toy_task(train_batches=failing))
        assert same_weights(fit(6, run=run)[0], whole)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as run:
        fit(2, run=run)
        with pytest.raises(BadFile, match="does not fit this run") as caught:
            fit(2, run=run, task=toy_task(model=Net(norm=False)))
        assert "\n" not in str(caught.value)
        run.save({**(run.checkpoint() or {}), "world_size": 4})
        with pytest.raises(BadFile, match="was written by 4 processes, and now there are 1"):
            fit(2, run=run)


# ---------------------------------------------------------------- resuming


def loader_task() -> Task:
    return toy_task(train_batches=DataLoader(TensorDataset(*data()), batch_size=4, shuffle=True))


def large_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """So large that the first steps in fp16 overflow and are skipped, until the scale fits."""
    return 1000 * F.cross_entropy(outputs, targets)


@pytest.mark.parametrize(
    ("first", "options"),
    [
        (1, {}),
        (8, {}),
        (13, {}),
        (19, {}),
        (5, {"task": loader_task}),
        (9, {"task": loader_task}),
        (5, {"precision": "bf16"}),
        (14, {"precision": "fp16", "task": lambda: toy_task(loss=large_loss)}),
        (5, {"schedule": Cosine()}),
        (5, {"micro_batch": 2}),
    ],
)
def test_a_resumed_training_equals_an_uninterrupted_one_bit_for_bit(
    tmp_path: Path, first: int, options: dict[str, Any]
) -> None:
    make = options.get("task", toy_task)
    options = {name: value for name, value in options.items() if name != "task"}
    with open_run(tmp_path / "whole", {}) as run:
        whole, _ = fit(20, run=run, task=make(), **options)
        expected = without_wall(run.history())
    with open_run(tmp_path / "run", {}) as run, pytest.raises(Interrupted):
        fit(20, run=run, task=make(), on_step=stop_at(first), **options)
    with open_run(tmp_path / "run", {}) as run:
        # The learning rate of the checkpoint is used: the optimizer of a method may start with another one.
        model, result = fit(20, run=run, task=make(), lr=0.5, **options)
        assert result.resumed_at == first
        assert without_wall(run.history()) == expected
    assert same_weights(model, whole)


def test_a_finished_training_is_not_repeated(tmp_path: Path) -> None:
    with open_run(tmp_path / "run", {}) as run:
        first, _ = fit(4, run=run)
    with open_run(tmp_path / "run", {}) as run:
        second, result = fit(4, run=run)
        assert (result.steps, result.resumed_at, result.loss) == (4, 4, None)
    assert same_weights(first, second)


def test_checkpoints_by_steps_and_by_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def saved(**options: Any) -> list[int]:
        steps = []
        with open_run(tmp_path / str(len(list(tmp_path.iterdir()))), {}) as run:
            monkeypatch.setattr(run, "save", lambda state: steps.append(state["step"]))
            fit(10, run=run, **options)
        return steps

    assert saved(checkpoint_steps=4) == [4, 8, 10]
    assert saved(checkpoint_steps=None) == [10]
    clock = iter(range(1000))
    monkeypatch.setattr("ecc.training.loop.time.monotonic", lambda: float(next(clock)))
    assert len(saved(checkpoint_seconds=3.0)) > 3


def test_on_step_can_end_the_training(tmp_path: Path) -> None:
    for resumed_at in (0, 4):
        with open_run(tmp_path / "run", {}) as run:
            _, result = fit(20, run=run, on_step=lambda step, info: step == 4)
            assert (result.steps, result.stopped, result.resumed_at) == (4, True, resumed_at)
            assert [line["step"] for line in run.history()] == [3, 4]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_says_how_to_resume(tmp_path: Path, number: signal.Signals) -> None:
    with open_run(tmp_path / "run", {}) as run:
        message = rf"signal {int(number)} after step 2, saved in .*checkpoint\.safetensors\. Run the same command again"
        with pytest.raises(Interrupted, match=message) as caught:
            fit(20, run=run, on_step=stop_at(2, number))
        assert caught.value.signum == number
        assert (run.checkpoint() or {})["step"] == 2
    with pytest.raises(Interrupted, match="nothing was saved"):
        fit(20, on_step=stop_at(2, number))
    with pytest.raises(Interrupted):
        fit(1, on_step=stop_at(1, number))  # in the last step


def test_buffers_that_state_dict_leaves_out_are_restored(tmp_path: Path) -> None:
    """The buffers of a slimmed network may differ from channel to channel."""

    def task(value: float) -> Task:
        found = toy_task()
        found.model.register_buffer("shift", torch.full((3,), value), persistent=False)
        return found

    with open_run(tmp_path / "run", {}) as run:
        fit(3, run=run, task=task(1.0))
        model, _ = fit(5, run=run, task=task(2.0))
    assert torch.equal(model.shift, torch.ones(3))


# ---------------------------------------------------------------- GPU


def test_optimizers_are_fused_on_a_gpu_only() -> None:
    assert fused_on_gpu(nn.Linear(2, 2).parameters()) is None
    assert fused_on_gpu([]) is None


@pytest.mark.gpu
def test_a_fused_optimizer_takes_steps() -> None:
    layer = nn.Linear(2, 2).cuda()
    assert fused_on_gpu(layer.parameters()) is True
    assert fused_on_gpu([*layer.parameters(), torch.zeros(1)]) is None
    optimizer = torch.optim.Adam(layer.parameters(), fused=fused_on_gpu(layer.parameters()))
    layer(torch.ones(1, 2, device="cuda")).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, layer.weight)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # the scaler of fp16 waits by itself
def test_a_gpu_is_waited_for_only_when_logging(precision: str) -> None:
    task = toy_task(model=plain_net().cuda())
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.02)
    settings = TrainSettings(precision=precision, clip_norm=1.0, log_every=10)
    seen = []

    def watch(step: int, info: Any) -> None:
        seen.append(step)
        torch.cuda.set_sync_debug_mode("error" if 10 < step < 19 else "default")

    stream, teacher = BatchStream(task, device="cuda"), Teacher(task.model)
    try:
        train(
            task.model, optimizer, stream, steps=20, loss=task.loss, settings=settings, teacher=teacher, on_step=watch
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_trains_and_resumes_on_a_gpu(tmp_path: Path, precision: str) -> None:
    losses = []
    settings = TrainSettings(precision=precision, channels_last=True, clip_norm=1.0, log_every=10)
    for steps in (20, 40):
        task = toy_task(model=two_convs().cuda())
        optimizer = torch.optim.Adam(task.model.parameters(), lr=0.02, fused=True)
        stream, teacher = BatchStream(task, device="cuda"), Teacher(task.model)
        with open_run(tmp_path / "run", {}, device_type="cuda") as run:
            result = train(
                task.model, optimizer, stream, steps=steps, loss=task.loss, settings=settings, run=run, teacher=teacher
            )
        losses.append(result.loss)
        assert result.resumed_at == steps - 20
    assert losses[1] < losses[0]
