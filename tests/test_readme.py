"""The pages a newcomer reads are executed: what they promise works, or the build is red.

In order, in an empty folder, with one namespace a page:

- a ```python block is executed; one whose first line is `# name.py` is saved under that name instead;
- in a ```console or ```sh block, `ecc ...` runs through the command line and must exit with 0,
  and `make ...` must name real targets. Where a block has `$ ` prompts, all else in it is output.
"""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

ROOT = Path(__file__).resolve().parent.parent
NO_STEPS = ("docs/api.md", "docs/data.md", "docs/faq.md", "docs/how-it-works.md", "docs/licences.md", "docs/rivals.md")
"""Pages with nothing to do: a reference, words, or commands for data and machines that are not here (```text)."""
SAME = ("docs/index.md",)
"""Pages whose steps are those of README.md, for `make thorough`."""
LOUD = ("docs/own-model.md",)
"""Pages that run trainers of others, which advise about this machine in warnings."""

PAGES = [
    pytest.param(
        name,
        marks=[pytest.mark.thorough if name in SAME else pytest.mark.slow] * name.startswith("docs/")
        + [pytest.mark.filterwarnings(f"ignore::{kind}Warning") for kind in ("User", "Future", "Deprecation")]
        * (name in LOUD),
    )
    for name in (
        "README.md",
        "CONTRIBUTING.md",
        *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md")) if f"docs/{path.name}" not in NO_STEPS),
    )
]

FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
FILE_NAME = re.compile(r"#\s*(\w+\.py)\s*")
PROMPT = "$ "
COMMAND = re.compile(r"(?:\w+=\S* )*(?:\.venv/bin/)?(ecc|make)(?: |$)(.*)")
TARGET = re.compile(r"^([a-z][\w-]*)\s*:(?!=)", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Step:
    """One thing that a page asks its reader to do."""

    line: int
    verb: Literal["save", "python", "ecc", "make"]
    text: str
    """The code, or the command's arguments."""
    name: str = ""
    """Of the file to save."""


def steps(page: str) -> Iterator[Step]:
    """The steps of a page, top to bottom."""
    for fence in FENCE.finditer(page):
        language, text = fence.groups()
        line = page.count("\n", 0, fence.start(2)) + 1
        if language == "python":
            name = FILE_NAME.fullmatch(text.partition("\n")[0])
            yield Step(line=line, verb="save" if name else "python", text=text, name=name[1] if name else "")
        elif language in {"console", "sh"}:
            yield from commands(text, line)


def commands(block: str, line: int) -> Iterator[Step]:
    """The commands of a shell block whose first line is number `line` of the page."""
    prompt = PROMPT if any(row.startswith(PROMPT) for row in block.split("\n")) else ""
    # A command that goes on after a backslash becomes one row that remembers how many lines it had.
    for row in block.replace("\\\n", "\0").split("\n"):
        command = row.removeprefix(prompt).replace("\0", " ")
        if row.startswith(prompt) and (match := COMMAND.match(command)):
            yield Step(line=line, verb=match[1], text=match[2])
        line += 1 + row.count("\0")


def run(page: Path, folder: Path, run_ecc: Callable[[list[str]], int], targets: set[str]) -> list[Step]:
    """Takes every step of a page in `folder`, the working directory, and returns them."""
    namespace: dict[str, object] = {"__name__": "__main__"}
    taken = list(steps(page.read_text(encoding="utf-8")))
    for step in taken:
        where = f"{page.name}:{step.line}"
        if step.verb == "save":
            (folder / step.name).write_text(step.text, encoding="utf-8")
        elif step.verb == "python":
            # The blank lines make a traceback point at the page's own line.
            exec(compile("\n" * (step.line - 1) + step.text, str(page), "exec"), namespace)
        elif step.verb == "ecc":
            code = run_ecc(shlex.split(step.text, comments=True))
            assert code == 0, f"{where}: `ecc {step.text}` exits with {code}"
        else:
            words = [word for word in shlex.split(step.text, comments=True) if not re.search("^-|=", word)]
            assert set(words) <= targets, f"{where}: the Makefile has no {sorted(set(words) - targets)}"
    return taken


@pytest.fixture
def run_ecc(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], int]:
    """The command line in this process: arguments in, exit code out."""
    from ecc.cli import main

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
    """An empty working directory; what is saved there can be imported, and is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("net", "train"):  # of other tests
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield tmp_path
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


def make_targets() -> set[str]:
    return set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))


@pytest.mark.parametrize("name", PAGES)
def test_a_page_keeps_its_promises(name: str, folder: Path, run_ecc: Callable[[list[str]], int]) -> None:
    taken = run(ROOT / name, folder, run_ecc, make_targets())
    assert taken, f"{name} has no step to take; was a fence renamed?"


def test_pages_without_steps_have_none() -> None:
    assert [name for name in NO_STEPS if list(steps((ROOT / name).read_text(encoding="utf-8")))] == []


def test_the_readme_shows_both_the_library_and_the_command_line() -> None:
    verbs = {step.verb for step in steps((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert verbs == {"save", "python", "ecc", "make"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])  # `mkdocs build --strict` checks the others
def test_links_lead_somewhere(name: str) -> None:
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readme_tells_what_the_files_say() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    totals = json.loads((ROOT / "results/trace_coverage.json").read_text(encoding="utf-8"))["totals"]["all"]
    ours, theirs = totals["ecc"]["exact"], totals["torch_pruning"]
    assert f"of {totals['networks']} networks | [{ours}](" in text
    assert f"| {theirs['exact']}, and {theirs['differs by nature (norm)']} that differ by nature |" in text
    run = json.loads((ROOT / "results/compress_imagenette.json").read_text(encoding="utf-8"))
    scores = run["summary"]["scores"]
    assert f"takes {run['budget_share_reached']:.1%} of the budget".replace("%", " %") in text
    assert f"from {100 * scores['dense']:.1f} % to {100 * scores['after tuning']:.1f} %" in text


# ---------------------------------------------------------------- the reader of pages, on a planted page

PAGE = """# A page

