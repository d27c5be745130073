"""Prunable groups of five networks under torch settings of the user: the same count everywhere, and settings kept."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

import ecc
from gpu_checks.common import Context, Outcome, end_with_parent
from gpu_checks.tracing_worker import first_line, groups_of, warm_up

Setting = Callable[[str], Any]  # makes the context manager of a setting, given the device
BATCH = 2


@contextmanager
def _changed(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def _matmul_precision(value: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(value)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


SETTINGS: dict[str, Setting] = {
    "defaults": lambda _: nullcontext(),
    "matmul_high": lambda _: _matmul_precision("high"),
    "autocast_bf16": lambda device: torch.autocast(device, dtype=torch.bfloat16),
    "cudnn_benchmark": lambda _: _changed(torch.backends.cudnn, "benchmark", True),
    "cudnn_deterministic": lambda _: _changed(torch.backends.cudnn, "deterministic", True),
}
MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    # The annotations of torch have no memory format without a dtype.
    "channels_last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "bf16_weights": lambda model: model.to(torch.bfloat16),
    "fp16_weights": lambda model: model.to(torch.float16),
    "train_mode": lambda model: model.train(),
}
COLUMNS = ("cpu", *SETTINGS, *MODELS)


def networks() -> dict[str, tuple[Callable[[], nn.Module], int]]:
    """How each network is built, and the size of its images."""
    from torchvision import models

    from ecc.zoo.resnet_cifar import resnet56

    return {
        "resnet18": (models.resnet18, 224),
        "resnet50": (models.resnet50, 224),
        "resnet56": (resnet56, 32),
        "mobilenet_v2": (models.mobilenet_v2, 224),
        "vit_b_16": (models.vit_b_16, 224),
    }


def torch_settings(context: Context) -> Outcome:
    """Passed when all columns of a network have the groups found on the CPU, and every setting is kept."""
    names = ["resnet56"] if context.small else list(networks())
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(names), mp_context=spawn) as pool:
        found = dict(zip(names, pool.map(_row_by_name, names, [context.device] * len(names)), strict=True))
    return judge(found)


def judge(rows: dict[str, dict[str, dict[str, Any]]]) -> Outcome:
    """The audit's table, and whether all columns are equal."""
    unequal = [
        f"{name} {column}: {cell['count']}"
        for name, cells in rows.items()
        for column, cell in cells.items()
        if not cell["same_groups"]
    ]
    changed = [
        f"{name} {column}: {', '.join(cell['changed'])}"
        for name, cells in rows.items()
        for column, cell in cells.items()
        if cell["changed"]
    ]
    columns = len(next(iter(rows.values()))) if rows else 0
    summary = f"{len(rows)} networks in {columns} columns: {len(unequal)} cells unlike the CPU"
    summary += f", {len(changed)} with a setting not restored"
    numbers = {"unequal": unequal, "not_restored": changed, "table": rows}
    return Outcome(bool(rows) and not unequal and not changed, summary, numbers)


def _row_by_name(name: str, device: str) -> dict[str, dict[str, Any]]:
    torch.set_num_threads(1)
    end_with_parent(signal.SIGKILL)
    for place in ("cpu", device):
        warm_up(place)
    make, size = networks()[name]
    return row_of(make, size, device)


def row_of(make: Callable[[], nn.Module], size: int, device: str) -> dict[str, dict[str, Any]]:
    """All columns of one network."""
    reference = _traced(_built(make, "cpu"), _example(size, "cpu"))
    cells = {"cpu": reference}
    for column in COLUMNS[1:]:
        model, example = _built(make, device), _example(size, device)
        if column in MODELS:
            model = MODELS[column](model)
            dtype = next(model.parameters()).dtype
            example = example.to(dtype)
            if column == "channels_last":
                example = example.contiguous(memory_format=torch.channels_last)
        with SETTINGS.get(column, SETTINGS["defaults"])(device):
            cells[column] = _traced(model, example)
        print(column, cells[column]["count"], flush=True)
    for cell in cells.values():
        cell["same_groups"] = bool(cell["groups"]) and cell["groups"] == reference["groups"]
    for cell in cells.values():
        del cell["groups"]
    return cells


def _built(make: Callable[[], nn.Module], device: str) -> nn.Module:
    torch.manual_seed(0)
    return make().eval().to(device)


def _example(size: int, device: str) -> Tensor:
    return torch.randn(BATCH, 3, size, size, generator=torch.Generator().manual_seed(1)).to(device)


def _traced(model: nn.Module, example: Tensor) -> dict[str, Any]:
    """The count of prunable groups, all groups, and which settings were not restored."""
    before = snapshot(model)
    try:
        graph = ecc.trace_channels(model, example)
    except Exception as error:  # noqa: BLE001 - recorded in the cell, which then differs from the CPU
        groups, count = [], first_line(error)
    else:
        groups, count = groups_of(graph), f"{len(graph.prunable)}/{len(graph.groups)}"
    after = snapshot(model)
    changed = [name for name, value in before.items() if not _equal(value, after[name])]
    return {"count": count, "groups": groups, "changed": changed}


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Settings of torch, and the state of the network, that tracing must leave as they are."""
    settings: dict[str, Callable[[], Any]] = {
        "matmul precision": torch.get_float32_matmul_precision,
        "matmul TF32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cuDNN TF32": lambda: torch.backends.cudnn.allow_tf32,
        "cuDNN enabled": lambda: torch.backends.cudnn.enabled,
        "cuDNN benchmark": lambda: torch.backends.cudnn.benchmark,
        "cuDNN deterministic": lambda: torch.backends.cudnn.deterministic,
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled,
        "autocast on CUDA": lambda: (torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda")),
        "autocast on CPU": lambda: (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "autocast cache": torch.is_autocast_cache_enabled,
        "gradients": torch.is_grad_enabled,
        "inference mode": torch.is_inference_mode_enabled,
        "default dtype": torch.get_default_dtype,
        "default device": torch.get_default_device,
        "threads": torch.get_num_threads,
        "flash attention": torch.backends.cuda.flash_sdp_enabled,
        "memory-efficient attention": torch.backends.cuda.mem_efficient_sdp_enabled,
        "math attention": torch.backends.cuda.math_sdp_enabled,
        "random state on CPU": torch.get_rng_state,
        "random state on CUDA": lambda: torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
    found: dict[str, Any] = {name: read() for name, read in settings.items()}
    found["mode of modules"] = [module.training for module in model.modules()]
    found["hooks"] = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
    for name, tensor in model.state_dict().items():
        found[f"tensor {name}"] = tensor.detach().clone()
    found["gradients of parameters"] = [parameter.grad is None for parameter in model.parameters()]
    return found


def _equal(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    places = [(t.device, t.dtype, t.stride()) for t in (one, other)]
    return places[0] == places[1] and torch.equal(one, other)
