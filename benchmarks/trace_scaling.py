"""How the time of tracing and slimming grows with depth and width.

    PYTHONPATH=src python3 benchmarks/trace_scaling.py --out trace_scaling.json

Networks: plain chains of convolution, batch norm and ReLU, and residual networks (two convolutions a block, identity
shortcuts). Depth is the number of 3x3 convolutions: 10 to 1,000 at width 64; width is that of every layer: 64 to
8,192 at depth 10. Weights are on the meta device where they would take more than `--weights-gib`; there `slim`, which
looks at values, is left out.

Each point has a process of its own, with one thread, warmed up on a tiny network. Process seconds are medians of
three, garbage collection held back as `timeit` does: `trace_channels` without verification, `with_widths` to half widths on
the meta device, `slim` with a random half of the units dead (it copies weights, which grow with the square of the
width), `ChannelGraph.save` and `load`. Also: the size of the file, and how far resident memory grew at its peak during
the traces. A straight line through the last decade in log-log gives the exponent of the growth (1 is linear). Beside
the JSON file goes a plot.
"""

from __future__ import annotations

import argparse
import gc
import math
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import altair as alt
import torch
from machine import machine, write_record
from plotting import in_rows, save_figure
from torch import Tensor, nn

import ecc
from ecc.report.chart_parts import make_chart, x_axis, y_axis

REPEATS = 3
DEPTHS = (10, 20, 50, 100, 200, 500, 1000)
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192)
TIMES = ("trace_seconds", "with_widths_seconds", "slim_seconds", "save_seconds", "load_seconds")
FITTED = (*TIMES, "file_bytes", "peak_memory_bytes")
Point = dict[str, Any]


def conv_bn(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs))


