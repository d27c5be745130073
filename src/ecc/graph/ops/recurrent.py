"""Recurrent layers and cells: LSTM, GRU and RNN.

A unit is one hidden unit: its row in every gate of the input and recurrent weights and of the biases, and its column of
the recurrent weight, which consumes it in the next time step. If that column and the columns of all other consumers are
zero, nothing depends on the unit's state, so removing it is exact.

torch keeps one hidden size for all layers and directions of a module. Therefore unit k of each layer and direction
is pruned together with unit k of the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ecc.graph.calls import GATES
from ecc.graph.labels import Labels, Role, channel_vector, frozen_labels, unfrozen, varying_axes
from ecc.graph.ops.reduce import unknown

if TYPE_CHECKING:
    from ecc.graph.calls import Call
    from ecc.graph.tracer import Tracer


class _Weights(NamedTuple):
    """The parameters of one layer in one direction."""

    input: Tensor
    recurrent: Tensor
    input_bias: Tensor | None = None
    recurrent_bias: Tensor | None = None
    projection: Tensor | None = None


class _Units(NamedTuple):
    """Labels of one layer in one direction."""

    cell: Tensor
    """The hidden units: the state of an LSTM's cell, and of its output if it has no projection."""
    out: Tensor
    """The units of the output, which the next time step consumes."""


