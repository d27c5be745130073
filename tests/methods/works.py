"""Pruning contexts for tests of methods: a wide network, its true cost, and targets."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ecc.methods import CompressSettings, PruningContext
from ecc.methods.base import MaskedAdam
from ecc.options import settings_from
from ecc.training import BatchStream, OptimizerLike, Training, train
from methods.jobs import squared, true_model, wide, wide_task


def work_of(name: str = "chain", share: float = 0.5, *, width_multiple: int = 1, **settings: Any) -> PruningContext:
    """The target is a share of the dense cost; what is logged is in `lines`."""
    model, _, graph = wide(name)
    cost = true_model(graph)
    chosen = settings_from(CompressSettings, {"prune_steps": 10, "finetune_steps": 0, "lr": 1e-3, **settings})
    lines: list[Mapping[str, Any]] = []
    model = copy.deepcopy(model)
    stream = BatchStream(wide_task(name))

    def held_out(net: nn.Module) -> float:
        return -float(sum(parameter.detach().abs().sum() for parameter in net.parameters()))

    def train_candidate(net: nn.Module, steps: int, lr: float, batches: BatchStream) -> None:
        train(net, MaskedAdam(net, graph, lr, 1e-4), batches, steps=steps, loss=squared)

    def training(optimizer: OptimizerLike, steps: int) -> Iterator[int]:
        made = Training(model, optimizer, stream, steps=steps, loss=squared)
        return (made.step for _ in made.each_step())

    context = PruningContext(
        model=model,
        graph=graph,
        costs=(cost,),
        targets=[share * cost.dense],
        settings=chosen,
        width_multiple=width_multiple,
        stream=stream,
        teacher=None,
        held_out=held_out,
        train=train_candidate,
        log=lines.append,
        loss=squared,
        training=training,
    )
    context.lines = lines  # type: ignore[attr-defined]
    return context
