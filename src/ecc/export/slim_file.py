"""`save_slim` and `load_slim`: slim networks as safetensors files.

The file holds each tensor at its final size, and modules take their sizes from their tensors. So loading needs neither
a graph nor an example input, and no code of the file is executed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ecc.errors import BadFile
from ecc.graph.forward_pass import refuse_computed_weights
from ecc.graph.masked_norm import MASKED_NORMS, read_masked_norms, use_masked_norms_
from ecc.graph.model_copy import named_tensors, rebuild, set_sizes_, unsaved_tensors, whole_state
from ecc.graph.removal import REMOVED, SIZES, read_removed, replace_modules_
from ecc.training import load_state, save_state

Net = TypeVar("Net", bound=nn.Module)

WEIGHTS = ("slim.safetensors", "sparse.safetensors")
"""Files of a run: with channels pruned, or with single weights pruned."""
_EXTRA = "_extra_state"  # torch's name


def save_slim(model: nn.Module, path: str | Path) -> None:
    """Write a slim network as a safetensors file, as a run does.

        ecc.save_slim(ecc.slim(model, graph), "slim.safetensors")
        model = ecc.load_slim(MyNet(), "slim.safetensors")

    Args:
        model: The result of `slim`.
        path: The file; it is replaced atomically.

    Raises:
        BadFile: If the file cannot be written.
    """
    save_state(path, whole_state(model))


def load_slim(model: Net, path: str | Path) -> Net:
    """Load the slim network of a run, of an export, or of `save_slim`.

        model = ecc.load_slim(MyNet(), "run")

    The file contains buffers with `persistent=False` as well, because they may have been pruned. Modules without
    tensors keep attributes such as `num_features`, which torch does not compute with.

    Args:
        model: The dense network, built as for the run. Its weights do not matter, so it may be on the meta device. It
            is not changed.
        path: Folder of the run or of the export, or the safetensors file.

    Raises:
        BadFile: If the file is missing or damaged, or belongs to another network.
        UntraceableModel: If weights of `model` are computed, as by weight_norm.
    """
    refuse_computed_weights(model)
    file = weights_file(path)
    return slim_from_state(model, load_state(file), file)


def slim_from_state(model: Net, state: Any, file: Path) -> Net:
    """`load_slim` with the state of a file: tensors by name, and attributes of modules that were pruned."""
    if not isinstance(state, dict):
        raise BadFile(f"{file} holds no weights; give slim.safetensors of a finished run.")
    sizes = _sizes(model, state.pop(SIZES, {}), file)
    removed = read_removed(model, state.pop(REMOVED, {}), file)
    norms = read_masked_norms(model, state.pop(MASKED_NORMS, []), file)
    if removed:  # a copy with the same tensors, without the removed modules
        model = rebuild(model, {id(tensor): tensor for tensor in named_tensors(model).values()})
        replace_modules_(model, removed)
    if not all(isinstance(state[name], Tensor) or _is_extra(name) for name in state):
        raise BadFile(f"{file} holds no weights; give slim.safetensors of a finished run.")
    names = {id(tensor): name for name, tensor in unsaved_tensors(model).items()}
    names |= {id(tensor): name for name, tensor in model.state_dict(keep_vars=True).items()}  # hooks may rename tensors
    _check_fits(model, state, file)
    made = {}
    for tensor in named_tensors(model).values():
        name = names[id(tensor)]
        if name in state:
            new = state[name] if tensor.is_meta else state[name].to(tensor.device)
        else:
            new = tensor.detach().clone()
        is_weight = isinstance(tensor, nn.Parameter)
        made[id(tensor)] = nn.Parameter(new, requires_grad=tensor.requires_grad) if is_weight else new
    small = rebuild(model, made)
    set_sizes_(small, sizes)
    use_masked_norms_(small, [small.get_submodule(one) for one in norms])
    for path_of, module in small.named_modules():
        extra = f"{path_of}.{_EXTRA}".removeprefix(".")
        if extra in state:
            module.set_extra_state(state[extra])
    return small


def weights_file(path: str | Path) -> Path:
    """The weights file in a folder, or the file itself."""
    path = Path(path)
    if not path.is_dir():
        return path
    for name in WEIGHTS:
        if (path / name).is_file():
            return path / name
    if (path / "config.json").exists():
        raise BadFile(f"{path} is an unfinished run without {WEIGHTS[0]}. Run its command again to resume.")
    raise BadFile(f"{path} has no {WEIGHTS[0]}; give the folder of a finished run.")


def _check_fits(model: nn.Module, state: Mapping[str, Any], file: Path) -> None:
    """Every tensor must exist with the same type and number of axes, none of them empty or longer than before."""
    unsaved = unsaved_tensors(model)
    needed = {n: tensor for n, tensor in unsaved.items() if n in state or isinstance(tensor, nn.Parameter)}
    full = {**model.state_dict(), **needed}
    for name in [*full, *(name for name in state if name not in full)]:
        if name not in state or name not in full:
            side = "the file lacks" if name not in state else "the network lacks"
            raise BadFile(f"{file} belongs to another network: {side} {name}. Build the network as for the run.")
        old, new = full[name], state[name]
        if _is_extra(name):
            continue
        fits = old.dim() == new.dim() and all(n == o or 1 <= n <= o for o, n in zip(old.shape, new.shape, strict=True))
        if not fits or old.dtype != new.dtype:
            raise BadFile(
                f"{file} belongs to another network: {name} is {_describe(new)} in the file, {_describe(old)} in the "
                "network. Build the network as for the run."
            )


def _can_be(old: Any, value: Any) -> bool:
    """Whether `slim` may have set an attribute to this value: sizes shrink, and eps of RMSNorm grows."""
    if type(value) is int:
        full = old[0] if type(old) is tuple and len(old) == 1 else old
        return type(full) is int and 1 <= value <= full
    return type(value) is float and (old is None or type(old) is float) and 0 < value < math.inf


def _sizes(model: nn.Module, found: Any, file: Path) -> dict[tuple[str, str], int | float]:
    """Attributes such as `num_heads` from a file."""
    modules = dict(model.named_modules())
    sizes = {}
    for path, values in found.items() if isinstance(found, dict) else ():
        for name, value in values.items() if isinstance(values, dict) else ():
            old = vars(modules[path]).get(name) if path in modules else None
            if not _can_be(old, value):
                raise BadFile(
                    f"{file} belongs to another network: {path}.{name} is {value!r} in the file, {old!r} in the "
                    "network. Build the network as for the run."
                )
            sizes[path, name] = value
    return sizes


def _is_extra(name: str) -> bool:
    """Whether a value comes from `get_extra_state`, which need not return a tensor."""
    return name.rpartition(".")[2] == _EXTRA


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def on_cpu(model: Net) -> Net:
    """The network on the CPU, in eval mode, without gradients."""
    return model.to(torch.device("cpu")).eval().requires_grad_(False)
