"""Convert profiles of version 0.1, which was never released, to the format of 0.2, in place.

    python benchmarks/convert_0_1.py profiles/h200/*.profile.gz results/evidence/*.profile.gz

Numbers stay as they are. A converted file is left as it is. Results are converted by `convert_results.py`.
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

from ecc.measure.profile import Profile, ProfileHeader, Sample
from ecc.records import from_json

OLD_VERSION = 2


def convert_profile(path: Path) -> None:
    """Replace a profile by the same one in the new format."""
    data = path.read_bytes()
    lines = [json.loads(line) for line in (gzip.decompress(data) if path.suffix == ".gz" else data).splitlines()]
    if lines[0]["header"]["version"] != OLD_VERSION:
        return
    header = from_json(json.dumps(convert_header(lines[0]["header"])), ProfileHeader, path)
    samples = tuple(from_json(json.dumps(convert_sample(line)), Sample, path) for line in lines[1:])
    Profile(header, samples).save(path)
    assert len(Profile.load(path).samples) == len(samples)


def convert_header(old: dict[str, Any]) -> dict[str, Any]:
    """The header with the new names and without nested parts."""
    network, design = old["network"], dict(old["design"])
    structure = dict(network.get("structure") or network["skeleton"])
    for before, now in (("least_widths", "min_widths"),):
        if before in structure:
            structure[now] = structure.pop(before)
    for before, now in (("rows", "samples"), ("multiple_of", "width_multiple"), ("round_to", "width_multiple")):
        if before in design:
            design[now] = design.pop(before)
    return {
        "created": old["created"],
        "groups": network["groups"],
        "full_widths": network["full_widths"],
        "input_shapes": old["input"]["shapes"],
        "batch": old["input"]["batch"],
        "meter": old["meter"],
        "device_type": old["device"],
        "settings": old["settings"],
        "mode_reason": old.get("mode_reason"),
        "design": design,
        "counter": old["counter"],
        "environment": old["environment"],
        "merged_from": old["merged_from"],
        "structure": structure,
    }


def convert_sample(old: dict[str, Any]) -> dict[str, Any]:
    """A sample with the new names; the reference has no index."""
    return {"index": old["row"], **{name: value for name, value in old.items() if name not in ("row", "reference")}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path)
    for path in parser.parse_args().paths:
        convert_profile(path)


if __name__ == "__main__":
    main()
