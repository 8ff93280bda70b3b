"""Elements of HTML and SVG as text: all text is escaped except markup that is built here.

    tag("td", "a < b", tag("b", "c"), class_="n")       <td class="n">a &lt; b<b>c</b></td>
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from typing import Final

VOID: Final = ("br", "input", "meta")
"""Elements of HTML that have no end."""
DRAWN: Final = ("line", "path", "rect")
"""Elements of SVG that end where they begin: without a slash the next ones would lie in them."""


class Markup(str):
    """Text that is HTML."""


def text(words: object) -> Markup:
    """Any text, which names of others may be in, as HTML shows it: markup and control characters are shown and do nothing."""
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
    """`numbers`: columns whose cells stand at their right end. Wide ones scroll by themselves."""
    kind = ["n" if column in numbers else None for column in range(len(headers))]
    head = tag("tr", *(tag("th", name, class_=one, scope="col") for name, one in zip(headers, kind, strict=True)))
    body = (tag("tr", *(tag("td", cell, class_=one) for cell, one in zip(row, kind, strict=True))) for row in rows)
    return tag("div", tag("table", tag("thead", head), tag("tbody", *body), class_=class_), class_="wide")
