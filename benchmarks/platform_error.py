"""Error of an analytic platform against a profile that was measured on a real device.

    python3 benchmarks/platform_error.py --out results/platform_error.json

The platform h100 is compared with the profile of ResNet-56 that was measured on an NVIDIA H200 (fp32, CUDA graphs, batch
512): the same chip as the H100, with faster memory. No other platform of a current device has a measured profile here.

absolute    computed / measured joules, and seconds, of the dense network
relative    mean error of the cost of a narrower network relative to the dense one, which is what a budget in percent uses
"""

from __future__ import annotations

import argparse
import gzip
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from machine import machine, write_record

from ecc.graph import trace_channels
from ecc.measure.meters.platform import Platform
from ecc.measure.profile import Profile
from ecc.zoo import find_task

ROOT = Path(__file__).resolve().parent.parent
PROFILE = "results/depth/resnet56.profile.gz"


def compare(platform: Platform, made: Profile) -> dict[str, Any]:
    """Absolute and relative errors of a platform on the samples of a profile in which no branch is removed."""
    header = made.header
    example = torch.randn(header.batch, 3, 32, 32)
    graph = trace_channels(find_task("resnet56").model.eval(), example, verify=False)
    full = platform.truth(graph, {})
    found: dict[str, Any] = {"batch": header.batch, "device": header.meter.device}
    for name in ("joules", "seconds"):
        dense = statistics.median(getattr(sample, name) for sample in made.references)
        errors = []
        for sample in made.design_samples:
            if 0 in sample.widths:
                continue
            widths = dict(zip(header.groups, sample.widths, strict=True))
            computed = getattr(platform.truth(graph, widths), name) / getattr(full, name)
            errors.append(abs(computed / (getattr(sample, name) / dense) - 1))
        found[name] = {
            "measured": dense,
            "computed": getattr(full, name),
            "ratio": getattr(full, name) / dense,
            "relative_mean": statistics.fmean(errors),
            "relative_p90": statistics.quantiles(errors, n=10)[-1],
            "samples": len(errors),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "resnet56.profile"
        path.write_bytes(gzip.decompress((ROOT / PROFILE).read_bytes()))
        made = Profile.load(path)
    record = {
        "what": "analytic platform h100 against a profile of ResNet-56 measured on an NVIDIA H200",
        "environment": machine(),
        "profile": PROFILE,
        "platform": "h100",
        **compare(Platform("h100"), made),
    }
    write_record(record, options.out)
    print({name: record[name] for name in ("joules", "seconds")})


if __name__ == "__main__":
    main()
