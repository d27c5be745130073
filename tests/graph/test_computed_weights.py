from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from ecc.errors import UntraceableModel
from ecc.export import load_slim
from ecc.graph import mask_channels_, max_relative_diff, slim, trace_channels, with_widths
from ecc.graph.forward_pass import refuse_computed_weights
from graph.layers import conv, image, named


class Doubled(nn.Module):
    """A parametrization of a user's own, without an inverse."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 2


def weight_norm(module: nn.Module, name: str = "weight") -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch prefers the parametrization
        torch.nn.utils.weight_norm(module, name)


KINDS: dict[str, tuple[Callable[[nn.Module], Any], str, str]] = {
    "weight_norm": (weight_norm, "weight_norm", "torch.nn.utils.remove_weight_norm({}, 'weight')"),
    "spectral_norm": (
        torch.nn.utils.spectral_norm,
        "spectral_norm",
        "torch.nn.utils.remove_spectral_norm({}, 'weight')",
    ),
    "mask": (
        lambda m: prune.random_unstructured(m, "weight", 0.3),
        "a mask of torch.nn.utils.prune",
        "torch.nn.utils.prune.remove({}, 'weight')",
    ),
}
for _name, _wrap in {
    "new weight_norm": parametrizations.weight_norm,
    "new spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": lambda m: parametrize.register_parametrization(m, "weight", Doubled()),
}.items():
    statement = "torch.nn.utils.parametrize.remove_parametrizations({}, 'weight')"
    KINDS[_name] = (_wrap, "a parametrization", statement)


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


@pytest.mark.parametrize("kind", KINDS)
def test_one_module_is_named_with_the_statement_that_folds_it(kind: str) -> None:
    wrap, words, statement = KINDS[kind]
    model, inputs = net(), image()()
    wrap(model.body[0])
    model.eval()
    wanted = model(inputs)
    reason, found = instruction(model, lambda: trace_channels(model, inputs))
    assert found == statement.format("model.body[0]")
    assert reason == (
        f"body.0.weight is computed by {words} in each pass, so channels of it cannot be removed. "
        "Make the computed values the weights"
    )
    pasted(found, model)
    assert torch.allclose(model(inputs), wanted, atol=1e-6)
    assert_prunable(model, inputs)


@pytest.mark.parametrize("kind", KINDS)
def test_many_modules_are_folded_by_one_line(kind: str) -> None:
    wrap, _, _ = KINDS[kind]
    model, inputs = net(), image()()
    for module in (model.conv1, model.body[0], model.head):
        wrap(module)
    model.eval()
    wanted = model(inputs)
    reason, found = instruction(model, lambda: trace_channels(model, inputs))
    assert reason.startswith("conv1.weight and 2 more weights are computed by ")
    assert found.startswith("for module")
    pasted(found, model)
    assert torch.allclose(model(inputs), wanted, atol=1e-6)
    assert_prunable(model, inputs)


def test_every_verb_says_so() -> None:
    model, inputs = net(), image()()
    graph = trace_channels(model, inputs)
    parametrizations.weight_norm(model.conv1)
    for act in (lambda: slim(model, graph), lambda: with_widths(model, graph, {"conv1": 2})):
        assert instruction(model, act)[1].endswith("remove_parametrizations(model.conv1, 'weight')")


def test_weights_of_other_names_and_in_other_containers_are_found() -> None:
    model = nn.Module()
    model.parts = nn.ModuleDict({"first part": nn.LSTM(4, 4)})
    weight_norm(model.parts["first part"], "weight_hh_l0")
    _, found = instruction(model, lambda: refuse_computed_weights(model))
    assert found == "torch.nn.utils.remove_weight_norm(model.get_submodule('parts.first part'), 'weight_hh_l0')"
    pasted(found, model)
    refuse_computed_weights(model)


def test_the_network_itself_may_be_the_module() -> None:
    model = conv(3, 8)
    parametrizations.weight_norm(model)
    reason, found = instruction(model, lambda: refuse_computed_weights(model))
    assert reason.startswith("weight is computed by a parametrization")
    pasted(found, model)
    refuse_computed_weights(model)


def test_a_slim_network_is_loaded_into_plain_weights_only(tmp_path: Any) -> None:
    parametrized = net()
    parametrizations.weight_norm(parametrized.conv1)
    _, found = instruction(parametrized, lambda: load_slim(parametrized, tmp_path / "slim.safetensors"))
    assert found == "torch.nn.utils.parametrize.remove_parametrizations(model.conv1, 'weight')"
