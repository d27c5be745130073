"""Networks with box code: what lies before it is prunable, and is verified although the boxes are few or none."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ecc.errors import EccWarning
from ecc.graph import ChannelGraph, mask_channels_, slim, trace_channels, verify_graph
from ecc.graph.numerics import Decisions, relative_error, run_without_randomness
from ecc.graph.verification import Run

CLASSES = 5


class Backbone(nn.Module):
    """Two levels of features, the coarse one added to the fine one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.down = nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.fine, self.coarse = nn.Conv2d(8, 10, 1), nn.Conv2d(12, 10, 1)

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.norm(self.stem(x)).relu()
        y = self.coarse(self.down(x).relu())
        return [self.fine(x) + F.interpolate(y, size=x.shape[-2:]), y]


class Head(nn.Module):
    """Scores and boxes of each position, with the same layers for all levels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(10, 9, 3, padding=1)
        self.scores, self.boxes = nn.Conv2d(9, CLASSES, 1), nn.Conv2d(9, 4, 1)

    def forward(self, levels: list[Tensor]) -> tuple[Tensor, Tensor]:
        many = [self.conv(x).relu() for x in levels]
        scores = torch.cat([self.scores(x).permute(0, 2, 3, 1).flatten(1, 2) for x in many], 1)
        boxes = torch.cat([self.boxes(x).permute(0, 2, 3, 1).flatten(1, 2) for x in many], 1)
        return scores.sigmoid(), boxes


def keep_distinct(boxes: Tensor, scores: Tensor, limit: float) -> Tensor:
    """Positions of boxes with the best scores that do not overlap better ones."""
    order, kept = scores.argsort(descending=True), []
    while order.numel():
        best, order = order[0], order[1:]
        kept.append(best)
        low = torch.maximum(boxes[best, :2], boxes[order, :2])
        high = torch.minimum(boxes[best, 2:], boxes[order, 2:])
        order = order[(high - low).clamp(min=0).prod(1) <= limit]
    return torch.stack(kept) if kept else order


class Detector(nn.Module):
    """One stage, or two: the second one classifies regions of the features."""

    def __init__(self, threshold: float, *, two_stages: bool = False) -> None:
        super().__init__()
        self.backbone, self.head, self.threshold = Backbone(), Head(), threshold
        self.region = nn.Sequential(nn.Linear(90, 11), nn.ReLU(), nn.Linear(11, CLASSES)) if two_stages else None

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        levels = self.backbone(torch.stack(images))
        scores, boxes = self.head(levels)
        return [self.found(levels, n, scores[n], boxes[n]) for n in range(len(images))]

    def found(self, levels: list[Tensor], image: int, scores: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        best, labels = scores.max(1)
        keep = best > self.threshold
        best, labels, boxes = best[keep], labels[keep], boxes[keep]
        boxes = torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:].sigmoid()], 1)
        best, order = best.topk(min(20, len(best)))
        labels, boxes = labels[order], boxes[order]
        kept = keep_distinct(boxes, best, 1.0)
        found = {"boxes": boxes[kept], "scores": best[kept], "labels": labels[kept]}
        if self.region is not None:
            found["regions"] = self.classified(levels, image, found["boxes"])
        return found

    def classified(self, levels: list[Tensor], image: int, boxes: Tensor) -> Tensor:
        assert self.region is not None
        is_large = (boxes[:, 2:] - boxes[:, :2]).prod(1) > 1
        pooled = torch.zeros(len(boxes), levels[0].shape[1], 3, 3, dtype=boxes.dtype)
        steps = torch.linspace(0, 1, 3, dtype=boxes.dtype)
        for number, level in enumerate(levels):
            rows = torch.where(is_large == bool(number))[0]
            some = boxes[rows, None, None]
            x = some[..., 0] + (some[..., 2] - some[..., 0]) * steps[None, None]
            y = some[..., 1] + (some[..., 3] - some[..., 1]) * steps[None, :, None]
            grid = torch.stack(torch.broadcast_tensors(x, y), -1)
            items = torch.full((len(rows),), image)
            pooled[rows] = F.grid_sample(level[items], grid, align_corners=False)
        return self.region(pooled.flatten(1))  # type: ignore[no-any-return]


def detector(threshold: float, *, two_stages: bool = False) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    net = Detector(threshold, two_stages=two_stages)
    nn.init.normal_(net.head.boxes.weight, std=3)  # boxes all over the image
    return net.eval(), ([torch.rand(3, 12, 12), torch.rand(3, 12, 12)],)


def prunable(graph: ChannelGraph) -> set[str]:
    return {group.name for group in graph.prunable}


BEFORE_BOXES = {"backbone.stem", "backbone.down", "backbone.coarse", "head.conv"}


@pytest.mark.parametrize("threshold", [0.0, 0.52, 0.99])
def test_layers_before_box_code_are_prunable(threshold: float) -> None:
    net, inputs = detector(threshold)
    graph = trace_channels(net, inputs)
    assert prunable(graph) == BEFORE_BOXES
    assert graph.max_relative_diff is not None
    assert graph.max_relative_diff < 1e-6
    assert {group.name for group in graph.groups if group.frozen} == {"head.scores", "head.boxes"}
    small = copy.deepcopy(net)
    mask_channels_(small, graph, {group.name: list(range(1, group.width, 2)) for group in graph.prunable})
    wanted = small.head(small.backbone(torch.stack(inputs[0])))  # type: ignore[operator]
    slimmed = slim(small, graph)
    found = slimmed.head(slimmed.backbone(torch.stack(inputs[0])))  # type: ignore[operator]
    assert sum(p.numel() for p in slimmed.parameters()) < 0.5 * sum(p.numel() for p in net.parameters())
    assert relative_error(wanted, found) < 1e-5


def test_regions_of_features_are_classified_by_prunable_layers() -> None:
    net, inputs = detector(0.5, two_stages=True)
    assert len(net(*inputs)[0]["boxes"]) > 2  # so that the second stage is verified
    graph = trace_channels(net, inputs)
    assert prunable(graph) == {*BEFORE_BOXES, "region.0"}
    assert graph.max_relative_diff is not None
    tensors = {one.tensor for one in graph["backbone.coarse"].slices}
    assert {"backbone.fine.weight", "head.conv.weight", "region.0.weight"} <= tensors


def test_layers_that_run_on_no_region_are_not_pruned() -> None:
    net, inputs = detector(0.99, two_stages=True)
    graph = trace_channels(net, inputs)
    assert "region.0" not in prunable(graph)
    assert "runs on an empty tensor" in (graph["backbone.coarse"].frozen or "")


@pytest.mark.parametrize("tensor", ["head.scores.weight", "head.boxes.weight"])
@pytest.mark.parametrize("threshold", [0.0, 0.99])
def test_a_wrong_graph_of_a_detector_fails(threshold: float, tensor: str) -> None:
    net, inputs = detector(threshold)
    graph = trace_channels(net, inputs, verify=False)
    group = graph["head.conv"]
    slices = tuple(replace(one, index=one.index.roll(1, 0)) if one.tensor == tensor else one for one in group.slices)
    wrong = replace(graph, groups=tuple(replace(group, slices=slices) if g is group else g for g in graph.groups))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EccWarning)
        found = verify_graph(net, wrong, inputs)
    assert "verification failed: outputs differ" in (found["head.conv"].frozen or "")
    assert "backbone.stem" in prunable(found)


class ChosenMap(nn.Module):
    """Shows the map of the class with the best score, which another input chooses differently."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.maps, self.scores = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1), nn.Linear(8, 6)
        self.last = nn.Conv2d(1, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x).relu()
        scores = self.scores(x.mean((0, 2, 3)))
        chosen = torch.where(scores == scores.max())[0]
        return self.last(self.maps(x)[:, chosen])  # type: ignore[no-any-return]


