"""How well energy models predict, on every recorded profile: the table of RESULTS.md and the figures of the README.

    python3 benchmarks/energy_fit.py --out results/energy_fit.json --figures results/figures

For each profile in profiles/ and results/depth/ (with removed branches): ten-fold cross-validated errors of the paper's bilinear model and of ours, at random
widths, at the dense network (in the fit, and held out) and near dense; noise of one measurement; learning curves. For
MobileNet also the paper's Figures 2 and 3: the error over iterations of Adam, of the bilinear model and of perceptrons.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from machine import machine, write_record
from paper_fit import Curves, draw_curves, paper_curves

from ecc.energy.ablation import FitAblation, run_ablation
from ecc.measure import Profile
from ecc.records import to_builtins
from ecc.report.figures import draw_fit

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--iterations", type=int, default=10_000)
    parser.add_argument(
        "--curves-of", type=Path, help="Take the curves of Adam from this record; they do not depend on the model."
    )
    options = parser.parse_args()
    earlier = json.loads(options.curves_of.read_text())["profiles"] if options.curves_of else {}
    found: dict[str, FitAblation] = {}
    curves: dict[str, Curves] = {}
    for path in [
        *sorted((ROOT / "profiles").glob("*/*.profile.gz")),
        *sorted((ROOT / "results/depth").glob("*.profile.gz")),
    ]:
        name = f"{path.parent.name}/{path.name.partition('.')[0]}"
        profile = Profile.load(path)
        found[name] = run_ablation(profile)
        if "mobilenet" in name:
            curves[name] = earlier[name]["paper"] if earlier else paper_curves(profile, options.iterations)
        families = found[name].families
        print(
            f"{name:24} {len(found[name].values)} samples, noise {found[name].noise:.2%}: "
            + ", ".join(f"{kind} {one.mean:.2%} (dense {one.dense_fitted:+.1%})" for kind, one in families.items()),
            flush=True,
        )
        if options.figures and path.is_relative_to(ROOT / "profiles"):
            title = path.name.partition(".")[0]
            draw_fit(found[name], title, options.figures, title)
    if options.figures:
        draw_curves(
            [(name.partition("/")[2], one) for name, one in curves.items()], options.figures / "paper-figures-2-3.svg"
        )
    record = {
        "what": "cross-validated relative errors of energy models on recorded profiles",
        "environment": machine(),
        "profiles": {name: {**to_builtins(one), "paper": curves.get(name, {})} for name, one in found.items()},
    }
    write_record(record, options.out, indent=None)


if __name__ == "__main__":
    main()
