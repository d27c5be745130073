"""`HeadAttention` computes what `nn.MultiheadAttention` does, and its heads can be pruned."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.graph import mask_channels_, max_relative_diff, slim, trace_channels
from ecc.graph.multihead import HeadAttention

LENGTH, OTHER, WIDTH, HEADS = 5, 7, 12, 4

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "batch first": {"batch_first": True},
    "without bias": {"bias": False},
    "key and value bias": {"add_bias_kv": True},
    "zero attention": {"add_zero_attn": True, "batch_first": True},
    "both": {"add_bias_kv": True, "add_zero_attn": True},
    "other widths": {"kdim": 6, "vdim": 9},
}


def layer(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    made = nn.MultiheadAttention(WIDTH, HEADS, **options).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    return made.eval()


def inputs(options: dict[str, Any], kind: str) -> tuple[Tensor, Tensor, Tensor]:
    def made(length: int, width: int) -> Tensor:
        if kind == "unbatched":
            return torch.randn(length, width, dtype=torch.float64)
        shape = (2, length, width) if options.get("batch_first") else (length, 2, width)
        return torch.randn(*shape, dtype=torch.float64)

    query = made(LENGTH, WIDTH)
    if kind == "self" and "kdim" not in options:
        return query, query, query
    return query, made(OTHER, options.get("kdim", WIDTH)), made(OTHER, options.get("vdim", WIDTH))


def masks(keys: int, kind: str) -> dict[str, Any]:
    if kind == "float":
        return {"attn_mask": torch.randn(LENGTH, keys, dtype=torch.float64)}
    if kind == "bool and padding":
        mask = torch.rand(LENGTH, keys) < 0.3
        mask[:, 0] = False
        padding = torch.zeros(2, keys, dtype=torch.bool)
        padding[1, -2:] = True
        return {"attn_mask": mask, "key_padding_mask": padding}
    if kind == "per head":
        return {"attn_mask": torch.randn(2 * HEADS, LENGTH, keys, dtype=torch.float64)}
    return {}


@pytest.mark.parametrize("need_weights", [False, True])
@pytest.mark.parametrize("mask", ["none", "float", "bool and padding", "per head"])
@pytest.mark.parametrize("kind", ["self", "cross", "unbatched"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_it_computes_what_torch_computes(options: dict[str, Any], kind: str, mask: str, need_weights: bool) -> None:
    if kind == "unbatched" and mask in ("bool and padding", "per head"):
        pytest.skip("these masks have a batch")
    theirs = layer(**options)
    given = inputs(options, kind)
    keys = given[1].shape[0 if kind == "unbatched" or not options.get("batch_first") else 1]
    more = masks(keys, mask)
    ours = copy.deepcopy(theirs)
    ours.__class__ = HeadAttention
    wanted, found = (net(*given, need_weights=need_weights, **more) for net in (theirs, ours))
    torch.testing.assert_close(found[0], wanted[0])
    assert (found[1] is None) == (wanted[1] is None)
    if need_weights:
        torch.testing.assert_close(found[1], wanted[1])
        each = (net(*given, average_attn_weights=False, **more)[1] for net in (ours, theirs))
        torch.testing.assert_close(*each)


def test_a_causal_mask() -> None:
    theirs = layer(batch_first=True)
    ours = copy.deepcopy(theirs)
    ours.__class__ = HeadAttention
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(LENGTH).double()
    for need_weights in (False, True):
        wanted, found = (
            net(x, x, x, need_weights=need_weights, attn_mask=mask, is_causal=True)[0] for net in (theirs, ours)
        )
        torch.testing.assert_close(found, wanted)
    with pytest.raises(RuntimeError, match="needs attn_mask"):
        ours(x, x, x, is_causal=True)


class Encoder(nn.Module):
    """torch's own encoder and decoder layers, with tokens in front."""

    def __init__(self, *, decoder: bool) -> None:
        super().__init__()
        self.embed = nn.Linear(6, WIDTH)
        options = {"dim_feedforward": 20, "batch_first": True, "dropout": 0.0}
        self.layer: nn.Module = nn.TransformerEncoderLayer(WIDTH, HEADS, **options)
        self.other = nn.TransformerDecoderLayer(WIDTH, HEADS, **options) if decoder else None
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        y = self.layer(x)
        return self.head(y if self.other is None else self.other(x, y))


@pytest.mark.parametrize("decoder", [False, True])
def test_heads_of_torch_s_transformer_layers(decoder: bool) -> None:
    torch.manual_seed(0)
    net, x = Encoder(decoder=decoder).double().eval(), torch.randn(2, LENGTH, 6, dtype=torch.float64)
    graph = trace_channels(net, x)
    heads = [group for group in graph.prunable if "attn" in group.name]
    assert [group.width for group in heads] == [HEADS] * (3 if decoder else 1)
    mask_channels_(net, graph, {group.name: [1] for group in graph.prunable})
    small = slim(net, graph)
    attention = small.layer.self_attn
    assert isinstance(attention, HeadAttention)
    assert (attention.num_heads, attention.head_dim, attention.embed_dim) == (3, 3, WIDTH - 1)
    assert max_relative_diff(net, small, x) < 1e-12
    with torch.no_grad():  # where torch takes its fused kernels
        torch.testing.assert_close(small(x), net(x))
    whole = slim(Encoder(decoder=decoder).double(), graph)
    assert type(whole.layer.self_attn) is nn.MultiheadAttention


class ReturnsWeights(nn.Module):
    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.attention, self.uses = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), uses

    def forward(self, x: Tensor) -> Any:
        y, weights = self.attention(x, x, x)
        return (y, weights) if self.uses else y


def test_averaged_weights_freeze_the_heads_only_if_they_are_used() -> None:
    x = torch.randn(2, LENGTH, WIDTH)
    assert [group.width for group in trace_channels(ReturnsWeights(uses=False), x).prunable] == [HEADS]
    graph = trace_channels(ReturnsWeights(uses=True), x)
    assert not graph.prunable
    assert any("`mean` in attention reduces over the channel axis" in str(group.frozen) for group in graph.groups)
