from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.methods.baselines.refit import (
    ConsumerView,
    DenseRefit,
    Samples,
    collect_samples,
    columns_of,
    least_squares,
    refit_,
    refittable_modules,
    restore_best,
)

TINY = 1e-12


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def seeded(build: type[nn.Module], *args: int, **kwargs: object) -> nn.Module:
    torch.manual_seed(0)
    return build(*args, **kwargs)


def lstsq(inputs: Tensor, targets: Tensor) -> Tensor:
    return torch.from_numpy(np.linalg.lstsq(inputs.double().numpy(), targets.double().numpy(), rcond=None)[0])


# ---------------------------------------------------------------- samples


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (3, 2), "stride": (2, 1), "padding": (0, 1)},
        {"kernel_size": 3, "dilation": 2, "padding": "same"},
        {"kernel_size": 3, "padding": 1, "padding_mode": "circular", "bias": False},
        {"kernel_size": 1, "stride": 2},
    ],
)
def test_samples_of_a_convolution_reproduce_its_outputs(options: dict[str, object]) -> None:
    net = nn.Sequential(seeded(nn.Conv2d, 3, 5, **options))
    layer = refittable_modules(net)["0"]
    batches = [drawn(2, 3, 7, 8), drawn(2, 3, 7, 8, seed=1)]
    for rows in (20, 10_000):
        samples = collect_samples(net, ["0"], batches, rows)["0"]
        expected = samples.inputs @ layer.weight.flatten(1).T + (0 if layer.bias is None else layer.bias)
        assert torch.allclose(samples.outputs, expected, atol=1e-5)
        assert len(samples.inputs) == min(rows, 2 * net(batches[0])[:, 0].numel())


def test_layers_may_be_called_twice_or_never_or_by_keyword() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice, self.never, self.named = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.named(input=self.twice(self.twice(x)))

    found = collect_samples(Net(), ["twice", "never", "named"], [drawn(3, 5, 4)], 100)
    assert set(found) == {"twice", "named"}
    assert found["twice"].inputs.shape == (30, 4)
    assert found["named"].outputs.shape == (15, 2)


def test_sampling_changes_nothing_even_after_an_error() -> None:
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Conv2d(4, 4, 3))
    net[1].eval()
    before, random = copy.deepcopy(net.state_dict()), torch.get_rng_state()
    first, second = (collect_samples(net, ["3"], [drawn(2, 3, 8, 8)], 9)["3"] for _ in range(2))
    with pytest.raises(RuntimeError):
        collect_samples(net, ["3"], [drawn(2, 5)], 9)
    assert torch.equal(first.inputs, second.inputs)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert [module.training for module in net] == [True, False, True, True]
    assert not any(module._forward_hooks for module in net.modules())


def test_what_can_be_refit() -> None:
    class Odd(nn.Linear):
        pass

    net = nn.ModuleDict(
        {
            "conv": nn.Conv2d(4, 4, 3),
            "fc": nn.Linear(4, 4),
            "grouped": nn.Conv2d(4, 4, 3, groups=2),
            "transposed": nn.ConvTranspose2d(4, 4, 3),
            "odd": Odd(4, 4),
            "one": nn.Linear(4, 4),
            "other": nn.Linear(4, 4),
            "parametrized": nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        }
    )
    net["other"].weight = net["one"].weight
    assert set(refittable_modules(net)) == {"conv", "fc"}


# ---------------------------------------------------------------- least squares


@pytest.mark.parametrize("shape", [(40, 7), (7, 40), (9, 9)])
def test_least_squares_equals_numpy(shape: tuple[int, int]) -> None:
    inputs, targets = drawn(*shape).double(), drawn(shape[0], 3, seed=1).double()
    assert torch.allclose(least_squares(inputs, targets, TINY), lstsq(inputs, targets), atol=1e-5)


def test_primal_and_dual_solution_are_equal() -> None:
    inputs, targets = drawn(6, 10).double(), drawn(6, 2, seed=1).double()
    pull = 0.1 * inputs.square().sum() / 10
    slow = torch.linalg.inv(inputs.T @ inputs + pull * torch.eye(10)) @ inputs.T @ targets
    assert torch.allclose(least_squares(inputs, targets, 0.1), slow)
    assert torch.equal(least_squares(0 * inputs, targets, 0.1), torch.zeros(10, 2).double())


@pytest.mark.parametrize("bias", [True, False])
def test_a_linear_layer_is_refit_as_in_numpy(bias: bool) -> None:
    layer = seeded(nn.Linear, 6, 3, bias=bias)
    inputs, targets = drawn(50, 6), drawn(50, 3, seed=1)
    layer.weight.data[:, 2] = 0
    kept = [0, 1, 3, 4, 5]
    refit_(layer, inputs, targets, TINY)
    seen = torch.cat([inputs[:, kept], torch.ones(50, 1)], 1) if bias else inputs[:, kept]
    best = lstsq(seen, targets).T.float()
    assert torch.allclose(layer.weight[:, kept], best[:, :5], atol=1e-5)
    assert torch.equal(layer.weight[:, 2], torch.zeros(3))
    assert not bias or torch.allclose(layer.bias, best[:, 5], atol=1e-5)


