"""The networks of `trace_coverage.py`, and how two of their outputs are compared.

Every classification, segmentation, detection and video network of torchvision, and two small networks of each timm family, which
`timm_families.json` names. Weights are random and hide nothing: tensors that are constant (a fresh batch norm, a scale that
starts at zero) get random values, since a branch multiplied by zero would agree with anything.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torchvision_ops import define_missing_operators

CLASSIFICATION = "torchvision classification"
SEGMENTATION = "torchvision segmentation"
DETECTION = "torchvision detection"
VIDEO = "torchvision video"
TIMM = "timm"
KINDS = (CLASSIFICATION, SEGMENTATION, DETECTION, VIDEO, TIMM)
FAMILIES = Path(__file__).with_name("timm_families.json")
TOLERANCE = 1e-4  # relative to the largest output: what float32 arithmetic in another order explains
DETECTION_INPUT = 256
VIDEO_INPUT = [8, 112, 112]
LARGEST_INPUT = 336  # timm networks that take any size and default to more than this get a smaller image


@dataclass(frozen=True)
class Network:
    """One network to measure."""

    kind: str
    name: str
    parameters: int
    """About how many; decides the order of the run and the memory a worker may take."""
    family: str | None = None
    is_first: bool = True
    """Whether it is the first of its timm family."""

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
    define_missing_operators()
    networks = list(_torchvision_networks())
    missing = []
    import timm

    for family, entry in json.loads(FAMILIES.read_text(encoding="utf-8")).items():
        for one in [entry, *([entry["second"]] if "second" in entry else [])]:
            if timm.is_model(one["model"]):
                networks.append(Network(TIMM, one["model"], one["parameters"], family, one is entry))
            else:
                missing.append(f"{family}: {one['model']}")
    return networks, missing


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
    define_missing_operators()
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
    if network.kind == DETECTION and "ssd" not in network.name:
        options.update(min_size=DETECTION_INPUT, max_size=DETECTION_INPUT)  # not enlarged to 800
        if "rcnn" in network.name:
            options.update(rpn_pre_nms_top_n_test=200, rpn_post_nms_top_n_test=100)  # of 1,000 regions each
    size = {"inception_v3": [299, 299], "s3d": [16, 224, 224]}
    usual = {DETECTION: [DETECTION_INPUT] * 2, VIDEO: VIDEO_INPUT}.get(network.kind, [224, 224])
    with _small_mvit():
        model = models.get_model(network.name, **options).eval()
    return model, torch.randn(1, 3, *size.get(network.name, usual))


@contextmanager
def _small_mvit() -> Iterator[None]:
    """Build MViT for the size of the example: its functions fix 16 x 224 x 224, and the class takes any size."""
    module = import_module("torchvision.models.video.mvit")
    usual = module._mvit
    frames, *size = VIDEO_INPUT
    vars(module)["_mvit"] = lambda **options: usual(**{**options, "spatial_size": (*size,), "temporal_size": frames})
    try:
        yield
    finally:
        vars(module)["_mvit"] = usual


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
