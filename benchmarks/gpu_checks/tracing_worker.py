"""One process of the tracing check: it traces networks on the CPU and on the GPU, and compares the groups."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch
from coverage_networks import CLASSIFICATION, SEGMENTATION, Network, build
from torch import nn
from torch.utils._pytree import tree_map_only

import ecc

DETECTION = "torchvision detection"
DETECTION_SIZE = 128  # pixels; the smallest that all of them take in reasonable time
READY = "ready"
"""Sent once, when everything is imported: the time limit of a network starts then."""
Group = tuple[str, int, bool]


def serve(channel: Connection, device: str, repeats: int) -> None:
    """Trace each network that is received, and send its row."""
    torch.set_num_threads(1)
    warm_up(device)
    channel.send(READY)
    while True:
        try:
            network = channel.recv()
        except EOFError:
            return
        channel.send(row_of(network, device, repeats))
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def warm_up(device: str) -> None:
    """Load what is loaded at first use, so that no network's time contains it."""
    tiny = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 3)).eval()
    for place in ("cpu", device):
        ecc.trace_channels(tiny.to(place), torch.randn(2, 3, 8, 8, device=place))


def row_of(network: Network, device: str, repeats: int = 1) -> dict[str, Any]:
    """Groups and seconds of one network on both devices; seconds are the least of `repeats`."""
    row: dict[str, Any] = {"kind": network.kind, "name": network.name}
    try:
        model, example = built(network, device)
    except Exception as error:  # noqa: BLE001 - told in the row, which is then a failure
        return row | {"status": "failed", "detail": f"cannot be built: {first_line(error)}"}
    row["parameters"] = sum(parameter.numel() for parameter in model.parameters())
    found: dict[str, ecc.ChannelGraph | str] = {}
    for name, place in (("cpu", "cpu"), ("cuda", device)):
        model = model.to(place)
        inputs = tree_map_only(torch.Tensor, lambda t, place=place: t.to(place), example)
        try:
            graph, seconds, warned = min((timed_trace(model, inputs) for _ in range(repeats)), key=lambda one: one[1])
        except Exception as error:  # noqa: BLE001 - as above
            found[name] = first_line(error)
            continue
        found[name] = graph
        row[f"{name}_seconds"] = round(seconds, 3)
        if warned:
            row[f"{name}_warnings"] = warned
    return row | compared(found["cpu"], found["cuda"])


def built(network: Network, device: str) -> tuple[nn.Module, Any]:
    """The network and its example input, on the CPU."""
    if network.kind in (CLASSIFICATION, SEGMENTATION):  # the large ones; all their tensors are parameters and buffers
        return build(network, drawn_on=device)
    if network.kind != DETECTION:
        return build(network)
    from torchvision import models

    torch.manual_seed(0)
    sizes = {} if network.name.startswith("ssd") else {"min_size": DETECTION_SIZE, "max_size": DETECTION_SIZE}
    model = models.get_model(network.name, weights=None, weights_backbone=None, **sizes)
    return model.eval(), ([torch.rand(3, DETECTION_SIZE, DETECTION_SIZE)],)


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
    """Name, width, and whether it is prunable, of every group."""
    return sorted((group.name, group.width, not group.frozen) for group in graph.groups)


def compared(cpu: ecc.ChannelGraph | str, cuda: ecc.ChannelGraph | str) -> dict[str, Any]:
    """Whether both graphs have the same groups; what was raised is compared by its first line."""
    if isinstance(cpu, str) or isinstance(cuda, str):
        told = [f"{name}: {one}" for name, one in (("CPU", cpu), ("CUDA", cuda)) if isinstance(one, str)]
        return {"status": "failed", "detail": "; ".join(told)}
    ours, theirs = groups_of(cpu), groups_of(cuda)
    counts = {"groups": len(ours), "prunable": sum(group[2] for group in ours)}
    if ours == theirs:
        return {"status": "same", **counts}
    reasons = {group.name: group.frozen for group in cuda.groups}
    differing = sorted({group[0] for group in set(ours) ^ set(theirs)})
    detail = f"{len(differing)} groups differ, such as {_named(differing, reasons)}"
    return {"status": "different", **counts, "prunable_on_cuda": sum(g[2] for g in theirs), "detail": detail}


def _named(names: Sequence[str], reasons: dict[str, str | None]) -> str:
    return "; ".join(f"{name} ({reasons.get(name, 'not a group') or 'prunable'})" for name in names[:2])


def first_line(error: BaseException) -> str:
    """The kind and the first line of an exception."""
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"[:300]
