"""The callback in Lightning's own Trainer."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from ecc.errors import EccError
from ecc.graph import ChannelGraph, max_relative_diff
from ecc.methods import EccSolver
from methods.nets import macs_cost, traced

EPOCHS, BATCHES = 2, 10
# Advice about this machine and this loader, none of it about the callback.
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning:lightning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]


@pytest.fixture(scope="module")
def lightning() -> Any:
    """Imported here, since that takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its dependencies at import
        return pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")


def make_callback(net: nn.Module, graph: ChannelGraph, **options: Any) -> Any:
    from ecc.integrations.lightning import EccCallback

    return EccCallback(net, graph, **options)


def make_module(lightning: Any, net: nn.Module, graph: ChannelGraph, steps: int | None = None) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def training_step(self, batch: tuple[Tensor], number: int) -> Tensor:
            loss: Tensor = self.net(batch[0]).square().mean()
            return loss

        def configure_optimizers(self) -> Any:
            solver = EccSolver(
                net, graph, macs_cost(graph), "50%", steps or int(self.trainer.estimated_stepping_batches), lr=1e-2
            )
            return {"optimizer": solver, "lr_scheduler": torch.optim.lr_scheduler.ConstantLR(solver)}

    return Module()


def fitted(lightning: Any, module: Any, callback: Any, example: Tensor, folder: Path) -> Any:
    logger = lightning.loggers.CSVLogger(folder)
    trainer = lightning.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        callbacks=[callback],
        logger=logger,
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
        default_root_dir=folder,
    )
    trainer.fit(module, DataLoader(TensorDataset(example.repeat(BATCHES, 1, 1, 1)), batch_size=len(example)))
    return Path(logger.log_dir) / "metrics.csv"


def test_the_trainer_prunes_logs_and_leaves_a_small_network(lightning: Any, tmp_path: Path) -> None:
    net, example, graph = traced("digits")
    callback = make_callback(net, graph, every=2)
    assert callback.slim is None
    metrics = fitted(lightning, make_module(lightning, net, graph), callback, example, tmp_path)
    assert callback.slim is not None
    assert max_relative_diff(net, callback.slim, example) <= 1e-5
    assert sum(p.numel() for p in callback.slim.parameters()) < sum(p.numel() for p in net.parameters())
    head, *rows = metrics.read_text().splitlines()
    column = head.split(",").index("ecc/energy")
    energies = [float(row.split(",")[column]) for row in rows if row.split(",")[column]]
    assert len(energies) == EPOCHS * BATCHES / 2
    assert energies[-1] <= 0.5 * float(macs_cost(graph).value(torch.tensor(macs_cost(graph).full_widths)))


def test_a_schedule_longer_than_the_training_is_refused_before_it(lightning: Any, tmp_path: Path) -> None:
    net, example, graph = traced("chain")
    before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    with pytest.raises(EccError, match=r"needs 1000 steps, but the trainer makes 20\b"):
        fitted(lightning, make_module(lightning, net, graph, 1000), make_callback(net, graph), example, tmp_path)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.state_dict().items())
