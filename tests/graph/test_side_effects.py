from __future__ import annotations

import logging
from collections import Counter, defaultdict, deque
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ecc.graph.hooks import undo_changes

LIST: list[int] = [1]
COUNT = 0


class Holder:
    def __init__(self) -> None:
        self.items: list[Any] = [1]
        self.inner = {"a": [1]}
        self.count = 0

    def change(self) -> None:
        self.items = [*self.items, 2]
        self.inner["a"].append(2)
        self.inner["b"] = [3]
        self.count += 1
        self.new = 1


def helper() -> None:
    global COUNT, FRESH  # noqa: PLW0603 - as users write it
    COUNT += 1
    FRESH = 1
    LIST.append(2)


def calls_a_helper() -> None:
    helper()


def test_containers_are_put_back_with_their_contents() -> None:
    items, pairs, unique, recent = [1, [2]], {"a": 1}, {1}, deque([1, 2], maxlen=2)
    counts, groups = Counter("aab"), defaultdict(list, {"x": [1]})
    inner = items[1]

    def change() -> None:
        inner.append(3)
        items.append(4)
        pairs["b"] = 2
        del pairs["a"]
        unique.add(2)
        recent.append(3)
        counts["c"] += 1
        groups["y"].append(1)
        groups["x"].append(2)

    with undo_changes([change]):
        change()
        assert len(items) == 3
    assert items == [1, [2]]
    assert items[1] is inner
    assert (pairs, unique, list(recent)) == ({"a": 1}, {1}, [1, 2])
    assert counts == Counter("aab")
    assert groups == {"x": [1]}


def test_objects_methods_partials_and_defaults_are_followed() -> None:
    one, other, third = Holder(), Holder(), Holder()

    def by_default(held: Holder = third) -> None:
        held.change()

    functions = [one.change, partial(Holder.change, other), by_default]
    with undo_changes(functions):
        for function in functions:
            function()
    for holder in (one, other, third):
        assert vars(holder) == {"items": [1], "inner": {"a": [1]}, "count": 0}


def test_variables_are_put_back() -> None:
    count, unset = 0, 1
    del unset

    def change() -> None:
        nonlocal count, unset
        count += 1
        unset = 1

    with undo_changes([change, calls_a_helper]):
        change()
        calls_a_helper()
    assert (count, COUNT, LIST) == (0, 0, [1])
    assert "FRESH" not in globals()


def test_tensors_and_arrays_are_put_back() -> None:
    total, array = torch.zeros(3), np.zeros(3)
    with torch.inference_mode():
        inference = torch.zeros(2)
    meter = nn.BatchNorm1d(2)

    def change() -> None:
        total.add_(1)
        np.add(array, 1, out=array)
        with torch.inference_mode():
            inference.add_(1)
        meter(torch.randn(4, 2))

    with undo_changes([change]):
        change()
        assert total.sum() == 3
    assert total.tolist() == [0, 0, 0]
    assert array.tolist() == [0, 0, 0]
    assert inference.tolist() == [0, 0]
    assert meter.running_mean is not None
    assert meter.running_mean.tolist() == [0, 0]


def test_all_is_put_back_after_an_error() -> None:
    items: list[int] = []

    def change() -> None:
        items.append(1)
        raise ValueError

    with pytest.raises(ValueError), undo_changes([change]):  # noqa: PT011 - that one
        change()
    assert items == []


def test_objects_of_libraries_and_spared_modules_are_left_alone() -> None:
    logger, spared = logging.getLogger("test of side effects"), nn.BatchNorm1d(2)

    def change() -> None:
        logger.level = 10
        spared.eps = 1.0

    with undo_changes([change], spare=[spared]):
        change()
    assert (logger.level, spared.eps) == (10, 1.0)
