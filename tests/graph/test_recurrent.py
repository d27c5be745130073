"""Recurrent networks: hidden units are prunable, pruning is exact, and the modules' sizes follow."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.flop_counter import FlopCounterMode

import ecc
from ecc.graph import ChannelGraph, mask_channels_, max_relative_diff, with_widths
from ecc.graph.structure import StructureSpec

HIDDEN = 15


class Classifier(nn.Module):
    """An embedding, a recurrent layer, and a linear layer on the output of the last step or of all steps."""

    def __init__(self, layer: nn.RNNBase, steps: str = "last") -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.layer, self.steps = layer, steps
        size = (layer.proj_size or layer.hidden_size) * (2 if layer.bidirectional else 1)
        self.head = nn.Linear(size, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        out, _ = self.layer(x if self.layer.batch_first else x.transpose(0, 1))
        axis = 1 if self.layer.batch_first else 0
        return self.head(out.select(axis, -1) if self.steps == "last" else out.mean(axis))


class FinalStates(nn.Module):
    """A linear layer on the final states of all layers and directions."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size * layer.num_layers * (2 if layer.bidirectional else 1), 4)

    def forward(self, tokens: Tensor) -> Tensor:
        _, states = self.layer(self.embedding(tokens))
        states = states[0] + states[1] if isinstance(states, tuple) else states
        return self.head(states.permute(1, 0, 2).flatten(1))


class Cells(nn.Module):
    """A loop over time steps."""

    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(30, 12), cell, nn.Linear(HIDDEN, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        state = None
        for x in self.embedding(tokens).unbind(1):
            state = self.cell(x, state)
        return self.head(state[0] if isinstance(state, tuple) else state)


class HandWritten(nn.Module):
    """An LSTM of two linear layers, with a first state of zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.input, self.recurrent = nn.Linear(12, 4 * HIDDEN), nn.Linear(HIDDEN, 4 * HIDDEN, bias=False)
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        state = cell = x.new_zeros(len(tokens), self.recurrent.in_features)
        for step in x.unbind(1):
            enter, forget, new, leave = (self.input(step) + self.recurrent(state)).chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
        return self.head(state)


class ConvolutionalLSTM(nn.Module):
    """A convolution over the image and the state of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3 + 8, 32, 3, padding=1), nn.Conv2d(8, 4, 1)

    def forward(self, video: Tensor) -> Tensor:
        state = cell = video.new_zeros(len(video), self.conv.out_channels // 4, *video.shape[-2:])
        for image in video.unbind(1):
            enter, forget, new, leave = self.conv(torch.cat([image, state], 1)).chunk(4, 1)
            cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
            state = leave.sigmoid() * cell.tanh()
        return self.head(state)


class EncoderDecoder(nn.Module):
    """The final states of one layer are the initial states of another."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.encoder, self.decoder = (nn.LSTM(12, HIDDEN, 2, batch_first=True) for _ in range(2))
        self.head = nn.Linear(HIDDEN, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        _, states = self.encoder(x)
        return self.head(self.decoder(x, states)[0])


class LearnedState(nn.Module):
    """The initial state is computed by a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.first = nn.Embedding(30, 12), nn.Linear(12, HIDDEN)
        self.layer, self.head = nn.GRU(12, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.layer(x, self.first(x.mean(1)).tanh()[None])[0])


class Packed(nn.Module):
    """Sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 12)
        self.layer = nn.LSTM(12, HIDDEN, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, 4)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        x = pack_padded_sequence(self.embedding(tokens), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (final, _) = self.layer(x)
        every, _ = pad_packed_sequence(out, batch_first=True)
        return self.head(every).sum(1) + self.head(torch.cat([final[0], final[1]], 1))


class ConvThenGRU(nn.Module):
    """Speech recognition: convolutions over time, stacked recurrent layers, a score for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 10, 3, padding=1), nn.BatchNorm1d(10)
        self.layer = nn.GRU(10, HIDDEN, 2, batch_first=True, bidirectional=True, dropout=0.2)
        self.scale, self.head = nn.LayerNorm(4), nn.Linear(2 * HIDDEN, 4)

    def forward(self, sound: Tensor) -> Tensor:
        x = self.norm(self.conv(sound)).relu().transpose(1, 2)
        return self.scale(self.head(self.layer(x)[0]))


