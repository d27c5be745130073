"""The pages that users read are executed: every command and every block of Python must work.

In order, in an empty folder, with one namespace per page:

- a ```python block is executed; if its first line is `# name.py`, it is saved under that name instead;
- in a ```sh block, `ecc ...` runs through the command line, with fewer steps, and must exit with 0, and `make ...` must
  name real targets.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import budget_runs
import pytest
import small_table
from small_grid import BUDGETS

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = tuple(sorted(path.stem for path in (ROOT / "docs").glob("api*.md")))
WITHOUT_STEPS = (
    *REFERENCE, "baselines", "cli", "concepts", "data", "faq", "gallery", "how-it-works", "licences", "troubleshooting",
)  # fmt: skip
"""Pages of docs/ without anything to execute here."""
SAME_AS_README = "docs/index.md"
FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"#\s*(\w+\.py)\s*")
COMMAND = re.compile(r"(?:\w+=\S* )*(ecc|make)(?: |$)(.*)")
TARGET = re.compile(r"^([a-z][\w-]*)\s*:(?!=)", re.MULTILINE)

SHORTER = {"--pretrain-steps": 2, "--prune-steps": 8, "--finetune-steps": 1, "--seconds": 1}
"""The largest values of options that the pages are executed with."""
MEASURED = "--window 0.01 --min-ticks 1 --warmup-seconds 0 --probe-seconds 0.05 --no-depth"
"""Options of short measurements; without depth, one file serves all samples."""

PAGES = ["README.md", "CONTRIBUTING.md"] + [
    f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if path.stem not in WITHOUT_STEPS
]


def steps(page: str) -> Iterator[tuple[int, str, str]]:
    """(line, kind, text) of everything that a page asks its reader to do; kind is python, ecc or make."""
    for fence in FENCE.finditer(page):
        language, text = fence.groups()
        line = page.count("\n", 0, fence.start(2)) + 1
        if language == "python":
            yield line, "python", text
        for number, row in enumerate(text.split("\n") if language == "sh" else ()):
            if match := COMMAND.match(row):
                yield line + number, match[1], match[2]


def shortened(words: list[str]) -> list[str]:
    """A command with smaller numbers, so that it takes less time."""
    pairs = zip(["", *words], words, strict=False)
    found = [
        str(min(SHORTER[name], float(word))).removesuffix(".0") if name in SHORTER else word for name, word in pairs
    ]
    return [*found, *MEASURED.split()] if "--runner" in words else found


def run(page: Path, folder: Path, run_ecc: Callable[[list[str]], int], targets: set[str]) -> int:
    """Take every step of a page in `folder`, the working directory; return their number."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    taken = 0
    for line, kind, text in steps(page.read_text(encoding="utf-8")):
        taken += 1
        name = FILE_NAME.fullmatch(text.partition("\n")[0])
        if kind == "python" and name:
            (folder / name[1]).write_text(text, encoding="utf-8")
        elif kind == "python":
            # The blank lines make a traceback point at the line of the page.
            exec(compile("\n" * (line - 1) + text, str(page), "exec"), namespace)
        elif kind == "ecc":
            code = run_ecc(shortened(shlex.split(text, comments=True)))
            assert code == 0, f"{page.name}:{line}: `ecc {text}` exits with {code}"
        else:
            words = {word for word in shlex.split(text, comments=True) if not re.search("^-|=", word)}
            assert words <= targets, f"{page.name}:{line}: the Makefile has no {sorted(words - targets)}"
    return taken


