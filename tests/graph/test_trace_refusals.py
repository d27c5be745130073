from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ecc.errors import UntraceableModel
from ecc.graph import trace_channels
from graph.cases import chain, named
from graph.special_nets import BranchesOnChannels


def refusal(net: Any, inputs: Any) -> str:
    with pytest.raises(UntraceableModel) as caught:
        trace_channels(net, inputs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def wrapped(wrap: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of its own torch.jit
        return wrap(chain())


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: wrapped(torch.jit.script), "TorchScript"),
        (lambda: wrapped(torch.compile), "compiled"),
        (lambda: named(first=nn.LazyConv2d(4, 3)), "first.weight is not initialised"),
        (lambda: named(norm=nn.LazyBatchNorm2d(affine=False)), "norm.running_mean is not initialised"),
        (lambda: torch.relu, "expected a torch.nn.Module, got builtin_function_or_method"),
        (lambda: nn.ReLU, "expected a torch.nn.Module, got type"),
    ],
)
def test_what_is_no_plain_network_is_refused(build: Any, words: str) -> None:
    assert words in refusal(build(), torch.randn(1, 3, 8, 8))


@pytest.mark.parametrize("inputs", [None, (), {}, 3, {"x": None}])
def test_an_input_without_a_tensor_is_refused(inputs: Any) -> None:
    assert refusal(chain(), inputs) == "the example input holds no tensor."


@pytest.mark.parametrize(
    ("net", "inputs", "words"),
    [
        (chain(), torch.zeros(1, 5, 8, 8), ["conv1 (conv2d)", "expected input[1, 5, 8, 8] to have 3 channels"]),
        (named(flat=nn.Flatten(), fc=nn.Linear(9, 4)), torch.zeros(1, 3, 8, 8), ["fc (linear)", "1x192 and 9x4"]),
        (chain(), (torch.zeros(1, 3, 8, 8), 1), ["TypeError", "positional arguments"]),
        (chain(), {"image": torch.zeros(1, 3, 8, 8)}, ["TypeError", "'image'"]),
    ],
)
def test_an_input_that_does_not_fit_is_refused_with_the_place(net: nn.Module, inputs: Any, words: list[str]) -> None:
    message = refusal(net, inputs)
    assert message.startswith("the network cannot run on the example input: ")
    for word in words:
        assert word in message


class Raises(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("images must be square\nand small")


def test_an_error_of_the_network_is_passed_on_in_one_line() -> None:
    message = refusal(Raises(), torch.zeros(1, 3, 8, 8))
    assert message == "the network cannot run on the example input: ValueError: images must be square"


def test_a_network_on_meta_tensors_that_asks_for_values_is_refused() -> None:
    with torch.device("meta"):
        net = BranchesOnChannels()
    assert "the network on meta tensors cannot run" in refusal(net, torch.zeros(1, 3, 8, 8))
