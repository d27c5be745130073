"""What MkDocs does beside its own work: the project's pages, equations without a script, and the command line.

Pages are written to be read in the repository too. So a page in docs/ links to `../RESULTS.md`, and equations are
in the two forms that repository browsers show: ```math blocks, and $`...`$ within a line. Here the files outside
docs/ that pages link to join the site, links follow, and equations become MathML, which browsers draw by themselves.
The reference of the command line is made from the commands.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = "<!-- commands -->"
"""In the page that is the reference of the command line: here it is inserted."""
OUTSIDE = (
    "*.md",
    "LICENSE",
    "examples/*.py",
    "examples/*.ipynb",
    "results/*.md",
    "results/**/*.json",
    "results/**/*.svg",
)
"""What joins the site; README.md does not, as index.md takes its place."""

_CODE = re.compile(r"<!-- code ([^>]+?) -->")
"""`<!-- code FILE:FUNCTION ... -->`: the source of functions in src/ecc, to be unfolded."""
_BLOCK = re.compile(r"^```math\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"\$`([^`]+)`\$")


def on_files(files: Any, config: Any) -> Any:
    """Adds the files outside docs/."""
    for pattern in OUTSIDE:
        for path in sorted(ROOT.glob(pattern)):
            name = path.relative_to(ROOT).as_posix()
            if name != "README.md":
                files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links as the site has them, and equations as MathML."""
    is_outside = (ROOT / page.file.src_uri).is_file()
    away = "](docs/" if is_outside else "](../"
    markdown = markdown.replace(away, "](").replace("](README.md", "](index.md")
    markdown = _CODE.sub(lambda found: "\n\n".join(map(_source, found[1].split())), markdown)
    if COMMANDS in markdown:
        markdown = markdown.replace(COMMANDS, command_reference())
    markdown = _BLOCK.sub(lambda found: f"\n<p>{_mathml(found[1], 'block')}</p>\n", markdown)
    return _INLINE.sub(lambda found: f"<span>{_mathml(found[1], 'inline')}</span>", markdown)


def _mathml(latex: str, display: str) -> str:
    return convert(" ".join(latex.split()), display=display).replace("\n", "")


def command_reference() -> str:
    """All commands with their text, arguments, options and examples, as Markdown."""
    sys.path.insert(0, str(ROOT / "src"))  # the commands of this tree
    verbs = import_module("ecc.cli.app").VERBS
    parts = []
    for name, verb in verbs.items():
        command = getattr(import_module(f"ecc.cli.{verb.module}"), name)
        context = click.Context(command, info_name=f"ecc {name}")
        text = inspect.cleandoc(command.callback.__doc__ or "").replace("\b\n", "")
        about, _, examples = text.partition("Examples:\n")
        arguments = [one.make_metavar(context) for one in command.params if isinstance(one, click.Argument)]
        rows = [one.get_help_record(context) for one in command.params if isinstance(one, click.Option)]
        parts += [f"## ecc {name}", about.strip(), f"```text\n{' '.join(['ecc', name, *arguments, '[OPTIONS]'])}\n```"]
        parts.append("| option | meaning |\n|---|---|\n" + "\n".join(_option_row(*row) for row in rows if row))
        if lines := inspect.cleandoc(examples).strip():
            parts.append(f"```text\n{lines}\n```")
    return "\n\n".join(parts)


def _option_row(names: str, meaning: str) -> str:
    return f"| `{names}` | {meaning.replace('|', '&#124;').replace('*', '&#42;').replace('<', '&lt;')} |"


def _source(place: str) -> str:
    """The source of a function, to be unfolded."""
    name, function = place.split(":")
    text = (ROOT / "src" / "ecc" / name).read_text(encoding="utf-8")
    (node,) = (one for one in ast.parse(text).body if isinstance(one, ast.FunctionDef) and one.name == function)
    lines = (ast.get_source_segment(text, node) or "").splitlines()
    code = "\n".join(f"    {line}" if line else "" for line in ["```python", *lines, "```"])
    return f'??? quote "`{function}` in `src/ecc/{name}`"\n\n{code}'
