"""Building smaller networks: at given widths, or without the channels that are masked.

Networks are rebuilt with smaller tensors (`model_copy.py`). Dense tensors are not copied whole.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar, cast
from weakref import WeakKeyDictionary, WeakMethod

import torch
from torch import Tensor, nn

from ecc.errors import BadWidths, EccWarning
from ecc.graph.channel_graph import ChannelGraph, ChannelGroup, WidthScale
from ecc.graph.forward_pass import refuse_computed_weights
from ecc.graph.masked_norm import MaskedNorm, fit_norms_, use_masked_norms_
from ecc.graph.model_copy import named_tensors, rebuild, scale_attributes_, set_sizes_
from ecc.graph.removal import at_widths, replace_modules_, tensors_inside
from ecc.graph.structure import Replacement
from ecc.torch_utils import on_cpu, to_device_of

Net = TypeVar("Net", bound=nn.Module)


def with_widths(
    model: Net, graph: ChannelGraph, widths: Mapping[str, int], *, device: torch.device | str | None = None
) -> Net:
    """A new network with the given widths. It keeps the first units of each group.

    Args:
        model: The network that was traced.
        graph: Its channel graph.
        widths: Width of each group by name. Other groups keep their full width.
        device: Device of the new tensors (`"meta"` allocates nothing), by default that of the old ones.

    Raises:
        BadWidths: If a group is unknown or not prunable, or a width is outside its range.
    """
    whole = graph.widths(widths)
    if bool((whole != whole.round()).any()):
        raise BadWidths(f"widths must be whole numbers: {dict(widths)}.")
    keep = {
        g.name: torch.arange(int(w), device="cpu")
        for g, w in zip(graph.groups, whole.tolist(), strict=True)
        if w < g.width
    }
    return _with_units(model, graph, keep, device)


def slim(model: Net, graph: ChannelGraph, width_multiple: int = 1) -> Net:
    """A new network without the masked channels of `model`. Its outputs equal those of `model`.

    A channel is masked if every layer that consumes it has a zero slice for it, in a `zeroed` group if all of its
    slices are zero. A group keeps at least its minimum width. Hooks of modules are copied, those of tensors are not, as
    in `copy.deepcopy`.

    Args:
        model: The network that was traced.
        graph: Its channel graph.
        width_multiple: Round widths up to multiples of this, as a solver does. Some masked channels stay for that.

    Warns:
        EccWarning: If a solver prunes this model and its budget is not met yet.
    """
    check = _CHECKS.get(model, lambda: None)()
    if check is not None:
        check()
    _warn_of_tensor_hooks(model)
    return build_slim(model, graph, width_multiple)


def build_slim(model: Net, graph: ChannelGraph, width_multiple: int = 1) -> Net:
    """`slim` without its checks."""
    refuse_computed_weights(model)
    kept = _kept_units(model, graph, width_multiple)
    if any(graph[name].zeroed for name in kept):
        mask_norms_(model, graph)
    return _with_units(model, graph, kept, None)


_CHECKS: WeakKeyDictionary[nn.Module, Callable[[], Callable[[], None] | None]] = WeakKeyDictionary()


def check_before_slim(model: nn.Module, check: Callable[[], None]) -> None:
    """Register a method that `slim` calls before it slims this model. It replaces an earlier one.

    Args:
        model: The network.
        check: A bound method. Its object is not kept alive, and the check ends with it.
    """
    _CHECKS[model] = WeakMethod(check)


def _warn_of_tensor_hooks(model: nn.Module) -> None:
    hooked = [n for n, p in model.named_parameters() if p._backward_hooks or p._post_accumulate_grad_hooks]
    if hooked:
        warnings.warn(
            f"{hooked[0]}{f' and {len(hooked) - 1} more parameters' if hooked[1:] else ''} of the dense network "
            f"{'have' if hooked[1:] else 'has'} hooks (register_hook or register_post_accumulate_grad_hook), which the "
            "slim network does not have. Register them on its parameters.",
            EccWarning,
            stacklevel=3,
        )


def _kept_units(model: nn.Module, graph: ChannelGraph, width_multiple: int) -> dict[str, Tensor]:
    """The units that `slim` keeps, for the groups that lose some."""
    live = on_cpu(live_masks(model, graph))
    masks = kept_masks(graph, live, width_multiple, removed_branches(model, graph))
    kept = zip(graph.groups, masks, strict=True)
    return {group.name: mask.nonzero().flatten() for group, mask in kept if not bool(mask.all())}


Slices: TypeAlias = Mapping[str, Mapping[int, Tensor] | None]
"""For each tensor and axis that is pruned, the indices that are kept; None for a tensor that is removed."""


def slim_and_slices(
    model: Net, graph: ChannelGraph, dead: Mapping[str, Tensor], branches: Collection[str]
) -> tuple[Net, Slices, dict[str, Tensor]]:
    """The network without masked units and branches, what is kept of its tensors, and the factors of scaled parameters.

    The result is that of `slim` if nothing else is masked, without reading the weights.

    Args:
        model: The network with masked units and branches.
        graph: Its channel graph.
        dead: Numbers of the masked units, by group.
        branches: Names of the masked branches.
    """
    kept = {name: _others(units, graph[name].width) for name, units in dead.items() if len(units)}
    gone = (group for name in branches for group in graph.branch(name).groups)
    kept |= {group: torch.zeros(0, dtype=torch.long, device="cpu") for group in gone}
    return _with_units(model, graph, kept, None), _kept_slices(graph, kept), _factors(graph, kept)


def _others(units: Tensor, width: int) -> Tensor:
    """The numbers below `width` that are not among `units`."""
    return torch.ones(width, dtype=torch.bool, device="cpu").index_fill(0, units, False).nonzero().flatten()


def _kept_slices(graph: ChannelGraph, kept: Mapping[str, Tensor]) -> Slices:
    widths = [len(kept[g.name]) if g.name in kept else g.width for g in graph.groups]
    removed = tensors_inside(graph.full_shapes, [one.path for one in _replacements(graph, widths)])
    return {**_slices(graph, kept), **dict.fromkeys(removed)}


def kept_masks(
    graph: ChannelGraph, live: Sequence[Tensor], width_multiple: int = 1, removed: Collection[str] = ()
) -> list[Tensor]:
    """For each group, which units `slim` keeps: the live ones, and masked ones to reach an allowed width.

    Args:
        graph: The channel graph.
        live: Masks from `live_masks`.
        width_multiple: As for `slim`.
        removed: Names of the removed branches (see `removed_branches`), of which nothing is kept.
    """
    if width_multiple < 1:
        raise BadWidths(f"width_multiple={width_multiple} is below 1; 1 allows any width.")
    widths = graph.structure.padded([int(mask.sum()) for mask in live], width_multiple, removed)
    kept = []
    for group, mask, width in zip(graph.groups, live, widths, strict=True):
        dead = (~mask).nonzero().flatten()
        kept.append(mask.index_fill(0, dead[: width - (group.width - len(dead))], True))
    return kept


def live_channels(model: nn.Module, graph: ChannelGraph) -> dict[str, int]:
    """Number of live units of each group, the paper's phi."""
    masks = live_masks(model, graph)
    return {group.name: int(live.sum()) for group, live in zip(graph.groups, masks, strict=True)}