def test_channels_chosen_by_value_are_not_pruned() -> None:
    torch.manual_seed(0)
    graph = trace_channels(ChosenMap(), torch.randn(2, 3, 8, 8))
    assert prunable(graph) == {"conv"}
    assert graph["maps"].frozen == "`index` selects channels by a computed index"


class Nothing(nn.Module):
    """Returns no row at all, without any decision."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)[:0]  # type: ignore[no-any-return]


def test_empty_outputs_verify_nothing() -> None:
    with pytest.warns(EccWarning, match="outputs of the masked network are empty"):
        graph = trace_channels(Nothing(), torch.randn(2, 4))
    assert graph.max_relative_diff is None


class Best(nn.Module):
    """The two best of three values, of which two differ by a rounding error only."""

    def __init__(self, error: float) -> None:
        super().__init__()
        self.values = nn.Parameter(torch.tensor([1.0, 1.0 + error, 0.5]))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        values, order = (self.values * x).topk(2)
        return values, self.values[order] * torch.tensor([1.0, 2.0, 3.0])[order]


def test_decisions_are_repeated_and_their_values_compared() -> None:
    x = torch.ones(3)
    first, second = Best(1e-6), Best(-1e-6)
    decisions = Decisions()
    one = run_without_randomness(first, x, training=False, decisions=decisions)
    plain = run_without_randomness(second, x, training=False)
    assert relative_error(one.outputs, plain.outputs) > 0.4
    decisions.repeating = True
    other = run_without_randomness(second, x, training=False, decisions=decisions)
    assert relative_error(one.outputs, other.outputs) < 1e-5
    before, after = decisions.compared
    assert [len(before), len(after)] == [1, 1]
    assert 0 < relative_error(before, after) < 1e-5


class Pooled(nn.Module):
    """Classifies given regions with torchvision's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 4, 3)

    def forward(self, x: Tensor, regions: Tensor) -> Tensor:
        pooled = torch.ops.torchvision.roi_align(self.conv(x).relu(), regions, 1.0, 2, 2, 1, False)
        return self.last(pooled.flatten(1))  # type: ignore[no-any-return]


