"""Hugging Face's models: heads and hidden widths are prunable, exactly."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from ecc.graph import (
    ChannelGraph,
    mask_branches_,
    mask_channels_,
    max_relative_diff,
    slim,
    trace_channels,
    with_widths,
)
from ecc.graph.masked_norm import MaskedNorm

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    from transformer_models import MODELS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

FLOAT32_NORMS = ("Llama", "Llama, eager", "Qwen2", "Qwen3", "Mistral", "Gemma", "Mixtral", "Mixtral, eager", "T5")
"""Models with RMSNorm of Hugging Face, which computes in float32."""
NO_RESIDUAL = ("Whisper encoder", "CLIP", "DETR")
"""Models whose residual stream is an output of the network."""


@cache
def traced_once(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], ChannelGraph]:
    torch.manual_seed(0)
    build, make_inputs = MODELS[name]
    net, inputs = build().eval(), make_inputs()
    return net, inputs, trace_channels(net, inputs)


def traced(name: str) -> tuple[nn.Module, dict[str, torch.Tensor], ChannelGraph]:
    """A model that may be changed, its inputs and its graph."""
    net, inputs, graph = traced_once(name)
    return copy.deepcopy(net), inputs, graph


SIMILAR = (
    "Llama, eager",
    "Qwen2",
    "Mistral",
    "Gemma",
    "Mixtral, eager",
    "BERT, eager",
    "RoBERTa",
    "Whisper encoder",
    "DeiT",
    "DETR",
    "Segformer",
)
"""Models with the layers of other ones of the list."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.thorough] * (name in SIMILAR)) for name in MODELS]
)
def test_the_share_of_parameters_and_a_random_cut(name: str) -> None:
    """At least 90 % of the parameters; exact."""
    net, inputs, graph = traced(name)
    frozen = [(g.name, g.frozen) for g in graph.groups]
    assert graph.prunable_share >= 0.9, frozen
    assert any(group.zeroed for group in graph.prunable) == (name not in NO_RESIDUAL), frozen
    dtype = torch.float32 if name == "Mixtral" else torch.float64  # its products of experts do not run in float64
    inputs = {key: t.to(dtype) if t.is_floating_point() else t for key, t in inputs.items()}
    dense, masked = (with_widths(net, graph, {}).to(dtype) for _ in range(2))
    for group in graph.prunable:
        gone = torch.randperm(group.width)[: int(0.4 * group.width)]
        mask_channels_(masked, graph, {group.name: gone})
    allowed = 1e-5 if name in FLOAT32_NORMS else 1e-9
    assert max_relative_diff(masked, slim(masked, graph), inputs) < allowed
    assert max_relative_diff(masked, dense, inputs) > 1e-3


@pytest.mark.parametrize("name", ["Llama", "T5", "BERT", "ViT"])
def test_intermediate_outputs_and_caches_do_not_matter(name: str) -> None:
    net, inputs, plain = traced(name)
    options = {"output_hidden_states": True, "output_attentions": name != "ViT"}
    if name in ("Llama", "T5"):
        options["use_cache"] = True
    graph = trace_channels(net, {**inputs, **options}, verify=False)
    assert [(g.name, g.width) for g in graph.prunable] == [(g.name, g.width) for g in plain.prunable]


