from __future__ import annotations

import signal
import threading

import pytest

from ecc.errors import EccError
from ecc.training.signals import Interrupted, StopRequests


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_noted_and_the_next_acts_as_before(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    came = []
    signal.signal(number, lambda *_: came.append("second"))
    try:
        with StopRequests() as requests:
            assert requests.signum == 0
            signal.raise_signal(number)
            assert requests.signum == number
            assert came == []
            signal.raise_signal(number)
            assert came == ["second"]
    finally:
        signal.signal(number, before)


def test_handlers_are_put_back() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with StopRequests():
        assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] != before
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


def test_a_block_within_another_leaves_the_signal_to_it() -> None:
    with StopRequests() as outer:
        with StopRequests() as inner:
            signal.raise_signal(signal.SIGTERM)
        assert (outer.signum, inner.signum) == (signal.SIGTERM, 0)


def test_in_another_thread_nothing_is_touched() -> None:
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work() -> None:
        with StopRequests() as requests:
            seen.append((requests.signum, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(0, before)]


def test_an_interruption_is_an_error_of_ours_and_knows_its_signal() -> None:
    error = Interrupted("stopped", signal.SIGTERM)
    assert isinstance(error, EccError)
    assert (str(error), error.signum) == ("stopped", 15)
