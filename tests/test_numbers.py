"""Every number that the README and RESULTS.md tell comes from a file in results/, or has a reason to be typed.

RESULTS.md is written by a script, and test_results.py checks that it is what the files say. So the script itself must
type no number: its text is searched here. The README is typed; a number in one of its paragraphs or rows of a table
must stand in the JSON file, or in the section of RESULTS.md, that the paragraph or row links to.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

import ecc
from ecc.methods.ecc.importance import IMPORTANCES
from ecc.methods.registry import METHODS

ROOT = Path(__file__).resolve().parent.parent
WRITERS = (
    "write_results.py",
    "result_tables.py",
    "evidence_page.py",
    "evidence_text.py",
    "evidence_tables.py",
    "gpu_table.py",
    "profile_table.py",
)

NUMBER = re.compile(r"(?<![\w.#/-])\d+(?:,\d{3})*(?:\.\d+)*(?:e-?\d+)?")
WORD = re.compile(r"\b(?:two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half|tenth)\b", re.IGNORECASE)
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```\s*?$", re.MULTILINE | re.DOTALL)

IN_README = {
    "CVPR 2019": "the paper's year",
    "Python 3.10": "what pyproject.toml asks for",
    "November 2026": "when the others were read",
    f"ECC {ecc.__version__.rpartition('.')[0]} ": "this version",
    "ModelOpt 0.47": "the version that was read",
    "fasterai 0.4.1": "the version that was read",
    "September 2025": "when it was released",
    "September 2026": "when they were released",
    f"{len(IMPORTANCES)} metrics; {len(METHODS) - 1} rival methods": "counted in the code, just here",
    "NNCF 3": "the version that was read",
    "Apache-2.0": "the licence",
}
IN_THE_WRITERS = {
    "two aligned windows of 20 s": "how window_accuracy.py makes its reference",
    "of the child's at 0.5 s": "which windows the goal is about",
    "Ten-fold": "how ecc.energy cross-validates",
    "lossy 128 px copy": "what the packed file holds",
    "multiples of eight, or four where": "CUTS of floors.py",
    "more than cutting it in half": "a row and a column of its table",
    "solve of 20,000 steps": "SOLVE_STEPS of step_time.py",
    "half of all weights": "one of the two layers of each block of step_time.py's MlpStack",
    "half of them just before": "how reliability.py kills",
    "about half their widths": "how export_roundtrip.py cuts",
    "widths in multiples of 8 and with": "export_roundtrip.py cuts in both ways",
    "40 % of the units": "how trace_coverage.py cuts",
    "agree to 1e-4": "TOLERANCE of coverage_networks.py",
    "9 in 10": "the name of a quantile",
    "MACs, 8s": "the name of a column",
    "latency, 8s": "the name of a column",
    "MACs, 1s": "the name of a column",
    "latency, 1s": "the name of a column",
    "(1 is linear)": "what an exponent means",
    "top-1 of 1,000": "ImageNet's classes",
    "top-5 of 1,000": "ImageNet's classes",
    "top-1 of ten": "Imagenette's classes",
    "CPU milliseconds at half widths": "how resize_speed.py cuts",
    "100 %": "the dense network, of itself",
    "paper's Table 2": "its number there",
    "Algorithm 1": "its number in the paper",
}
KEYS = {"0.5", "8", "1"}
"""Of the JSON files: strings that are looked up, and told nowhere."""


# ---------------------------------------------------------------- what is typed in the scripts


def typed(source: str) -> Iterator[str]:
    """Every text in a script but docstrings, formats, and the words for counts."""
    tree = ast.parse(source)
    untold: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and isinstance(node.body[0], ast.Expr):
            untold.add(node.body[0].value)
        elif isinstance(node, ast.FormattedValue) and node.format_spec:
            untold.update(ast.walk(node.format_spec))
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "WORDS":
            untold.update(ast.walk(node.value))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in untold:
            yield node.value


def left_over(text: str, allowed: Iterable[str], *patterns: re.Pattern[str]) -> list[str]:
    """Numbers in a text that no allowed phrase holds."""
    joined = " ".join(text.split())
    for phrase in allowed:
        joined = joined.replace(phrase, " ")
    return [found for pattern in patterns for found in pattern.findall(joined)]


@pytest.mark.parametrize("name", WRITERS)
def test_the_scripts_type_no_number(name: str) -> None:
    source = (ROOT / "benchmarks" / name).read_text(encoding="utf-8")
    texts = [text for text in typed(source) if text not in KEYS]
    assert texts
    assert [found for text in texts for found in left_over(text, IN_THE_WRITERS, NUMBER, WORD)] == []


def test_the_scripts_still_need_what_is_allowed_them() -> None:
    sources = [(ROOT / "benchmarks" / name).read_text(encoding="utf-8") for name in WRITERS]
    texts = [" ".join(text.split()) for source in sources for text in typed(source)]
    assert [phrase for phrase in IN_THE_WRITERS if not any(phrase in text for text in texts)] == []


def test_a_typed_number_is_caught() -> None:
    source = '"""Of 3."""\ncount = 7\ntext = f"""missed by two of four; {1.5:.2f} and 1.03\nof 20 s{count}"""\n'
    texts = list(typed(source))
    assert [found for text in texts for found in left_over(text, (), NUMBER, WORD)] == ["two", "four", "1.03", "20"]
    assert left_over("windows of\n20 s", ["windows of 20 s"], NUMBER) == []


# ---------------------------------------------------------------- what the README tells


def told_by(value: Any) -> Iterator[float]:
    """All numbers in a JSON value, but those about the machine."""
    if isinstance(value, Mapping):
        yield from (one for key, item in value.items() if key != "environment" for one in told_by(item))
    elif isinstance(value, list):
        yield from (one for item in value for one in told_by(item))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)


def is_in(number: str, values: Iterable[float], *, percent: bool) -> bool:
    """Whether a number is one of the values, as they round to its digits; whole numbers must be met exactly."""
    digits, wanted = len(number.partition(".")[2]), float(number.replace(",", ""))
    if percent:
        return any(round(100 * value, digits) == wanted for value in values)
    return any((round(value, digits) if digits else value) == wanted for value in values)


def section_of(page: str, anchor: str) -> str:
    """The part of a page under the heading that an anchor names; all of it without one."""
    if not anchor:
        return page
    for part in re.split(r"^(?=#{2,3} )", page, flags=re.MULTILINE):
        heading = part.partition("\n")[0].lstrip("# ").lower()
        if re.sub(r"[^\w -]", "", heading).replace(" ", "-") == anchor:
            return part
    return ""


def untold(page: str, root: Path, allowed: Iterable[str]) -> list[str]:
    """Numbers of a page that the files and sections it links to do not tell, each with the paragraph's beginning."""
    complaints = []
    for part in re.split(r"\n\s*\n|\n(?=[|-])", FENCE.sub("", page)):
        text = LINK.sub("]", part)
        for phrase in allowed:
            text = " ".join(text.split()).replace(phrase, " ")
        links = [link.partition("#") for link in LINK.findall(part)]
        records = [name for name, _, _ in links if name.startswith("results/") and name.endswith(".json")]
        values = [one for name in records for one in told_by(json.loads((root / name).read_text(encoding="utf-8")))]
        sections = [
            section_of((root / name).read_text(encoding="utf-8"), anchor)
            for name, _, anchor in links
            if name in ("RESULTS.md", "results/evidence.md")
        ]
        tokens = {number for section in sections for number in NUMBER.findall(section)}
        for found in NUMBER.finditer(text):
            percent = text[found.end() :].lstrip().startswith("%")
            if found[0] not in tokens and not is_in(found[0], values, percent=percent):
                complaints.append(f"{found[0]} in {part.strip()[:60]!r}")
    return complaints


