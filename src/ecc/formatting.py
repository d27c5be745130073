"""Numbers for people: SI prefixes, percentages and durations. Every table, page and message uses these."""

from __future__ import annotations

import math

_PREFIXES = (
    (1e12, "T"),
    (1e9, "G"),
    (1e6, "M"),
    (1e3, "k"),
    (1.0, ""),
    (1e-3, "m"),
    (1e-6, "µ"),
    (1e-9, "n"),
    (1e-12, "p"),
)


def si_scale(value: float, unit: str) -> tuple[float, str]:
    """The factor to divide by, and the unit with its prefix: 0.019 J gives (0.001, "mJ").

    Counts (an empty unit) below 1 keep the factor 1.
    """
    for factor, prefix in _PREFIXES:
        if abs(value) >= 0.9995 * factor:  # 0.9996 would be rounded to 1.00
            return factor, prefix + unit
        if factor == 1.0 and not unit:
            break
    return 1.0, unit


def si(value: float, unit: str) -> str:
    """Three digits and a prefix: `24.7 mJ`, `714 M`. Whole counts below 1000 are shown as they are."""
    if not unit and abs(value) < 1000 and value == round(value):
        return f"{value:.0f}"
    factor, shown = si_scale(value, unit)
    return f"{three_digits(value / factor)} {shown}".rstrip()


def three_digits(value: float) -> str:
    """Three significant digits without an exponent: 19.0, 0.00123, 123."""
    if value == 0 or not math.isfinite(value):
        return f"{value:.0f}"
    rounded = float(f"{value:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(abs(rounded))))}f}"


def score_text(score: float, metric: str = "score") -> str:
    """A score; with the metric `perplexity`, the perplexity of a mean log-likelihood per token."""
    if metric != "perplexity":
        return f"{score:.4f}"
    return three_digits(math.exp(min(700.0, -score)))


def percent(share: float, digits: int = 1, *, sign: bool = False) -> str:
    """`49.5 %`; with a sign `+1.0 %`, and `±0.0 %` for what rounds to zero."""
    shown = f"{100 * share:+.{digits}f}"
    if float(shown) == 0:
        shown = f"±{shown[1:]}"
    return f"{shown if sign else shown.replace('±', '').replace('+', '')} %"


def duration(seconds: float) -> str:
    """`45 s`, `12 min` or `3.5 h`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 90 * 60 else f"{seconds / 3600:.1f} h"