```python
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

```console
$ .venv/bin/ecc inspect "two words" \\
    --json
ecc begins a line of the output
$ eccentric
$ ecc --version
```

```text
ecc never
```

```python
seen.append(1)
```
"""


@pytest.fixture
def page(folder: Path) -> Path:
    file = folder / "PAGE.md"
    file.write_text(PAGE, encoding="utf-8")
    return file


def test_steps_are_read_in_order_with_their_lines() -> None:
    assert [(step.line, step.verb) for step in steps(PAGE)] == [
        (4, "save"),
        (9, "make"),
        (11, "ecc"),
        (15, "python"),
        (20, "ecc"),
        (24, "ecc"),
        (32, "python"),
    ]


def test_steps_are_taken_in_one_folder_and_namespace(page: Path) -> None:
    calls: list[list[str]] = []
    run(page, page.parent, lambda arguments: calls.append(arguments) or 0, targets={"demo"})
    assert calls == [["inspect", "net.py:build"], ["inspect", "two words", "--json"], ["--version"]]
    assert (page.parent / "net.py").read_text(encoding="utf-8") == "# net.py\nanswer = 42\n"


def test_a_command_that_fails_is_named_with_its_line(page: Path) -> None:
    with pytest.raises(AssertionError, match=r"PAGE.md:24: `ecc --version` exits with 2"):
        run(page, page.parent, lambda arguments: 2 * (arguments == ["--version"]), targets={"demo"})


def test_a_target_the_makefile_lacks_is_caught(page: Path) -> None:
    with pytest.raises(AssertionError, match=r"PAGE.md:9: the Makefile has no \['demo'\]"):
        run(page, page.parent, lambda arguments: 0, targets={"test"})


def test_a_failing_block_points_at_its_line_of_the_page(folder: Path) -> None:
    file = folder / "PAGE.md"
    file.write_text("text\n\n```python\nfine = 1\nfine / 0\n```\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError) as caught:
        run(file, folder, lambda arguments: 0, targets=set())
    assert (caught.traceback[-1].path, caught.traceback[-1].lineno + 1) == (file, 5)


def test_make_targets_are_read_from_the_makefile() -> None:
    assert {"help", "demo", "test", "check", "lint", "types", "format", "clean"} <= make_targets()
    assert "JOBS" not in make_targets()
