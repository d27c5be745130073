"""Prefill and decode of a language model of transformers, as networks that can be measured, and their counted costs.

    prefill   one forward pass over batch x length tokens; logits of the last one only, as `generate` does
    decode    one forward pass over one token per sequence, with a KV cache that holds `length` tokens

`workload_model` gives a network with the same parameters whose `forward` runs the workload. The cache is the static
one of transformers, so that a decode step can be captured as a CUDA graph. `workload_graph` gives a channel graph with
the groups of the network and the layers of the workload.
"""

from __future__ import annotations

import copy
import inspect
from dataclasses import replace
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ecc.errors import BadTask
from ecc.graph import AffineSize, ChannelGraph, Layer, trace_channels
from ecc.task import TokenWorkload
from ecc.torch_utils import device_of, input_shapes

Net = TypeVar("Net", bound=nn.Module)

_TRACED_TOKENS = 2  # a trace with an axis of size one could not tell it from other such axes
_SEED = 20190613


class _CacheSlot:
    """Holds the cache of a decode step. A copy of the network gets an empty one, since its heads may differ."""

    def __init__(self) -> None:
        self.cache: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> _CacheSlot:
        del memo
        return _CacheSlot()


class _Prefill:
    """`forward` of a prefill."""

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the last token of each sequence."""
        base: Any = super()
        logits: Tensor = base.forward(input_ids=input_ids, **_last_logits(base)).logits[:, -1:]
        return logits


class _Decode:
    """`forward` of a decode step."""

    _ecc_slot: _CacheSlot
    _ecc_length: int

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of one token per sequence, with a cache that holds `length` tokens before it."""
        base: Any = super()
        if self._ecc_slot.cache is None:
            self._ecc_slot.cache = self._filled_cache(input_ids)
        cache = self._ecc_slot.cache
        position = torch.full_like(input_ids, self._ecc_length)
        logits: Tensor = base.forward(
            input_ids=input_ids, past_key_values=cache, position_ids=position, use_cache=True
        ).logits
        _step_back(cache)
        return logits

    def _filled_cache(self, input_ids: Tensor) -> Any:
        """A static cache after a prompt of random tokens."""
        from transformers import StaticCache

        base: Any = super()
        number_caches_(self)  # type: ignore[arg-type]  # it is a module
        config: Any = self.config  # type: ignore[attr-defined]  # every model of transformers has one
        cache = StaticCache(config=config, max_cache_len=self._ecc_length + 1)
        generator = torch.Generator().manual_seed(_SEED)
        shape = (len(input_ids), self._ecc_length)
        prompt = torch.randint(config.get_text_config().vocab_size, shape, generator=generator).to(input_ids.device)
        base.forward(input_ids=prompt, past_key_values=cache, use_cache=True, **_last_logits(base))
        return cache


def workload_model(model: Net, workload: TokenWorkload) -> Net:
    """A network with the parameters of a language model whose forward pass runs a workload.

    Parameters are shared, not copied. The input of the new network is `workload_input(model, workload)`.
    """
    _check_causal(model)
    step = copy.copy(model)
    step.__dict__ = dict(model.__dict__)
    mixin = _Prefill if workload.name == "prefill" else _Decode
    step.__class__ = type(f"{type(model).__name__}{workload.name.title()}", (mixin, type(model)), {})
    if workload.name == "decode":
        step.__dict__.update(_ecc_slot=_CacheSlot(), _ecc_length=workload.length)
    return step


def workload_input(model: nn.Module, workload: TokenWorkload, tokens: int | None = None) -> dict[str, Tensor]:
    """Random tokens for one run of a workload, or this many tokens per sequence."""
    config: Any = model.config
    length = tokens or (workload.length if workload.name == "prefill" else 1)
    generator = torch.Generator().manual_seed(_SEED)
    found = torch.randint(1, config.get_text_config().vocab_size, (workload.batch, length), generator=generator)
    return {"input_ids": found.to(device_of(model))}


def workload_graph(
    model: nn.Module, graph: ChannelGraph, workload: TokenWorkload, attention: str = "heads"
) -> ChannelGraph:
    """The channel graph of a network with its groups and the layers, and so the counted costs, of a workload.

    A decode step is traced without a cache on two tokens per sequence. All layers are linear in the number of tokens
    but the products of queries with keys and values, which are quadratic. The former are halved; the latter read the
    whole cache. `attention` is that of the trace of the graph.
    """
    known, key = _LAYERS.setdefault(model, {}), (workload, attention)
    if key not in known:
        known[key] = _traced_layers(model, graph, workload, attention)
    return replace(graph, layers=known[key], input_shapes=input_shapes(workload_input(model, workload)))