@torch.no_grad()
def live_masks(model: nn.Module, graph: ChannelGraph) -> list[Tensor]:
    """For each group, which units are live. Shapes (width,).

    A unit is live if a consumer has a nonzero slice for it, in a `zeroed` group if any tensor has.
    """
    tensors = _tensors_of(model, graph)
    masks = []
    for group in graph.groups:
        live: Tensor | None = None
        for one in group.masked_slices:
            tensor = tensors[one.tensor]
            others = [a for a in range(tensor.dim()) if a != one.axis]
            touched = (tensor != 0).any(others) if others else tensor != 0
            mine = touched[to_device_of(tensor, one.index)].any(1)
            live = mine if live is None else live | mine
        masks.append(torch.ones(group.width, dtype=torch.bool, device="cpu") if live is None else live)
    return masks


@torch.no_grad()
def mask_channels_(model: nn.Module, graph: ChannelGraph, dead: Mapping[str, Tensor | Sequence[int]]) -> None:
    """Mask units: set their slices of all consumers to zero, in a `zeroed` group all of their slices.

    Args:
        model: The network that was traced.
        graph: Its channel graph.
        dead: For each group by name, the numbers of the units to mask, or a boolean mask of them.

    Raises:
        BadWidths: If a group is unknown or not prunable, or a unit does not exist.
    """
    tensors = _tensors_of(model, graph)
    if any(graph[name].zeroed for name in dead):
        mask_norms_(model, graph)
    places: dict[tuple[str, int], list[Tensor]] = defaultdict(list)
    for name, units in dead.items():
        group = graph[name]
        if group.frozen is not None:
            raise BadWidths(f"group {name!r} is not prunable: {group.frozen.rstrip('.')}.")
        units = _checked_units(units, group.width, name)
        for one in group.masked_slices:
            places[one.tensor, one.axis].append(one.index[units].flatten())
    for (name, axis), indices in places.items():
        tensors[name].index_fill_(axis, to_device_of(tensors[name], torch.cat(indices)), 0)