def test_generation_with_a_cache_works_after_pruning() -> None:
    net, inputs, graph = traced("Llama")
    for group in graph.prunable:
        mask_channels_(net, graph, {group.name: [0]})
    small = slim(net, graph)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(net.generate(**inputs, **options), small.generate(**inputs, **options))


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "BERT", "ViT"])
def test_attention_and_mlp_branches_are_removed_exactly(name: str) -> None:
    net, inputs, graph = traced(name)
    names = [branch.name for branch in graph.branches]
    assert len(names) == 4, graph.kept_branches
    inputs = {key: t.double() if t.is_floating_point() else t for key, t in inputs.items()}
    for some in (names[:1], names[1:2], names[::2], names[1:], names):
        masked = with_widths(net, graph, {}).double()
        mask_branches_(masked, graph, some)
        assert max_relative_diff(masked, slim(masked, graph), inputs) < 1e-12


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
def test_generation_with_a_cache_works_without_branches(name: str) -> None:
    """The cache counts tokens by its first layer, which may be removed."""
    net, inputs, graph = traced(name)
    names = [branch.name for branch in graph.branches]
    options = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}
    for some in (names[:1], names[:2], names[::2], names):
        masked = copy.deepcopy(net)
        mask_branches_(masked, graph, some)
        wanted, found = (one.generate(**inputs, **options) for one in (masked, slim(masked, graph)))
        assert torch.equal(wanted.sequences, found.sequences)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(wanted.logits, found.logits, strict=True))


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "ViT"])
def test_models_with_layer_norm_are_saved_loaded_and_slimmed_to_multiples(name: str, tmp_path: Path) -> None:
    from ecc.integrations.huggingface import load_pruned, save_pruned

    net, inputs, graph = traced(name)
    stream = next(group for group in graph.prunable if group.zeroed)
    assert stream.width == 64
    mask_channels_(net, graph, {stream.name: range(0, 50, 2)})
    for multiple, width in ((1, 39), (8, 40)):  # of 40 channels, one is masked
        small = slim(net, graph, multiple)
        assert max_relative_diff(net, small, inputs) < 1e-5
        save_pruned(small, tmp_path / str(multiple))
        loaded = load_pruned(tmp_path / str(multiple))
        assert max_relative_diff(small, loaded, inputs) == 0
        norms = [module for module in loaded.modules() if isinstance(module, nn.LayerNorm)]
        assert {module.normalized_shape for module in norms} == {(width,)}
        assert {isinstance(module, MaskedNorm) for module in norms} == {multiple > 1}


def test_tied_embeddings_stay_tied() -> None:
    net, inputs, graph = traced("GPT-2")
    mask_channels_(net, graph, {next(g.name for g in graph.prunable if g.zeroed): range(10)})
    small = slim(net, graph)
    assert small.lm_head.weight is small.transformer.wte.weight
    assert small.lm_head.weight.shape == (64, 54)
    options = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(net.generate(**inputs, **options), small.generate(**inputs, **options))


def test_a_vision_transformer_with_equal_layers_is_loaded_by_transformers(tmp_path: Path) -> None:
    from ecc.integrations.huggingface import load_pruned, save_pruned

    net, inputs, graph = traced("ViT")
    hidden = [g for g in graph.prunable if any("fc1" in one.tensor or "intermediate" in one.tensor for one in g.slices)]
    mask_channels_(net, graph, {group.name: range(8) for group in hidden if not group.zeroed})
    small = slim(net, graph)
    save_pruned(small, tmp_path)
    for loaded in (load_pruned(tmp_path), type(net).from_pretrained(tmp_path).eval()):
        assert max_relative_diff(small, loaded, inputs) == 0
    assert sum(p.numel() for p in small.parameters()) < sum(p.numel() for p in net.parameters())


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "GPT-2", "BERT", "BERT, eager", "ViT", "T5", "GPT-NeoX"])
def test_the_width_inside_heads_is_prunable_exact_and_saved(name: str, tmp_path: Path) -> None:
    from ecc.integrations.huggingface import load_pruned, save_pruned

    torch.manual_seed(0)
    build, make_inputs = MODELS[name]
    net, inputs = build().eval(), make_inputs()
    graph = trace_channels(net, inputs, attention="width", verify=name in ("Llama", "GPT-2"))
    assert graph.prunable_share >= 0.9
    queries = ("q_proj", "c_attn", "query", ".q", "query_key_value")
    rows = [g.slices[0].index[0].tolist() for g in graph.prunable if g.name.endswith(queries)]
    assert rows
    assert all((one[1] == one[0] + 1) == (name == "GPT-NeoX") for one in rows)  # it fixes the number of rotary columns
    for group in graph.prunable:
        mask_channels_(net, graph, {group.name: range(group.width // 2)})
    small = slim(net, graph)
    assert max_relative_diff(net, small, inputs) < 1e-5
    save_pruned(small, tmp_path)
    loaded = load_pruned(tmp_path)
    assert max_relative_diff(small, loaded, inputs) < 1e-6  # with another implementation of attention
    if name in ("Llama", "GPT-2"):
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(net.generate(**inputs, **options), loaded.generate(**inputs, **options))


def test_every_branch_of_t5_is_removed_where_heads_are_not_shared() -> None:
    """The position bias makes one group of the heads of all layers, but not of the width inside them."""
    torch.manual_seed(0)
    build, make_inputs = MODELS["T5"]
    net, inputs = build().eval(), make_inputs()
    graph = trace_channels(net, inputs, attention="width")
    assert len(graph.branches) == 10, graph.kept_branches
