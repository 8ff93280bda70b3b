"""What a plan keeps on the host while it is not used, a line each.

    offload state                            optimizer state, of all parameters
    offload state model.layers.*             of those that a glob names
    offload model.layers.*                   what backward reads of what these modules do
    offload value:model.layers.*             what they return, as far as backward reads it
"""

from __future__ import annotations

from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final

from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import cite, is_in

STATE: Final = "state"
VALUE: Final = "value:"
MODULES: Final = ""
TO_COME: Final = ("params", "grads")
"""What lies on the device yet."""


@dataclass(frozen=True, slots=True)
class OffloadLine:
    """``what``: STATE, and ``pattern`` is of parameters; MODULES or VALUE, and it is of module paths."""

    what: str
    pattern: str
    line: int = field(default=0, compare=False)
    text: str = field(default="", compare=False)

    def names(self, name: str) -> bool:
        """Whether the line is about the parameter, or about what the module at this path returns."""
        return fnmatchcase(name, self.pattern)

    def covers(self, module: str) -> bool:
        """Whether the line is about what is called in the module at this path."""
        return self.what == MODULES and is_in(module, self.pattern)

    @property
    def where(self) -> str:
        """The line as messages cite it."""
        return cite(self)

    def __str__(self) -> str:
        if self.what == STATE:
            return f"offload {STATE}" if self.pattern == "*" else f"offload {STATE} {self.pattern}"
        return f"offload {self.what}{self.pattern}"


def read_offload_line(line: Line, number: int) -> OffloadLine:
    names = "an offload line names `state`, modules (`model.layers.*`) or what these return (`value:model.layers.*`), with * for any text"
    start = line.at
    if line.accept(r"state(?=\s|$)") is not None:
        pattern = "*" if line.done else line.expect(GLOB, "after `state` come the parameters that it is of: `offload state layers.*`")
        what = STATE
    else:
        what = VALUE if line.accept(VALUE) is not None else MODULES
        pattern = line.expect(GLOB, names)
        if what == MODULES and pattern in TO_COME:
            line.fail(f"{pattern} cannot lie on the host yet: `state` can, and what backward reads of modules", start)
    if not line.done:
        line.fail("an offload line ends after its pattern; write one line for each")
    return OffloadLine(what, pattern, number, line.text.strip())
