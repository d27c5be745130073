"""How well energy models predict, on every recorded profile: the table of RESULTS.md and the figures of the README.

    python3 benchmarks/energy_fit.py --out results/energy_fit.json --figures results/figures

For each profile in profiles/ and results/depth/ (with removed branches): ten-fold cross-validated errors of the
paper's bilinear model and of ours, at random widths, at the dense network (in the fit, and held out) and near dense; noise
of one measurement; learning curves. For profiles of at least 200 samples also the error from 100 of them on all others,
the mean over random choices that contain the ends of the range. Where an error is above its goal, what the held-out errors
depend on (residual_variance.py). For MobileNet also the paper's Figures 2 and 3: the error over iterations of Adam, of the
bilinear model and of perceptrons.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from machine import machine, write_record
from paper_fit import Curves, draw_curves, paper_curves
from residual_variance import Residuals, residual_variance

from ecc.energy.ablation import FitAblation, run_ablation
from ecc.energy.families import physical
from ecc.energy.regression import samples_from_profile
from ecc.measure import Profile
from ecc.records import to_builtins
from ecc.report.figures import draw_fit

ROOT = Path(__file__).resolve().parent.parent
PAPER_GOAL, DEPTH_GOAL = 0.02, 0.03
FEW, MANY, CHOICES = 100, 200, 4


def error_from_few(profile: Profile) -> float | None:
    """Mean error of models fitted to `FEW` samples on all others; None for a short profile."""
    samples = samples_from_profile(profile)
    if len(samples) < MANY:
        return None
    ends, others = np.flatnonzero(samples.range_ends), np.flatnonzero(~samples.range_ends)
    found = []
    for seed in range(CHOICES):
        order = np.random.default_rng(seed).permutation(others)
        chosen, rest = np.concatenate([ends, order[: FEW - len(ends)]]), samples.take(order[FEW - len(ends) :])
        predicted = physical(samples.take(chosen)).at(rest.widths)
        found.append(float(np.abs(predicted / rest.values - 1).mean()))
    return float(np.mean(found))


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
    few: dict[str, float | None] = {}
    residuals: dict[str, Residuals] = {}
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
        few[name] = error_from_few(profile)
        if families["physical"].mean > (DEPTH_GOAL if name.startswith("depth/") else PAPER_GOAL):
            residuals[name] = residual_variance(samples_from_profile(profile))
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
        "choices_of_100": CHOICES,
        "profiles": {
            name: {
                **to_builtins(one),
                "paper": curves.get(name, {}),
                "from_100": few[name],
                "residuals": residuals.get(name),
            }
            for name, one in found.items()
        },
    }
    write_record(record, options.out, indent=None)


if __name__ == "__main__":
    main()
