"""Parameters that the example input did not reach, and the channels that may feed them.

Experts of a mixture that no item chose, or a branch that opens later, run with another input. Whether a channel reaches
them cannot be traced, so every channel axis that fits one of their sizes stays as it is.
"""

from __future__ import annotations

from collections.abc import Set

from torch import Tensor, nn

from ecc.graph.labels import LabelBook


def unreached_parameters(model: nn.Module, reached: Set[str]) -> list[str]:
    """Names of the parameters that no operator took, in the order of the model; tied ones under one name."""
    return [name for name, _ in model.named_parameters() if name not in reached]


def unreached_modules(model: nn.Module, reached: Set[str]) -> list[str]:
    """Paths of the largest modules of which no parameter was reached; parameters that stand alone by their names."""
    missing = set(unreached_parameters(model, reached))
    found: list[str] = []
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        names = [prefix + name for name, _ in module.named_parameters()]
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if names and path and not inside and missing.issuperset(names):
            found.append(path)
    alone = [name for name in missing if not any(name.startswith(f"{path}.") for path in found)]
    return found + sorted(alone)


def freeze_unreached(book: LabelBook, model: nn.Module, reached: Set[str]) -> None:
    """Freezes what may feed, or may be fed by, parameters that were not reached.

    Args:
        book: The labels of the passes.
        model: The traced network.
        reached: Names of the parameters and buffers that some operator took.
    """
    missing = set(unreached_parameters(model, reached))
    for name, parameter in model.named_parameters():
        if name in missing:
            scope = _scope(book, name)
            why = f"it may feed {name.rpartition('.')[0] or name}, which the example input did not reach"
            for key in _fitting(book, scope, parameter):
                book.freeze(book.vector(*key), why)


def _scope(book: LabelBook, name: str) -> str:
    """The prefix of the smallest module around a parameter in which something was reached."""
    path = name.rpartition(".")[0]
    while path and not any(tensor.startswith(f"{path}.") for tensor, _ in book.axes):
        path = path.rpartition(".")[0]
    return f"{path}." if path else ""


def _fitting(book: LabelBook, scope: str, parameter: Tensor) -> list[tuple[str, int]]:
    """The axes within a module whose size is one of the parameter's.

    Where none has the size of its input axis, those of which that is a multiple: channels may be flattened first.
    """
    inside = {key: axis.size for key, axis in book.axes.items() if key[0].startswith(scope)}
    sizes = {size for size in parameter.shape if size > 1}
    found = [key for key, size in inside.items() if size in sizes]
    if parameter.dim() > 1 and parameter.shape[1] not in inside.values():
        found += [key for key, size in inside.items() if size > 1 and parameter.shape[1] % size == 0]
    return found
