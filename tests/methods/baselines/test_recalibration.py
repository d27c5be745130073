from __future__ import annotations

import pytest
import torch
from torch import nn

from ecc.methods.baselines.recalibration import recalibrate_, recalibrated


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.Dropout(0.5), nn.Conv2d(4, 3, 1))


def batches(count: int = 3) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [5 + torch.randn(6, 2, 5, 5) for _ in range(count)]


def test_statistics_are_the_means_over_all_batches() -> None:
    model, seen = net(), batches()
    recalibrate_(model, seen)
    with torch.no_grad():
        outputs = [model[0](batch) for batch in seen]
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm2d)
    mean = torch.stack([one.mean((0, 2, 3)) for one in outputs]).mean(0)
    variance = torch.stack([one.var((0, 2, 3)) for one in outputs]).mean(0)
    torch.testing.assert_close(norm.running_mean, mean)
    torch.testing.assert_close(norm.running_var, variance)


def test_nothing_else_changes() -> None:
    model = net()
    model[2].eval()
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    modes = [module.training for module in model.modules()]
    seen = batches()
    state = torch.get_rng_state()
    recalibrate_(model, seen)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.named_parameters())
    assert [module.training for module in model.modules()] == modes
    assert model[1].momentum == 0.3
    assert torch.equal(torch.get_rng_state(), state), "dropout drew nothing"


def test_a_block_puts_the_old_ones_back_even_after_an_error() -> None:
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen = batches()
    try:
        with recalibrated(model, seen):
            assert not torch.equal(model.state_dict()["1.running_mean"], before["1.running_mean"])
            raise RuntimeError("judging failed")
    except RuntimeError:
        pass
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_network_without_batch_norms_is_not_run() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False))
    recalibrate_(model, ["no inputs at all"])
    recalibrate_(net(), [])
    assert model[1].running_mean is None


@pytest.mark.gpu
def test_it_does_not_wait_for_the_device() -> None:
    """Where processes share a card, each wait lasts until it is their turn, and hundreds of networks are judged."""
    model, seen = net().cuda(), [batch.cuda() for batch in batches()]
    recalibrate_(model, seen)  # libraries are loaded, which waits
    found = model[1].running_mean.clone()
    model[1].reset_running_stats()
    torch.cuda.set_sync_debug_mode("error")  # to wait is an error
    try:
        with recalibrated(model, seen):
            inside = model[1].running_mean.clone()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(inside, found)
    assert not model[1].running_mean.any()
