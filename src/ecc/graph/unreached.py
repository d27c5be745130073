"""Modules and tensors that the example input does not run."""

from __future__ import annotations

from collections.abc import Iterator, Set

import torch
from torch import Tensor, nn

from ecc.graph.labels import ChannelLabels, Role


def unreached_tensors(model: nn.Module, reached: Set[str]) -> dict[str, Tensor]:
    """Parameters and non-scalar float buffers that are an argument of no operator, by name."""
    buffers = {name: t for name, t in model.named_buffers() if t.is_floating_point() and t.numel() > 1}
    return {name: t for name, t in (*model.named_parameters(), *buffers.items()) if name not in reached}


def unreached_modules(model: nn.Module, reached: Set[str]) -> list[str]:
    """Paths of the largest modules of which no tensor was used, and names of single unused tensors."""
    missing = unreached_tensors(model, reached)
    found: list[str] = []
    for path, _ in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in found)
        is_idle = any(name.startswith(f"{path}.") for name in missing) and not any(
            name.startswith(f"{path}.") for name in reached
        )
        if path and is_idle and not inside:
            found.append(path)
    return found + sorted(name for name in missing if not any(name.startswith(f"{path}.") for path in found))


def freeze_unreached(channel_labels: ChannelLabels, model: nn.Module, reached: Set[str]) -> None:
    """Freeze channels that may be inputs or outputs of modules that did not run.

    Experts of a mixture that no item chose, or a branch that opens later, run with another input. The channels that
    reach them are not known, so all channels of a matching number are frozen: those of the size of an input, those
    that make it up together with others (concatenated) or several times (flattened), and those that contain it.

    Args:
        channel_labels: The labels of the passes.
        model: The traced network.
        reached: Names of the parameters and buffers that are an argument of some operator.
    """
    sizes = {axis.size for axis in channel_labels.axes.values()}
    for name, tensor in unreached_tensors(model, reached).items():
        module = name.rpartition(".")[0] or name
        why = f"it may be an input of {module}, which the example input does not run. Trace with an input that runs it"
        fitting = set(_fitting(sizes, tensor, _input_axis(model, name, tensor)))
        for key, axis in channel_labels.axes.items():
            if axis.size in fitting:
                channel_labels.freeze(channel_labels.vector(*key), why)


def _input_axis(model: nn.Module, name: str, tensor: Tensor) -> int | None:
    """The input axis of a weight; None for tensors without one."""
    if tensor.dim() < 2:
        return None
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.modules.conv._ConvTransposeNd) or tensor.shape[1] == 1:  # or depthwise
        return 0
    return 1


def _fitting(sizes: Set[int], tensor: Tensor, input_axis: int | None) -> Iterator[int]:
    """Sizes of channel axes that may be combined with a tensor."""
    own = {size for size in tensor.shape if size > 1}
    yield from own
    taken = tensor.shape[input_axis] if input_axis is not None else 1
    for size in sizes if taken > 1 else ():
        if size > 1 and (taken % size == 0 or size % taken == 0 or taken - size in sizes):
            yield size


def unite_copies(channel_labels: ChannelLabels, model: nn.Module, reached: Set[str]) -> set[str]:
    """Prune unused buffers that are copies of a used one of the same module with it, and return their names.

    Rotary embeddings keep a copy of their frequencies, for a time when they have to change them.
    """
    copies = set()
    for name, tensor in unreached_tensors(model, reached).items():
        path = name.rpartition(".")[0]
        if isinstance(tensor, nn.Parameter) or tensor.dim() != 1 or tensor.is_meta:
            continue
        for other, buffer in model.get_submodule(path).named_buffers(recurse=False):
            key = (f"{path}.{other}".removeprefix("."), 0)
            if key in channel_labels.axes and buffer.shape == tensor.shape and torch.equal(buffer, tensor):
                own = channel_labels.axis(name, 0, tensor.numel(), Role.PER_CHANNEL)
                channel_labels.unite(channel_labels.vector(*key), own, f"{name}, which is a copy of {key[0]}")
                copies.add(name)
                break
    return copies
