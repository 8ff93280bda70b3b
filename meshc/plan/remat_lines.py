"""Recompute lines of a plan: policy of each module in backward, and values that are never recomputed.

    remat model.layers.*: selective
    keep value:model.layers.*.mlp
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import PlanLine, is_in
from meshc.plan.plan_faults import suggest

POLICIES: Final = ("none", "cheap", "selective", "layer", "sqrt")
"""Recompute policies, from least to most recomputation; docs/memory.md defines them."""
_VALUE: Final = "value:"


@dataclass(frozen=True, slots=True)
class RematLine(PlanLine):
    """Recompute policy of the modules that ``pattern`` names and of those in them; of several lines the last one counts."""

    pattern: str
    policy: str

    def covers(self, module: str) -> bool:
        """Whether the line applies to operators of the module at this path."""
        return is_in(module, self.pattern)

    def __str__(self) -> str:
        return f"remat {self.pattern}: {self.policy}"


@dataclass(frozen=True, slots=True)
class KeepLine(PlanLine):
    """Outputs of the modules that ``pattern`` names are never recomputed. ``pattern`` is a glob of module paths."""

    pattern: str

    def names(self, module: str) -> bool:
        """Whether the pattern matches the module at this path."""
        return fnmatchcase(module, self.pattern)

    def __str__(self) -> str:
        return f"keep {_VALUE}{self.pattern}"


def read_remat_line(line: Line, number: int) -> RematLine:
    names = "a remat line names modules, with * for any text, and a policy: `remat model.layers.*: selective`"
    pattern = line.expect(GLOB, names)
    line.expect(":", f"then comes a colon, and a policy: {', '.join(POLICIES)}")
    start = line.at
    policy = line.expect(r"\w+", f"a policy belongs here: {', '.join(POLICIES)}")
    if policy not in POLICIES:
        line.fail(f"{policy} is no policy{suggest(policy, POLICIES)}", start)
    if not line.is_at_end:
        line.fail("a remat line ends after its policy")
    return RematLine(pattern, policy, line=number, text=line.text.strip())


def read_keep_line(line: Line, number: int) -> KeepLine:
    names = "a keep line names what modules return, with * for any text: `keep value:model.layers.*.mlp`"
    line.expect(_VALUE, names)
    pattern = line.expect(GLOB, names)
    if not line.is_at_end:
        line.fail("a keep line ends after the name of a value; write one line for each")
    return KeepLine(pattern, line=number, text=line.text.strip())
