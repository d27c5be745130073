"""Networks and inputs that cannot be traced are refused with one clear line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from ecc.errors import UntraceableModel
from ecc.export import load_slim
from ecc.graph import mask_channels_, max_relative_diff, slim, trace_channels, with_widths
from ecc.graph.forward_pass import refuse_computed_weights
from graph.cases import chain, named
from graph.layers import conv, image
from graph.special_nets import BranchesOnChannels


def refusal(net: Any, inputs: Any) -> str:
    with pytest.raises(UntraceableModel) as caught:
        trace_channels(net, inputs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wrapped(wrap: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is deprecated
        return wrap(chain())


def quantized() -> nn.Module:
    net = nn.Module()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        values = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    net.weight = nn.Parameter(values, requires_grad=False)
    return net


def changed(change: Any) -> nn.Module:
    """A network of which one module was changed in place."""
    net = chain()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit and torch.ao are deprecated
        change(net)
    return net


def with_head(net: nn.Module) -> nn.Module:
    net.head = nn.Linear(4, 4)
    return net


def for_quantization(net: nn.Module) -> None:
    net.conv2.qconfig = torch.ao.quantization.get_default_qat_qconfig("fbgemm")
    torch.ao.quantization.prepare_qat(net.train(), inplace=True)


def with_nan() -> nn.Module:
    net = chain()
    net.conv2.bias.data[0] = torch.nan
    return net


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: wrapped(torch.jit.script), "TorchScript"),
        (lambda: wrapped(partial(torch.compile, backend="eager")), "compiled"),
        (lambda: changed(nn.Module.compile), "the network is compiled. Trace the network before torch.compile"),
        (lambda: changed(lambda net: net.conv2.compile()), "module conv2 is compiled"),
        (lambda: changed(lambda net: setattr(net, "conv2", torch.compile(net.conv2))), "module conv2 is compiled"),
        (
            lambda: changed(lambda net: setattr(net, "conv2", torch.jit.script(net.conv2))),
            "module conv2 is a TorchScript",
        ),
        (lambda: changed(for_quantization), "module conv2.weight_fake_quant simulates quantization"),
        (
            lambda: changed(lambda net: torch.ao.quantization.quantize_dynamic(with_head(net), inplace=True)),
            "module head is quantized. Prune the float network",
        ),
        (lambda: named(first=nn.LazyConv2d(4, 3)), "first.weight is not initialized"),
        (lambda: named(norm=nn.LazyBatchNorm2d(affine=False)), "norm.running_mean is not initialized"),
        (quantized, "weight is quantized. Prune the float network"),
        (with_nan, "conv2.bias contains NaN"),
        (lambda: torch.relu, "expected a torch.nn.Module, got builtin_function_or_method"),
        (lambda: nn.ReLU, "expected a torch.nn.Module, got type"),
    ],
)
def test_networks_that_cannot_be_traced(build: Any, words: str) -> None:
    assert words in refusal(build(), torch.randn(1, 3, 8, 8))


def test_an_empty_input_is_refused() -> None:
    assert "the example input is empty (shape (0, 3, 8, 8))" in refusal(chain(), torch.zeros(0, 3, 8, 8))


@pytest.mark.parametrize("inputs", [None, (), {}, 3, {"x": None}])
def test_an_input_without_a_tensor_is_refused(inputs: Any) -> None:
    assert refusal(chain(), inputs) == "the example input holds no tensor."


@pytest.mark.parametrize(
    ("net", "inputs", "words"),
    [
        (
            chain(),
            torch.zeros(1, 5, 8, 8),
            ["`conv2d` in conv1 failed", "expected input[1, 5, 8, 8] to have 3 channels"],
        ),
        (
            named(flat=nn.Flatten(), fc=nn.Linear(9, 4)),
            torch.zeros(1, 3, 8, 8),
            ["`linear` in fc failed", "1x192 and 9x4"],
        ),
        (chain(), (torch.zeros(1, 3, 8, 8), 1), ["TypeError", "positional arguments"]),
        (chain(), {"image": torch.zeros(1, 3, 8, 8)}, ["TypeError", "'image'"]),
    ],
)
def test_an_input_of_the_wrong_shape_is_refused_with_the_layer(net: nn.Module, inputs: Any, words: list[str]) -> None:
    message = refusal(net, inputs)
    assert message.startswith("the network cannot run on the example input: ")
    for word in words:
        assert word in message


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("images must be square\nand small")


def test_an_error_of_the_network_is_shown_in_one_line() -> None:
    message = refusal(Raises(), torch.zeros(1, 3, 8, 8))
    assert message == "the network cannot run on the example input: ValueError: images must be square"


def test_a_network_on_meta_tensors_that_reads_values_is_refused() -> None:
    with torch.device("meta"):
        net = BranchesOnChannels()
    assert "the network on meta tensors cannot run" in refusal(net, torch.zeros(1, 3, 8, 8))


# ---------------------------------------------------------------- computed weights


class Doubled(nn.Module):
    """A user's parametrization without an inverse."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def weight_norm(module: nn.Module, name: str = "weight") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers the parametrization
        torch.nn.utils.weight_norm(module, name)