class Residual(nn.Module):
    """Two convolutions around which the input is added."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = conv_bn(width, width), conv_bn(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        return torch.relu(x + self.second(torch.relu(self.first(x))))


def plain(depth: int, width: int) -> nn.Module:
    """Convolution, batch norm and ReLU, `depth` times."""
    layers = [nn.Sequential(conv_bn(3 if i == 0 else width, width), nn.ReLU()) for i in range(depth)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def residual(depth: int, width: int) -> nn.Module:
    """A stem and as many blocks as make `depth` convolutions."""
    blocks = [Residual(width) for _ in range((depth - 1) // 2)]
    return nn.Sequential(conv_bn(3, width), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


FAMILIES: dict[str, Callable[[int, int], nn.Module]] = {"plain": plain, "residual": residual}


class Res2Block(nn.Module):
    """Convolutions on quarters of the channels, each of which adds the one before, as in Res2Net."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.split, self.join = conv_bn(width, width), conv_bn(width, width)
        self.parts = nn.ModuleList(conv_bn(width // 4, width // 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Add to the input."""
        first, *others = torch.relu(self.split(x)).chunk(4, 1)
        done = [first]
        for part, one in zip(self.parts, others, strict=True):
            done.append(torch.relu(part(one + done[-1])))
        return torch.relu(x + self.join(torch.cat(done, 1)))


class LSTMs(nn.Module):
    """LSTMs, one after the other."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(count))
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Class scores from the last step."""
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x[:, -1])  # type: ignore[no-any-return]  # torch has no type here


BLOCKS = (16, 32, 64)
"""Numbers of blocks of the networks below."""


def blocks_of(kind: str, count: int) -> tuple[nn.Module, Tensor]:
    """A network of `count` blocks, and an input."""
    if kind == "LSTMs":
        return LSTMs(count, 32).eval(), torch.randn(1, 6, 32)
    blocks = [Res2Block(32) for _ in range(count)]
    model = nn.Sequential(conv_bn(3, 32), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
    return model.eval(), torch.randn(1, 3, 16, 16)


def measure_blocks(point: tuple[str, int]) -> Point:
    """Seconds to trace one network of blocks, in a process of its own."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind, count = point
    small, example = blocks_of(kind, 2)
    ecc.trace_channels(small, example, verify=False)  # late imports are nobody's cost
    model, example = blocks_of(kind, count)
    seconds: list[float] = []
    for _ in range(REPEATS):
        graph = _timed(lambda: ecc.trace_channels(model, example, verify=False), seconds)
    return {
        "kind": kind,
        "blocks": count,
        "groups": len(graph.groups),
        "prunable": len(graph.prunable),
        "trace_seconds": statistics.median(seconds),
    }


def measure(family: str, depth: int, width: int, weights_gib: float) -> Point:
    """All numbers of one point."""
    on_meta = 4 * 9 * depth * width**2 > weights_gib * 2**30
    with torch.device("meta" if on_meta else "cpu"):
        model = FAMILIES[family](depth, width).eval()
    image = torch.randn(1, 3, 16, 16)
    seconds: dict[str, list[float]] = {name: [] for name in TIMES}
    peaks = []
    for _ in range(REPEATS):
        before = reset_peak_memory()
        graph = _timed(lambda: ecc.trace_channels(model, image, verify=False), seconds["trace_seconds"])
        if before is not None:
            peaks.append(status("VmHWM") - before)
        _time_the_rest(model, graph, seconds)
    return {
        "family": family,
        "depth": depth,
        "width": width,
        "meta_weights": on_meta,
        "groups": len(graph.groups),
        "parameters": int(graph.parameters()),
        "file_bytes": _file_bytes(graph),
        "peak_memory_bytes": max(peaks, default=None),
        **{name: statistics.median(values) if values else None for name, values in seconds.items()},
    }


def _time_the_rest(model: nn.Module, graph: ecc.ChannelGraph, seconds: dict[str, list[float]]) -> None:
    """Cut, save and load."""
    half = {g.name: max(1, g.width // 2) for g in graph.prunable}
    _timed(lambda: ecc.with_widths(model, graph, half, device="meta"), seconds["with_widths_seconds"])
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.json"
        _timed(lambda: graph.save(file), seconds["save_seconds"])
        _timed(lambda: ecc.ChannelGraph.load(file), seconds["load_seconds"])
    if not any(p.is_meta for p in model.parameters()):
        masked = ecc.with_widths(model, graph, {})
        dead = {g.name: torch.randperm(g.width)[: g.width // 2] for g in graph.prunable}
        ecc.graph.mask_channels_(masked, graph, dead)
        _timed(lambda: ecc.slim(masked, graph), seconds["slim_seconds"])


def _file_bytes(graph: ecc.ChannelGraph) -> int:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "graph.json"
        graph.save(file)
        return file.stat().st_size


def _timed(function: Callable[[], Any], seconds: list[float]) -> Any:
    gc.collect()
    gc.disable()
    try:
        start = time.process_time()
        result = function()
        seconds.append(time.process_time() - start)
    finally:
        gc.enable()
    return result


def in_own_process(point: tuple[str, int, int, float]) -> Point:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    measure(point[0], 5, 8, 1)  # late imports are nobody's cost
    return measure(*point)


def reset_peak_memory() -> int | None:
    """Start the peak of resident memory anew; what is resident now, or None where the system cannot say."""
    try:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        return status("VmRSS")
    except OSError:
        return None


def status(field: str) -> int:
    """A size from the process's status, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))


def slope(sizes: list[int], values: list[float | None]) -> float | None:
    """The exponent over the last decade: least squares through the points in log-log."""
    pairs = [(math.log(s), math.log(v)) for s, v in zip(sizes, values, strict=True) if v]
    pairs = [(x, y) for x, y in pairs if x >= pairs[-1][0] - math.log(10) - 1e-9]
    if len(pairs) < 2:
        return None
    mean_x, mean_y = (statistics.fmean(column) for column in zip(*pairs, strict=True))
    over = sum((x - mean_x) * (y - mean_y) for x, y in pairs)
    return over / sum((x - mean_x) ** 2 for x, _ in pairs)


def slopes(points: list[Point]) -> list[Point]:
    """The exponents of every sweep."""
    found = []
    for family in FAMILIES:
        for axis, fixed in (("depth", "width"), ("width", "depth")):
            sweep = _sweep(points, family, axis, fixed)
            if len(sweep) > 1:
                sizes = [point[axis] for point in sweep]
                exponents = {name: slope(sizes, [point[name] for point in sweep]) for name in FITTED}
                found.append({"family": family, "over": axis, **exponents})
    return found


def _sweep(points: list[Point], family: str, axis: str, fixed: str) -> list[Point]:
    """The points along one axis, the other at its smallest."""
    mine = [point for point in points if point["family"] == family]
    least = min((point[fixed] for point in mine), default=0)
    return sorted((point for point in mine if point[fixed] == least), key=lambda point: point[axis])


def print_table(points: list[Point], exponents: list[Point]) -> None:
    print(f"{'':10}{'depth':>6}{'width':>6}{'trace ms':>10}{'with_widths ms':>11}{'slim ms':>9}", end="")
    print(f"{'save ms':>9}{'load ms':>9}{'file kB':>9}{'peak MB':>9}")
    for point in points:
        cells = [_cell(point[name], 1e3) for name in TIMES]
        cells += [_cell(point["file_bytes"], 1e-3), _cell(point["peak_memory_bytes"], 1e-6)]
        print(f"{point['family']:10}{point['depth']:>6}{point['width']:>6}", end="")
        print("".join(f"{cell:>{width}}" for cell, width in zip(cells, (10, 11, 9, 9, 9, 9, 9), strict=True)))
    print("\nexponent over the last decade (1 = linear)")
    for row in exponents:
        cells = [f"{name.removesuffix('_seconds')} {_cell(row[name], 1, 2)}" for name in FITTED]
        print(f"{row['family']:10}over {row['over']:6} {', '.join(cells)}")


def _cell(value: float | None, factor: float, digits: int = 1) -> str:
    return "-" if value is None else f"{value * factor:.{digits}f}"


def plot(points: list[Point], out: Path) -> Path:
    """Seconds over depth and over width, one panel each."""
    panels = []
    for axis, fixed in (("depth", "width"), ("width", "depth")):
        rows = [
            {"size": point[axis], "seconds": point[name], "what": name.removesuffix("_seconds"), "family": family}
            for family in FAMILIES
            for point in _sweep(points, family, axis, fixed)
            for name in ("trace_seconds", "with_widths_seconds", "slim_seconds")
            if point[name]
        ]
        log = alt.Scale(type="log")
        x, y = x_axis("size", axis, scale=log), y_axis("seconds", "CPU seconds, one thread", scale=log)
        line = make_chart(rows).mark_line(point=True)
        panels.append(line.encode(x, y, color="what:N", strokeDash="family:N").properties(width=400, height=280))
    return save_figure(in_rows(panels, 2), out.with_suffix(".svg"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--depths", type=int, nargs="*", default=DEPTHS, help="at the smallest width")
    parser.add_argument("--widths", type=int, nargs="*", default=WIDTHS, help="at the smallest depth")
    parser.add_argument("--weights-gib", type=float, default=0.5, help="real weights up to this size")
    parser.add_argument("--jobs", type=int, default=1, help="points measured at a time")
    args = parser.parse_args()
    sizes = [(depth, min(args.widths)) for depth in args.depths]
    sizes += [(min(args.depths), width) for width in args.widths if width != min(args.widths)]
    todo = [(family, depth, width, args.weights_gib) for family in FAMILIES for depth, width in sizes]
    points: list[Point] = []
    with multiprocessing.get_context("spawn").Pool(args.jobs, maxtasksperchild=1) as pool:
        for point in pool.imap(in_own_process, todo, chunksize=1):
            points.append(point)
            print(f"{point['family']} depth {point['depth']} width {point['width']}: ", end="")
            print(f"{point['trace_seconds']:.3f} s", flush=True)
        blocks = pool.map(measure_blocks, [(kind, count) for kind in ("Res2 blocks", "LSTMs") for count in BLOCKS], 1)
    exponents = slopes(points)
    data = {
        "environment": machine(),
        "exponents": exponents,
        "points": points,
        "blocks": blocks,
    }
    write_record(data, args.out)
    print()
    print_table(points, exponents)
    print(f"\nwrote {args.out.name} and {plot(points, args.out).name}")


if __name__ == "__main__":
    main()
