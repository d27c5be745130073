"""Threads that decode. Pillow leaves Python's lock alone while it decodes and resizes, so threads use all cores.

Compared with processes they need no copies of what they made, and no second interpreter each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def cores() -> int:
    """Processors that this process may use; where several processes train on one machine, its part of them."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    beside = os.environ.get("LOCAL_WORLD_SIZE", "1")  # set by torchrun
    return max(1, count // max(1, int(beside) if beside.isdecimal() else 1))


@cache
def pool() -> ThreadPoolExecutor:
    """The threads of this process, started when first needed."""
    return ThreadPoolExecutor(cores(), thread_name_prefix="ecc-data")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=pool.cache_clear)  # threads do not survive a fork


def in_threads(function: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
    """The results in the order of the items; the first error is raised."""
    return list(pool().map(function, items))
