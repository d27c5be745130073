"""What MkDocs does beside its own work: the project's pages in the site, and equations without a script.

Pages are written to be read in the repository too. So a page in docs/ links to `../RESULTS.md`, and equations are
in the two forms that repository browsers show: ```math blocks, and $`...`$ within a line. Here the files outside
docs/ that pages link to join the site, links follow, and equations become MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ("*.md", "LICENSE", "examples/*.py", "results/*.md", "results/**/*.json", "results/**/*.svg")
"""What joins the site; README.md does not, as index.md takes its place."""

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
    markdown = _BLOCK.sub(lambda found: f"\n<p>{_mathml(found[1], 'block')}</p>\n", markdown)
    return _INLINE.sub(lambda found: f"<span>{_mathml(found[1], 'inline')}</span>", markdown)


def _mathml(latex: str, display: str) -> str:
    return convert(" ".join(latex.split()), display=display).replace("\n", "")