KINDS: dict[str, tuple[Callable[[nn.Module], Any], str]] = {
    "weight_norm": (weight_norm, "weight_norm"),
    "spectral_norm": (torch.nn.utils.spectral_norm, "spectral_norm"),
    "mask": (lambda m: prune.random_unstructured(m, "weight", 0.3), "a mask of torch.nn.utils.prune"),
    "new weight_norm": (parametrizations.weight_norm, "a parametrization"),
    "new spectral_norm": (parametrizations.spectral_norm, "a parametrization"),
    "orthogonal": (parametrizations.orthogonal, "a parametrization"),
    "own": (lambda m: parametrize.register_parametrization(m, "weight", Doubled()), "a parametrization"),
}


def net() -> nn.Sequential:
    return named(conv1=conv(3, 8), relu=nn.ReLU(), body=nn.Sequential(conv(8, 6), nn.ReLU()), head=conv(6, 4, 1))


def pasted(statement: str, model: nn.Module) -> None:
    exec(statement, {"torch": torch, "model": model})


def instruction(model: nn.Module, act: Callable[[], Any]) -> tuple[str, str]:
    with pytest.raises(UntraceableModel) as caught:
        act()
    message = str(caught.value)
    assert "\n" not in message
    before, _, statement = message.partition(" with: ")
    return before, statement


def assert_prunable(model: nn.Module, inputs: Tensor) -> None:
    graph = trace_channels(model, inputs)
    assert {group.name: group.width for group in graph.prunable} == {"conv1": 8, "body.0": 6}
    mask_channels_(model, graph, {"conv1": [0, 5], "body.0": [1]})
    small = slim(model, graph)
    assert small.conv1.out_channels == 6
    assert max_relative_diff(model, small, inputs) < 1e-5


@pytest.mark.parametrize("many", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_computed_weight_is_refused_with_the_statement_that_stores_it(kind: str, many: bool) -> None:
    wrap, words = KINDS[kind]
    model, inputs = net(), image()()
    for module in (model.body[0], model.conv1, model.head) if many else (model.body[0],):
        wrap(module)
    model.eval()
    wanted = model(inputs)
    reason, statement = instruction(model, lambda: trace_channels(model, inputs))
    weights = "conv1.weight and 2 more weights are" if many else "body.0.weight is"
    assert reason == (
        f"{weights} computed by {words} in each pass, so channels cannot be removed. "
        "Store the computed values as weights"
    )
    pasted(statement, model)
    assert torch.allclose(model(inputs), wanted, atol=1e-6)
    assert_prunable(model, inputs)


def test_slim_with_widths_and_load_slim_refuse_computed_weights(tmp_path: Any) -> None:
    model, inputs = net(), image()()
    graph = trace_channels(model, inputs)
    parametrizations.weight_norm(model.conv1)
    for act in (
        lambda: slim(model, graph),
        lambda: with_widths(model, graph, {"conv1": 2}),
        lambda: load_slim(model, tmp_path / "slim.safetensors"),
    ):
        assert "remove_parametrizations" in instruction(model, act)[1]


def test_computed_weights_with_other_names_are_found() -> None:
    model = nn.Module()
    model.parts = nn.ModuleDict({"first part": nn.LSTM(4, 4)})
    weight_norm(model.parts["first part"], "weight_hh_l0")
    reason, statement = instruction(model, lambda: refuse_computed_weights(model))
    assert reason.startswith("parts.first part.weight_hh_l0 is computed by weight_norm")
    pasted(statement, model)
    refuse_computed_weights(model)