def tokens() -> Tensor:
    return torch.randint(0, 30, (3, 5), generator=torch.Generator().manual_seed(0))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any]]] = {
    "LSTM": (lambda: Classifier(nn.LSTM(12, HIDDEN, batch_first=True)), tokens),
    "GRU": (lambda: Classifier(nn.GRU(12, HIDDEN, batch_first=True)), tokens),
    "RNN": (lambda: Classifier(nn.RNN(12, HIDDEN, nonlinearity="relu")), tokens),
    "RNN with tanh": (lambda: Classifier(nn.RNN(12, HIDDEN), "all"), tokens),
    "stacked LSTM": (lambda: Classifier(nn.LSTM(12, HIDDEN, 3, batch_first=True, dropout=0.3), "all"), tokens),
    "stacked GRU without biases": (lambda: Classifier(nn.GRU(12, HIDDEN, 2, bias=False)), tokens),
    "bidirectional LSTM": (lambda: Classifier(nn.LSTM(12, HIDDEN, 2, bidirectional=True), "all"), tokens),
    "final states of an LSTM": (lambda: FinalStates(nn.LSTM(12, HIDDEN, 2, batch_first=True)), tokens),
    "final states of a GRU": (lambda: FinalStates(nn.GRU(12, HIDDEN, batch_first=True, bidirectional=True)), tokens),
    "LSTM cell": (lambda: Cells(nn.LSTMCell(12, HIDDEN)), tokens),
    "GRU cell": (lambda: Cells(nn.GRUCell(12, HIDDEN)), tokens),
    "RNN cell": (lambda: Cells(nn.RNNCell(12, HIDDEN, bias=False)), tokens),
    "hand-written LSTM": (HandWritten, tokens),
    "convolutional LSTM": (ConvolutionalLSTM, lambda: torch.randn(2, 3, 3, 6, 6)),
    "encoder and decoder": (EncoderDecoder, tokens),
    "learned initial state": (LearnedState, tokens),
    "packed sequences": (Packed, lambda: (tokens(), torch.tensor([5, 2, 4]))),
    "convolution, then GRU": (ConvThenGRU, lambda: torch.randn(2, 6, 9)),
}


def prunable_share(graph: ChannelGraph) -> float:
    """Share of the parameters that lie in a prunable slice."""
    touched = {one.tensor for group in graph.prunable for one in group.slices}
    sizes = {t.name: graph.full_shapes[t.name].numel() for t in graph.tensors if t.is_parameter}
    return sum(size for name, size in sizes.items() if name in touched) / sum(sizes.values())


def cut(net: nn.Module, graph: ChannelGraph, share: float = 0.4) -> tuple[nn.Module, nn.Module]:
    """The network with a random part of each group masked, and the slim one."""
    generator = torch.Generator().manual_seed(1)
    dead = {g.name: torch.randperm(g.width, generator=generator)[: int(share * g.width)] for g in graph.prunable}
    masked = copy.deepcopy(net)
    mask_channels_(masked, graph, dead)
    return masked, ecc.slim(masked, graph)


def double(example: Any) -> Any:
    many = example if isinstance(example, tuple) else (example,)
    many = tuple(t.double() if t.is_floating_point() else t for t in many)
    return many if isinstance(example, tuple) else many[0]


@pytest.mark.parametrize("name", NETWORKS)
def test_hidden_units_are_prunable_and_the_slim_network_is_exact(name: str) -> None:
    torch.manual_seed(0)
    net, example = NETWORKS[name][0]().double(), double(NETWORKS[name][1]())
    graph = ecc.trace_channels(net, example, verify=False)
    assert prunable_share(graph) >= 0.9
    masked, small = cut(net, graph)
    assert sum(p.numel() for p in small.parameters()) < 0.75 * sum(p.numel() for p in net.parameters())
    assert max_relative_diff(masked, small, example) < 1e-9
    widths = {group.name: group.width - int(0.4 * group.width) for group in graph.prunable}
    assert sum(p.numel() for p in small.parameters()) == graph.parameters(widths)
    built = with_widths(net, graph, widths)
    built.load_state_dict(small.state_dict())
    assert max_relative_diff(small, built, example) == 0
    verified = ecc.graph.verify_graph(net, graph, example)
    assert verified.fingerprint == graph.fingerprint  # nothing was frozen
    assert verified.max_relative_diff is not None
    assert verified.max_relative_diff < 1e-12


@pytest.mark.parametrize("name", ["LSTM", "GRU", "stacked LSTM", "bidirectional LSTM", "GRU cell"])
def test_macs_are_those_that_torch_counts(name: str) -> None:
    net, example = NETWORKS[name][0](), NETWORKS[name][1]()
    graph = ecc.trace_channels(net, example, verify=False)
    _, small = cut(net, graph)
    widths = {group.name: group.width - int(0.4 * group.width) for group in graph.prunable}
    for model, at in ((net, {}), (small, widths)):
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            model.double()(example)
        assert counter.get_total_flops() == 2 * graph.macs(at)


