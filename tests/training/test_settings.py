"""Settings, learning-rate schedules, random states and signals."""

from __future__ import annotations

import math
import random
import signal
import threading

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ecc.training import (
    Cosine,
    DistillSettings,
    Interrupted,
    StopRequests,
    derived_seed,
    fork_rng,
    rng_state,
    seed_everything,
    set_rng_state,
)


def test_distillation_is_automatic_unless_a_weight_is_given() -> None:
    auto, off, given_weight = DistillSettings(), DistillSettings(weight=0), DistillSettings(weight=0.3)
    assert (auto.is_auto, auto.is_off, auto.used_weight) == (True, False, 0.5)
    assert (off.is_auto, off.is_off) == (False, True)
    assert (given_weight.is_auto, given_weight.is_off, given_weight.used_weight) == (False, False, 0.3)


# ---------------------------------------------------------------- schedules


def test_the_learning_rates_of_a_cosine() -> None:
    schedule = Cosine(start_lr=3e-5)
    rates = [schedule.lr(1.0, step, 100) for step in range(100)]
    assert rates[0] == 3e-5
    assert rates[50] == pytest.approx(1.5e-5)
    assert rates[25] == pytest.approx(3e-5 * (1 + math.sqrt(0.5)) / 2)
    assert rates == sorted(rates, reverse=True)
    assert 0 < rates[99] < 1e-8
    assert [Cosine().lr(2.0, step, 10) for step in (0, 10, 99)] == pytest.approx([2.0, 0.0, 0.0])
    assert Cosine().lr(1.0, 0, 0) == 1.0
    held = Cosine(hold_steps=20)
    assert [held.lr(1.0, step, 120) for step in (0, 10, 20)] == [1.0, 1.0, 1.0]
    assert held.lr(1.0, 70, 120) == pytest.approx(0.5)


@given(st.integers(0, 50), st.integers(1, 50), st.integers(0, 50), st.integers(0, 60))
def test_two_trainings_can_share_one_cosine(before: int, steps: int, after: int, hold: int) -> None:
    part = Cosine(start_lr=0.3, hold_steps=hold, steps_before=before, steps_after=after)
    whole = Cosine(start_lr=0.3, hold_steps=hold)
    rates = [part.lr(1.0, step, steps) for step in range(steps)]
    assert rates == [whole.lr(1.0, before + step, before + steps + after) for step in range(steps)]


# ---------------------------------------------------------------- random states


def drawn() -> tuple[float, float, float, float]:
    return random.gauss(0, 1), numpy.random.standard_normal(), random.random(), float(torch.rand(()))  # noqa: NPY002


def test_each_purpose_has_its_own_seed_on_every_machine() -> None:
    assert derived_seed(0, "data") == 736872305540241488
    assert len({derived_seed(seed, purpose) for seed in range(10) for purpose in ("data", "model")}) == 20
    seed_everything(derived_seed(3, "a"))
    first = drawn()
    seed_everything(derived_seed(3, "a"))
    assert drawn() == first
    seed_everything(derived_seed(3, "b"))
    assert all(one != other for one, other in zip(drawn(), first, strict=True))


@pytest.mark.parametrize("spare", [False, True])  # generators of normal numbers make two and keep one
def test_a_random_state_is_restored_exactly(spare: bool) -> None:
    seed_everything(5)
    if spare:
        drawn()
    state = rng_state()
    first = [drawn() for _ in range(3)]
    set_rng_state(state)
    assert [drawn() for _ in range(3)] == first


def test_a_forked_block_leaves_the_generators_unchanged() -> None:
    seed_everything(5)
    expected = [drawn(), drawn()]
    seed_everything(5)
    with fork_rng(7):
        inside = drawn()
    assert drawn() == expected[0]
    with pytest.raises(ZeroDivisionError), fork_rng(7):
        random.seed(int(inside[0] - drawn()[0]) // 0)
    assert drawn() == expected[1]


@pytest.mark.gpu
def test_the_generator_of_a_gpu_is_seeded_and_restored() -> None:
    device = torch.device("cuda", 0)
    seed_everything(5, device)
    state = rng_state(device)
    first = torch.rand(4, device=device)
    with fork_rng(9, device):
        assert not torch.equal(torch.rand(4, device=device), first)
    set_rng_state(state, device)
    assert torch.equal(torch.rand(4, device=device), first)


# ---------------------------------------------------------------- signals


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_next_one_acts_as_usual(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    came = []
    signal.signal(number, lambda *_: came.append("second"))
    try:
        with StopRequests() as requests:
            signal.raise_signal(number)
            assert (requests.signum, came) == (number, [])
            signal.raise_signal(number)
            assert came == ["second"]
    finally:
        signal.signal(number, before)


def test_an_inner_block_leaves_the_signal_to_the_outer_one_and_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with StopRequests() as outer:
        assert signal.getsignal(signal.SIGTERM) != before
        with StopRequests() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.signum, inner.signum) == (signal.SIGTERM, 0)
    assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_handlers_stay() -> None:
    before, seen = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with StopRequests() as requests:
            seen.append((requests.signum, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, before)]
    assert Interrupted("stopped", signal.SIGTERM).signum == 15