def layers(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """`nn.LSTM`, `nn.GRU` and `nn.RNN`: all time steps of all layers and directions."""
    x = call.tensors[0]
    states = _states(call)
    directions = 2 if call["bidirectional"] else 1
    weights = _weights(call, states)
    if weights is None or any(trace.weight_name(t) is None for one in weights for t in one if t is not None):
        return unknown(trace, call)
    trace.freeze_all([trace.labels(call.get("batch_sizes", None))], f"{call.here} uses its values as positions")
    steps = x.numel() // x.shape[-1]
    incoming = _features(trace, call, x)
    found: list[_Units] = []
    for layer in range(call["num_layers"]):
        mine = [
            _one(trace, call, incoming, one, steps, traffic=layer == 0 and number == 0)
            for number, one in enumerate(weights[layer * directions : (layer + 1) * directions])
        ]
        found += mine
        incoming = torch.cat([units.out for units in mine])
    for units in found[1:]:
        trace.channel_labels.unite(found[0].cell, units.cell, call.here)
        trace.channel_labels.unite(found[0].out, units.out, call.here)
    _bind_states(trace, call, states, found)
    outs = [torch.cat([units.out for units in found[-directions:]]), found[0].out, found[0].cell]
    return [labels.expand(out.shape) for labels, out in zip(outs, call.outs, strict=False)]


def cell(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """`nn.LSTMCell`, `nn.GRUCell` and `nn.RNNCell`: one time step."""
    x = call.tensors[0]
    weights = _Weights(call["w_ih"], call["w_hh"], call["b_ih"], call["b_hh"])
    if any(trace.weight_name(t) is None for t in weights if t is not None):
        return unknown(trace, call)
    units = _one(trace, call, _features(trace, call, x), weights, x.numel() // x.shape[-1], traffic=True)
    _bind_states(trace, call, _states(call), [units])
    return [units.out.expand(out.shape) for out in call.outs]


def pack(trace: Tracer, call: Call) -> Labels | list[Labels]:
    """Packing and unpacking of sequences: they move the axes of time and batch, the features are the last axis."""
    x = call.tensors[0]
    trace.freeze_others(call, x)
    vector = _features(trace, call, x)
    trace.record(call, "move", 0, [], [])
    first = None if vector is None else vector.expand(call.outs[0].shape)
    return [first, *(frozen_labels(out.shape) for out in call.outs[1:])]


def _states(call: Call) -> list[Tensor]:
    """The initial states."""
    states = call["hx"]
    return [states] if isinstance(states, Tensor) else list(states)


def _weights(call: Call, states: list[Tensor]) -> list[_Weights] | None:
    """The parameters of each layer and direction, None if there are more or fewer than expected."""
    parameters = list(call["params"])
    projected = len(states) == 2 and states[0].shape[-1] != states[1].shape[-1]
    size = (4 if call["has_biases"] else 2) + projected
    count = call["num_layers"] * (2 if call["bidirectional"] else 1)
    if len(parameters) != size * count:
        return None
    parts = [parameters[size * k : size * (k + 1)] for k in range(count)]
    biases = [(part[2], part[3]) if call["has_biases"] else (None, None) for part in parts]
    return [
        _Weights(part[0], part[1], first, second, part[-1] if projected else None)
        for part, (first, second) in zip(parts, biases, strict=True)
    ]


def _features(trace: Tracer, call: Call, x: Tensor) -> Labels:
    """Labels of the last axis of a sequence; None for a constant."""
    labels = trace.labels(x)
    if labels is not None and any(axis != x.dim() - 1 for axis in varying_axes(labels)):
        labels = trace.freeze(labels, f"{call.here} has channels on an axis of time or batch", unusual=True)
    return None if labels is None else channel_vector(labels, x.dim() - 1, x.shape[-1])


def _one(trace: Tracer, call: Call, incoming: Labels, weights: _Weights, steps: int, *, traffic: bool) -> _Units:
    """Consume the input and the units of the step before, and produce the hidden units."""
    known = trace.channel_labels
    gates = GATES.get(call.name.removesuffix("_cell"), 1)
    names = [trace.weight_name(tensor) or "" for tensor in weights[:2]]
    rows = [
        known.axis(name, 0, tensor.shape[0], Role.PRODUCER) for name, tensor in zip(names, weights[:2], strict=True)
    ]
    reads = [
        known.axis(name, 1, tensor.shape[1], Role.CONSUMER) for name, tensor in zip(names, weights[:2], strict=True)
    ]
    hidden = rows[0].view(gates, -1)[0]
    biases = [trace.labels(bias, Role.PRODUCER) for bias in weights[2:4]]
    for labels in (*rows, *(bias.reshape(-1) for bias in biases if bias is not None)):
        known.unite(hidden, labels.view(gates, -1), call.here)
    if unfrozen(incoming) is not None:
        known.unite(incoming, reads[0], call.here)  # type: ignore[arg-type]
    elif incoming is not None:
        known.freeze(reads[0], "its input is not prunable")
    trace.record(call, "linear", steps, [reads[0], rows[0]], [weights.input, weights.input_bias], traffic=traffic)
    own = [weights.recurrent, weights.recurrent_bias]
    trace.record(call, "linear", steps, [reads[1], rows[1]], own, traffic=False)
    if weights.projection is None:
        known.unite(hidden, reads[1], call.here)
        return _Units(hidden, hidden)
    name = trace.weight_name(weights.projection) or ""
    consumed = known.axis(name, 1, weights.projection.shape[1], Role.CONSUMER)
    out = known.axis(name, 0, weights.projection.shape[0], Role.PRODUCER)
    known.unite(hidden, consumed, call.here)
    # torch recognizes a projection by its size, so that a hidden size equal to proj_size would not run.
    known.freeze(hidden, f"{call.here} has a projection, and torch requires hidden_size > proj_size")
    known.unite(out, reads[1], call.here)
    trace.record(call, "linear", steps, [consumed, out], [weights.projection], traffic=False)
    return _Units(hidden, out)


def _bind_states(trace: Tracer, call: Call, states: list[Tensor], found: list[_Units]) -> None:
    """Initial states have the units of their layer. A constant has those of any."""
    for number, state in enumerate(states):
        labels = trace.labels(state)
        if labels is None:
            continue
        batch = state.dim() - 2
        if batch in varying_axes(labels):
            labels = trace.freeze(labels, f"{call.here} has channels on an axis of time or batch", unusual=True)
        labels = labels.select(batch, 0)
        for layer, units in enumerate(found):
            mine = labels[layer] if labels.dim() == 2 else labels
            trace.channel_labels.unite(mine, units.cell if number else units.out, f"the initial state of {call.here}")