def test_every_number_of_the_readme_has_its_file() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    rival = json.loads((ROOT / "results/trace_coverage.json").read_text(encoding="utf-8"))["environment"]
    measured = f"Torch-Pruning {rival['torch_pruning']}"  # the version that was run
    assert untold(page, ROOT, [*IN_README, measured]) == []


def test_the_readme_still_needs_what_is_allowed_it() -> None:
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    assert [phrase for phrase in IN_README if phrase not in page] == []


def test_the_picture_of_the_readme_is_of_its_file() -> None:
    """matplotlib leaves each text of a picture in it as a comment."""
    run = json.loads((ROOT / "results/compress_imagenette.json").read_text(encoding="utf-8"))
    energy, scores = run["summary"]["budgets"]["energy"], run["summary"]["scores"]
    picture = (ROOT / "results/figures/readme.svg").read_text(encoding="utf-8")
    assert f"<!-- {energy['dense']:.3f} J → {energy['result']:.3f} J, {energy['label']} -->" in picture
    assert f"<!-- accuracy {scores['dense']:.1%} → {scores['after tuning']:.1%} -->" in picture


# ---------------------------------------------------------------- the reader of numbers, on planted pages


@pytest.fixture
def house(tmp_path: Path) -> Path:
    (tmp_path / "results").mkdir()
    record = {"environment": {"cores": 16}, "joules": 0.7275, "rows": [{"lost": 0.0295, "count": 178, "done": True}]}
    (tmp_path / "results/run.json").write_text(json.dumps(record), encoding="utf-8")
    (tmp_path / "RESULTS.md").write_text("# Results\n\n## One thing\n\n12.5 of 20\n\n## Other, thing\n\n7\n", "utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("text", "complaints"),
    [
        ("[run](results/run.json): 0.73 J, 2.95 % of 178", 0),
        ("[run](results/run.json): 0.74 J", 1),
        ("[run](results/run.json): 16 cores", 1),  # about the machine
        ("[run](results/run.json): 1 of 178", 1),  # True is no number
        ("178", 1),  # no link
        ("178\n\n[run](results/run.json)", 1),  # in another paragraph
        ("| 178 |\n| [run](results/run.json) | 178 |", 1),  # in another row
        ("12.5 [there](RESULTS.md#one-thing)", 0),
        ("7 [there](RESULTS.md#one-thing)", 1),
        ("7 [there](RESULTS.md#other-thing)", 0),
        ("7 [there](RESULTS.md)", 0),
        ("7 [there](RESULTS.md#no-such-thing)", 1),
        ("```sh\nmake 99\n```\n\nint8 and v1", 0),
        ("since 1999", 0),
    ],
)
def test_numbers_are_looked_up(house: Path, text: str, complaints: int) -> None:
    assert len(untold(text, house, ["since 1999"])) == complaints
