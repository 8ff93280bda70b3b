"""Store lines: the plan's lines on storage, resolved to parameters, gradients and state.

    store lm_head.weight state: vocab/dp/tp, _      the state of lm_head.weight: dim 0 split by dp, each tile by tp; dim 1 open

A dim that a line names is stored exactly as the line says; a dim that it leaves open is stored as used, further split by the axes with
store clauses. An axis that a line names splits nothing else of the tensor.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Final

from meshc.ir.keys import kind_of, name_of
from meshc.ir.mesh import role
from meshc.ir.sharding import tile_sizes
from meshc.passes.depth.captured_names import captured_lines
from meshc.passes.phases.factor_names import FactorNames
from meshc.passes.phases.placed_model import PlacedModel, Slots
from meshc.passes.place.storage import CLAUSE
from meshc.plan.entries import StoreLine
from meshc.plan.plan import contradictions
from meshc.plan.plan_faults import did_you_mean

Stored = Mapping[tuple[str, str], Slots]
"""(parameter, kind: parameter, gradient or state) -> axes of its dims by the lines."""
STAGES_STORE: Final = ": what a stage needs lies on its ranks"
"""Why the pipeline axis splits no storage."""


def store_lines(placed: PlacedModel, names: FactorNames) -> tuple[Stored, list[str]]:
    """The storage by the plan's store lines, and every fault, each naming the lines of the plan. `names`: factor names, with those from
    pins."""
    found = defaultdict[tuple[str, str], dict[tuple[int, int], tuple[str, ...]]](dict)
    lines = defaultdict[tuple[str, str], list[StoreLine]](list)
    faults: list[str] = []
    parameters = {name_of(key): (node, 0) for key, node in placed.joint.placeholders().items() if kind_of(key) == "parameter"}
    for line in captured_lines(placed.plan.stores, placed.depth):
        matches = [name for name in parameters if line.matches(name)]
        if not matches:
            faults.append(f"{line.where}: no parameter is called {line.pattern!r}{did_you_mean(line.pattern, parameters)}")
        for name in matches:
            row = placed.factors.dims[parameters[name]]
            if len(row) != len(line.dims):
                faults.append(f"{line.where}: {name} has {len(row)} dims, the line has {len(line.dims)}")
                continue
            slots, fault = _slots(line, name, row, placed, names)
            if fault:
                faults.append(f"{line.where}: {fault}")
                continue
            for kind in (kind for kind, said in CLAUSE.items() if said in line.kinds):
                others, merged = lines[name, kind], found[name, kind]
                faults += contradictions([*others, line]) if others else []
                merged |= slots
                twice = [axis for axis, times in Counter(axis for axes in merged.values() for axis in axes).items() if times > 1]
                if twice and others:
                    faults.append(f"{others[-1].where} and {line.where}: together they split two factors of {name} by {twice[0]}")
                others.append(line)
    return dict(found), list(dict.fromkeys(faults))


def _slots(line: StoreLine, name: str, row: tuple[tuple[int, ...], ...], placed: PlacedModel, names: FactorNames) -> tuple[Slots, str]:
    """A line's axes of a parameter's factors, or why it does not fit."""
    chosen: dict[tuple[int, int], tuple[str, ...]] = {}
    for dim, (wanted, factors) in enumerate(zip(line.dims, row, strict=True)):
        left = list(range(len(factors)))  # of two factors of one name (halves that rotate) the first mention is the first
        for part in wanted.factors:
            named = [(p, name) for p in left for name in {*names.also[factors[p]], names.of[factors[p]]}]
            place = next((p for p, name in named if fnmatchcase(name, part.factor)), None)
            if place is None:
                have = " * ".join(names.of[factor] for factor in factors) or "1"
                again = "no factor" if len(left) == len(factors) else "no further factor"
                return {}, f"dim {dim} of {name} is {have}, it has {again} {part.factor!r}"
            left.remove(place)
            if part.axes or part.whole:
                chosen[(dim, place)] = part.axes
            fault = too_many(part.axes, placed.real(placed.factors.size[factors[place]]), placed)
            if fault:
                return {}, f"{part.factor} of {name} {fault}"
    return chosen, ""


def too_many(axes: Sequence[str], size: int, placed: PlacedModel, how: str = "stored split", why: str = STAGES_STORE) -> str:
    """Why these axes cannot split a factor of this size, one after the other; "" if they can, be it with padding. `how` and `why` complete
    the message on the pipeline axis."""
    for at, axis in enumerate(axes):
        if role(axis) == "pp":
            return f"cannot be {how} by {axis}, which cuts the model into stages{why}"
        tile = tile_sizes(size, [placed.sizes[earlier] for earlier in axes[:at]])[-1]
        if tile < 2 and placed.sizes[axis] > 1:
            gone = f", of which {'/'.join(axes[:at])} leaves 1 to a rank" if at else ""
            return f"has size {size}{gone}: nothing is left for {axis}"
    return ""
