"""The licences of all that ECC needs, extras included: docs/licences.md, and an error if one does not fit Apache-2.0.

    python3 benchmarks/licences.py            # write the page
    python3 benchmarks/licences.py --check    # exit 1 if a licence is unknown or does not fit
    python3 benchmarks/licences.py --json     # facts for programs

Read from the installed distributions, from the requirements in pyproject.toml downwards. What is not installed here,
such as the packages of a GPU, is named without a licence.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.metadata import Distribution, PackageMetadata, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:  # pytest brings it along
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"

# May be used by, and distributed beside, a program under Apache-2.0. We copy none of them into ours.
COMPATIBLE = {
    "MPL-2.0": r"\bMPL[- ]?2|mozilla public license 2",
    "Apache-2.0": r"apache",
    "BSD": r"\bBSD",
    "MIT": r"\bMIT\b(?!-CMU)|\bexpat\b",
    "MIT-CMU": r"\bMIT-CMU\b|\bHPND\b",
    "PSF-2.0": r"\bPSF|python software foundation",
    "ISC": r"\bISC\b",
    "Unlicense": r"\bunlicense\b",
    "Zlib": r"\bzlib\b",
    "CC0-1.0": r"\bCC0\b",
}
FORBIDDEN = re.compile(r"\b[AL]?GPL|general public license|proprietary|non-?commercial", re.IGNORECASE)
EXCEPTIONS = {
    # numpy and scipy name the GPL with the runtime library exception, for libgfortran and libgcc inside their wheels.
    "numpy": "BSD",
    "scipy": "BSD",
}


def requirements(texts: list[str]) -> list[tuple[str, str]]:
    """(name, marker) of each."""
    found = []
    for text in texts:
        match = re.match(r"\s*([A-Za-z0-9._-]+)[^;]*(?:;(.*))?$", text)
        assert match is not None, text
        found.append((re.sub(r"[-_.]+", "-", match[1]).lower(), (match[2] or "").strip()))
    return found


def said_of(one: Distribution) -> str:
    """What a distribution says of its licence: an SPDX expression, its field, or its classifiers."""
    facts = one.metadata
    classifiers = [line for line in facts.get_all("Classifier") or [] if line.startswith("License ::")]
    field = _first(facts, "License").strip().splitlines()
    parts = [_first(facts, "License-Expression"), field[0] if field else "", *classifiers]
    return "; ".join(part for part in parts if part)


def _first(facts: PackageMetadata, name: str) -> str:
    return str((facts.get_all(name) or [""])[0])


def licence_of(name: str, said: str) -> str | None:
    """The short names of the licences that a package names; None if one does not fit, or none is known."""
    if name in EXCEPTIONS:
        return EXCEPTIONS[name]
    if FORBIDDEN.search(said):
        return None
    found = [short for short, sign in COMPATIBLE.items() if re.search(sign, said, re.IGNORECASE)]
    return ", ".join(sorted(found)) or None


def collected() -> dict[str, dict[str, Any]]:
    """Every distribution that is needed, by name: version, licence, and who needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wanted = [(name, "ecc") for name, _ in requirements(project["dependencies"])]
    for extra, texts in project["optional-dependencies"].items():
        wanted += [(name, f"ecc[{extra}]") for name, _ in requirements(texts)]
    found: dict[str, dict[str, Any]] = {}
    while wanted:
        name, user = wanted.pop(0)
        if name in found:
            found[name]["needed_by"] = sorted({*found[name]["needed_by"], user})
            continue
        try:
            one = distribution(name)
        except PackageNotFoundError:
            found[name] = {"version": None, "said": None, "licence": None, "needed_by": [user]}
            continue
        said = said_of(one)
        found[name] = {"version": one.version, "said": said, "licence": licence_of(name, said), "needed_by": [user]}
        below = [(child, marker) for child, marker in requirements(one.requires or []) if "extra ==" not in marker]
        wanted += [(child, name) for child, _ in below]
    return dict(sorted(found.items()))


def page(found: dict[str, dict[str, Any]]) -> str:
    here = {name: one for name, one in found.items() if one["version"]}
    absent = [name for name in found if name not in here]
    rows = [f"| {name} | {one['licence'] or '?'} | {', '.join(one['needed_by'])} |" for name, one in here.items()]
    lines = [
        "# Licences of what ECC needs",
        "",
        "ECC is under Apache-2.0 and copies none of these packages. Written by `benchmarks/licences.py` from what the",
        "installed packages say of themselves; `ecc[...]` are optional extras.",
        "",
        "| package | licence | needed by |",
        "|---|---|---|",
        *rows,
    ]
    if absent:
        lines += ["", f"Not installed where this was written, so not looked at: {', '.join(absent)}."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = collected()
    wrong = [f"{name}: {one['said']!r}" for name, one in found.items() if one["version"] and one["licence"] is None]
    if options.json:
        print(json.dumps(found, indent=1))
    elif not options.check:
        PAGE.write_text(page(found), encoding="utf-8")
        print(f"{len(found)} packages, {sum(one['version'] is None for one in found.values())} of them not installed")
    if wrong:
        sys.exit("unknown, or not to be used with Apache-2.0:\n  " + "\n  ".join(wrong))


if __name__ == "__main__":
    main()
