"""The solvers of ECC on E1 to E4, each with both criteria of importance, on one GPU.

    PYTHONPATH=src python3 benchmarks/solvers.py --data DATA --root WORK

Calls `evidence.py` for each experiment with `--variants solvers`: two budgets and three seeds of `solver="scheduled"` and
`solver="admm"` with `importance="taylor"` and `"adam_norm"`, from the same dense networks, without removed branches. Every
result is measured. Run the same command again to resume; it ends when no run is missing. The records are
results/solvers/NAME.json. The last lines printed are paired differences to the default with 95 % intervals.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from evidence_grid import DATA, SOLVER_VARIANTS
from paired import paired_interval

ROOT = Path(__file__).resolve().parent.parent


def command(name: str, options: Any) -> list[str]:
    """The call of `evidence.py` for one experiment."""
    given = {
        "--data": options.data,
        "--root": options.root / name,
        "--out": options.out / f"{name}.json",
        "--methods": "ecc",
        "--budgets": ",".join(options.budgets),
        "--seeds": options.seeds,
        "--settings": json.dumps({"depth": False}),
        "--variants": "solvers",
        "--seconds": options.seconds,
        "--meter": options.meter,
    }
    words = [str(ROOT / "benchmarks" / "evidence.py"), name]
    return [sys.executable, *words, *(str(word) for pair in given.items() for word in pair)]


def differences(record: dict[str, Any], variant: str) -> list[float]:
    """Points of a variant less those of the default after fine-tuning, for each budget and seed that both have."""
    scores: dict[str, dict[tuple[str, int], float]] = {"": {}, variant: {}}
    for row in record["rows"]:
        name = row.get("variant", "")
        if name in scores and "scores" in row:
            scores[name][row["budget"], row["seed"]] = 100 * row["scores"]["finetuned"]
    common = sorted(scores[""].keys() & scores[variant].keys())
    return [scores[variant][place] - scores[""][place] for place in common]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--root", type=Path, required=True, help="working folder; keep it to resume")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "solvers")
    parser.add_argument("--only", nargs="*", default=list(DATA), choices=list(DATA))
    parser.add_argument("--budgets", nargs="*", default=["65%", "50%"])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=3600.0, help="time limit of one experiment")
    parser.add_argument("--meter", default="nvml")
    options = parser.parse_args()
    for name in options.only:
        subprocess.run(command(name, options), check=True)
    for name in options.only:
        record = json.loads((options.out / f"{name}.json").read_text(encoding="utf-8"))
        for variant in SOLVER_VARIANTS:
            if found := differences(record, variant):
                print(f"{name:22} {variant:22} {paired_interval(found)} points, {len(found)} pairs")


if __name__ == "__main__":
    main()
