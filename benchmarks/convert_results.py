"""Convert committed results of version 0.1 to the names of version 0.2, in place.

    python3 benchmarks/convert_results.py results/*.json results/evidence/*.json

Keys and a few values are renamed; numbers stay as they are. A file that has the new names is left as it is. Profiles
are converted by `convert_0_1.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

KEYS = {
    "steps": "prune_steps",
    "distill": "kd_weight",
    "temperature": "kd_temperature",
    "even": "uniform_floor",
    "before tuning": "pruned",
    "after tuning": "finetuned",
    "weighed": "measured",
    "weighings": "cost_checks",
    "landed": "within_band",
    "slim_gap": "max_relative_diff",
    "spent": "cost",
    "aims": "targets",
    "descent": "progress",
    "ninetieth": "p90",
    "largest": "max",
    "mean_share": "mean_width_ratio",
    "seconds_per_network": "seconds_per_sample",
    "judged_on": "held_out_images",
    "tested_on": "test_images",
    "prices": "coefficients",
    "resized_seconds": "with_widths_seconds",
    "literal": "admm",
    "proof_seconds": "verify_seconds",
    "frozen_by_proof": "frozen_by_verification",
}
SETTINGS_ONLY = {"steps"}
"""Keys that are renamed inside the settings of a compression alone."""
FORMS = {"steady": "constant LR", "even": "uniform floor", "soon": "early"}
"""Variants of ECC in the evidence."""
VALUES = {
    "phase": ("phase", {"dense": "pretrain", "solve": "prune", "tune": "finetune", "weighing": "cost_check"}),
    "dynamics": ("solver", {"paper": "admm", "pace": "scheduled"}),
    "metric": ("importance", {"adam": "adam_norm"}),
}
"""Keys whose values are renamed: the new key, and the new values."""


def converted(value: Any, inside: str = "") -> Any:
    """A JSON value with the new names; `inside` is the key that it belongs to."""
    if isinstance(value, list):
        return [converted(item, inside) for item in value]
    if not isinstance(value, dict):
        return value
    is_settings = "pretrain_steps" in value or "finetune_steps" in value or inside in FORMS.values()
    found: dict[str, Any] = {}
    for key, item in value.items():
        if key == "falling":
            found["lr_schedule"] = "cosine" if item else "constant"
        elif key in VALUES:
            name, values = VALUES[key]
            found[name] = values.get(item, item)
        elif key == "rows" and isinstance(item, int):
            found["samples"] = item
        elif key == "path" and "near_dense" in value:
            found["uniform"] = item
        elif key == "forms":
            found["variants"] = {FORMS.get(name, name): converted(one, "uniform floor") for name, one in item.items()}
        elif key == "form":
            found["variant"] = FORMS.get(item, item)
        elif key in KEYS and (key not in SETTINGS_ONLY or is_settings):
            found[KEYS[key]] = converted(item, key)
        else:
            found[key] = converted(item, key)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        text = path.read_text(encoding="utf-8")
        new = json.dumps(converted(json.loads(text)), indent=1) + "\n"
        if new != text:
            path.write_text(new, encoding="utf-8")
            print(f"converted {path}")


if __name__ == "__main__":
    main()
