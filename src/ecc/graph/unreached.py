"""What the example input did not reach, and the channels that may feed it.

Experts of a mixture that no item chose, or a branch that opens later, run with another input. Which channels reach them
cannot be traced, so all whose number fits are left as they are: those of the size of an input, those that make it up
together with others (concatenated) or several times over (flattened), and those of which it is a part.
"""

from __future__ import annotations

from collections.abc import Iterator, Set

from torch import Tensor, nn

from ecc.graph.labels import ChannelLabels


def unreached_tensors(model: nn.Module, reached: Set[str]) -> dict[str, Tensor]:
    """Parameters, and floating-point buffers of several numbers, that no operator took; by name."""
    buffers = {name: t for name, t in model.named_buffers() if t.is_floating_point() and t.numel() > 1}
    return {name: t for name, t in (*model.named_parameters(), *buffers.items()) if name not in reached}


def unreached_modules(model: nn.Module, reached: Set[str]) -> list[str]:
    """Paths of the largest modules of which nothing was reached; tensors that stand alone by their names."""
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


def freeze_unreached(book: ChannelLabels, model: nn.Module, reached: Set[str]) -> None:
    """Freezes what may feed, or may be fed by, what was not reached.

    Args:
        book: The labels of the passes.
        model: The traced network.
        reached: Names of the parameters and buffers that some operator took.
    """
    sizes = {axis.size for axis in book.axes.values()}
    for name, tensor in unreached_tensors(model, reached).items():
        why = f"it may feed {name.rpartition('.')[0] or name}, which the example input did not reach"
        fitting = set(_fitting(sizes, tensor, _input_axis(model, name, tensor)))
        for key, axis in book.axes.items():
            if axis.size in fitting:
                book.freeze(book.vector(*key), why)


def _input_axis(model: nn.Module, name: str, tensor: Tensor) -> int | None:
    """The axis along which a weight takes its inputs; None for tensors that have none."""
    if tensor.dim() < 2:
        return None
    module = model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, nn.modules.conv._ConvTransposeNd) or tensor.shape[1] == 1:  # or depthwise
        return 0
    return 1


def _fitting(sizes: Set[int], tensor: Tensor, input_axis: int | None) -> Iterator[int]:
    """Sizes of channel axes that may meet a tensor."""
    own = {size for size in tensor.shape if size > 1}
    yield from own
    taken = tensor.shape[input_axis] if input_axis is not None else 1
    for size in sizes if taken > 1 else ():
        if size > 1 and (taken % size == 0 or size % taken == 0 or taken - size in sizes):
            yield size
