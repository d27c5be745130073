"""The networks of `trace_coverage.py`, and how two of their outputs are compared.

Every classification, segmentation, detection and video network of torchvision, the smallest network of each timm
family in `timm_families.json` and a second small one of each family. Weights are random and hide nothing: tensors that are constant (a fresh batch norm, a scale
that starts at zero) get random values, since a branch multiplied by zero would agree with anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

CLASSIFICATION = "torchvision classification"
SEGMENTATION = "torchvision segmentation"
DETECTION = "torchvision detection"
VIDEO = "torchvision video"
TIMM = "timm"
KINDS = (CLASSIFICATION, SEGMENTATION, DETECTION, VIDEO, TIMM)
SMALL = (
    "atto",
    "femto",
    "pico",
    "nano",
    "xxs",
    "xx_small",
    "tiny",
    "_t",
    "_s",
    "small",
    "18",
    "26",
    "s0",
    "b0",
    "b1",
    "50",
)
"""Parts of the names of small timm networks, smallest first."""

FAMILIES = Path(__file__).with_name("timm_families.json")
TOLERANCE = 1e-4  # relative to the largest output: what float32 arithmetic in another order explains
LARGEST_INPUT = 336  # timm networks that take any size and default to more than this get a smaller image


@dataclass(frozen=True)
class Network:
    """One network to measure."""

    kind: str
    name: str
    parameters: int
    """About how many; decides the order of the run and the memory a worker may take."""
    family: str | None = None

    @property
    def key(self) -> str:
        """What a row is found by."""
        return f"{'timm' if self.kind == TIMM else 'torchvision'}/{self.name}"

    @property
    def memory_gib(self) -> float:
        """What a worker may take: a fixed part, and six copies of the weights."""
        return 5 + 6 * 4 * self.parameters / 2**30


def all_networks() -> tuple[list[Network], list[str]]:
    """The networks that can be built here, and the timm names that this timm lacks."""
    networks = list(_torchvision_networks())
    missing = []
    import timm

    for family, entry in json.loads(FAMILIES.read_text(encoding="utf-8")).items():
        if timm.is_model(entry["model"]):
            networks.append(Network(TIMM, entry["model"], entry["parameters"], family))
            networks += [Network(TIMM, name, entry["parameters"], family) for name in _second(family, entry["model"])]
        else:
            missing.append(f"{family}: {entry['model']}")
    return networks, missing


def _second(family: str, first: str) -> list[str]:
    """A second small network of a timm family, judged by its name; none if the family has only one."""
    import timm

    others = [name for name in timm.list_models(module=family) if name != first]
    ranks = {name: next((i for i, part in enumerate(SMALL) if part in name), len(SMALL)) for name in others}
    return sorted(others, key=lambda name: (ranks[name], len(name), name))[:1]


def _torchvision_networks() -> Iterator[Network]:
    from torchvision import models

    modules = {
        CLASSIFICATION: models,
        SEGMENTATION: models.segmentation,
        DETECTION: models.detection,
        VIDEO: models.video,
    }
    for kind, module in modules.items():
        for name in models.list_models(module=module):
            weights = list(models.get_model_weights(name))
            size = weights[0].meta.get("num_params", 50_000_000) if weights else 50_000_000
            yield Network(kind, name, size)


def build(network: Network, seed: int = 0) -> tuple[nn.Module, Tensor]:
    """The network in eval mode with visible random weights, and an example input of batch 1."""
    torch.manual_seed(seed)
    if network.kind == TIMM:
        model, example = _build_timm(network.name)
    else:
        model, example = _build_torchvision(network)
    make_visible_(model, torch.Generator().manual_seed(seed))
    return model, example


def _build_torchvision(network: Network) -> tuple[nn.Module, Tensor]:
    from torchvision import models

    options: dict[str, Any] = {"weights": None}
    if network.kind in (SEGMENTATION, DETECTION):
        options["weights_backbone"] = None
    if network.name in ("googlenet", "inception_v3"):
        options["init_weights"] = False  # its own initialisation takes half a minute and changes nothing here
    size = {
        "inception_v3": [299, 299],
        "r3d_18": [16, 112, 112],
        "mc3_18": [16, 112, 112],
        "r2plus1d_18": [16, 112, 112],
    }
    usual = {DETECTION: [320, 320], VIDEO: [16, 224, 224]}.get(network.kind, [224, 224])
    model = models.get_model(network.name, **options).eval()
    return model, torch.randn(1, 3, *size.get(network.name, usual))


def _build_timm(name: str) -> tuple[nn.Module, Tensor]:
    import timm

    model = timm.create_model(name, pretrained=False).eval()
    config = model.default_cfg
    channels, *size = config["input_size"]
    if max(size) > LARGEST_INPUT and not config.get("fixed_input_size"):
        smaller = torch.randn(1, *(config.get("min_input_size") or (channels, 224, 224)))
        try:
            with torch.inference_mode():
                model(smaller)
        except (RuntimeError, AssertionError, ValueError):  # it does need the larger image
            pass
        else:
            return model, smaller
    return model, torch.randn(1, channels, *size)


@torch.no_grad()
def make_visible_(model: nn.Module, generator: torch.Generator) -> None:
    """Replace constant tensors by random ones around their usual value."""
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.is_floating_point() and tensor.numel() > 1 and bool((tensor == tensor.flatten()[0]).all()):
            around = -0.5 if "mean" in name or "bias" in name else 0.5
            tensor.copy_(around + torch.rand(tensor.shape, generator=generator))


@torch.no_grad()
def outputs(model: nn.Module, example: Tensor) -> list[Tensor]:
    """All tensors that the network returns in eval mode."""
    model.eval()
    torch.manual_seed(0)
    return [leaf for leaf in tree_leaves(model(example.clone())) if isinstance(leaf, Tensor)]


def difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative to the largest value of each output; infinite where shapes differ."""
    if [t.shape for t in expected] != [t.shape for t in found]:
        return math.inf
    worst = 0.0
    for left, right in zip(expected, found, strict=True):
        if not left.is_floating_point() or not left.numel():
            continue
        if not bool(left.isfinite().all()):
            return math.nan  # nothing can be said
        gap = float((left - right).abs().max() / left.abs().max().clamp(min=1e-12))
        worst = max(worst, gap) if math.isfinite(gap) else math.inf
    return worst
