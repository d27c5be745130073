"""A work for methods: a wide network, its true cost, and aims; and a method that is quick at it."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from torch import nn

from ecc.methods import CompressSettings, Work
from ecc.methods.driving import trainer
from ecc.methods.eap import Eap, EapSettings
from ecc.training import BatchStream, World
from methods.jobs import squared, true_model, wide, wide_task


def work_of(name: str = "chain", share: float = 0.5, *, round_to: int = 1, **settings: Any) -> Work:
    """Aims at a share of what the dense network costs."""
    model, _, graph = wide(name)
    cost = true_model(graph)
    chosen = CompressSettings(**{"steps": 10, "tune_steps": 0, "lr": 1e-3, **settings})
    lines: list[Mapping[str, Any]] = []

    def held_out(net: nn.Module) -> float:
        return -float(sum(parameter.detach().abs().sum() for parameter in net.parameters()))

    work = Work(
        model=copy.deepcopy(model),
        graph=graph,
        costs=(cost,),
        aims=[share * cost.dense],
        settings=chosen,
        round_to=round_to,
        stream=BatchStream(wide_task(name)),
        teacher=None,
        held_out=held_out,
        train=trainer(graph, squared, None, chosen, World("cpu")),
        log=lines.append,
    )
    work.lines = lines  # type: ignore[attr-defined]  # for tests
    return work


def eap(**settings: Any) -> Eap:
    """The method with few batches and rows to refit on."""
    return Eap(EapSettings(**{"batches": 2, "rows": 256, **settings}))
