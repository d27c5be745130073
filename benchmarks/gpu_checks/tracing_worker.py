"""One process of the tracing checks: it traces networks on the CPU or on the GPU."""

from __future__ import annotations

import gc
import math
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch
from coverage_networks import Network, build
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

import ecc
from gpu_checks.common import end_with_parent

DETECTION = "torchvision detection"
DETECTION_SIZE = 128  # pixels; the smallest that all of them take in reasonable time
READY = "ready"
"""Sent once, when everything is imported: the time limit of a network starts then."""
BLOCK = 1_000_003  # random numbers, used over and over; a prime, so that no two rows of a weight are equal

Row = dict[str, Any]
Group = list[Any]  # name, width, whether it is prunable, and why not


def serve(channel: Connection, places: Sequence[str], repeats: int) -> None:
    """Trace each network on the place received with it, and send the row."""
    end_with_parent(signal.SIGKILL)
    torch.set_num_threads(1)
    for place in places:
        warm_up(place)
    channel.send(READY)
    while True:
        try:
            network, place = channel.recv()
        except EOFError:
            return
        channel.send(row_of(network, place, repeats))
        gc.collect()
        if place == "cuda":
            torch.cuda.empty_cache()


def warm_up(place: str) -> None:
    """Load what is loaded at first use, so that no network's time contains it."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval()
    ecc.trace_channels(tiny.to(place), torch.randn(2, 3, 8, 8, device=place))


def row_of(network: Network, place: str, repeats: int = 1) -> Row:
    """Groups and seconds of one network; seconds are the least of `repeats`."""
    row: Row = {"kind": network.kind, "name": network.name}
    try:
        model, example = built(network)
        model = model.to(place)
        example = tree_map_only(Tensor, lambda tensor: tensor.to(place), example)
        graph, seconds, warned = min((timed_trace(model, example) for _ in range(repeats)), key=lambda one: one[1])
    except Exception as error:  # noqa: BLE001 - recorded in the row as a failure
        return row | {"error": first_line(error)}
    row |= {"groups": groups_of(graph), "seconds": round(seconds, 3)}
    return row | ({"warnings": warned} if warned else {})


def built(network: Network) -> tuple[nn.Module, Any]:
    """The network and its example input, on the CPU: the same weights in every process."""
    with quick_random_weights():
        if network.kind != DETECTION:
            return build(network)
        from torchvision import models

        torch.manual_seed(0)
        sizes = {} if network.name.startswith("ssd") else {"min_size": DETECTION_SIZE, "max_size": DETECTION_SIZE}
        model = models.get_model(network.name, weights=None, weights_backbone=None, **sizes)
        return model.eval(), ([torch.rand(3, DETECTION_SIZE, DETECTION_SIZE)],)


@contextmanager
def quick_random_weights() -> Iterator[None]:
    """Let `normal_` and `uniform_` copy a block of random numbers: drawing takes longer than tracing large networks."""
    draw = torch.Generator().manual_seed(0)
    normal, uniform = torch.randn(BLOCK, generator=draw), torch.rand(BLOCK, generator=draw)

    def fill_(tensor: Tensor, block: Tensor, scale: float, shift: float) -> Tensor:
        values = (block * scale + shift).repeat(math.ceil(tensor.numel() / BLOCK))[: tensor.numel()]
        with torch.no_grad():
            return tensor.copy_(values.view(tensor.shape))

    def normal_(tensor: Tensor, mean: float = 0.0, std: float = 1.0, *, generator: Any = None) -> Tensor:  # noqa: ARG001
        return fill_(tensor, normal, std, mean)

    def uniform_(tensor: Tensor, a: float = 0.0, b: float = 1.0, *, generator: Any = None) -> Tensor:  # noqa: ARG001
        return fill_(tensor, uniform, b - a, a)

    torch.Tensor.normal_, torch.Tensor.uniform_ = normal_, uniform_  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del torch.Tensor.normal_, torch.Tensor.uniform_


def timed_trace(model: nn.Module, example: Any) -> tuple[ecc.ChannelGraph, float, list[str]]:
    """Trace and verify with default options: the graph, seconds, and warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        started = time.perf_counter()
        graph = ecc.trace_channels(model, example)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    return graph, seconds, [str(one.message)[:300] for one in caught if "ecc" in one.filename][:2]


def groups_of(graph: ecc.ChannelGraph) -> list[Group]:
    """Name, width, whether it is prunable, and why not, of every group."""
    return sorted([group.name, group.width, not group.frozen, group.frozen or ""] for group in graph.groups)


def compared(cpu: Row, cuda: Row) -> Row:
    """Whether both rows of a network have the same groups: names, widths, prunable or not."""
    row: Row = {"kind": cpu["kind"], "name": cpu["name"]}
    for name, one in (("cpu", cpu), ("cuda", cuda)):
        row |= {f"{name}_{key}": one[key] for key in ("seconds", "warnings") if key in one}
    if "error" in cpu or "error" in cuda:
        errors = [f"{name}: {one['error']}" for name, one in (("CPU", cpu), ("CUDA", cuda)) if "error" in one]
        return row | {"status": "failed", "detail": "; ".join(errors)}
    ours, theirs = ({tuple(group[:3]) for group in one["groups"]} for one in (cpu, cuda))
    row |= {"groups": len(ours), "prunable": sum(group[2] for group in ours)}
    if ours == theirs:
        return row | {"status": "same"}
    differing = sorted({group[0] for group in ours ^ theirs})
    reasons = {group[0]: group[3] or "prunable" for group in cuda["groups"]}
    named = "; ".join(f"{name} ({reasons.get(name, 'not a group')})" for name in differing[:2])
    detail = f"{len(differing)} groups differ, such as {named}"
    return row | {"status": "different", "prunable_on_cuda": sum(group[2] for group in theirs), "detail": detail}


def first_line(error: BaseException) -> str:
    """The kind and the first line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
