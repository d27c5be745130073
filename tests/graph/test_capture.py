from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import UntraceableModel, first_line
from ecc.graph.forward_pass import ModelCopy, as_call, one_pass, refuse_untraceable
from ecc.graph.grouping import ChannelPartition
from ecc.graph.labels import ChannelLabels, Misaligned, Role
from ecc.graph.model_copy import named_tensors
from ecc.graph.tracer import Tracer
from graph.cases import CASES, AuxiliaryHead, chain, conv, image, named
from graph.following import cut_book

X = torch.zeros(1)


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, 2), (X, 2), {}),
        ([X, None], (X, None), {}),
        ({"x": X, "flag": True}, (), {"x": X, "flag": True}),
    ],
)
def test_an_example_input_is_a_call(inputs: Any, args: Any, kwargs: Any) -> None:
    assert as_call(inputs) == (args, kwargs)


# ---------------------------------------------------------------- twins


def test_a_twin_on_meta_keeps_shapes_and_lets_values_go() -> None:
    net = chain()
    twin = ModelCopy.of(net, on_meta=True)
    assert {k: t.shape for k, t in twin.tensors.items()} == {k: t.shape for k, t in named_tensors(net).items()}
    assert {t.device.type for t in twin.model.parameters()} == {"meta"}
    assert {t.device.type for t in net.parameters()} == {"cpu"}
    assert [twin.paths[id(module)] for module in twin.model.modules()] == [name for name, _ in net.named_modules()]


def test_an_index_keeps_its_values_on_meta() -> None:
    net = chain()
    net.register_buffer("order", torch.tensor([2, 0, 1]))
    net.register_buffer("mask", torch.tensor([True, False]))
    twin = ModelCopy.of(net, on_meta=True)
    assert torch.equal(twin.model.order, net.order)
    assert torch.equal(twin.model.mask, net.mask)
    assert twin.model.order is not net.order


def test_a_twin_of_real_tensors_shares_none() -> None:
    net = chain()
    twin = ModelCopy.of(net, on_meta=False)
    for name, tensor in named_tensors(net).items():
        assert torch.equal(twin.tensors[name], tensor)
        assert twin.tensors[name].data_ptr() != tensor.data_ptr()


# ---------------------------------------------------------------- a pass


def passed(net: nn.Module, inputs: Any, *, training: bool = False, **settings: Any) -> Tracer:
    tracer = Tracer(ChannelLabels(), **settings)
    return one_pass(ModelCopy.of(net, on_meta=tracer.on_meta), inputs, tracer, training=training)


@pytest.mark.parametrize("on_meta", [True, False])
def test_a_pass_freezes_the_outputs_and_names_the_axes(on_meta: bool) -> None:
    tracer = passed(chain(), image()(), on_meta=on_meta, recording=True)
    resolved = ChannelPartition(tracer.channel_labels)
    assert {resolved.why(int(u)) for u in resolved.units_on(("conv3.weight", 0))} == {"it is an output of the network"}
    assert {resolved.why(int(u)) for u in resolved.units_on(("conv2.weight", 0))} == {None}
    assert [record.path for record in tracer.records] == ["conv1", "bn1", "relu1", "conv2", "relu2", "conv3"]


def test_both_modes_run_what_the_network_runs_in_them() -> None:
    net = AuxiliaryHead()
    assert "aux.weight" not in passed(net, image()()).reached
    assert "aux.weight" in passed(net, image()(), training=True).reached


def test_random_state_and_attention_settings_are_restored() -> None:
    net, images = named(first=conv(3, 8), drop=nn.Dropout(0.5), head=conv(8, 4, 1)), image()()
    state, fast = torch.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    passed(net, images, training=True, on_meta=False)
    with pytest.raises(Misaligned):
        passed(net, images[:, :2])
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.backends.mha.get_fastpath_enabled() == fast


@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_enabled_after_a_pass_as_they_were_before(training: bool) -> None:
    for before in (True, False):
        with torch.set_grad_enabled(before):
            passed(chain(), image()(), training=training)
            assert torch.is_grad_enabled() == before


class Watches(nn.Module):
    """Notes whether autograd watches it; the twin's notes are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = conv(3, 4)
        self.watched: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        self.watched.append(x.requires_grad)
        return x


def test_a_pass_runs_without_gradients_and_on_the_twin() -> None:
    net = Watches()
    twin = ModelCopy.of(net, on_meta=False)
    one_pass(twin, image()(), Tracer(ChannelLabels(), on_meta=False), training=True)
    assert twin.model.watched == [False]
    assert net.watched == []


def test_an_operator_that_cannot_run_is_placed() -> None:
    with pytest.raises(Misaligned, match=r"conv1 \(conv2d\) has a fixed size") as caught:
        passed(chain(), torch.zeros(1, 5, 8, 8))
    assert caught.value.path == "conv1"
    assert str(caught.value.line).startswith("conv2d@")


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no")


def test_an_error_of_the_networks_own_is_left_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^no$"):
        passed(Raises(), X)


def test_in_a_cut_network_it_shows_that_the_code_does_not_follow() -> None:
    dense = ChannelLabels()
    dense.axis("w", 0, 4, Role.PRODUCER)
    book = cut_book(dense)
    with pytest.raises(Misaligned, match=r"^ValueError: no$") as caught:
        one_pass(ModelCopy.of(Raises(), on_meta=True), X, Tracer(book), training=False)
    assert caught.value.labels.numel() == 0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("name", CASES)
def test_ordinary_networks_are_not_refused(name: str) -> None:
    assert refuse_untraceable(CASES[name].build(), CASES[name].inputs()) is None


def test_a_quantised_parameter_is_refused() -> None:
    net = nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own quantised tensors
        values = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    net.weight = nn.Parameter(values, requires_grad=False)
    with pytest.raises(UntraceableModel, match=r"weight is quantised\. Cut the float network, then quantise"):
        refuse_untraceable(net, X)


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "ValueError: one"),
        (RuntimeError("one\ntwo"), "RuntimeError: one"),
        (KeyError("x"), "KeyError: 'x'"),
        (AssertionError(), "AssertionError"),
        (ValueError("\n one"), "ValueError: one"),
    ],
)
def test_errors_are_told_in_one_line(error: Exception, line: str) -> None:
    assert first_line(error) == line
