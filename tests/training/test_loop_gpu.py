from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from ecc.training.batches import BatchStream
from ecc.training.distill import Teacher
from ecc.training.loop import train
from ecc.training.run_dir import open_run
from ecc.training.settings import TrainSettings
from training.toys import plain_net, toy_task


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16"])  # the scaler of fp16 waits by itself
def test_a_gpu_is_waited_for_only_when_looking(precision: Any) -> None:
    task = toy_task(model=plain_net().cuda())
    optimizer = torch.optim.Adam(task.model.parameters(), lr=0.02)
    settings = TrainSettings(precision=precision, clip_norm=1.0, log_every=10)
    seen = []

    def watch(step: int, facts: Any) -> None:
        seen.append(step)
        torch.cuda.set_sync_debug_mode("error" if 10 < step < 19 else "default")

    try:
        train(
            task.model,
            optimizer,
            BatchStream(task, device="cuda"),
            steps=20,
            loss=F.cross_entropy,
            settings=settings,
            teacher=Teacher(task.model),
            on_step=watch,
        )
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(seen) == 20


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_it_trains_and_resumes_on_a_gpu(tmp_path: Path, precision: Any) -> None:
    losses = []
    for steps in (20, 40):
        task = toy_task(model=plain_net().cuda())
        optimizer = torch.optim.Adam(task.model.parameters(), lr=0.02)
        settings = TrainSettings(precision=precision, channels_last=True, clip_norm=1.0, log_every=10)
        with open_run(tmp_path / "run", {}, device_type="cuda") as run:
            stream = BatchStream(task, device="cuda")
            teacher = Teacher(task.model)
            outcome = train(
                task.model,
                optimizer,
                stream,
                steps=steps,
                loss=F.cross_entropy,
                settings=settings,
                run=run,
                teacher=teacher,
            )
            losses.append(outcome.loss)
            assert outcome.resumed_at == steps - 20
    assert losses[1] < losses[0]
