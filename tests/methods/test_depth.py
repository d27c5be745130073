"""A compression that removes residual branches, from the budget to the file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import ecc
from ecc.errors import InfeasibleBudget
from ecc.graph.removal import RemovedModule
from graph.branch_nets import NETWORKS, built


def test_a_budget_that_needs_fewer_branches_is_met(tmp_path: Path) -> None:
    net, x = built(*NETWORKS["basic"][:2])
    data = [(torch.randn(4, 3, 8, 8), torch.randint(5, (4,))) for _ in range(4)]
    options = {
        "loss": F.cross_entropy,
        "evaluate": lambda _: 0.5,
        "example_input": x[:1],
        "prune_steps": 30,
        "finetune_steps": 2,
        "min_width_ratio": 0.5,
        "progress": False,
    }
    with pytest.raises(InfeasibleBudget, match=r"depth=True \(reaches [\d.]+ %\)"):
        ecc.compress(net, data, "macs=20%", folder=tmp_path / "wide", depth=False, **options)
    done = ecc.compress(net, data, "macs=15%", folder=tmp_path / "deep", **options)
    assert done.met
    removed = [path for path, module in done.model.named_modules() if isinstance(module, RemovedModule)]
    assert removed
    again = ecc.load_slim(built(*NETWORKS["basic"][:2])[0], tmp_path / "deep").eval()
    assert torch.allclose(again(x), done.model.eval()(x), atol=1e-5)
    assert removed == [path for path, module in again.named_modules() if isinstance(module, RemovedModule)]
