"""Words of version 0.1 that were private to the project do not come back, neither in names nor in text."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

RETIRED = {
    "weigh": "measure",
    "weighed": "measured",
    "weighing": "measurement, cost check",
    "weighings": "measurements, cost checks",
    "weighs": "measures",
    "rival": "baseline",
    "rivals": "baselines",
    "landing": "budget controller",
    "landed": "within the band",
    "ladder": "ranking",
    "rungs": "sorted channels",
    "silenced": "masked",
    "skeleton": "structure",
    "lattice": "width remainders",
    "proof": "verification",
    "proven": "verified",
    "prices": "coefficients",
    "priced": "fitted",
    "sacred": "always kept",
    "users_code": "user code",
}
"""Retired word: what to write instead, in names and in text."""

RETIRED_NAMES = RETIRED | {
    "told": "described, reported",
    "tells": "says, reports",
    "judged": "evaluated",
    "settled": "fixed",
    "asked": "config, requested",
    "aims": "targets",
    "rooms": "packages",
    "slots": "channel ids",
    "silent": "masked",
    "prove": "verify",
    "proves": "verifies",
    "twin": "model copy",
    "harm": "importance",
    "evenly": "uniformly",
    "steadily": "at a constant rate",
}
"""Ordinary words of English that are no names of functions, classes or fields."""

PHRASES = ("on the scales", "9 in 10", "nine in ten", "lives and dies", "live and die", "by the model's word")


def python_files() -> list[Path]:
    folders = ("src", "benchmarks", "examples")
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def words_of(name: str) -> list[str]:
    """The words of an identifier: `RunSummary` and `run_summary` are `run`, `summary`."""
    return re.findall(r"[a-z]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Names, strings and comments of a Python file, with their line."""
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        if tokenize.tok_name[token.type] in ("NAME", "STRING", "COMMENT", "FSTRING_MIDDLE"):
            yield token.start[0], token.string


def found_in(text: str) -> list[str]:
    retired = RETIRED_NAMES if text.isidentifier() else RETIRED
    return sorted(set(words_of(text)) & retired.keys()) + [phrase for phrase in PHRASES if phrase in text.lower()]


def complaints(path: Path, lines: Iterator[tuple[int, str]]) -> list[str]:
    where = path.relative_to(ROOT)
    return [
        f"{where}:{number}: {word!r}: write {RETIRED_NAMES.get(word, 'it plainly')}"
        for number, text in lines
        for word in found_in(text)
    ]


def test_python_files_use_the_vocabulary_of_the_field() -> None:
    files = python_files()
    assert len(files) > 200
    assert [found for path in files for found in complaints(path, texts_of(path))] == []


def test_pages_use_the_vocabulary_of_the_field() -> None:
    pages = [path for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")] if path.name != "CHANGELOG.md"]
    assert len(pages) > 20
    for path in pages:
        assert complaints(path, enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)) == []
