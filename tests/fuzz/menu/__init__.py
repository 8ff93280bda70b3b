"""The operators that random programs are made of: name -> how it draws its operands and numbers.

An entry takes a `Drawer` and gives `(text, operands)`: Python over `{0}`, `{1}`, ... and, for statements, `{out}`. With operands of one
shape it picks a line of a table; where numbers depend on shapes it makes the text. The number beside a family is how often it is drawn.
"""

from __future__ import annotations

from tests.fuzz.menu import chance, index, layers, layout, pointwise, product, reduction, routing
from tests.fuzz.menu.entry import Entry

FAMILIES: tuple[tuple[int, dict[str, Entry]], ...] = (
    (8, pointwise.MENU),
    (5, product.MENU),
    (5, reduction.MENU),
    (10, layout.MENU),
    (5, index.MENU),
    (3, layers.MENU),
    (2, chance.MENU),
    (3, routing.MENU),
)
MENU: dict[str, Entry] = {name: entry for _, family in FAMILIES for name, entry in family.items()}

__all__ = ["FAMILIES", "MENU", "Entry"]