@pytest.fixture
def run_ecc(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """The command line in this process: arguments in, exit code out."""
    from ecc.cli import main

    monkeypatch.setattr("ecc.export.onnx_tools.BLOCK_SECONDS", 0.001)

    def call(arguments: list[str]) -> int:
        monkeypatch.setattr(sys, "argv", ["ecc", *arguments])
        try:
            main()
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
        return 0

    return call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory. Modules saved there can be imported, and are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("net", "task", "shunt"):  # modules of the same name that other tests imported
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def make_targets() -> set[str]:
    return set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


def marks(name: str) -> list[pytest.MarkDecorator]:
    if name == SAME_AS_README:
        return [pytest.mark.thorough]
    found = [pytest.mark.slow] if name.startswith("docs/") else []
    if name in (
        "docs/own-model.md",
        "docs/hugging-face.md",
        "docs/ultralytics.md",
    ):  # runs trainers of other libraries, which warn about this machine
        found += [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("User", "Future", "Deprecation")]
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in PAGES])
def test_every_step_of_a_page_works(
    name: str, folder: Path, run_ecc: Callable[[list[str]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    if name == "docs/hugging-face.md":
        pytest.importorskip("transformers", minversion="5", reason="tasks hf: need transformers 5")
    if name == "docs/ultralytics.md":
        pytest.importorskip("ultralytics", reason="ultralytics is not installed")
    assert run(ROOT / name, folder, run_ecc, make_targets()) > 0
    if name == "README.md":
        check_shown_output(capsys.readouterr().out)


def check_shown_output(printed: str) -> None:
    """The output in the README is that of its code; numbers that depend on training may differ in their digits."""
    blocks = [text for kind, text in FENCE.findall((ROOT / "README.md").read_text("utf-8")) if kind == "text"]
    (shown,) = [text for text in blocks if text.startswith("energy ")]
    without_digits = re.compile(r"\d[\d.]*")
    assert without_digits.sub("0", shown) in without_digits.sub("0", printed)
    dense = shown.partition(" -> ")[0]  # analytic, and without training: exact
    assert dense in printed
    for number, was in zip(numbers(printed, "energy"), numbers(shown, "energy"), strict=True):
        assert number == pytest.approx(was, rel=0.03)


def numbers(text: str, name: str) -> list[float]:
    """The numbers of the first line that starts with a name."""
    line = next(line for line in text.splitlines() if line.startswith(name))
    return [float(one) for one in re.findall(r"\d+(?:\.\d+)?", line)]


def test_pages_without_steps_have_none() -> None:
    assert [name for name in WITHOUT_STEPS if list(steps((ROOT / f"docs/{name}.md").read_text("utf-8")))] == []


def test_the_readme_shows_the_library_and_the_command_line() -> None:
    assert {kind for _, kind, _ in steps((ROOT / "README.md").read_text("utf-8"))} == {"python", "ecc", "make"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])  # `mkdocs build --strict` checks the others
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_numbers_of_the_readme_are_those_of_the_records() -> None:
    text = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    coverage = json.loads((ROOT / "results/trace_coverage_cpu.json").read_text(encoding="utf-8"))
    totals, peer = coverage["totals"]["all"], coverage["environment"]["torch_pruning"]
    ecc, other = totals["ecc"], totals["torch_pruning"]
    assert "WRONG" not in ecc
    run = json.loads((ROOT / "results/compress_imagenette.json").read_text(encoding="utf-8"))
    language = json.loads((ROOT / "results/llm.json").read_text(encoding="utf-8"))
    halves = []
    for resource in ("decode", "prefill"):
        mine = [one for one in language["cells"] if one["resource"] == resource and one["share"] == 0.5]
        half = {one["method"]: one["perplexity"] for one in mine}
        ours, best = half.pop("one_shot"), min(half, key=lambda name: half[name])
        peer_text = f"the best baseline, {best.upper()}, {half[best]:.1f}"
        halves.append(f"at 50 % of the {resource} energy ECC has {ours:.1f} and {peer_text}")
    assert all(0.98 <= one["of_budget"] <= 1 for one in language["cells"] if one["method"] == "one_shot")
    counts = []
    for is_loop in (False, True):
        shares = budget_runs.total(budget_runs.all_runs(), is_loop).shares
        counts.append(f"{sum(share > 1 for share in shares)} of {len(shares)}")
    pair = [one.shares for one in budget_runs.all_runs() if one.title == budget_runs.LATENCY_TITLE]
    both = " and ".join(str(sum(share > 1 for share in shares)) for shares in pair)
    gaps = small_table.overall(small_table.load(small_table.FILE)["cells"])
    ahead = [method for method, gap in gaps.items() if method not in small_table.OURS and gap.side == "ahead"]
    assert len(ahead) == len(set(gaps) - set(small_table.OURS))
    widths = small_table.overall(small_table.load(small_table.FILE)["cells"], "ecc_widths")
    assert sum(widths[one].side == "undecided" for one in ahead) > len(ahead) / 2
    cells, methods = small_table.load(small_table.FILE)["cells"], sorted(gaps)
    tight, mild = (
        [
            gap.mean
            for task, budgets in BUDGETS.items()
            if (gap := small_table.against_best(cells, task, budgets[place], methods)[1]) is not None
        ]
        for place in (1, 0)
    )
    assert len(tight) == len(mild) == 3
    assert min(mild) < 0 < min(tight)
    published = small_table.load(small_table.PUBLISHED)["cells"]
    assert small_table.overall(published)["netadapt"].side == "undecided"
    (ours,) = {one["batches"] for one in published if one["method"] == "ecc"}
    batches = [one["batches"] / ours for one in published if one["method"] == "netadapt"]
    searched = min(batches), max(batches)
    dense, slim = (100 * run["summary"]["scores"][name] for name in ("dense", "finetuned"))
    for phrase in (
        f"of {totals['networks']} networks of timm and torchvision | [{ecc['exact']}](",
        f"none wrong, {ecc['time limit']} reached the time limit |",
        f"| {other['exact']}; {other['time limit']} reached the time limit |",
        f"Torch-Pruning {peer}",
        f"uses {100 * run['budget_share_reached']:.1f} % of the budget",
        f"from {dense:.1f} % to {slim:.1f} %",
        f"ECC is ahead of all {len(ahead)} baselines on average over the budgets",
        f"it is {min(tight):.1f} to {max(tight):.1f} points above the best baseline, at the milder one from "
        f"{-min(mild):.1f} points below to {max(mild):.1f} above",
        f"which takes {searched[0]:.0f} to {searched[1]:.0f} times as many batches, is level with ECC",
        f"{counts[0]} runs exceed their budget with predictions alone, and {counts[1]} with measurements during "
        f"pruning; of {len(pair[0])} runs that were made both ways (latency on a CPU), {both} exceed it.",
        f"dense model has a perplexity of {language['dense']['perplexity']:.1f}; {'; '.join(halves)}.",
    ):
        assert phrase in text
    printed = json.loads((ROOT / "results/readme_output.json").read_text(encoding="utf-8"))["output"]
    assert "```text\n" + "\n".join(printed) + "\n```" in (ROOT / "README.md").read_text(encoding="utf-8")
    evidence = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    for number in re.findall(r"\d\d\.\d\d %", text):
        assert number.removesuffix(" %") in evidence


# ---------------------------------------------------------------- the reader of pages

PAGE = """```python
# net.py
answer = 42
```

```sh
make demo JOBS=1    # a comment
pip install something
SEED=1 ecc inspect net.py:build
```

```python
from net import answer
seen = [answer]
```

```text
ecc never
```
"""


def test_steps_run_in_order_in_one_folder(folder: Path) -> None:
    page = folder / "PAGE.md"
    page.write_text(PAGE, encoding="utf-8")
    calls: list[list[str]] = []
    assert run(page, folder, lambda arguments: calls.append(arguments) or 0, {"demo"}) == 4
    assert calls == [["inspect", "net.py:build"]]
    with pytest.raises(AssertionError, match=r"PAGE.md:9: `ecc inspect net.py:build` exits with 2"):
        run(page, folder, lambda arguments: 2, {"demo"})
    with pytest.raises(AssertionError, match=r"PAGE.md:7: the Makefile has no \['demo'\]"):
        run(page, folder, lambda arguments: 0, {"test"})
