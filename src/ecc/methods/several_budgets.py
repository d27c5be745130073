"""Several budgets in one run: a chain of the milder ones, and a run for the tightest.

    dense ─► prune to 80 % ─► prune on to 50 % ─► prune on to 35 %
      │          └─► finetune      └─► finetune       └─► finetune
      └────► prune to 25 % ─► finetune

Each budget is a `Compression` in a folder of its own, with the dense network as teacher. A milder budget starts from
the masked network of the one before. They share out a part of the pruning steps of the settings, and are finetuned for
fewer steps, the mildest for the fewest.

The tightest budget starts from the dense network and gets all steps of the settings, as in a run with this budget
alone. At the end of the chain it would lose more: it needs training after its last removals, and has most of its steps
before them there.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

from ecc.budget import Budget
from ecc.errors import EccError
from ecc.run_records import Front, FrontRow, RunSummary
from ecc.settings import CompressSettings
from ecc.task import Task
from ecc.training import load_state

from .base import has_schedule
from .compression import PRUNED_FILE, Compression
from .registry import find_method

PRUNE_SHARES = (2 / 3, 4 / 3)
"""Pruning steps of the mildest and of the last budget of the chain, as multiples of `prune_steps / (budgets + 1)`."""
FINETUNE_SHARES = (0.2, 0.65)
"""Steps of the finetuning of the mildest and of the last budget of the chain, as fractions of `finetune_steps`."""

StageFactory = Callable[[Task, Sequence[Budget], CompressSettings, Mapping[str, Any] | None], Compression]
"""Makes the compression of one budget from its task, budget, settings and initial weights."""


def stage_settings(settings: CompressSettings, count: int) -> list[CompressSettings]:
    """The settings of each budget, the mildest first.

    Raises:
        EccError: If there are fewer pruning steps than budgets.
    """
    if settings.prune_steps < count:
        raise EccError(
            f"{count} budgets need at least {count} pruning steps, and prune_steps is {settings.prune_steps}."
        )
    milder = count - 1
    places = [number / (milder - 1) for number in range(milder)] if milder > 1 else [0.5]
    prune, finetune = (
        [first + (last - first) * place for place in places] for first, last in (PRUNE_SHARES, FINETUNE_SHARES)
    )
    ends = [round(settings.prune_steps * part / (count + 1)) for part in accumulate(prune)]
    chain = [
        replace(
            settings,
            pretrain_steps=0 if number else settings.pretrain_steps,
            prune_steps=max(1, end - start),
            finetune_steps=round(part * settings.finetune_steps),
            train=replace(settings.train, seed=settings.train.seed + 1 + number),
        )
        for number, (start, end, part) in enumerate(zip([0, *ends[:-1]], ends, finetune, strict=True))
    ]
    return [*chain, replace(settings, pretrain_steps=0)]


def check_several(method: str, settings: CompressSettings, count: int) -> None:
    """Refuse what is not possible with several budgets.

    Raises:
        EccError: If the method does not prune while it trains, or there are fewer pruning steps than budgets.
    """
    stage_settings(settings, count)
    if not has_schedule(find_method(method)):
        raise EccError(f"several budgets need a method that prunes while it trains, such as ecc, not {method!r}.")


def budget_stages(
    task: Task, budgets: Sequence[Budget], settings: CompressSettings, folder: Path, make: StageFactory
) -> Iterator[tuple[Compression, Path]]:
    """The compression of each budget and its folder. Run each one before taking the next.

    Args:
        task: Of the dense network.
        budgets: From `parse_several_budgets`.
        settings: Of all stages together.
        folder: Of the whole run; each stage gets a folder in it.
        make: Makes a compression.
    """
    start: Mapping[str, Any] | None = None
    for number, (budget, own) in enumerate(zip(budgets, stage_settings(settings, len(budgets)), strict=True)):
        place = folder / folder_name(budget)
        job = make(task, [budget], own, start)
        job.keeps_pruned = number + 2 < len(budgets)  # the next one is not the tightest
        yield job, place
        start = load_state(place / PRUNED_FILE) if job.keeps_pruned else None
        if own.pretrain_steps:
            task = replace(task, model=copy.deepcopy(task.model))
            task.model.load_state_dict(load_state(place / "dense.safetensors"))


def folder_name(budget: Budget) -> str:
    """Name of the folder of a budget, such as `energy_80pct` or `latency_0.012_s`."""
    return re.sub(r"[^0-9A-Za-z.]+", "_", str(budget).removesuffix(" of dense").replace("%", "pct")).strip("_")


def make_front(summaries: Mapping[str, RunSummary]) -> Front:
    """The results of all budgets, by folder."""
    rows = []
    for place, summary in summaries.items():
        (row,) = summary.budgets.values()
        score = summary.scores.get("finetuned", summary.scores.get("pruned"))
        rows.append(
            FrontRow(
                folder=place,
                **{name: getattr(row, name) for name in ("budget", "limit", "unit", "dense", "result", "label", "met")},
                score=score,
                macs=summary.macs,
                parameters=summary.parameters,
                batches=0 if summary.batches is None else summary.batches.total,
            )
        )
    first = next(iter(summaries.values()))
    return Front(
        task=first.task,
        resource=next(iter(first.budgets)),
        metric=first.metric,
        dense_score=first.scores.get("dense"),
        batches=sum(row.batches for row in rows),
        rows=rows,
    )