def test_a_unit_has_its_rows_of_all_gates_its_recurrent_column_and_its_consumers() -> None:
    graph = ecc.trace_channels(Classifier(nn.LSTM(12, HIDDEN, batch_first=True)), tokens(), verify=False)
    found = {(one.tensor, one.axis): (one.index[3].tolist(), one.is_consumer) for one in graph["layer"].slices}
    gates = [3, 3 + HIDDEN, 3 + 2 * HIDDEN, 3 + 3 * HIDDEN]
    rows = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    assert found == {
        **{(f"layer.{name}", 0): (gates, False) for name in rows},
        ("layer.weight_hh_l0", 1): ([3], True),
        ("head.weight", 1): ([3], True),
    }


def test_layers_and_directions_of_one_module_keep_one_hidden_size() -> None:
    net = Classifier(nn.LSTM(12, HIDDEN, 2, bidirectional=True))
    graph = ecc.trace_channels(net, tokens(), verify=False)
    assert graph.full_widths["layer"] == HIDDEN
    _, small = cut(net, graph)
    assert (small.layer.input_size, small.layer.hidden_size) == (8, 9)  # type: ignore[union-attr]
    assert [tuple(w.shape) for w in small.layer._flat_weights[:2]] == [(36, 8), (36, 9)]  # type: ignore[union-attr, index]
    assert small.layer._flat_weights[0] is small.layer.weight_ih_l0  # type: ignore[union-attr, index]


def test_a_projection_is_prunable_and_the_hidden_size_behind_it_is_not() -> None:
    net = Classifier(nn.LSTM(12, HIDDEN, 2, batch_first=True, proj_size=8)).double()
    graph = ecc.trace_channels(net, tokens())
    assert graph["layer#2"].frozen is None
    assert "hidden_size > proj_size" in str(graph["layer"].frozen)
    masked, small = cut(net, graph)
    assert (small.layer.hidden_size, small.layer.proj_size) == (HIDDEN, 5)  # type: ignore[union-attr]
    assert max_relative_diff(masked, small, tokens()) < 1e-9


class GivenState(nn.Module):
    """The initial state is an input, or has a written size."""

    def __init__(self, *, written: bool) -> None:
        super().__init__()
        self.layer, self.head, self.written = nn.GRU(6, HIDDEN, batch_first=True), nn.Linear(HIDDEN, 4), written

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        return self.head(self.layer(x, x.new_zeros(1, len(x), HIDDEN) if self.written else state)[0])


@pytest.mark.parametrize(
    ("written", "reason"), [(False, "the initial state of `gru` in layer"), (True, "Expected hidden size")]
)
def test_a_given_initial_state_freezes_the_hidden_size(written: bool, reason: str) -> None:
    graph = ecc.trace_channels(GivenState(written=written), (torch.randn(2, 3, 6), torch.zeros(1, 2, HIDDEN)))
    assert reason in str(graph["layer"].frozen)


def test_outputs_and_final_states_that_leave_the_network_are_frozen() -> None:
    graph = ecc.trace_channels(nn.LSTM(6, HIDDEN), torch.randn(5, 2, 6))
    assert not graph.prunable
    assert all("output of the network" in str(group.frozen) for group in graph.groups)


def test_a_slim_network_trains_and_is_saved(tmp_path: Path) -> None:
    net = Classifier(nn.LSTM(12, HIDDEN, 2, batch_first=True))
    graph = ecc.trace_channels(net, tokens())
    _, small = cut(net, graph)
    small.train()
    small(tokens()).square().sum().backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in small.parameters())
    ecc.save_slim(small, tmp_path / "slim.safetensors")
    loaded = ecc.load_slim(Classifier(nn.LSTM(12, HIDDEN, 2, batch_first=True)), tmp_path / "slim.safetensors")
    assert max_relative_diff(small, loaded, tokens()) == 0


def test_the_graph_of_a_deep_network_is_saved_with_its_costs(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(6, 12), *[TakeOutput(nn.LSTM(12, 12, batch_first=True)) for _ in range(12)])
    net.append(nn.Linear(12, 2))
    graph = ecc.trace_channels(net, torch.randn(1, 4, 6), verify=False)
    assert len(graph.prunable) == 13
    graph.save(tmp_path / "graph.json")
    structure: StructureSpec = ChannelGraph.load(tmp_path / "graph.json").structure
    assert float(structure.costs.macs(structure.widths())) == float(graph.macs())


class TakeOutput(nn.Module):
    """The output of a recurrent layer without its states."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)[0]
        return out
