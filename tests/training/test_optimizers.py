from __future__ import annotations

import pytest
import torch

from ecc.training.optimizers import fused_on_gpu


def test_on_a_cpu_torch_decides() -> None:
    assert fused_on_gpu(torch.nn.Linear(2, 2).parameters()) is None
    assert fused_on_gpu([]) is None


@pytest.mark.gpu
def test_on_a_gpu_a_step_is_fused() -> None:
    layer = torch.nn.Linear(2, 2).cuda()
    assert fused_on_gpu(layer.parameters()) is True
    assert fused_on_gpu([*layer.parameters(), torch.zeros(1)]) is None
    optimizer = torch.optim.Adam(layer.parameters(), fused=fused_on_gpu(layer.parameters()))
    layer(torch.ones(1, 2, device="cuda")).sum().backward()
    before = layer.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(before, layer.weight)