_LAYERS: WeakKeyDictionary[nn.Module, dict[tuple[TokenWorkload, str], tuple[Layer, ...]]] = WeakKeyDictionary()
"""Layers of networks that were traced, because the trace of a large model takes a minute."""


def _traced_layers(model: nn.Module, graph: ChannelGraph, workload: TokenWorkload, attention: str) -> tuple[Layer, ...]:
    is_decode = workload.name == "decode"
    tokens = _TRACED_TOKENS if is_decode else max(workload.length, _TRACED_TOKENS)
    traced = model if is_decode else workload_model(model, workload)  # in a decode step all tokens have logits
    found = trace_channels(traced, workload_input(model, workload, tokens), attention=attention, verify=False)
    if [(one.name, one.width) for one in found.groups] != [(one.name, one.width) for one in graph.groups]:
        raise BadTask(
            f"the channel groups of the {workload.name} workload differ from those of the network with its example "
            "input, so its costs cannot be counted. Give a budget without a workload, such as macs=50%."
        )
    return tuple(_decode_layer(one, workload.length + 1) for one in found.layers) if is_decode else found.layers


def number_caches_(model: nn.Module) -> None:
    """Number the attention modules of a network consecutively, as caches of transformers expect.

    The first one determines the length of the sequence, so it has to exist after attention modules were removed.
    """
    found, removed = [], []
    for module in model.modules():
        if hasattr(module, "cache_layer"):  # stands for a removed one
            removed.append(module)
        elif isinstance(vars(module).get("layer_idx"), int) and any(True for _ in module.parameters()):
            found.append(module)
    for one in removed if found else ():
        one.cache_layer = None  # type: ignore[assignment]  # there is nothing to keep in the cache
    order = {number: new for new, number in enumerate(sorted({int(vars(one)["layer_idx"]) for one in found}))}
    for module in found:
        old = int(vars(module)["layer_idx"])
        if order[old] != old:
            module.layer_idx = order[old]  # type: ignore[assignment]  # not a tensor


# --- parts -------------------------------------------------------------------------------------------


def _check_causal(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if not callable(getattr(model, "generate", None)) or not hasattr(config, "get_text_config"):
        raise BadTask(
            f"model {type(model).__name__} is no causal language model of transformers, so it has neither prefill nor "
            "decode. Give a budget on the energy of its forward pass, such as 70%."
        )


def _last_logits(model: Any) -> dict[str, int]:
    """Arguments with which a model computes logits of the last token only, where it supports that."""
    return {"logits_to_keep": 1} if "logits_to_keep" in inspect.signature(model.forward).parameters else {}


def _step_back(cache: Any) -> None:
    """Let a static cache forget the last token, so that the step can be repeated; in place, for a CUDA graph.

    Layers with a state of fixed size, as those of Mamba, cost the same at every token.
    """
    used = [layer for layer in cache.layers if getattr(layer, "is_initialized", False)]
    if used:
        torch._foreach_sub_([layer.cumulative_length for layer in used], 1)  # one kernel for all layers
    for layer in used:
        if hasattr(layer, "cumulative_length_int"):
            layer.cumulative_length_int -= 1


def _decode_layer(layer: Layer, keys: int) -> Layer:
    """A layer of a trace on two tokens as it works in a decode step with `keys` keys per sequence."""
    half = replace(
        layer, macs=-(-layer.macs // _TRACED_TOKENS), reads=_divided(layer.reads), writes=_divided(layer.writes)
    )
    if layer.kind != "matmul" or layer.tensors:
        return half
    macs = -(-layer.macs // _TRACED_TOKENS**2) * keys
    query, cached = half.writes, _sum(half.reads, half.writes, -1)
    return replace(half, macs=macs, reads=_sum(query, _scaled(cached, keys)))


def _divided(size: AffineSize) -> AffineSize:
    divided = [(group, -(-multiple // _TRACED_TOKENS)) for group, multiple in size.multiples]
    return AffineSize(-(-size.fixed // _TRACED_TOKENS), tuple(divided))


def _scaled(size: AffineSize, factor: int) -> AffineSize:
    return AffineSize(size.fixed * factor, tuple((group, multiple * factor) for group, multiple in size.multiples))


def _sum(one: AffineSize, two: AffineSize, sign: int = 1) -> AffineSize:
    total = dict(one.multiples)
    for group, multiple in two.multiples:
        total[group] = max(0, total.get(group, 0) + sign * multiple)
    return AffineSize(max(0, one.fixed + sign * two.fixed), tuple(total.items()))
