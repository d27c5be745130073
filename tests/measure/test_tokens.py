"""Prefill and decode of language models: the same outputs as a forward pass, and counted costs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from ecc.errors import BadTask
from ecc.graph import trace_channels, with_widths
from ecc.measure import MeasureSettings, find_meter, measure_model
from ecc.measure.tokens import number_caches_, workload_graph, workload_input, workload_model
from ecc.task import TokenWorkload

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    transformers = pytest.importorskip("transformers", minversion="5", reason="a static cache of transformers 5")

from transformer_models import MODELS

import zoo.tiny_models as tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

DECODE = TokenWorkload(name="decode", batch=3, length=12)
PREFILL = TokenWorkload(name="prefill", batch=2, length=12)


def graph_of(model: Any) -> Any:
    return trace_channels(model, {"input_ids": torch.randint(1, 30, (2, 8))}, verify=False)


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "Gemma", "GPT-NeoX"])
def test_a_decode_step_equals_a_forward_pass_over_all_tokens(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name][0]().eval()
    tokens = torch.randint(1, 64, (3, 13))
    step = workload_model(model, DECODE)
    cache = transformers.StaticCache(config=model.config, max_cache_len=13)
    with torch.no_grad():
        model(tokens[:, :12], past_key_values=cache)
        step._ecc_slot.cache = cache
        first, second = step(tokens[:, 12:]), step(tokens[:, 12:])
        expected = model(tokens).logits[:, -1:]
    assert torch.allclose(first, expected, atol=1e-5)
    assert torch.equal(first, second)  # a step does not move the cache on, so that it can be repeated


def test_a_decode_step_of_a_state_space_model_can_be_repeated() -> None:
    config = transformers.MambaConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, state_size=4)
    model = transformers.MambaForCausalLM(config).eval()
    step, inputs = workload_model(model, DECODE), workload_input(model, DECODE)
    with torch.no_grad():
        shapes = [step(**inputs).shape for _ in range(2)]
    assert shapes == [(3, 1, 64), (3, 1, 64)]


def test_a_prefill_gives_the_last_logits_only() -> None:
    model = tiny.tiny_llama()
    inputs = workload_input(model, PREFILL)
    with torch.no_grad():
        found = workload_model(model, PREFILL)(**inputs)
        assert torch.allclose(found, model(**inputs).logits[:, -1:], atol=1e-6)


def test_a_copy_with_other_heads_gets_its_own_cache() -> None:
    model = tiny.tiny_llama()
    graph, step = graph_of(model), workload_model(model, DECODE)
    inputs = workload_input(model, DECODE)
    with torch.no_grad():
        step(**inputs)
        small = with_widths(step, graph, {group.name: 1 for group in graph.prunable})
        assert small._ecc_slot.cache is None
        assert small(**inputs).shape == (3, 1, 32)
    assert small._ecc_slot.cache.layers[0].keys.shape == (3, 1, 13, 4)
    assert type(model).__name__ == "LlamaForCausalLM"


def test_costs_of_a_decode_step_are_those_of_one_token_with_a_cache() -> None:
    model = tiny.tiny_llama()
    graph = graph_of(model)
    costs = {
        length: workload_graph(model, graph, TokenWorkload(name="decode", batch=1, length=length))
        for length in (15, 31)
    }
    config, linear = model.config, 0
    for _ in range(config.num_hidden_layers):
        linear += 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
    linear += 32 * 32  # logits
    attention = 2 * 2 * 8 * 4  # layers, queries with keys and with values, heads, head size
    for length, found in costs.items():
        assert float(found.macs()) == linear + attention * (length + 1)
    more = float(costs[31].activation_bytes() - costs[15].activation_bytes())
    assert more == 16 * 2 * 2 * 4 * 4 * 4  # tokens, layers, keys and values, KV heads, head size, bytes
    prefill = workload_graph(model, graph, TokenWorkload(name="prefill", batch=1, length=16))
    per_token = linear - 32 * 32 + attention * 16
    assert float(prefill.macs()) == 16 * per_token + 32 * 32
    assert len({found.fingerprint for found in (graph, prefill, *costs.values())}) == 4


def test_a_removed_attention_leaves_no_gap_in_the_caches() -> None:
    model = tiny.tiny_llama(num_hidden_layers=3)
    graph = graph_of(model)
    first = next(branch for branch in graph.branches if branch.name.endswith("layers.0.self_attn"))
    small = with_widths(workload_model(model, DECODE), graph, dict.fromkeys(first.groups, 0))
    plain = with_widths(model, graph, dict.fromkeys(first.groups, 0))
    number_caches_(plain)
    assert [layer.self_attn.layer_idx for layer in plain.model.layers[1:]] == [0, 1]
    tokens = torch.randint(1, 30, (3, 13))
    cache = transformers.StaticCache(config=model.config, max_cache_len=13)
    with torch.no_grad():
        plain(tokens[:, :12], past_key_values=cache)
        number_caches_(small)
        small._ecc_slot.cache = cache
        assert torch.allclose(small(tokens[:, 12:]), plain(tokens).logits[:, -1:], atol=1e-5)


def test_a_decode_step_can_be_measured() -> None:
    model = tiny.tiny_llama()
    settings = MeasureSettings(
        window_seconds=0.02, min_ticks=1, min_repeats=1, max_repeats=1, warmup_seconds=0.0, warmup_runs=1,
        probe_seconds=0.05,
    )  # fmt: skip
    meter = find_meter("cputime:10W")
    found = measure_model(workload_model(model, DECODE), workload_input(model, DECODE), meter, settings)
    assert found.joules > 0
    assert found.batch == 3


def test_only_language_models_have_workloads() -> None:
    with pytest.raises(BadTask, match="is no causal language model"):
        workload_model(torch.nn.Linear(2, 2), DECODE)
    with pytest.raises(BadTask, match="workload 'chat' is unknown"):
        TokenWorkload(name="chat")
    with pytest.raises(BadTask, match="give 1 or more"):
        TokenWorkload(name="decode", length=0)
    assert (DECODE.tokens, PREFILL.tokens) == (3, 24)
