"""Lines of a plan about memory: what backward recomputes or keeps, what is kept on the host, and chunks of the head and loss.

    remat model.layers.*: selective          policy of each module in backward
    keep value:model.layers.*.mlp            values that backward never recomputes
    offload state                            optimizer state of all parameters, kept on the host while not in use
    offload state model.layers.*             optimizer state of the parameters that a glob names
    offload state, update                    optimizer state, whose update runs on the host; a glob may name parameters
    offload state: disk                      on the host's disk; with a glob, `offload state model.layers.*: disk`
    offload params                           all parameters; or those that a glob names
    offload model.layers.*                   values of these modules that backward reads
    offload value:model.layers.*             outputs of these modules that backward reads
    chunk lm_head: 8                         token chunks in which a step's head and loss run
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final

from meshc.ir.storage_moves import TIERS, Storage, is_state_only
from meshc.plan.cursor import GLOB, Line
from meshc.plan.entries import ModuleLine, PlanLine, is_in
from meshc.plan.plan_faults import suggest

POLICIES: Final = ("none", "cheap", "selective", "layer", "sqrt")
"""Recompute policies, from least to most recomputation; docs/memory.md defines them."""
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
MOST_CHUNKS: Final = 256
"""Largest number of chunks; each adds lines to the program."""


@dataclass(frozen=True, slots=True)
class RematLine(ModuleLine):
    """Recompute policy of the modules that ``pattern`` names and of those in them; of several lines the last one counts."""

    policy: str

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
        return f"keep {VALUE}{self.pattern}"


def read_remat_line(line: Line) -> RematLine:
    names = "a remat line names modules, with * for any text, and a policy: `remat model.layers.*: selective`"
    pattern = line.expect(GLOB, names)
    line.expect(":", f"then comes a colon, and a policy: {', '.join(POLICIES)}")
    start = line.at
    policy = line.expect(r"\w+", f"a policy belongs here: {', '.join(POLICIES)}")
    if policy not in POLICIES:
        line.fail(f"{policy} is no policy{suggest(policy, POLICIES)}", start)
    line.expect_end("a remat line ends after its policy")
    return RematLine(pattern, policy)


def read_keep_line(line: Line) -> KeepLine:
    names = "a keep line names what modules return, with * for any text: `keep value:model.layers.*.mlp`"
    line.expect(VALUE, names)
    pattern = line.expect(GLOB, names)
    line.expect_end("a keep line ends after the name of a value; write one line for each")
    return KeepLine(pattern)


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


def read_offload_line(line: Line) -> OffloadLine:
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
    words = " or ".join(f"`: {tier}`" for tier in TIERS if is_state_only(tier))
    line.expect_end(f"an offload line ends after its pattern, of state with {words} behind it; write one line for each")
    return OffloadLine(what, pattern, update, storage)


def _read_tier(line: Line, what: str, update: bool, start: int) -> Storage:
    """The tier that the line names, of those for state alone; without a name the host."""
    tier = next((one for one in TIERS if is_state_only(one) and line.accept(rf":\s*{one}(?=\s|$)") is not None), HOST)
    right = f"`offload state: {tier}`"
    if tier != HOST and what != STATE:
        line.fail(f"state can lie on the {tier}, which is read once a call: {right}; parameters in the host's memory", start)
    if tier != HOST and update:
        line.fail(f"an update runs on what lies in the host's memory: `offload state, update`, or {right}", start)
    return tier


@dataclass(frozen=True, slots=True)
class ChunkLine(ModuleLine):
    """The matrix product in the module that ``pattern`` names, and the loss computed from the product, run in ``count`` chunks."""

    count: int

    def __str__(self) -> str:
        return f"chunk {self.pattern}: {self.count}"


def read_chunk_line(line: Line) -> ChunkLine:
    names = "a chunk line names the module of the head, with * for any text, and a number of chunks: `chunk lm_head: 8`"
    pattern = line.expect(GLOB, names)
    line.expect(":", "then comes a colon, and a number of chunks")
    start = line.at
    count = int(line.expect(r"\d{1,6}", "a number of chunks belongs here"))
    if not 1 <= count <= MOST_CHUNKS:
        line.fail(f"from 1 (whole) to {MOST_CHUNKS} chunks", start)
    line.expect_end("a chunk line ends after its number")
    return ChunkLine(pattern, count)
