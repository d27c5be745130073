"""Hugging Face's models hook their layers when hidden states or attentions are first requested."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, slim, trace_channels

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of its dependencies at import
    transformers = pytest.importorskip("transformers", reason="the extra `transformers` is not installed")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning"),
]

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SMALL, "vocab_size": 50, "max_position_embeddings": 32}


def bert() -> nn.Module:
    return transformers.BertModel(transformers.BertConfig(**TEXT))


def vit() -> nn.Module:
    return transformers.ViTModel(transformers.ViTConfig(**SMALL, image_size=16, patch_size=4))


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(0, 50, (2, 9))}


def pixels(size: int) -> Callable[[], dict[str, Any]]:
    return lambda: {"pixel_values": torch.randn(2, 3, size, size)}


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]]]] = {
    "bert": (bert, tokens),
    "vit": (vit, pixels(16)),
}


def facts(graph: ChannelGraph) -> dict[str, tuple[int, str | None]]:
    return {group.name: (group.width, group.frozen) for group in graph.groups}


def hooks_of(net: nn.Module) -> int:
    return sum(len(module._forward_hooks) for module in net.modules())


@pytest.mark.parametrize(
    ("name", "flag"),
    [
        ("bert", "output_hidden_states"),
        ("vit", "output_attentions"),
        pytest.param("bert", "output_attentions", marks=pytest.mark.thorough),
        pytest.param("vit", "output_hidden_states", marks=pytest.mark.thorough),
    ],
)
def test_the_graph_is_the_same_after_outputs_were_requested(name: str, flag: str) -> None:
    build, make_inputs = MODELS[name]
    net, inputs = build().eval(), make_inputs()
    if flag == "output_attentions":
        net.set_attn_implementation("eager")
    wanted = trace_channels(net, inputs)
    net(**inputs, **{flag: True})
    if not hooks_of(net):
        pytest.skip("this version of transformers registers no hooks")
    graph = trace_channels(net, inputs)
    assert facts(graph) == facts(wanted)
    assert graph.notes == wanted.notes
    mask_channels_(net, graph, {group.name: [0] for group in graph.prunable})
    small = slim(net, graph)
    assert hooks_of(small) == hooks_of(net)
    assert max_relative_diff(net, small, inputs) < 1e-5
    asked = {**inputs, flag: True}
    ours, theirs = small(**asked), net(**asked)
    axis = 1 if flag == "output_attentions" else None  # a head was pruned
    for one, other in zip(ours[flag[7:]], theirs[flag[7:]], strict=True):
        assert [n for a, n in enumerate(one.shape) if a != axis] == [n for a, n in enumerate(other.shape) if a != axis]
