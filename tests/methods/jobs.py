"""What compressions are tested with: networks wide enough to land, models that err by a known amount, small jobs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from ecc.energy import EnergyModel, counted_cost, fit, parse_budgets
from ecc.energy.families import FittedModel, bilinear_terms
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import EnergySource, MeterInfo, Profile, Reading, find_meter, profile
from ecc.methods import CompressedModel, Compression, CompressSettings, PruningContext
from ecc.options import settings_from
from ecc.task import Task, with_batch_size
from ecc.training import BatchStream
from ecc.zoo import find_task
from energy.cases import model_of, origin, slow_size
from methods.nets import Concat, Residual, TransformerMlp, chain, depthwise, grouped, transposed

BATCH = 256  # of digits: with one item, starting the kernels is most of what a platform spends

# ---------------------------------------------------------------- networks of which one channel is less than the band


WIDE: dict[str, Callable[[], nn.Module]] = {
    "chain": partial(chain, 96, 64, relu=False),
    "residual": partial(Residual, 64, 72),
    "depthwise": partial(depthwise, 96, 80),
    "concat": partial(Concat, 60, 70, 64),
    "grouped": partial(grouped, 128, 32),
    "transposed": partial(transposed, 96, 80),
    "transformer MLP": partial(TransformerMlp, 320),
}


@cache
def _graph(name: str) -> ChannelGraph:
    net = WIDE[name]()
    return trace_channels(net.eval(), example_of(name), verify=False)


def example_of(name: str) -> Tensor:
    shape = (2, 5, 6) if name == "transformer MLP" else (2, 3, 4, 4)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def wide(name: str) -> tuple[nn.Module, Tensor, ChannelGraph]:
    """A network with fresh weights, its example input and its graph."""
    torch.manual_seed(0)
    return WIDE[name]().train(), example_of(name), _graph(name)


# ---------------------------------------------------------------- what networks really cost, and who errs about it


@cache
def true_model(graph: ChannelGraph, resource: str = "energy") -> EnergyModel:
    """Prices that are the same for each unit of work, and a base of a twentieth."""
    structure = graph.structure
    terms = bilinear_terms(structure)
    price = 1e-9 if resource == "energy" else 3e-7
    coefficients = tuple(price * (1 + number % 3) for number in range(len(terms)))
    dense = sum(
        one * slow_size(term.left, structure.full_widths) * slow_size(term.right, structure.full_widths)
        for one, term in zip(coefficients, terms, strict=True)
    )
    return model_of(FittedModel("bilinear", dense / 20, terms, coefficients), structure, resource=resource)


def wrong_model(graph: ChannelGraph, factor: float, resource: str = "energy") -> EnergyModel:
    """Errs by a factor on two of three layers."""
    true = true_model(graph, resource)
    coefficients = tuple(
        price * (factor if number % 3 else 1.0) for number, price in enumerate(true.fitted.coefficients)
    )
    return replace(true, fitted=replace(true.fitted, coefficients=coefficients))


class Truth:
    """An analytic source: the true model, and a count of how often it was asked."""

    def __init__(self, energy: EnergyModel, latency: EnergyModel | None = None, device: str = "paper") -> None:
        self.energy, self.latency, self.device, self.calls = energy, latency, device, 0

    def cost(self, graph: ChannelGraph, widths: Mapping[str, int]) -> Reading:
        self.calls += 1
        return Reading(self.energy.at(widths), 1e-3 if self.latency is None else self.latency.at(widths))

    def describe(self) -> MeterInfo:
        return replace(origin().meter, device=self.device)


# ---------------------------------------------------------------- a task of a wide network


def noise_batches(shape: tuple[int, ...], epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Four batches an epoch; what is to be learnt is the mean of the input."""
    for _ in range(4):
        batch = torch.randn((8, *shape))
        yield batch, batch.flatten(1).mean(1)


def squared(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.flatten(1).mean(1) - targets).square().mean()


def one_shot_context(task: Task, graph: ChannelGraph, share: float, held_out: Any, **fields: Any) -> PruningContext:
    """The context of a method that does not train, with a budget on MACs."""
    cost = counted_cost(graph, "macs")
    return PruningContext(
        model=task.model,
        graph=graph,
        costs=(cost,),
        targets=[share * cost.dense],
        settings=CompressSettings(prune_steps=0, finetune_steps=0),
        width_multiple=1,
        stream=BatchStream(task),
        teacher=None,
        held_out=held_out,
        train=lambda *_: None,
        log=lambda _: None,
        **fields,
    )


def wide_task(name: str = "chain", **fields: Any) -> Task:
    torch.manual_seed(0)
    example = example_of(name)
    values: dict[str, Any] = {
        "model": WIDE[name](),
        "example_input": example,
        "train_batches": lambda epoch: noise_batches(tuple(example.shape[1:]), epoch),
        "loss": squared,
    }
    return Task(name=name, **(values | fields))


def wide_job(
    *budgets: str, name: str = "chain", factor: float = 0.8, task: Task | None = None, **settings: Any
) -> Compression:
    """A compression of a wide network by a model that errs, on scales that do not."""
    graph = _graph(name)
    values = {"prune_steps": 24, "finetune_steps": 4, "lr": 1e-3, "log_every": 5} | settings
    return Compression(
        task or wide_task(name),
        parse_budgets(budgets or ("50%",)),
        wrong_model(graph, factor),
        meter=Truth(true_model(graph)),
        settings=settings_from(CompressSettings, values),
    )


# ---------------------------------------------------------------- digits on a platform


@cache
def digits_profile(platform: str = "jetson-tx2") -> Profile:
    task = find_task("digits")
    inputs = with_batch_size(task.example_input, BATCH)
    graph = trace_channels(task.model, inputs, verify=False)
    with TemporaryDirectory() as folder:
        return profile(
            task.model, graph, inputs, find_meter(f"platform:{platform}"), Path(folder) / "a.profile", samples=50
        )


@cache
def digits_model(platform: str = "jetson-tx2", resource: str = "energy") -> EnergyModel:
    return fit(digits_profile(platform), resource=resource)


def platform(name: str = "jetson-tx2") -> EnergySource:
    return find_meter(f"platform:{name}")


def digits_job(*budgets: str, **settings: Any) -> Compression:
    values = {"pretrain_steps": 6, "prune_steps": 16, "finetune_steps": 4, "lr": 1e-3, "log_every": 5} | settings
    models = [digits_model(), *([digits_model(resource="latency")] if any("latency" in b for b in budgets) else [])]
    return Compression(
        find_task("digits"),
        parse_budgets(budgets),
        models,
        meter=platform(),
        settings=settings_from(CompressSettings, values),
    )


# ---------------------------------------------------------------- what a run left behind


def history_of(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run, without what differs from run to run."""
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{name: value for name, value in facts.items() if name != "wall"} for facts in lines]


def same_result(one: CompressedModel, other: CompressedModel) -> bool:
    first, second = one.model.state_dict(), other.model.state_dict()
    return (
        one.widths == other.widths
        and list(first) == list(second)
        and all(torch.equal(first[name], second[name]) for name in first)
    )
