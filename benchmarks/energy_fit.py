"""How well energy models predict, on every recorded profile: the table of RESULTS.md and the figures of the README.

    python3 benchmarks/energy_fit.py --out results/energy_fit.json --figures results/figures

For each profile in profiles/ and results/depth/ (with removed branches): ten-fold cross-validated errors of the paper's bilinear model and of ours, at random
widths, at the dense network (in the fit, and held out) and near dense; noise of one measurement; learning curves. For
MobileNet also the paper's Figures 2 and 3: the error over iterations of Adam, of the bilinear model and of perceptrons.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from machine import machine, write_record

from ecc.energy.ablation import FitAblation, run_ablation
from ecc.measure import Profile
from ecc.records import to_builtins
from ecc.report.figures import draw_fit, draw_paper

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--iterations", type=int, default=10_000)
    options = parser.parse_args()
    found: dict[str, FitAblation] = {}
    for path in [
        *sorted((ROOT / "profiles").glob("*/*.profile.gz")),
        *sorted((ROOT / "results/depth").glob("*.profile.gz")),
    ]:
        name = f"{path.parent.name}/{path.name.partition('.')[0]}"
        profile = Profile.load(path)
        found[name] = run_ablation(profile, iterations=options.iterations if "mobilenet" in name else 0)
        families = found[name].families
        print(
            f"{name:24} {len(found[name].values)} samples, noise {found[name].noise:.2%}: "
            + ", ".join(f"{kind} {one.mean:.2%} (dense {one.dense_fitted:+.1%})" for kind, one in families.items()),
            flush=True,
        )
        if options.figures and path.is_relative_to(ROOT / "profiles"):
            title = path.name.partition(".")[0]
            draw_fit(replace(found[name], paper={}), title, options.figures, title)
    if options.figures:
        chosen = [(name.partition("/")[2], one) for name, one in found.items() if "mobilenet" in name]
        draw_paper(chosen, options.figures / "paper-figures-2-3.svg")
    record = {
        "what": "cross-validated relative errors of energy models on recorded profiles",
        "environment": machine(),
        "profiles": to_builtins(found),
    }
    write_record(record, options.out, indent=None)


if __name__ == "__main__":
    main()