@torch.no_grad()
def mask_norms_(model: nn.Module, graph: ChannelGraph) -> None:
    """Let layer norms over prunable channels leave out masked channels (see `masked_norm.py`).

    Called before channels are masked. Classes of modules change, outputs do not.

    Args:
        model: The network that was traced.
        graph: Its channel graph.
    """
    found = ((path, model.get_submodule(path)) for path in graph.layer_norms)
    norms = {path: module for path, module in found if not isinstance(module, MaskedNorm)}
    if not norms:
        return
    use_masked_norms_(model, norms.values())
    _keep_zeros_live_(model, graph, norms)


def _keep_zeros_live_(model: nn.Module, graph: ChannelGraph, norms: Collection[str]) -> None:
    """Replace zero weights of live channels by the smallest number, since a zero weight and bias would mask them."""
    tensors = named_tensors(model)
    names = {id(tensor): name for name, tensor in tensors.items()}
    tables = [model.get_submodule(path)._parameters for path in norms]
    pairs = [(weight, table.get("bias")) for table in tables if (weight := table.get("weight")) is not None]
    pairs = [(weight, bias) for weight, bias in pairs if not weight.is_meta]
    zeros = [weight == 0 if bias is None else (weight == 0) & (bias == 0) for weight, bias in pairs]
    some = on_cpu([zero.any() & ~zero.all() for zero in zeros])  # all are zero if a branch is masked
    found = [(weight, zero) for (weight, _), zero, flag in zip(pairs, zeros, some, strict=True) if bool(flag)]
    live = on_cpu(live_masks(model, graph)) if found else []
    for weight, zero in found:
        for group, mask in zip(graph.groups, live, strict=True):
            for one in (one for one in group.slices if one.tensor == names[id(weight)]):
                index = to_device_of(weight, one.index[mask].flatten())
                weight[index[zero[index]]] = torch.finfo(weight.dtype).tiny


@torch.no_grad()
def removed_branches(model: nn.Module, graph: ChannelGraph) -> tuple[str, ...]:
    """Names of the branches that are masked in the model, which `slim` removes.

    A branch is masked if its exits are zero and no unit of its groups is live.
    """
    if not graph.branches:
        return ()
    tensors = _tensors_of(model, graph)
    flags = []
    for branch in graph.branches:
        parts = [tensors[name].any() for name in branch.exits]
        parts += [_any_nonzero(tensors, graph[name]) for name in branch.groups]
        flags.append(torch.stack([part.to(parts[0].device) for part in parts]).any())
    live = torch.stack([flag.to(flags[0].device) for flag in flags]).tolist()
    return tuple(branch.name for branch, is_live in zip(graph.branches, live, strict=True) if not is_live)


def _any_nonzero(tensors: Mapping[str, Tensor], group: ChannelGroup) -> Tensor:
    """Whether a slice of a consumer or factor of a group is not zero."""
    found = torch.zeros((), dtype=torch.bool, device="cpu")
    for one in group.slices:
        if one.masks:
            tensor = tensors[one.tensor]
            whole = one.index.numel() == tensor.shape[one.axis]
            mine = tensor if whole else tensor.index_select(one.axis, to_device_of(tensor, one.index.flatten()))
            found = found.to(tensor.device) | mine.any()
    return found


