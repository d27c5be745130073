"""The paper's devices as analytic platforms, beside what the paper measured on them (estimated).

    PYTHONPATH=src python3 benchmarks/paper_devices.py --data DATA --out results/paper_devices.json

The constants of `platform:jetson-tx2` and `platform:gtx-1080-ti` were solved from the dense energies in the paper, so that these
agree is no evidence. AlexNet at random widths is compared with the coefficients that the authors fitted to their own
measurements on the TX2 (`ecc_alexnet_tx2_bilinear_model.json`). The platform's energies of a MAC and of a byte of weights come
from them too: this shows how well two constants explain the 8 layers of their model. Also: the
error of the bilinear and of the default model when they are fitted to the platform, and whether widths alone reach the
tightest budget that the paper names.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import commit, machine, write_record
from scipy.stats import spearmanr

from ecc.energy import fit
from ecc.graph import ChannelGraph, trace_channels
from ecc.measure import find_meter, profile
from ecc.measure.meters.platform import Platform
from ecc.zoo import AlexNet, ERFNet, MobileNetV1

DEVICES = ("gtx-1080-ti", "jetson-tx2")
NETWORKS = {
    "AlexNet": (AlexNet, (1, 3, 224, 224)),
    "MobileNet v1": (MobileNetV1, (1, 3, 224, 224)),
    "ERFNet": (ERFNet, (1, 3, 512, 1024)),
}
JOULES = {
    "AlexNet": {"gtx-1080-ti": 0.2339, "jetson-tx2": 0.0498},
    "MobileNet v1": {"gtx-1080-ti": 0.2877, "jetson-tx2": 0.0487},
    "ERFNet": {"gtx-1080-ti": 1.9708, "jetson-tx2": 1.3213},
}
"""Dense networks, section 5.2 of the paper."""
TIGHTEST = {
    ("MobileNet v1", "jetson-tx2"): 0.0247,
    ("ERFNet", "gtx-1080-ti"): 1.3843,
    ("ERFNet", "jetson-tx2"): 0.8542,
}
"""The tightest budgets that the text and Table 2 name, in joules."""
MIN_WIDTH_RATIO = 0.1
RANDOM = 500
MODEL = "ecc_alexnet_tx2_bilinear_model.json"


def compare(name: str, device: str, samples: int) -> dict[str, Any]:
    """One network on one device."""
    build, shape = NETWORKS[name]
    model, example = build().eval(), torch.randn(shape)
    graph, platform = trace_channels(model, example, verify=False), Platform(device)
    dense = platform.truth(graph, {}).joules
    least = {group.name: max(group.min_width, round(MIN_WIDTH_RATIO * group.width)) for group in graph.prunable}
    with tempfile.TemporaryDirectory() as folder:
        found = profile(
            model, graph, example, find_meter(f"platform:{device}"), Path(folder) / "network.profile", samples=samples
        )
    errors = {family: fit(found, family).errors for family in ("bilinear", "physical")}
    tightest = TIGHTEST.get((name, device))
    return {
        "network": name,
        "device": device,
        "joules_in_paper": JOULES[name][device],
        "joules": dense,
        "least_share": platform.truth(graph, least).joules / dense,
        "tightest_share_in_paper": None if tightest is None else tightest / JOULES[name][device],
        "samples": samples,
        "errors": {family: one.mean for family, one in errors.items() if one is not None},
    }


def authors_joules(published: Mapping[str, Any], widths: list[int]) -> float:
    """Energy of AlexNet by the authors' coefficients, with the widths of its seven hidden layers."""
    full = published["width"]
    shares = [width / whole for width, whole in zip([full[0], *widths, full[-1]], full, strict=True)]
    products = (a * b for a, b in pairwise(shares))
    return float(published["bias"] + sum(c * one for c, one in zip(published["coef"], products, strict=True)))


def compare_alexnet(published: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The platform against the authors' coefficients at random widths, both relative to the dense network."""
    build, shape = NETWORKS["AlexNet"]
    graph: ChannelGraph = trace_channels(build().eval(), torch.randn(shape), verify=False)
    platform, rng = Platform("jetson-tx2"), np.random.default_rng(seed)
    groups = [group for group in graph.prunable if group.width in published["width"][1:-1]]
    if [group.width for group in groups] != [int(width) for width in published["width"][1:-1]]:
        raise SystemExit(f"the groups of AlexNet have the widths {[group.width for group in groups]}")
    dense, theirs = platform.truth(graph, {}).joules, authors_joules(published, [group.width for group in groups])
    ours_relative, theirs_relative = [], []
    for _ in range(RANDOM):
        widths = [max(1, round(group.width * rng.uniform(MIN_WIDTH_RATIO, 1))) for group in groups]
        named = {group.name: width for group, width in zip(groups, widths, strict=True)}
        ours_relative.append(platform.truth(graph, named).joules / dense)
        theirs_relative.append(authors_joules(published, widths) / theirs)
    errors = np.abs(np.array(ours_relative) / np.array(theirs_relative) - 1)
    return {
        "samples": RANDOM,
        "seed": seed,
        "dense": {"authors": theirs, "platform": dense},
        "mean_error": float(errors.mean()),
        "p90_error": float(np.quantile(errors, 0.9)),
        "rank_correlation": float(spearmanr(ours_relative, theirs_relative).statistic),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True, help=f"folder with {MODEL}")
    parser.add_argument("--samples", type=int, default=250, help="of a profile")
    options = parser.parse_args()
    published = json.loads((options.data / MODEL).read_text(encoding="utf-8"))
    record = {
        "what": "analytic platforms of the paper's devices against the energies that the paper and its code publish",
        "environment": machine(commit=commit()),
        "label": "estimated",
        "networks": [compare(name, device, options.samples) for name in NETWORKS for device in DEVICES],
        "alexnet": compare_alexnet(published, seed=0),
    }
    write_record(record, options.out)
    for row in [*record["networks"], record["alexnet"]]:
        print(row)


if __name__ == "__main__":
    main()
