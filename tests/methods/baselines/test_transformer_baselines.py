"""Methods for transformers without training, on a tiny Llama and a counted budget."""

from __future__ import annotations

import copy
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from ecc.graph import trace_channels
from ecc.methods.base import PruningContext
from ecc.methods.baselines.widths import uniform_widths
from ecc.methods.calibration import activation_statistics, block_influence
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
    assert torch.allclose(found.variances[:, 0], expected.var(0, correction=0), rtol=1e-6, atol=1e-9)
    assert not layer._forward_pre_hooks  # none is left
    influence = block_influence(model, inputs)
    assert list(influence) == [f"model.layers.{number}" for number in range(4)]
    assert all(0 < one < 2 for one in influence.values())
