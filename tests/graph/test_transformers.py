"""Hugging Face's models: heads and hidden widths are prunable, exactly."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

from ecc.graph import mask_channels_, max_relative_diff, slim, trace_channels, with_widths

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
    try:
        from transformer_models import MODELS
    finally:
        sys.path.pop(0)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

RESIDUAL = ("Llama", "Llama, eager", "Qwen2", "Qwen3", "Mistral", "Gemma", "Mixtral", "Mixtral, eager", "T5")
"""Models with RMSNorm, whose residual width can be pruned."""
LOWER = {"Segformer": 0.54}
"""Models below the goal, because most of their parameters lie between layers whose outputs a LayerNorm mixes."""
MAX_TRACE_SECONDS = 2.0


def built(name: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    build, make_inputs = MODELS[name]
    return build().eval(), make_inputs()


@pytest.mark.parametrize("name", MODELS)
def test_the_share_of_parameters_and_a_random_cut(name: str) -> None:
    """At least 90 % of the parameters with the residual width, 80 % without; exact; traced in two CPU seconds."""
    net, inputs = built(name)
    started = time.process_time()
    graph = trace_channels(net, inputs)
    seconds = time.process_time() - started
    frozen = [(g.name, g.frozen) for g in graph.groups]
    wanted = LOWER.get(name, 0.9 if name in RESIDUAL else 0.8)
    assert graph.prunable_share >= wanted, frozen
    assert any(group.zeroed for group in graph.prunable) == (name in RESIDUAL), frozen
    assert seconds < MAX_TRACE_SECONDS * torch.get_num_threads()
    dtype = torch.float32 if name == "Mixtral" else torch.float64  # its products of experts do not run in float64
    inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}
    dense, masked = (with_widths(net, graph, {}).to(dtype) for _ in range(2))
    for group in graph.prunable:
        gone = torch.randperm(group.width)[: int(0.4 * group.width)]
        mask_channels_(masked, graph, {group.name: gone})
    allowed = 1e-5 if name in RESIDUAL else 1e-9  # Hugging Face's RMSNorm computes in float32
    assert max_relative_diff(masked, slim(masked, graph), inputs) < allowed
    assert max_relative_diff(masked, dense, inputs) > 1e-3


@pytest.mark.parametrize("name", ["Llama", "T5", "BERT", "ViT"])
def test_intermediate_outputs_and_caches_do_not_matter(name: str) -> None:
    net, inputs = built(name)
    plain = trace_channels(net, inputs, verify=False)
    options = {"output_hidden_states": True, "output_attentions": name != "ViT"}
    if name in ("Llama", "T5"):
        options["use_cache"] = True
    graph = trace_channels(net, {**inputs, **options}, verify=False)
    assert [(g.name, g.width) for g in graph.prunable] == [(g.name, g.width) for g in plain.prunable]


def test_generation_with_a_cache_works_after_pruning() -> None:
    net, inputs = built("Llama")
    graph = trace_channels(net, inputs)
    for group in graph.prunable:
        mask_channels_(net, graph, {group.name: [0]})
    small = slim(net, graph)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(net.generate(**inputs, **options), small.generate(**inputs, **options))
