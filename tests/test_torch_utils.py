"""Helpers for modules and tensors, and settings of torch that are set for a block and restored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ecc import torch_utils
from ecc.torch_utils import (
    NotCapturable,
    capture_cuda_graph,
    device_of,
    eval_mode,
    exact_arithmetic,
    tensors_in,
    torch_settings,
)

BACKENDS = ("cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv", "mkldnn.rnn")
HAS_NEW_SETTINGS = hasattr(torch.backends.cuda.matmul, "fp32_precision")


def backend(path: str) -> Any:
    found: Any = torch.backends
    for name in path.split("."):
        found = getattr(found, name)
    return found


def state() -> list[object]:
    """Every relevant setting, as a caller reads it."""

    def read(owner: Any, name: str) -> object:
        try:
            return getattr(owner, name)
        except RuntimeError:
            return "contradiction"

    found = [read(torch.backends.cuda.matmul, "allow_tf32"), read(torch.backends.cudnn, "allow_tf32")]
    if HAS_NEW_SETTINGS:
        found += [read(backend(path), "fp32_precision") for path in BACKENDS]
    try:
        found.append(torch.get_float32_matmul_precision())
    except RuntimeError:
        found.append("contradiction")
    cudnn = torch.backends.cudnn
    return [
        *found,
        cudnn.benchmark,
        cudnn.deterministic,
        torch.are_deterministic_algorithms_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.is_inference_mode_enabled(),
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
    ]


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    before = [(backend(path), backend(path).fp32_precision) for path in BACKENDS] if HAS_NEW_SETTINGS else []
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    old = torch.get_float32_matmul_precision(), matmul.allow_tf32, cudnn.allow_tf32
    flags = cudnn.benchmark, cudnn.deterministic
    yield
    torch.set_float32_matmul_precision(old[0])
    matmul.allow_tf32, cudnn.allow_tf32 = old[1:]
    for owner, value in before:
        owner.fp32_precision = value
    cudnn.benchmark, cudnn.deterministic = flags
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("conv", [None, "ieee", "tf32"])
@pytest.mark.parametrize("allow", [None, True, False])
@pytest.mark.parametrize("matmul", [None, "highest", "high", "medium"])
def test_all_settings_come_back_also_after_an_exception(
    matmul: str | None, allow: bool | None, conv: str | None
) -> None:
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if allow is not None:
        torch.backends.cuda.matmul.allow_tf32 = allow
    if conv is not None and HAS_NEW_SETTINGS:
        torch.backends.cudnn.conv.fp32_precision = conv
    torch.backends.cudnn.benchmark = torch.backends.cudnn.deterministic = True
    before = state()
    with exact_arithmetic():
        assert not torch.backends.cuda.matmul.allow_tf32
        assert not torch.backends.cudnn.allow_tf32
        assert not torch.backends.cudnn.benchmark
        assert torch.get_float32_matmul_precision() == "highest"
    assert state() == before
    with pytest.raises(KeyError), exact_arithmetic():
        raise KeyError
    assert state() == before
    with torch_settings(tf32=True, cudnn_autotune=False):
        assert torch.backends.cuda.matmul.allow_tf32
        assert torch.backends.cudnn.allow_tf32
    assert state() == before


def test_settings_that_contradict_each_other_come_back() -> None:
    if not HAS_NEW_SETTINGS:
        pytest.skip("this torch has one set of settings")
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    before = state()
    assert "contradiction" in before
    with exact_arithmetic():
        assert "contradiction" not in state()
    assert state() == before


def test_modes_are_left_and_come_back() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        before = state()
        with exact_arithmetic():
            assert not torch.is_autocast_enabled("cpu")
            assert not torch.is_inference_mode_enabled()
            assert not torch.are_deterministic_algorithms_enabled()
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32
        assert state() == before
        assert torch.is_deterministic_algorithms_warn_only_enabled()


# ---------------------------------------------------------------- modules and tensors


def test_the_device_is_that_of_the_first_parameter_or_buffer() -> None:
    assert device_of(nn.Linear(2, 2, device="meta")) == torch.device("meta")
    assert device_of(nn.BatchNorm1d(2, affine=False, device="meta")) == torch.device("meta")
    assert device_of(nn.ReLU()) == torch.device("cpu")


def test_modes_are_restored_module_by_module() -> None:
    net = nn.Sequential(nn.Dropout(), nn.Dropout().eval(), nn.Sequential(nn.Dropout()))
    before = [module.training for module in net.modules()]
    with eval_mode(net):
        assert not any(module.training for module in net.modules())
    assert [module.training for module in net.modules()] == before


@dataclass
class Boxes:
    scores: torch.Tensor
    labels: list[torch.Tensor]


def test_tensors_are_found_in_nested_values() -> None:
    a, b, c, d = (torch.tensor(k) for k in range(4))
    plain = SimpleNamespace(c=c, module=nn.Linear(1, 1), text="x")
    plain.itself = plain  # a circular reference
    found = list(tensors_in([{"a": a}, Boxes(b, [d]), plain, 3, None]))
    assert {int(t) for t in found} == {0, 1, 2, 3}
    assert len([t for t in found if t is a]) == 1


# --- CUDA graphs -------------------------------------------------------------------------------------


class FakeStream:
    def wait_stream(self, other: object) -> None:
        pass


@pytest.mark.parametrize(
    ("fails_at", "error", "expected"),
    [
        (None, None, None),
        (0, RuntimeError("wrong shape"), RuntimeError),  # it does not run at all
        (2, RuntimeError("called a synchronizing operation.\nmore"), NotCapturable),
        (3, RuntimeError("not permitted while capturing"), NotCapturable),
        (3, torch.OutOfMemoryError("no memory"), torch.OutOfMemoryError),
    ],
)
def test_a_function_is_captured_after_a_warm_up_or_refused_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, fails_at: int | None, error: Exception | None, expected: type[Exception] | None
) -> None:
    """torch.cuda is replaced; real captures are tested on GPUs."""
    calls: list[str] = []
    modes = ["warm-up"]

    @contextmanager
    def mode(name: str, *_: object, **__: object) -> Iterator[None]:
        modes.append(name)
        yield
        modes.pop()

    fakes = {"CUDAGraph": lambda: "graph", "Stream": FakeStream, "current_stream": FakeStream, "stream": nullcontext}
    for name, fake in {**fakes, "graph": partial(mode, "capture")}.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch_utils, "sync_is_an_error", partial(mode, "check"))

    def run() -> int:
        calls.append(modes[-1])
        if error is not None and len(calls) - 1 == fails_at:
            raise error
        return len(calls)

    if expected is None:
        assert capture_cuda_graph(run, warmup=2) == ("graph", 4)
        assert calls == ["warm-up", "warm-up", "check", "capture"]
        return
    with pytest.raises(expected) as caught:
        capture_cuda_graph(run, warmup=2)
    if expected is NotCapturable:
        assert str(caught.value) == str(error).partition("\n")[0].rstrip(".")
    else:
        assert caught.value is error
