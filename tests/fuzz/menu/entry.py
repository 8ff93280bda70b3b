"""What an entry of the menu is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.draw import Drawer

Entry = Callable[["Drawer"], tuple[str, Sequence[str]]]
