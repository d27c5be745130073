from __future__ import annotations

import random

import numpy
import pytest
import torch

from ecc.errors import BadFile
from ecc.training.rng import derived_seed, fork_host_rng, fork_rng, rng_state, seed_everything, set_rng_state


def drawn() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), numpy.random.standard_normal(), random.random(), float(torch.rand(()))  # noqa: NPY002


def test_each_purpose_has_its_own_seed_on_every_machine() -> None:
    assert derived_seed(0, "data") == 736872305540241488
    assert len({derived_seed(seed, purpose) for seed in range(10) for purpose in ("data", "model")}) == 20
    assert all(0 <= derived_seed(seed, "data") < 2**63 for seed in range(100))


def test_the_same_seed_draws_the_same_numbers() -> None:
    seed_everything(derived_seed(3, "a"))
    first = drawn()
    seed_everything(derived_seed(3, "a"))
    assert drawn() == first
    seed_everything(derived_seed(3, "b"))
    assert all(one != other for one, other in zip(drawn(), first, strict=True))


@pytest.mark.parametrize("spare", [False, True])  # a generator of normal numbers makes two and keeps one
def test_a_state_is_put_back_exactly(spare: bool) -> None:
    seed_everything(5)
    if spare:
        drawn()
    state = rng_state()
    first = [drawn() for _ in range(3)]
    set_rng_state(state)
    assert [drawn() for _ in range(3)] == first


def test_the_state_of_a_rank_is_taken_from_those_of_all() -> None:
    """Given a row of a larger tensor as it is, torch crashes."""
    seed_everything(5)
    states = {name: torch.stack([torch.zeros_like(state), state]) for name, state in rng_state().items()}
    first = drawn()
    set_rng_state({name: rows[1] for name, rows in states.items()})
    assert drawn() == first


def test_states_are_tensors_of_fixed_shapes() -> None:
    seed_everything(5)
    before = {name: (tensor.shape, tensor.dtype) for name, tensor in rng_state().items()}
    drawn()
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in rng_state().items()} == before
    assert set(before) == {"python", "numpy", "torch"}


@pytest.mark.parametrize("block", [fork_rng, fork_host_rng])
def test_a_block_of_its_own_leaves_no_trace(block: type) -> None:
    seed_everything(5)
    expected = drawn()
    seed_everything(5)
    with block(7):
        inside = drawn()
    assert drawn() == expected
    with block(7):
        assert drawn() == inside


@pytest.mark.parametrize("block", [fork_rng, fork_host_rng])
def test_an_error_inside_a_block_leaves_no_trace_either(block: type) -> None:
    seed_everything(5)
    expected = drawn()
    seed_everything(5)
    with pytest.raises(ZeroDivisionError), block(7):
        random.seed(1 / 0)
    assert drawn() == expected


def test_a_state_that_is_none_is_refused() -> None:
    with pytest.raises(BadFile, match="random state does not fit"):
        set_rng_state({"python": torch.zeros(3, dtype=torch.int64), "torch": torch.zeros(2)})
    with pytest.raises(BadFile, match="random state does not fit"):
        set_rng_state({})


@pytest.mark.gpu
def test_the_device_is_seeded_and_put_back() -> None:
    device = torch.device("cuda", 0)
    seed_everything(5, device)
    state = rng_state(device)
    first = torch.rand(4, device=device)
    with fork_rng(9, device):
        assert not torch.equal(torch.rand(4, device=device), first)
    set_rng_state(state, device)
    assert torch.equal(torch.rand(4, device=device), first)
