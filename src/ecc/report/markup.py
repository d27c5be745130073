"""Small pieces of HTML. Whatever comes from a run passes through `text`, which no markup survives."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence

from .charts import scale_of

NOTHING = "\N{EN DASH}"
"""Stands where there is no number."""


class Html(str):
    """Markup that was made here, and is not escaped again."""

    __slots__ = ()


def text(value: object) -> Html:
    """Escaped, unless it was made here."""
    return value if isinstance(value, Html) else Html(html.escape(str(value), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    """All of them, escaped."""
    return Html(between.join(text(part) for part in parts))


def tag(name: str, *parts: object, **attributes: object) -> Html:
    """An element; `class_` is its class, and underscores in other attributes are hyphens. None leaves one out."""
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value), quote=True)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{words}>{join(parts)}</{name}>")


# ---------------------------------------------------------------- numbers


def amount(value: float | None, unit: str) -> str:
    """Three digits and a prefix: 24.7 mJ."""
    if value is None:
        return NOTHING
    factor, shown = scale_of(abs(value), unit)
    return f"{three_digits(value / factor)}\N{NO-BREAK SPACE}{shown}".rstrip()


def three_digits(value: float) -> str:
    """Not in powers of ten: 19.0, 0.00123, 123."""
    if value == 0:
        return "0"
    return f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}".replace("-", "\N{MINUS SIGN}")


def percent(share: float | None, digits: int = 1, *, sign: bool = False) -> str:
    """49.5 %."""
    if share is None:
        return NOTHING
    shown = f"{100 * share:{'+' if sign else ''}.{digits}f}\N{NO-BREAK SPACE}%"
    if float(shown.split("\N{NO-BREAK SPACE}")[0]) == 0:
        shown = shown.replace("+", "±").replace("-", "±" if sign else "")
    return shown.replace("-", "\N{MINUS SIGN}")


def score(value: float | None) -> str:
    """Four decimals."""
    return NOTHING if value is None else f"{value:.4f}".replace("-", "\N{MINUS SIGN}")


def exact(value: float | None, shown: str) -> Html:
    """A number as it is shown, with the number itself for programs."""
    return text(shown) if value is None else tag("data", shown, value=repr(float(value)))


# ---------------------------------------------------------------- tables and lists


def table(caption: object, heads: Sequence[object], rows: Sequence[Sequence[object]], *, left: int = 1) -> Html:
    """A table that scrolls sideways by itself where it is too wide; its first `left` columns are words."""
    head = join(tag("th", name, scope="col", class_="word" if i < left else None) for i, name in enumerate(heads))
    body = join(
        tag(
            "tr",
            *(
                tag("th", cell, scope="row") if i == 0 else tag("td", cell, class_="word" if i < left else None)
                for i, cell in enumerate(row)
            ),
        )
        for row in rows
    )
    whole = tag("table", tag("caption", tag("span", caption)), tag("thead", tag("tr", head)), tag("tbody", body))
    return tag("div", whole, class_="scroll", tabindex="0", role="region", aria_label=_plain(caption))


def _plain(caption: object) -> str:
    return str(caption) if not isinstance(caption, Html) else "table"


def pairs(items: Iterable[tuple[object, object]]) -> Html:
    """Terms and what they are."""
    return tag("dl", *(tag("div", tag("dt", name), tag("dd", value)) for name, value in items))


def section(name: str, title: str, *parts: object) -> Html:
    """A part of the page, under its heading."""
    return tag("section", tag("h2", title), *parts, id=name)


def more(title: str, *parts: object) -> Html:
    """Shown on request."""
    return tag("details", tag("summary", title), *parts)
