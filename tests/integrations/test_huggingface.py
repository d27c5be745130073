"""The callback in Hugging Face's own Trainer."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from ecc.errors import EccError
from ecc.graph import max_relative_diff, trace_channels
from ecc.methods import EccSolver
from ecc.zoo import DigitsNet
from methods.nets import macs_cost

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    pytest.importorskip("accelerate", reason="the Trainer needs it")

STEPS = 20
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = DigitsNet()

    def forward(self, pixels: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        scores = self.net(pixels)
        loss = {} if labels is None else {"loss": nn.functional.cross_entropy(scores, labels)}
        return {**loss, "logits": scores}


class Data(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(number)
        return {"pixels": torch.randn(1, 8, 8, generator=generator), "labels": torch.tensor(number % 10)}


class Noted:
    def __init__(self) -> None:
        self.lines: list[tuple[int, Mapping[str, Any]]] = []
        self.closed = False

    def log(self, facts: Mapping[str, Any], step: int) -> None:
        self.lines.append((step, dict(facts)))

    def close(self) -> None:
        self.closed = True


def dense_joules(model: nn.Module) -> float:
    cost = macs_cost(trace_channels(model, {"pixels": torch.randn(4, 1, 8, 8)}))
    return float(cost.value(torch.tensor(cost.full_widths)))


def trainer_of(folder: Path, solver_steps: int, noted: Noted, **settings: Any) -> tuple[Any, Classifier, Any]:
    from ecc.integrations.huggingface import EccCallback  # here: it imports the Trainer for seconds

    model = Classifier()
    graph = trace_channels(model, {"pixels": torch.randn(4, 1, 8, 8)})
    solver = EccSolver(model, graph, macs_cost(graph), "50%", solver_steps, lr=1e-3)
    callback = EccCallback(model, graph, loggers=[noted])
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=8,
        logging_steps=5,
        report_to=[],
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
        **settings,
    )
    made = transformers.Trainer(
        model=model, args=arguments, train_dataset=Data(), optimizers=(solver, None), callbacks=[callback]
    )
    return made, model, callback


@pytest.mark.parametrize("bf16", [False, True])
def test_the_trainer_prunes_logs_and_leaves_a_small_network(bf16: bool, tmp_path: Path) -> None:
    noted = Noted()
    trainer, model, callback = trainer_of(tmp_path, STEPS, noted, bf16=bf16)
    trainer.train()
    small = callback.slim
    assert small is not None
    assert "forward" not in vars(small)  # accelerate's, which would run the dense network
    vars(model).pop("forward", None)
    assert max_relative_diff(model, small, {"pixels": torch.randn(3, 1, 8, 8)}) <= 1e-5
    assert sum(p.numel() for p in small.parameters()) < 0.8 * sum(p.numel() for p in model.parameters())
    assert [step for step, _ in noted.lines] == [5, 10, 15, 20]
    energies = [facts["ecc/energy"] for _, facts in noted.lines]
    assert energies[-1] <= 0.5 * dense_joules(model) * (1 + 1e-6)
    assert noted.closed
    assert trainer.state.log_history[0]["ecc/energy"] == energies[0]


def test_a_schedule_longer_than_the_training_is_refused_before_it(tmp_path: Path) -> None:
    trainer, _, callback = trainer_of(tmp_path, 1000, Noted())
    with pytest.raises(EccError, match=r"needs 1000 steps, but the trainer makes 20\b"):
        trainer.train()
    assert callback.slim is None
