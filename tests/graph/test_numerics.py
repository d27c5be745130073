from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.graph.numerics import (
    ALLOWED_FLOAT32,
    ALLOWED_FLOAT64,
    CannotVerify,
    allowed_difference,
    to_float64,
    materialize,
    other_inputs,
    plain_state,
    relative_error,
    run_without_randomness,
    randomize_constants_,
)


def eps(dtype: torch.dtype) -> float:
    return float(torch.finfo(dtype).eps)


def test_what_is_allowed_follows_from_the_coarsest_type() -> None:
    assert allowed_difference(0.0, eps(torch.float64)) == ALLOWED_FLOAT64
    assert allowed_difference(eps(torch.float32), eps(torch.float64)) == ALLOWED_FLOAT32
    assert allowed_difference(eps(torch.bfloat16), 0.0) == 8 * eps(torch.bfloat16)


def test_gradients_are_compared_with_the_largest_of_all() -> None:
    wanted, found = [torch.tensor([100.0]), torch.tensor([1e-8])], [torch.tensor([100.0]), torch.tensor([2e-8])]
    assert relative_error(wanted, found) == pytest.approx(1)
    assert relative_error(wanted, found, together=True) == pytest.approx(1e-10)


def test_whole_numbers_count_where_there_are_no_others() -> None:
    assert relative_error([torch.tensor([1, 2, 3, 4])], [torch.tensor([1, 2, 3, 5])]) == 0.25
    assert relative_error([torch.ones(2), torch.tensor([1])], [torch.ones(2), torch.tensor([2])]) == 0
    assert relative_error([torch.ones(2)], []) == float("inf")


class Draws(nn.Module):
    """All that networks draw in train mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.lstm = nn.Linear(4, 4), nn.LSTM(4, 4, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = F.dropout(self.layer(x), 0.5, self.training) + F.alpha_dropout(x, 0.3, self.training)
        noise = (
            torch.rand_like(x) + torch.randn(x.shape) + torch.empty_like(x).uniform_() + torch.bernoulli(x.sigmoid())
        )
        attended = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5)
        return x, noise, F.rrelu(x, training=self.training), attended, self.lstm(x)[0], torch.randint(0, 9, (3,))


@pytest.mark.parametrize("training", [True, False])
def test_two_runs_draw_the_same_and_leave_the_random_state(training: bool) -> None:
    net, x, state = Draws(), torch.randn(2, 5, 4), torch.get_rng_state()
    one = run_without_randomness(net, x, training=training)
    torch.rand(7)
    torch.set_rng_state(state)
    other = run_without_randomness(net, x, training=training)
    assert all(torch.equal(a, b) for a, b in zip(one.outputs, other.outputs, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    assert one.epsilon == eps(torch.float32)


def test_gradients_are_those_of_autograd_and_of_kept_indices() -> None:
    net, x = nn.Linear(3, 4), torch.randn(2, 3)
    index = torch.tensor([0, 2])
    ran = run_without_randomness(net, x, training=True, gradients=True, slices={"weight": {1: index}})
    weights = torch.arange(8.0).cos().view(2, 4)
    torch.testing.assert_close(ran.gradients[0], (weights.T @ x)[:, index])
    torch.testing.assert_close(ran.gradients[1], weights.sum(0))


def test_a_cast_inside_is_noticed() -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.to(torch.bfloat16).double()

    ran = run_without_randomness(Casts(), torch.randn(4, dtype=torch.float64), training=False)
    assert ran.epsilon == eps(torch.bfloat16)


def test_constants_made_by_code_follow_into_float64() -> None:
    class Makes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) @ torch.eye(4)

    net = Makes()
    inputs = to_float64(net, torch.randn(2, 4))
    assert run_without_randomness(net, inputs, training=False).epsilon == eps(torch.float64)
    assert torch.get_default_dtype() == torch.float32


def test_complex_weights_stay_complex() -> None:
    net = nn.ParameterList([torch.randn(3, dtype=torch.complex64)])
    to_float64(net, torch.randn(1))
    assert net[0].dtype == torch.complex128


def test_other_inputs_have_other_numbers_of_the_same_kind() -> None:
    example = {"images": torch.rand(5, 3) + 10, "words": torch.arange(10).view(5, 2), "mask": torch.ones(5) > 0, "n": 3}
    small, whole, same = other_inputs(example)
    assert small["images"].shape == (2, 3)
    assert whole["words"].sort().values.shape == (5, 2)
    assert sorted(whole["words"].flatten().tolist()) == list(range(10))
    assert whole["words"].flatten().tolist() != list(range(10))
    assert float(whole["images"].mean()) < 0 < float(same["images"].mean())
    assert torch.equal(same["images"], example["images"])
    assert whole["n"] == 3
    (*_, last) = other_inputs(torch.zeros(1, 4), repeated=True)
    assert last.shape == (4, 4)
    assert len(last.unique(dim=0)) == 4, "equal items have no deviation"
    assert bool(next(other_inputs(torch.zeros(1, 4))).any()), "an all-zero example hides everything"


def test_constant_tensors_get_other_values() -> None:
    net = nn.BatchNorm1d(6)
    randomize_constants_(net, torch.Generator().manual_seed(0))
    assert all(len(tensor.unique()) == 6 for name, tensor in net.state_dict().items() if name != "num_batches_tracked")
    assert bool((net.running_var > 0).all())


def test_counters_are_seen_and_modes_are_not() -> None:
    net = nn.Linear(2, 2)
    before = plain_state(net)
    net.eval()
    assert plain_state(net) == before
    net.calls = 1  # type: ignore[assignment]
    assert plain_state(net) != before


def test_networks_on_meta_are_given_values_unless_they_cannot_be_made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Linear(3, 4, device="meta")
    made, inputs = materialize(net, torch.empty(2, 3, device="meta"))
    assert bool(made(inputs).isfinite().all())
    monkeypatch.setattr("ecc.graph.numerics.MAX_ELEMENTS", 15)
    with pytest.raises(CannotVerify, match=r"on the meta device and has 16 numbers \(at most 15\)"):
        materialize(net, torch.empty(2, 3))
    monkeypatch.undo()
    net.register_buffer("order", torch.empty(3, dtype=torch.long, device="meta"))
    with pytest.raises(CannotVerify, match="order is on the meta device and its values are not known"):
        materialize(net, torch.empty(2, 3))
