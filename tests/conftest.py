"""What every test starts from: fixed seeds, one thread, and hypothesis profiles."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import sys
from typing import Any

import hypothesis
import numpy
import pytest
import torch

SEED = 20190613

# One thread a process: the suite itself runs in parallel, and sums over threads differ from run to run.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the programs that tests start

# Without a GPU, torch.manual_seed queues calls for one, each with the text of the stack: milliseconds under pytest.
if not torch.cuda.is_available():
    for device in (torch.cuda, torch.xpu, torch.mtia):
        device.manual_seed_all = lambda seed: None  # type: ignore[attr-defined]

os.fsync = lambda fd: None  # the disk takes milliseconds, thousands of times; no test cuts the power

# A shell starts jobs in the background with Ctrl-C ignored, and the programs that tests interrupt would inherit that.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


class _TorchRandom:
    """torch's generator as hypothesis wants it, so that an example replays with the same weights."""

    def seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    def getstate(self) -> torch.Tensor:
        return torch.get_rng_state()

    def setstate(self, state: Any) -> None:
        torch.set_rng_state(state)


_TORCH_RANDOM = _TorchRandom()  # hypothesis holds it weakly
hypothesis.register_random(_TORCH_RANDOM)

# `ci`: the same examples on every run, so that a red build is red for everyone.
# `explore`: new examples on every run, for a long look: HYPOTHESIS_PROFILE=explore make pytest
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True, max_examples=15)
hypothesis.settings.register_profile("explore", deadline=None, max_examples=5_000, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


LIBRARIES = {
    "onnx": ("export/", "runners.py", "remote/test_faults", "[docs/compressing", "[docs/runners", "[docs/own-runner"),
    "transformers": (
        *("transformer", "test_language.py", "test_vision.py", "huggingface", "test_tokens.py"),
        *("[docs/hugging-face", "[docs/own-model"),
    ),
}
"""Tests, by a part of their name, that import a library for seconds."""


def _kind(item: pytest.Item) -> str:
    """Which tests run in the same worker: those of a large library, or of a file with slow tests."""
    for library, parts in LIBRARIES.items():
        if any(part in item.nodeid for part in parts):
            return library
    return str(item.path)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin the share of each worker with files that have slow tests, so that none of these is left for the end."""
    if not hasattr(config, "workerinput"):  # without workers, tests run in the order that was asked for
        return
    count = config.workerinput["workercount"]
    kinds: dict[str, list[pytest.Item]] = {library: [] for library in LIBRARIES}
    for item in items:
        kinds.setdefault(_kind(item), []).append(item)
    slow = [found for found in kinds.values() if any(item.get_closest_marker("slow") for item in found)]
    shares: list[list[pytest.Item]] = [[] for _ in range(count)]
    for number, found in enumerate(slow):
        shares[number % count] += found
    quick = [item for found in kinds.values() if found not in slow for item in found]
    for number, share in enumerate(shares):
        size = (len(items) + number) // count  # as xdist shares them out
        share += [quick.pop(0) for _ in range(min(len(quick), size - len(share)))]
    items[:] = [item for share in shares for item in share] + quick


@pytest.fixture(scope="session", autouse=True)
def _frozen() -> None:
    """Spare each full garbage collection, of which every profile makes one, the objects of all imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _shorter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spare hundreds of small runs most of their time: plans have fewer restarts, and a graph is verified once.

    `test_allocation.py` has all restarts, and tests/graph verifies its graphs without this.
    """
    if (allocation := sys.modules.get("ecc.methods.ecc.allocation")) and request.path.name != "test_allocation.py":
        monkeypatch.setattr(allocation, "MAX_RESTARTS", 2)
    if base := sys.modules.get("ecc.methods.base"):
        monkeypatch.setattr(base, "verify_graph", _verify_once)


_VERIFIED: dict[tuple[str, str], float] = {}
"""Largest difference by class and fingerprint, of graphs that verification did not change."""


def _verify_once(model: torch.nn.Module, graph: Any, example_input: Any) -> Any:
    from ecc.graph import verify_graph

    key = str(type(model)), graph.fingerprint
    if key in _VERIFIED:
        return dataclasses.replace(graph, max_relative_diff=_VERIFIED[key])
    verified = verify_graph(model, graph, example_input)
    fields = ("groups", "branches", "kept_branches", "notes")
    if verified.max_relative_diff and all(getattr(verified, name) == getattr(graph, name) for name in fields):
        _VERIFIED[key] = verified.max_relative_diff
    return verified


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    numpy.random.seed(SEED)  # noqa: NPY002 - for libraries that draw from the global generator
    torch.manual_seed(SEED)
