"""Count lines of Python per package: all lines, and lines without docstrings, comments and blank lines.

python benchmarks/code_size.py              src/ecc, tests and benchmarks of this tree
python benchmarks/code_size.py --json FILE  the same numbers for a table
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import tokenize
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SKIPPED = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def count_lines(text: str) -> tuple[int, int]:
    """All lines, and lines with code."""
    strings: set[int] = set()  # docstrings, also those of fields
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            strings.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SKIPPED:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(text.splitlines()), len(code - strings)


def package_of(path: Path) -> str:
    """The folder below src/ecc, a single file of it, or the folder of tests or benchmarks."""
    parts = path.relative_to(ROOT).parts
    if parts[0] == "src":
        return "/".join(parts[1:3]) if len(parts) > 3 else "ecc/*.py"
    return parts[0]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the numbers")
    arguments = parser.parse_args()
    counts: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for top in ("src", "tests", "benchmarks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            lines, code = count_lines(path.read_text(encoding="utf-8"))
            for name in (package_of(path), "src") if top == "src" else (top,):
                counts[name] = [a + b for a, b in zip(counts[name], (1, lines, code), strict=True)]
    print(f"{'package':<18}{'files':>7}{'lines':>8}{'code':>8}")
    for name, (files, lines, code) in counts.items():
        print(f"{name:<18}{files:>7}{lines:>8,}{code:>8,}")
    if arguments.json is not None:
        rows = {name: dict(zip(("files", "lines", "code"), row, strict=True)) for name, row in counts.items()}
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