@torch.no_grad()
def mask_branches_(model: nn.Module, graph: ChannelGraph, names: Collection[str]) -> None:
    """Mask branches in one: set their exits, and the consumer slices of all their groups, to zero.

    Args:
        model: The network that was traced.
        graph: Its channel graph.
        names: Names of branches of the graph.

    Raises:
        BadWidths: If a branch is unknown.
    """
    tensors = _tensors_of(model, graph)
    for name in names:
        branch = graph.branch(name)
        for exit_ in branch.exits:
            tensors[exit_].zero_()
        for one in (one for group in branch.groups for one in graph[group].masked_slices):
            tensor = tensors[one.tensor]
            tensor.index_fill_(one.axis, to_device_of(tensor, one.index.flatten()), 0)


def _checked_units(units: Any, width: int, name: str) -> Tensor:
    found: Tensor = torch.as_tensor(units, device="cpu")
    if not found.numel():
        return torch.zeros(0, dtype=torch.long, device="cpu")
    mask = found.dtype == torch.bool
    fits = found.shape == (width,) if mask else found.dim() == 1 and 0 <= found.min() <= found.max() < width
    if not fits or found.dtype not in (torch.bool, torch.int32, torch.int64):
        raise BadWidths(
            f"units of group {name!r} must be integers from 0 to {width - 1}, or a boolean mask of length {width}."
        )
    return found


def slim_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, small: nn.Module, graph: ChannelGraph, width_multiple: int = 1
) -> torch.optim.Optimizer:
    """An optimizer for `small` with the state of `optimizer` for the channels that were kept.

    Call it before the masked channels of `model` change, since they determine what was kept. The state of weights that
    `slim` scales (those of RMSNorm) is scaled as their gradients are.

    Args:
        optimizer: A torch optimizer, or a solver that wraps one.
        model: The dense network.
        small: The result of `slim(model, graph, width_multiple)`.
        graph: The channel graph of `model`.
        width_multiple: The same value as for `slim`.

    Raises:
        BadWidths: If `small` was slimmed differently, or the optimizer has state that cannot be sliced.
    """
    optimizer = getattr(optimizer, "inner", optimizer)
    new = dict(small.named_parameters())
    kept = _kept_units(model, graph, width_multiple)
    slices = _kept_slices(graph, kept)
    factors = _factors(graph, kept)
    names = {id(old): name for name, old in model.named_parameters()}
    _check_slimmed_alike(model, new, slices)
    gone = {id(old) for name, old in model.named_parameters() if slices.get(name, {}) is None}
    pairs = {id(old): new[name] for name, old in model.named_parameters() if id(old) not in gone}
    settings = []
    for settings_of_group in optimizer.param_groups:
        mine = {key: value for key, value in settings_of_group.items() if key != "params"}
        params = [pairs.get(id(p), p) for p in settings_of_group["params"] if id(p) not in gone]
        settings.append({**mine, "params": params})
    try:
        new_optimizer = cast(Callable[..., torch.optim.Optimizer], type(optimizer))(settings)
    except TypeError as error:
        raise BadWidths(
            f"a new {type(optimizer).__name__} cannot be created from parameter groups alone: {error}."
        ) from error
    new_optimizer.defaults = dict(optimizer.defaults)
    for old, state in optimizer.state.items():
        if id(old) in gone:
            continue
        name = names.get(id(old), "")  # parameters of other modules keep their state
        axes = slices.get(name) or {}
        unfit = next((key for key, value in state.items() if axes and _cannot_follow(value, old)), None)
        if unfit is not None:
            raise BadWidths(
                f"{type(optimizer).__name__} keeps {unfit} of {name} in another shape than the weight, which "
                "cannot be sliced. Create a new optimizer for the slim network."
            )
        new_optimizer.state[pairs.get(id(old), old)] = {
            key: _scaled(_sliced(value, axes), factors.get(name), -_order(key))
            if _is_like(value, old)
            else copy.deepcopy(value)
            for key, value in state.items()
        }
    return new_optimizer


