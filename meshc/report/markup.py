"""Elements of HTML and SVG as text: all text is escaped except markup that is built here.

    tag("td", "a < b", tag("b", "c"), class_="n")       <td class="n">a &lt; b<b>c</b></td>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

VOID: Final = ("br", "input", "meta")
"""HTML elements without an end tag."""
DRAWN: Final = ("line", "path", "rect")
"""Self-closing SVG elements: without the slash, following elements would be nested in them."""


class Markup(str):
    """Text that is HTML already and is not escaped."""


def text(words: object) -> Markup:
    """Untrusted text, escaped for HTML: markup and control characters are shown and have no effect."""
    if isinstance(words, Markup):
        return words
    return Markup(escape("".join(one if one.isprintable() or one in "\n\t" else ascii(one)[1:-1] for one in str(words))))


def tag(name: str, /, *inside: object, **attributes: object) -> Markup:
    """One element. `class_`, `for_`: `class`, `for`; `data_find`: `data-find`; an attribute that is None is left out."""
    said = "".join(f' {key.rstrip("_").replace("_", "-")}="{text(value)}"' for key, value in attributes.items() if value is not None)
    if name in VOID or name in DRAWN:
        return Markup(f"<{name}{said}/>" if name in DRAWN else f"<{name}{said}>")
    return Markup(f"<{name}{said}>{join(inside)}</{name}>")


def join(those: Iterable[object], between: str = "") -> Markup:
    return Markup(text(between).join(map(text, those)))


def table(headers: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[int] = (), class_: str | None = None) -> Markup:
    """A table element. `numbers`: indices of right-aligned columns. A row may be an element already. Wide tables scroll on their own."""
    kind = ["n" if column in numbers else None for column in range(len(headers))]
    head = tag("tr", *(tag("th", name, class_=one, scope="col") for name, one in zip(headers, kind, strict=True)))
    body = (
        row if isinstance(row, Markup) else tag("tr", *(tag("td", cell, class_=one) for cell, one in zip(row, kind, strict=True)))
        for row in rows
    )
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=class_), class_="wide")
