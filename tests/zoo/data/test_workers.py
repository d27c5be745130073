from __future__ import annotations

import os
import threading

import pytest

from ecc.zoo.data.sets import cores, in_threads, pool


def test_results_come_in_the_order_of_the_items() -> None:
    assert in_threads(lambda number: number * number, range(50)) == [number * number for number in range(50)]


def test_the_first_error_is_raised() -> None:
    def fails(number: int) -> int:
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        in_threads(fails, range(5))


def test_work_is_done_in_threads_of_the_pool() -> None:
    (name,) = set(in_threads(lambda _: threading.current_thread().name.rpartition("_")[0], range(3)))
    assert name == "ecc-data"


def test_processes_on_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    alone = cores()
    assert alone >= 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(alone))
    assert cores() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    assert cores() == alone


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_process_starts_threads_of_its_own() -> None:
    pool().submit(int).result()
    child = os.fork()
    if child == 0:
        os._exit(0 if in_threads(abs, [-7]) == [7] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