def _check_slimmed_alike(model: nn.Module, small: Mapping[str, Tensor], slices: Slices) -> None:
    for name, dense in model.named_parameters():
        axes = slices.get(name, {})
        wanted = None if axes is None else [len(axes.get(axis, range(size))) for axis, size in enumerate(dense.shape)]
        found = list(small[name].shape) if name in small else None
        if found != wanted:
            shapes = ["was removed" if shape is None else f"has shape {shape}" for shape in (found, wanted)]
            raise BadWidths(
                f"{name} of the slim network {shapes[0]}, expected that it {shapes[1]}. "
                "Use the same width_multiple as for slim, and call this before channels change."
            )


def _scaled(value: Tensor, factor: Tensor | None, power: int) -> Tensor:
    return value if factor is None else value * to_device_of(value, factor**power).to(value.dtype)


def _order(key: str) -> int:
    """Which power of the gradient a state has: 2 for Adam's `exp_avg_sq` and the like, else 1."""
    return 2 if key in ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf") else 1


def _is_like(value: Any, parameter: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == parameter.shape


def _cannot_follow(value: Any, parameter: Tensor) -> bool:
    """Whether optimizer state has several values, but not one per weight."""
    inner = value if isinstance(value, (list, tuple)) else [value]
    return any(isinstance(v, Tensor) and v.numel() > 1 and v.shape != parameter.shape for v in inner)


# --- rebuilding ----------------------------------------------------------------------------------


@torch.no_grad()
def _with_units(model: Net, graph: ChannelGraph, keep: Mapping[str, Tensor], device: torch.device | str | None) -> Net:
    """Rebuild the network with only the kept units, by group name. Other groups keep all."""
    refuse_computed_weights(model)
    tensors = _tensors_of(model, graph)
    widths = [len(keep[g.name]) if g.name in keep else g.width for g in graph.groups]
    removed = _replacements(graph, widths)
    # What is left of a removed branch, such as code between its modules, runs at minimum widths.
    keep = {**keep, **{g.name: _first_units(g) for g, width in zip(graph.groups, widths, strict=True) if not width}}
    widths = [len(keep[g.name]) if g.name in keep else g.width for g in graph.groups]
    if device is not None and torch.device(device).type == "meta":
        shapes = {t.name: [round(axis.at(widths)) for axis in t.axes] for t in graph.tensors}
        made = {id(t): _empty_like(t, shapes.get(name, list(t.shape))) for name, t in tensors.items()}
    else:
        slices = _slices(graph, keep)
        made = {id(t): _sliced_like(t, slices.get(name, {}), device) for name, t in tensors.items()}
    scales = _scales(graph, keep)
    for scale, factor in scales:
        if scale.target in tensors:
            tensor = made[id(tensors[scale.target])]
            by = factor if not scale.ranges else _by_slice(graph, scale, factor, keep).to(tensor)
            tensor.add_(scale.offset).mul_(by).sub_(scale.offset)
    small = rebuild(model, made)
    fit_norms_(small)
    set_sizes_(small, {(path, name): round(size.at(widths)) for path, name, size in graph.features})
    scale_attributes_(small, {scale.target: factor for scale, factor in scales if scale.target not in tensors})
    replace_modules_(small, [at_widths(one, widths) for one in removed])
    return small


def _scales(graph: ChannelGraph, keep: Mapping[str, Tensor]) -> list[tuple[WidthScale, float]]:
    """The parameters and attributes that change, and their factors."""
    full = [g.width for g in graph.groups]
    widths = [len(keep[g.name]) if g.name in keep else g.width for g in graph.groups]
    factors = [(scale, scale.factor(full, widths)) for scale in graph.scales]
    return [(scale, factor) for scale, factor in factors if factor != 1]


def _factors(graph: ChannelGraph, keep: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each parameter or attribute that changes its factor, in float64, which is broadcast over a parameter."""
    found: dict[str, Tensor] = {}
    for scale, factor in _scales(graph, keep):
        one = torch.tensor(factor, dtype=torch.float64, device="cpu")
        by = _by_slice(graph, scale, factor, keep) if scale.ranges else one
        found[scale.target] = found.get(scale.target, 1.0) * by
    return found


def _by_slice(graph: ChannelGraph, scale: WidthScale, factor: float, keep: Mapping[str, Tensor]) -> Tensor:
    """The factor of each slice that is kept of a parameter of which only some slices change."""
    shape = graph.full_shapes[scale.target]
    factors = torch.ones(shape[scale.axis], dtype=torch.float64, device="cpu")
    for start, end in scale.ranges:
        factors[start:end] = factor
    kept = _slices(graph, keep).get(scale.target, {}).get(scale.axis)
    return (factors if kept is None else factors[kept]).view([-1 if a == scale.axis else 1 for a in range(len(shape))])


def _first_units(group: ChannelGroup) -> Tensor:
    return torch.arange(group.width if group.frozen is not None else group.min_width, device="cpu")


def _replacements(graph: ChannelGraph, widths: Sequence[int]) -> list[Replacement]:
    """The modules that are replaced at these widths."""
    if not graph.replacements:
        return []
    gone = set(graph.structure.removed(widths))
    return [one for one in graph.replacements if gone.issuperset(one.branches)]


def _slices(graph: ChannelGraph, keep: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
    """For each tensor and axis that is pruned, the indices that it keeps, in ascending order."""
    alive = torch.ones(graph.num_channel_ids, dtype=torch.bool, device="cpu")
    for name, kept in keep.items():
        start, stop = graph.channel_ids(name)
        alive[start:stop] = False
        alive[start + kept] = True
    stays = alive[graph.channel_id_of_index].nonzero().flatten()  # all axes of all tensors, concatenated
    starts = torch.tensor(
        [start for start, _ in graph.axis_spans.values()] + [len(graph.channel_id_of_index)], device="cpu"
    )
    bounds = torch.searchsorted(stays, starts).tolist()
    slices: dict[str, dict[int, Tensor]] = {}
    for number, ((tensor, axis), (start, size)) in enumerate(graph.axis_spans.items()):
        if bounds[number + 1] - bounds[number] < size:
            slices.setdefault(tensor, {})[axis] = stays[bounds[number] : bounds[number + 1]] - start
    return slices


def _sliced(tensor: Tensor, axes: Mapping[int, Tensor]) -> Tensor:
    """A copy of selected indices along some axes, in the memory format of the original."""
    result = tensor
    for axis, index in sorted(axes.items(), key=lambda item: item[1].numel() / tensor.shape[item[0]]):
        numbers = index.numpy()
        if numbers[-1] - numbers[0] + 1 == len(numbers):
            result = result.narrow(axis, int(numbers[0]), len(numbers))
        else:
            result = result.index_select(axis, to_device_of(tensor, index))
    if tensor.dim() == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last):
        return result.clone(memory_format=torch.channels_last)
    return result.clone(memory_format=torch.contiguous_format) if result._is_view() or result is tensor else result


def _sliced_like(tensor: Tensor, axes: Mapping[int, Tensor], device: torch.device | str | None) -> Tensor:
    new = _sliced(tensor.detach(), axes)
    return _alike(tensor, new if device is None else new.to(device))


def _empty_like(tensor: Tensor, shape: list[int]) -> Tensor:
    if shape == list(tensor.shape) and not tensor.is_floating_point() and not tensor.is_complex():
        return tensor.detach().clone()  # an index, whose values are needed
    return _alike(tensor, torch.empty(shape, dtype=tensor.dtype, device="meta"))


def _alike(old: Tensor, new: Tensor) -> Tensor:
    return nn.Parameter(new, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else new


def _tensors_of(model: nn.Module, graph: ChannelGraph) -> dict[str, Tensor]:
    """The model's parameters and buffers, checked against the graph."""
    tensors = named_tensors(model)
    for name, shape in graph.full_shapes.items():
        tensor = tensors.get(name)
        if tensor is None or tensor.shape != shape:
            have = "nothing" if tensor is None else list(tensor.shape)
            raise BadWidths(
                f"this graph belongs to another network: it expects {name} of shape {list(shape)}, found {have}. "
                "Trace this network."
            )
    return tensors
