from __future__ import annotations

import pytest
import torch
from torch import nn

from ecc.methods.ecc.taylor import DECAY, EVERY, Taylor

CPU = torch.device("cpu")


def test_the_first_step_is_looked_at_and_then_one_in_a_few() -> None:
    taylor = Taylor(3, CPU)
    due = [step for step in range(1, 4 * EVERY + 1) if taylor.is_due(step)]
    assert due == [1 + k * EVERY for k in range(4)]


def test_scores_are_the_weighted_mean_of_squares() -> None:
    looks = torch.randn(30, 5, generator=torch.Generator().manual_seed(0))
    taylor = Taylor(5, CPU)
    for products in looks:
        taylor.look(products)
    weights = DECAY ** torch.arange(29, -1, -1.0)
    torch.testing.assert_close(taylor.scores, (weights[:, None] * looks**2).sum(0) / weights.sum())


def test_before_the_first_look_nothing_is_known() -> None:
    assert Taylor(2, CPU).scores.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_exploded_gradients_are_not_remembered(bad: float) -> None:
    taylor = Taylor(2, CPU)
    taylor.look(torch.tensor([bad, 2.0]))
    taylor.look(torch.tensor([1.0, 2.0]))
    assert taylor.scores.isfinite().all()
    assert float(taylor.scores[1]) == pytest.approx(4.0)


def test_a_state_goes_on_where_it_was() -> None:
    looks = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    whole, first, second = (Taylor(4, CPU) for _ in range(3))
    for products in looks:
        whole.look(products)
    for products in looks[:3]:
        first.look(products)
    second.load(first.state)
    for products in looks[3:]:
        second.look(products)
    assert torch.equal(second.scores, whole.scores)
    assert second.state[1] == 6


def test_it_is_the_squared_change_of_the_loss_to_first_order() -> None:
    torch.manual_seed(0)
    layer = nn.Linear(4, 3).double()
    inputs, targets = torch.randn(8, 4, dtype=torch.float64), torch.randn(8, 3, dtype=torch.float64)

    def loss(scale: torch.Tensor) -> torch.Tensor:
        return (layer(inputs * scale) - targets).square().mean()

    loss(torch.ones(4, dtype=torch.float64)).backward()
    assert layer.weight.grad is not None
    taylor = Taylor(4, CPU)
    taylor.look((layer.weight.detach() * layer.weight.grad).sum(0).float())
    slopes = torch.autograd.functional.jacobian(loss, torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(taylor.scores.double(), slopes**2, rtol=1e-5, atol=1e-10)
