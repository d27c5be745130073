"""A work for methods: a wide network, its true cost, and targets; and a method that is quick at it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from ecc.methods import CompressSettings, PruningContext
from ecc.methods.baselines.eap import Eap, EapSettings
from ecc.methods.driving import trainer
from ecc.training import BatchStream, DistributedContext
from methods.jobs import squared, true_model, wide, wide_task


def work_of(name: str = "chain", share: float = 0.5, *, width_multiple: int = 1, **settings: Any) -> PruningContext:
    """Aims at a share of what the dense network costs."""
    model, _, graph = wide(name)
    cost = true_model(graph)
    chosen = CompressSettings(**{"prune_steps": 10, "finetune_steps": 0, "lr": 1e-3, **settings})
    lines: list[Mapping[str, Any]] = []

    def held_out(net: nn.Module) -> float:
        return -float(sum(parameter.detach().abs().sum() for parameter in net.parameters()))

    work = PruningContext(
        model=copy.deepcopy(model),
        graph=graph,
        costs=(cost,),
        targets=[share * cost.dense],
        settings=chosen,
        width_multiple=width_multiple,
        stream=BatchStream(wide_task(name)),
        teacher=None,
        held_out=held_out,
        train=trainer(graph, squared, None, chosen, DistributedContext("cpu")),
        log=lines.append,
    )
    work.lines = lines  # type: ignore[attr-defined]  # for tests
    return work


def eap(**settings: Any) -> Eap:
    """The method with few batches and rows to refit on."""
    return Eap(EapSettings(**{"batches": 2, "rows": 256, **settings}))
