"""Settings of torch are set for a block and restored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ecc.torch_utils import exact_arithmetic, torch_settings

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


@pytest.mark.parametrize("tf32", [False, True])
def test_tf32_and_autotuning_are_set_and_put_back(tf32: bool) -> None:
    def precisions() -> tuple[object, ...]:
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        return cudnn.benchmark, matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision

    before = precisions()
    wanted = "tf32" if tf32 else "ieee"
    with torch_settings(tf32=tf32, cudnn_autotune=True):
        assert precisions() == (True, wanted, wanted, wanted)
        assert torch.backends.cudnn.allow_tf32 is tf32  # the older setting agrees
    assert precisions() == before


def test_older_versions_of_torch_have_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    class Settings:
        allow_tf32 = True
        benchmark = False

    cudnn, matmul = Settings(), Settings()
    monkeypatch.setattr(torch.backends, "cudnn", cudnn)
    monkeypatch.setattr(torch.backends.cuda, "matmul", matmul)
    with torch_settings(tf32=False, cudnn_autotune=True):
        assert (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark) == (False, False, True)
    assert (cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark) == (True, True, False)
