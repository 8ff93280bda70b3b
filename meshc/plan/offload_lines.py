"""Offload lines of a plan: state, parameters and values that are kept on the host while not in use.

    offload state                            optimizer state of all parameters
    offload state model.layers.*             optimizer state of the parameters that a glob names
    offload state, update                    optimizer state, whose update runs on the host; a glob may name parameters
    offload state: disk                      on the host's disk; with a glob, `offload state model.layers.*: disk`
    offload params                           all parameters; or those that a glob names
    offload model.layers.*                   values of these modules that backward reads
    offload value:model.layers.*             outputs of these modules that backward reads
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from meshc.ir.storage_moves import TIERS, Storage, is_state_only
from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import PlanLine, is_in

STATE: Final = "state"
PARAMS: Final = "params"
STORED: Final = (STATE, PARAMS)
"""Kinds of lines for tensors that are stored between steps."""
VALUE: Final = "value:"
MODULES: Final = ""
HOST: Final[Storage] = "host"
"""The tier of lines that name none."""
TO_COME: Final = ("grads",)
"""Kinds that cannot be offloaded yet."""


@dataclass(frozen=True, slots=True)
class OffloadLine(PlanLine):
    """An offload line. ``what`` is STATE or PARAMS, with a ``pattern`` of parameter names, or MODULES or VALUE, with one of module paths.
    For STATE, ``update``: its update runs on the host; ``storage``: the tier in which it is stored."""

    what: str
    pattern: str
    update: bool = False
    storage: Storage = HOST

    def names(self, name: str) -> bool:
        """Whether the pattern matches this parameter, or the module at this path."""
        return fnmatchcase(name, self.pattern)

    def covers(self, module: str) -> bool:
        """Whether the line applies to operators of the module at this path."""
        return self.what == MODULES and is_in(module, self.pattern)

    def __str__(self) -> str:
        if self.what in STORED:
            what = f"offload {self.what}{', update' * self.update}"
            return (what if self.pattern == "*" else f"{what} {self.pattern}") + f": {self.storage}" * (self.storage != HOST)
        return f"offload {self.what}{self.pattern}"


def read_offload_line(line: Line, number: int) -> OffloadLine:
    names = "an offload line names `state`, `params`, modules (`model.layers.*`) or what they return (`value:model.layers.*`), * for any"
    start = line.at
    update, storage = False, HOST
    if (stored := line.accept(r"(state|params)(?=[\s,:]|$)")) is not None:
        what = stored
        if line.accept(",") is not None:
            found = line.accept(r"update(?=[\s:]|$)")
            if found is None or what != STATE:
                line.fail("the update runs on the host where its state lies there: `offload state, update`", start)
            update = True
        of = f"after `{what}` come the parameters that it is of: `offload {what} layers.*`"
        pattern = "*" if line.is_at_end or line.accept(r"(?=:)") is not None else line.expect(GLOB, of)
        storage = _read_tier(line, what, update, start)
    else:
        what = VALUE if line.accept(VALUE) is not None else MODULES
        pattern = line.expect(GLOB, names)
        if what == MODULES and pattern in TO_COME:
            line.fail(f"{pattern} cannot lie on the host yet: `state` and `params` can, and what backward reads of modules", start)
    if not line.is_at_end:
        words = " or ".join(f"`: {tier}`" for tier in TIERS if is_state_only(tier))
        line.fail(f"an offload line ends after its pattern, of state with {words} behind it; write one line for each")
    return OffloadLine(what, pattern, update, storage, line=number, text=line.text.strip())


def _read_tier(line: Line, what: str, update: bool, start: int) -> Storage:
    """The tier that the line names, of those for state alone; without a name the host."""
    tier = next((one for one in TIERS if is_state_only(one) and line.accept(rf":\s*{one}(?=\s|$)") is not None), HOST)
    right = f"`offload state: {tier}`"
    if tier != HOST and what != STATE:
        line.fail(f"state can lie on the {tier}, which is read once a call: {right}; parameters in the host's memory", start)
    if tier != HOST and update:
        line.fail(f"an update runs on what lies in the host's memory: `offload state, update`, or {right}", start)
    return tier