def test_a_convolution_is_refit_as_in_numpy() -> None:
    layer = seeded(nn.Conv2d, 4, 3, kernel_size=3, padding=1)
    net, batch = nn.Sequential(layer), drawn(4, 4, 6, 6)
    dense = collect_samples(net, ["0"], [batch], 10_000)["0"]
    layer.weight.data[:, 1] = 0
    refit_(layer, dense.inputs, dense.outputs, TINY)
    kept = [0, 2, 3]
    columns = columns_of(layer, torch.tensor(kept)[:, None]).flatten()
    unfolded = F.unfold(batch, 3, padding=1).transpose(1, 2).flatten(0, 1)[:, columns]
    best = lstsq(torch.cat([unfolded, torch.ones(len(unfolded), 1)], 1), dense.outputs.detach()).T.float()
    assert torch.allclose(layer.weight[:, kept], best[:, :-1].view(3, 3, 3, 3), atol=1e-4)
    assert torch.allclose(layer.bias, best[:, -1], atol=1e-4)
    assert torch.equal(layer.weight[:, 1], torch.zeros(3, 3, 3))


def test_weights_of_inputs_that_are_always_zero_stay() -> None:
    layer = seeded(nn.Linear, 4, 2)
    before = layer.weight.detach().clone()
    inputs = drawn(20, 4)
    inputs[:, 3] = 0
    refit_(layer, inputs, drawn(20, 2, seed=1), 1e-6)
    assert torch.equal(layer.weight[:, 3], before[:, 3])
    assert not torch.equal(layer.weight[:, 0], before[:, 0])


# ---------------------------------------------------------------- restore


def error_without(view: ConsumerView, gone: set[int]) -> float:
    weight = view.module.weight.detach().flatten(1).clone()
    for unit in gone:
        weight[:, view.columns[unit]] = 0
    target = view.samples.outputs
    given = view.samples.inputs @ weight.T + (0 if view.module.bias is None else view.module.bias.detach())
    return float((given - target).square().sum() / target.square().sum())


def views() -> list[ConsumerView]:
    """A convolution of six channels, and a linear layer with two features of each."""
    conv, fc = seeded(nn.Conv2d, 6, 4, kernel_size=2), seeded(nn.Linear, 12, 3, bias=False)
    found = []
    for layer, size, index in ((conv, 24, torch.arange(6)[:, None]), (fc, 12, torch.arange(12).view(6, 2))):
        inputs = drawn(30, size) @ drawn(size, size, seed=1)
        dense = inputs @ layer.weight.detach().flatten(1).T + 0.3 * drawn(30, len(layer.weight), seed=2)
        found.append(ConsumerView(Samples(inputs, dense), layer, columns_of(layer, index)))
    return found


@pytest.mark.parametrize("which", [[0], [1], [0, 1]])
@pytest.mark.parametrize("removed", [[5, 0, 3], [4, 1, 2, 0]])
def test_the_first_restored_channel_lowers_the_error_most(which: list[int], removed: list[int]) -> None:
    seen = [views()[k] for k in which]
    errors = {unit: sum(error_without(view, set(removed) - {unit}) for view in seen) for unit in removed}
    assert restore_best(seen, removed, 1) == [min(errors, key=errors.__getitem__)]


def test_channels_are_restored_greedily() -> None:
    removed, back = [4, 1, 2, 0], []
    for _ in removed:
        gone = set(removed) - set(back)
        errors = {u: sum(error_without(view, gone - {u}) for view in views()) for u in removed if u not in back}
        back.append(min(errors, key=errors.__getitem__))
    for count in range(6):
        assert restore_best(views(), removed, count) == back[:count]


@pytest.mark.parametrize("bias", [True, False])
def test_a_refit_from_products_equals_one_from_samples(bias: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=bias), nn.Conv2d(4, 2, 1))
    batches = [drawn(4, 3, 9, 9), drawn(4, 3, 9, 9, seed=1)]
    many = DenseRefit(net, ["2", "3", "9"], batches, rows=150, ridge=1e-3)
    samples = collect_samples(net, ["2"], batches, 150)["2"]
    pruned, expected = copy.deepcopy(net), copy.deepcopy(net)
    for one in (pruned, expected):
        with torch.no_grad():
            one[2].weight[:, [1, 4]] = 0
    untouched = copy.deepcopy(pruned[3].state_dict())
    masked = samples.inputs.clone().view(len(samples.inputs), 6, -1)
    masked[:, [1, 4]] = 0
    refit_(expected[2], masked.flatten(1), samples.outputs, 1e-3)
    many.apply_(pruned)
    assert not pruned[2].weight[:, [1, 4]].any()
    torch.testing.assert_close(pruned[2].weight, expected[2].weight, rtol=1e-3, atol=1e-4)
    assert all(torch.equal(value, untouched[key]) for key, value in pruned[3].state_dict().items())  # lost no input
