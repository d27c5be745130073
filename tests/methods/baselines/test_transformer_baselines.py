"""Methods for transformers without training, on a tiny Llama and a counted budget."""

from __future__ import annotations

import copy
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.graph import trace_channels
from ecc.methods.base import PruningContext
from ecc.methods.baselines.widths import uniform_widths
from ecc.methods.calibration import activation_statistics, block_influence, taylor_elements
from ecc.methods.registry import find_method
from ecc.task import Task
from ecc.zoo.language import LogLikelihood, TokenBatches
from methods.jobs import one_shot_context

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    pytest.importorskip("transformers", minversion="5", reason="needs transformers 5")

sys.path.insert(0, str(Path(__file__).parents[2] / "zoo"))
try:
    import tiny_models as tiny
finally:
    sys.path.pop(0)

pytestmark = pytest.mark.slow  # transformers takes seconds to import

TOKENS = torch.randint(1, 32, (24, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def traced() -> tuple[Any, Any]:
    """A Llama of four layers with three groups of heads in each, and its channel graph."""
    model = tiny.tiny_llama(num_hidden_layers=4, hidden_size=36, num_attention_heads=9, num_key_value_heads=3)
    return model, trace_channels(model, {"input_ids": TOKENS[:2, :8]}, verify=False)


def context_of(traced: tuple[Any, Any], share: float) -> PruningContext:
    model, graph = copy.deepcopy(traced[0]), traced[1]
    task = Task(
        name="tiny", model=model, example_input={"input_ids": TOKENS[:2]}, train_batches=TokenBatches(TOKENS[:20], 4)
    )
    return one_shot_context(task, graph, share, LogLikelihood(TOKENS[20:]))


@pytest.mark.parametrize(
    ("method", "least"),
    [
        ("one_shot", 0.98),
        ("flap", 0.95),
        ("wanda_sp", 0.95),
        ("llm_pruner", 0.95),
        ("uniform", 0.9),
        ("2ssp", 0.9),
        ("shortgpt", 0.6),
    ],
)
def test_the_budget_is_met(traced: tuple[Any, Any], method: str, least: float) -> None:
    context = context_of(traced, 0.8)
    chosen = find_method(method)
    chosen.start(context)
    assert not chosen.is_done
    chosen.step()
    assert chosen.is_done
    assert least - 1 <= context.constraint_violation(context.widths()) <= 0


def test_rounded_heads_are_spread_over_the_layers(traced: tuple[Any, Any]) -> None:
    context = context_of(traced, 0.9)
    inner = [group.name for group in context.graph.prunable if not group.zeroed]
    ratio, widths = uniform_widths(context, inner)
    heads = [widths[name] for name in inner if "attn" in name]
    assert sorted(set(heads)) == [2, 3]  # not all layers lose a third
    hidden = {widths[name] for name in inner if "mlp" in name}
    assert hidden == {int(64 * ratio + 1e-9)}


def test_statistics_are_those_of_the_inputs(traced: tuple[Any, Any]) -> None:
    model, graph = traced
    inputs = [{"input_ids": TOKENS[:4]}, {"input_ids": TOKENS[4:8]}]
    seen = []
    layer = model.model.layers[1].mlp.down_proj
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    with torch.no_grad():
        for one in inputs:
            model(**one)
    handle.remove()
    expected = torch.cat([one.flatten(0, 1) for one in seen]).double()
    (found,) = activation_statistics(model, graph, inputs)["model.layers.1.mlp.gate_proj"]
    assert torch.allclose(found.square_sums[:, 0], expected.square().sum(0))
    norms = torch.cat(seen).double().norm(dim=1)  # of each sequence
    assert torch.allclose(found.mean_norms[:, 0], norms.mean(0))
    assert torch.allclose(found.variances[:, 0], expected.var(0, correction=0), rtol=1e-6, atol=1e-9)
    assert not layer._forward_pre_hooks  # none is left
    influence = block_influence(model, inputs)
    assert list(influence) == [f"model.layers.{number}" for number in range(4)]
    assert all(0 < one < 2 for one in influence.values())


@dataclass(frozen=True)
class AttentionCost:
    """A cost that attention blocks cause alone, such as that of reading a long cache."""

    groups: tuple[str, ...]
    full_widths: tuple[int, ...]
    branches: tuple[str, ...]

    def value(self, widths: torch.Tensor) -> torch.Tensor:
        return sum(width for name, width in zip(self.groups, widths, strict=True) if "attn" in name) + 0.0

    def to(self, device: str) -> AttentionCost:
        del device
        return self


def test_2ssp_balances_its_stages_by_cost_and_loss(traced: tuple[Any, Any]) -> None:
    graph = traced[1]
    full = graph.full_widths
    cost: Any = AttentionCost(tuple(full), tuple(full.values()), tuple(one.name for one in graph.branches))
    context = replace(context_of(traced, 0.8), costs=(cost,), targets=[6.0])  # of twelve groups of heads
    method = find_method("2ssp")
    method.start(context)
    method.step()
    widths = dict(zip(full, context.widths(), strict=True))
    assert sorted(width for name, width in widths.items() if "attn" in name) == [0, 0, 3, 3]
    assert all(width == full[name] for name, width in widths.items() if "mlp" in name)  # they would save nothing
    # On a budget that both can meet, no other number of attention blocks has a smaller loss.
    context = context_of(traced, 0.8)
    method = find_method("2ssp")
    method.start(context)
    number = method._choose_number()
    losses = {}
    for other in range(4):
        method._prune_(method._widths(method._order[:other]))
        if context.constraint_violation(context.widths()) <= 0:
            losses[other] = -context.held_out(context.model)
    assert len(losses) > 1
    assert losses[number] == min(losses.values())


def test_the_criterion_of_llm_pruner_is_that_of_single_weights(traced: tuple[Any, Any]) -> None:
    context = context_of(traced, 0.8)
    batches = [next(stream) for stream in [context.stream.fork()] for _ in range(3)]
    model = copy.deepcopy(context.model)
    for batch in batches:
        model(**batch).loss.backward()
    layer = model.model.layers[1]
    gate, up, down = (
        (one.weight * one.weight.grad).abs() for one in (layer.mlp.gate_proj, layer.mlp.up_proj, layer.mlp.down_proj)
    )
    found = taylor_elements(context, batches)
    expected = gate.sum(1) + up.sum(1) + down.sum(0)
    assert torch.allclose(found["model.layers.1.mlp.gate_proj"], expected.double(), rtol=1e-4)
    query, key, value, output = (
        (one.weight * one.weight.grad).abs()
        for one in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj, layer.self_attn.o_proj)
    )
    expected = sum(one.sum(1).view(3, -1).sum(1) for one in (query, key, value)) + output.sum(0).view(3, -1).sum(1)
    assert torch.allclose(found["model.layers.1.self_attn.q_proj"], expected.double(), rtol=1e-4)
    assert all(one.grad is None for one in context.model.parameters())
