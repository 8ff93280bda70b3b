"""Store lines for a storage that is known: the text that says it, as short as names allow.

    (model.layers.0.up.weight, state)   [model.layers.0.ffn 64/tp/dp, hidden 32]
    (model.layers.1.up.weight, state)   [model.layers.1.ffn 64/tp/dp, hidden 32]
  is written as
    store model.layers.*.up.weight state: model.layers.*.ffn/tp/dp, _

What the plan's other lines say already is left out; kinds that lie alike are one line, and so are parameters whose names differ in one
number, if all that the pattern matches lie so. Read with the plan whose storage was `given`, the lines give what was wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TypeAlias

from meshc.cost.work import collapsed
from meshc.ir.sharding import Part, Sharding
from meshc.passes.place.storage import CLAUSE
from meshc.plan.entries import PinDim, PinFactor, StoreLine

Storage: TypeAlias = Mapping[tuple[str, str], Sharding]
"""(parameter, what of it: parameter, gradient or state) -> how it lies between steps."""
_Said: TypeAlias = frozenset[tuple[tuple[str, ...], tuple[PinDim, ...]]]
"""The lines about one parameter: kinds, and dims."""


def storage_lines(wanted: Storage, given: Storage) -> tuple[StoreLine, ...]:
    """The lines that make what would lie as `given` lie as `wanted`; both have every parameter and kind."""
    own = {name: _lines(name, wanted, given, False) for name, _ in wanted}
    shared = {name: _lines(name, wanted, given, True) for name in own}
    found: dict[str, _Said] = {}
    for name, said in own.items():
        pattern = collapsed(name)
        alike = {shared[other] for other in own if fnmatchcase(other, pattern)}
        if len(alike) == 1 and pattern != name:
            found[pattern] = shared[name]
        else:
            found[name] = said
    return tuple(StoreLine(pattern, dims, kinds) for pattern, said in found.items() for kinds, dims in sorted(said, key=str))


def _lines(name: str, wanted: Storage, given: Storage, globs: bool) -> _Said:
    kinds: dict[tuple[PinDim, ...], list[str]] = defaultdict(list)
    changed: set[tuple[PinDim, ...]] = set()
    exact = any(not given[name, kind].split_axes() <= wanted[name, kind].split_axes() for kind in CLAUSE)
    for kind, word in CLAUSE.items():
        dims = _dims(wanted[name, kind], exact, globs)
        kinds[dims].append(word)
        if wanted[name, kind] != given[name, kind]:
            changed.add(dims)
    return frozenset((tuple(kinds[dims]), dims) for dims in changed)


def _dims(lies: Sharding, exact: bool, globs: bool) -> tuple[PinDim, ...]:
    """Each dim's factors with the axes that split them. Those without are left open if all axes that could split them split others."""
    return tuple(_dim(parts, exact, globs) for parts in lies.dims)


def _dim(parts: Sequence[Part], exact: bool, globs: bool) -> PinDim:
    """A factor after which another of its name is split is mentioned, so that the other is known for the second."""
    names = [collapsed(part.factor) if globs else part.factor for part in parts]
    split = [name for name, part in zip(names, parts, strict=True) if part.axes]
    said = []
    for at, (name, part) in enumerate(zip(names, parts, strict=True)):
        if part.axes or exact:
            said.append(PinFactor(name, part.axes, whole=not part.axes))
        elif name in split and any(later == name and other.axes for later, other in zip(names[at + 1 :], parts[at + 1 :], strict=True)):
            said.append(PinFactor(name))
    return PinDim(tuple(said))