def roi_align(x: Tensor, regions: Tensor, *_: Any) -> Tensor:
    """The mean of each region in each quarter; enough for the rule."""
    return torch.stack([F.adaptive_avg_pool2d(x[int(r[0])], 2) * r[1:].sum() for r in regions])


@pytest.mark.skipif(hasattr(torch.ops.torchvision, "roi_align"), reason="torchvision defines the operator")
def test_pooling_of_regions_keeps_channels() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")
    library.define(
        "roi_align(Tensor input, Tensor rois, float spatial_scale, int pooled_height, int pooled_width, "
        "int sampling_ratio, bool aligned) -> Tensor"
    )
    library.impl("roi_align", roi_align, "CompositeImplicitAutograd")
    regions = torch.tensor([[0, 0, 0, 4, 4], [1, 2, 2, 6, 6], [1, 1, 1, 7, 7.0]])
    graph = trace_channels(Pooled().eval(), (torch.randn(2, 3, 8, 8), regions))
    assert prunable(graph) == {"conv"}
    assert graph.max_relative_diff is not None
    library._destroy()


class Pasted(nn.Module):
    """Python code reads the sizes of boxes, and runs as often as there are boxes."""

    def __init__(self, *, last: bool = False) -> None:
        super().__init__()
        self.backbone, self.boxes = Backbone(), nn.Conv2d(10, 2, 1)
        self.last = nn.Conv2d(10, 3, 1) if last else None

    def forward(self, x: Tensor) -> Any:
        level = self.backbone(x)[0]
        sizes = 4 + 8 * self.boxes(level).sigmoid().flatten(2)[0, :, :3].T
        images = []
        for box in sizes:
            image = torch.zeros(16, 16, dtype=x.dtype)
            height, width = int(box[0]), int(box[1])
            for _ in range(height % 3):  # other operators for other values
                box = box * 2
            image[:height, :width] = box.mean()
            images.append(image)
        return torch.stack(images) if self.last is None else (torch.stack(images), self.last(level))


def test_code_that_reads_values_freezes_only_what_it_uses() -> None:
    torch.manual_seed(0)
    net = Pasted().eval()
    nn.init.normal_(net.boxes.weight, std=2)
    graph = trace_channels(net, torch.rand(1, 3, 12, 12))
    assert prunable(graph) == {"backbone.stem", "backbone.down", "backbone.coarse"}
    assert "Python code reads" in (graph["boxes"].frozen or "")


def test_layers_after_code_that_reads_values_are_not_pruned() -> None:
    torch.manual_seed(0)
    net = Pasted(last=True).eval()
    nn.init.normal_(net.boxes.weight, std=2)
    graph = trace_channels(net, torch.rand(1, 3, 12, 12))
    assert prunable(graph) == {"backbone.stem", "backbone.down"}
    assert "runs after Python code reads values" in (graph["backbone.coarse"].frozen or "")


def test_a_network_that_decides_is_compared_with_its_decisions_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[bool] = []
    run = Run.of

    def counted(self: Run, *args: Any, **options: Any) -> Any:
        runs.append(options.get("decisions") is not None)
        return run(self, *args, **options)

    monkeypatch.setattr(Run, "of", counted)
    net, inputs = detector(0.99)  # no box, so that outputs are empty and only what decides can be compared
    graph = trace_channels(net, inputs)
    assert prunable(graph) == BEFORE_BOXES
    assert runs[:4] == [False, False, True, True]  # the first comparison finds out
    assert len(runs) > 8
    assert all(runs[4:])
