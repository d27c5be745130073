"""Torch-Pruning in `trace_coverage.py`: used as its README says, and held to the same test as ECC.

Its pruner removes channels at once, so the masked network is made beside it: while it prunes one copy group by
group (`step(interactive=True)`), the input channels that it says it removes from convolutions and linear layers are
noted, translated back to the numbering of the dense network, and set to zero in another copy. Both copies must
agree.

It is given every help that can be had without knowing the network: the layers of the output's width are ignored,
and so is every group that its own graph leads to an output; where modules tell their `num_heads`, these are passed
and widths are rounded to a multiple of them (both left out in a second try, if the first fails), and static sizes
are updated after the step, as in its examples; inputs come as a tuple, so that its first try to call the network
succeeds. A difference is called WRONG only in a network without any operator that mixes channels by itself (norms
over channels, softmax, attention, sums over channels): there, no cause but a wrong cut is left.
"""

from __future__ import annotations

import copy
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from coverage_networks import TOLERANCE, difference, outputs
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

Result = dict[str, Any]
QUICK = 1.0  # seconds; a step that takes less is measured three times
_HEADS = ("qkv", "q", "k", "v", "query", "key", "value", "q_proj", "k_proj", "v_proj")


class NeedsAnswer(Exception):
    """A status that ends the measurement of a network."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(f"{status}: {detail}")
        self.status, self.detail = status, detail


def measure_torch_pruning(
    model: nn.Module,
    example: Tensor,
    dense: list[Tensor],
    ratio: float,
    stages: Any,
    timed: Callable[[Callable[[], Any]], tuple[Any, Any]],
    out: Result,
) -> None:
    """Build its graph, step its pruner, and compare masked with removed. Spoils `model`."""
    import torch_pruning as tp

    def build() -> tuple[Any, int]:
        graph = tp.DependencyGraph().build_dependency(model, example_inputs=(example,))
        return graph, sum(1 for _ in graph.get_all_groups())

    with stages("graph"):
        (graph, groups), seconds = timed(build)
        if seconds.wall < QUICK:
            seconds = min([seconds, *(timed(build)[1] for _ in range(2))], key=lambda t: t.cpu)
        ignored = _ignored_layers(tp, model, graph, dense)
        del graph
    out.update(trace_seconds=seconds.cpu, trace_wall_seconds=seconds.wall, groups=groups)
    failures: list[tuple[Exception, str, Result]] = []
    for with_heads in (True, False) if _heads(model) else (False,):
        found: Result = {}
        try:
            _prune_and_check(Recipe(tp, example, ratio, ignored, with_heads), model, dense, stages, timed, found)
        except Exception as error:  # noqa: BLE001 - perhaps it does better without the hint
            failures.append((error, stages.name, found))
        else:
            out.update(found)
            return
    failure, stages.name, found = failures[0]
    out.update(found)
    raise failure


def _prune_and_check(
    recipe: Recipe, model: nn.Module, dense: list[Tensor], stages: Any, timed: Any, out: Result
) -> None:
    with stages("pruner"):
        pruned = copy.deepcopy(model)
        pruner, seconds = timed(lambda: recipe.pruner(pruned))
    out.update(pruner_seconds=seconds.cpu)
    record = Record()
    with stages("step"):
        step = _recorded_step(pruner, pruned, record)
    steps = [step]
    while len(steps) < 3 and step < QUICK:
        with stages("step again"):
            copied = recipe.pruner(copy.deepcopy(model))
            steps.append(timed(copied.step)[1].cpu)
    out.update(
        step_seconds=statistics.median(steps),
        first_step_seconds=step,
        remove_seconds=record.remove_seconds,
        pruned_groups=record.groups,
        parameters_left=sum(p.numel() for p in pruned.parameters()),
    )
    if not record.groups:
        raise NeedsAnswer("nothing pruned", "")
    _update_static_sizes(pruned, pruner)
    found = _forward_after_pruning(pruned, recipe.example, stages)
    with stages("check"):
        record.mask_(model)
        expected = outputs(model, recipe.example)
        gap = difference(expected, found)
        out.update(difference=gap, effect=difference(dense, expected))
        out["status"], out["detail"] = _verdict(gap, record, model, recipe.example)


def _forward_after_pruning(pruned: nn.Module, example: Tensor, stages: Any) -> list[Tensor]:
    try:
        with stages("forward after pruning"):
            return outputs(pruned, example)
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise NeedsAnswer("forward fails after pruning", f"{type(error).__name__}: {lines[0]}"[:240]) from error


@dataclass(frozen=True)
class Recipe:
    """Its high-level pruner, one step, uniform ratio, magnitude importance: as in the README."""

    tp: Any
    example: Tensor
    ratio: float
    ignored: list[str]
    with_heads: bool

    def pruner(self, model: nn.Module) -> Any:
        """A pruner of a copy of the network."""
        names = ("GroupMagnitudeImportance", "MagnitudeImportance")
        found = [getattr(self.tp.importance, name) for name in names if hasattr(self.tp.importance, name)]
        base = getattr(self.tp.pruner, "BasePruner", None) or self.tp.pruner.MagnitudePruner
        modules = dict(model.named_modules())
        options: dict[str, Any] = {}
        if self.with_heads:
            options["num_heads"] = {linear: attention.num_heads for attention, linear, _ in _attentions(model)}
            options["round_to"] = math.lcm(*_heads(model))
        return base(
            model,
            (self.example,),
            importance=found[0](p=2),
            pruning_ratio=self.ratio,
            ignored_layers=[modules[name] for name in self.ignored],
            **options,
        )


def _ignored_layers(tp: Any, model: nn.Module, graph: Any, dense: list[Tensor]) -> list[str]:
    """Layers that make the output: those of its width, and the roots of groups that reach an output."""
    widths = {t.shape[-1] if t.dim() == 3 else t.shape[1] for t in dense if t.dim() > 1}
    ignored = {
        name
        for name, module in model.named_modules()
        if getattr(module, "out_features", getattr(module, "out_channels", None)) in widths
    }
    output = getattr(getattr(tp, "ops", None), "_OutputOp", None)
    names = {id(module): name for name, module in model.named_modules()}
    if output is not None:
        for group in graph.get_all_groups():
            if any(isinstance(dep.target.module, output) for dep, _ in group):
                root = names.get(id(group[0][0].target.module))
                if root is not None:
                    ignored.add(root)
    return sorted(ignored)


def _heads(model: nn.Module) -> set[int]:
    """The numbers of heads of attention modules."""
    found = {getattr(module, "num_heads", None) for module in model.modules()}
    return {number for number in found if isinstance(number, int) and number > 0}


def _attentions(model: nn.Module) -> Iterator[tuple[Any, nn.Linear, int]]:
    """(attention, projection, parts the projection makes at once) for modules that tell their heads."""
    for module in model.modules():
        if isinstance(getattr(module, "num_heads", None), int):
            for name in _HEADS:
                linear = getattr(module, name, None)
                if isinstance(linear, nn.Linear):
                    yield module, linear, 3 if name == "qkv" else 1


def _update_static_sizes(model: Any, pruner: Any) -> None:
    """Sizes kept as plain numbers that its examples update by hand after a step."""
    if hasattr(model, "hidden_dim") and hasattr(model, "conv_proj"):  # torchvision's vision transformer
        model.hidden_dim = model.conv_proj.out_channels
    heads = getattr(pruner, "num_heads", {})
    for attention, linear, parts in _attentions(model):
        attention.num_heads = heads.get(linear, attention.num_heads)
        width = linear.out_features // parts
        if isinstance(getattr(attention, "head_dim", None), int):
            attention.head_dim = width // attention.num_heads
        if isinstance(getattr(attention, "attn_dim", None), int):
            attention.attn_dim = width


# --- what a step removed ----------------------------------------------------------------------------------------


@dataclass
class Record:
    """The input channels that a step removed, in the numbering of the dense network."""

    groups: int = 0
    remove_seconds: float = 0.0
    norms: set[str] = field(default_factory=set)
    """Kinds of modules in the pruned groups through which a masked channel still acts."""
    gone: dict[str, Tensor] = field(default_factory=dict)
    """By layer: input channels removed."""
    gone_of_parameters: dict[str, tuple[int, Tensor]] = field(default_factory=dict)
    """By bare parameter: axis, and indices removed."""
    _left: dict[str, Tensor] = field(default_factory=dict)

    def add(self, group: Any, model: nn.Module) -> None:
        """Note a group that is about to be pruned."""
        self.groups += 1
        modules = {id(module): name for name, module in model.named_modules()}
        parameters = {id(tensor): name for name, tensor in model.named_parameters()}
        for dep, indices in group:
            target = dep.target.module
            if isinstance(target, nn.Parameter):
                name, axis = parameters[id(target)], dep.target.pruning_dim
                removed = self._original(name, target.shape[axis], indices)
                _, before = self.gone_of_parameters.get(name, (axis, removed[:0]))
                self.gone_of_parameters[name] = (axis, torch.cat([before, removed]))
            elif id(target) in modules:
                self._add_module(modules[id(target)], target, dep.handler.__name__, indices)

    def _add_module(self, name: str, module: nn.Module, handler: str, indices: list[int]) -> None:
        kind = type(module).__name__
        if isinstance(module, (nn.LayerNorm, nn.GroupNorm, nn.MultiheadAttention)) or "RMSNorm" in kind:
            self.norms.add(kind)
        # What has one function for both sides (batch norm, depthwise) calls it by the output's name.
        elif handler == "prune_in_channels":
            width = next(getattr(module, a) for a in ("in_channels", "in_features", "input_size") if hasattr(module, a))
            removed = self._original(name, width, indices)
            self.gone[name] = torch.cat([self.gone.get(name, removed[:0]), removed])

    def _original(self, name: str, width: int, indices: list[int]) -> Tensor:
        """Numbers in the dense network of channels numbered as they stand now."""
        left = self._left.setdefault(name, torch.arange(width))
        now = torch.tensor(sorted({i for i in indices if 0 <= i < len(left)}), dtype=torch.long)
        stays = torch.ones(len(left), dtype=torch.bool)
        stays[now] = False
        self._left[name] = left[stays]
        return left[now]

    @torch.no_grad()
    def mask_(self, model: nn.Module) -> None:
        """Mask in the dense network what the step removed."""
        modules = dict(model.named_modules())
        for name, channels in self.gone.items():
            _zero_inputs_(modules[name], channels)
        parameters = dict(model.named_parameters())
        for name, (axis, indices) in self.gone_of_parameters.items():
            parameters[name].index_fill_(axis, indices, 0)


def _zero_inputs_(layer: Any, channels: Tensor) -> None:
    if isinstance(layer, nn.LSTM):
        for name, weight in layer.named_parameters():
            if name.startswith("weight_ih_l0"):
                weight.index_fill_(1, channels, 0)
    elif getattr(layer, "transposed", False):
        layer.weight.index_fill_(0, channels, 0)
    elif getattr(layer, "groups", 1) > 1:
        width = layer.in_channels // layer.groups
        blocks = layer.weight.view(layer.groups, -1, *layer.weight.shape[1:])
        blocks[channels // width, :, channels % width] = 0
    else:
        layer.weight.index_fill_(1, channels, 0)


def _recorded_step(pruner: Any, model: nn.Module, record: Record) -> float:
    """One step; the seconds that the pruner itself took."""
    seconds = 0.0
    groups = pruner.step(interactive=True)
    while True:
        start = time.process_time()
        group = next(groups, None)
        seconds += time.process_time() - start
        if group is None:
            return seconds
        record.add(group, model)
        start = time.process_time()
        group.prune()
        took = time.process_time() - start
        seconds += took
        record.remove_seconds += took


# --- what a difference means ------------------------------------------------------------------------------------


def _verdict(gap: float, record: Record, model: nn.Module, example: Tensor) -> tuple[str, str]:
    if gap <= TOLERANCE:
        return "exact", ""
    if gap != gap:
        return "outputs not finite", ""
    if record.norms:
        return "differs by nature (norm)", ", ".join(sorted(record.norms))
    with Mixing() as mixing:
        outputs(model, example)
    if mixing.found:
        return "differs, cause unknown", ", ".join(sorted(mixing.found))
    return "WRONG", "output shapes" if gap == float("inf") else f"{gap:.2g} of the largest output"


class Mixing(TorchDispatchMode):
    """Collects operators through which a masked channel may act on others without a weight that reads it."""

    _ALWAYS = ("norm", "softmax", "attention", "bmm", "std", "var", "cumsum", "sort", "topk", "fft")
    _OVER_AXES = ("sum", "mean", "amax", "amin", "max", "min", "logsumexp", "prod", "argmax")

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch lacks the annotation
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if self._mixes(name, args, kwargs or {}):
            self.found.add(name.strip("_"))
        return func(*args, **(kwargs or {}))

    def _mixes(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if "batch_norm" in name:  # in eval mode, statistics of its own mean standardised weights
            return args[3] is None and not name.endswith("no_training")
        if name == "convolution":
            return tuple(args[1].shape[:2]) == (1, 1)  # slides along the channels
        if name in self._OVER_AXES:
            axes = kwargs.get("dim", args[1] if len(args) > 1 else None)
            return not isinstance(axes, Tensor) and not _is_spatial(args[0].dim(), axes)
        return any(part in name for part in self._ALWAYS)


def _is_spatial(rank: int, axes: Any) -> bool:
    """Whether a reduction surely leaves the channels alone."""
    if axes is None or isinstance(axes, bool):
        return False
    numbers = {axis % rank for axis in ([axes] if isinstance(axes, int) else axes)}
    return numbers <= set(range(2, rank)) if rank > 3 else rank == 3 and numbers == {1}
