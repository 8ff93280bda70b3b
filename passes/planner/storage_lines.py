"""Store lines for a known storage: the plan text that says it, as short as names allow.

    (model.layers.0.up.weight, state)   [model.layers.0.ffn 64/tp/dp, hidden 32]
    (model.layers.1.up.weight, state)   [model.layers.1.ffn 64/tp/dp, hidden 32]
  is written as
    store model.layers.*.up.weight state: model.layers.*.ffn/tp/dp, _

What the plan's other lines say already is left out; kinds that lie alike are one line, and so are parameters that one pattern matches, if
all that it matches lie so. Read with the plan whose storage was `given`, the lines give what was wanted.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from meshc.ir.sharding import Part, Sharding
from meshc.passes.place.storage import CLAUSE
from meshc.passes.planner.cover_patterns import cover_patterns
from meshc.passes.planner.layer_globs import factor_of_layers
from meshc.plan.entries import PinDim, PinFactor, StoreLine

Storage: TypeAlias = Mapping[tuple[str, str], Sharding]
"""(parameter, what of it: parameter, gradient or state) -> how it lies between steps."""
_Line: TypeAlias = tuple[tuple[str, ...], tuple[PinDim, ...]]
"""Kinds, and dims, that a line is to say of one parameter."""


def storage_lines(wanted: Storage, given: Storage) -> tuple[StoreLine, ...]:
    """The lines that make what would lie as `given` lie as `wanted`; both have every parameter and kind."""
    known = {name: _StoredParameter(name, wanted, given) for name, _ in wanted}
    needed: dict[_Line, list[str]] = defaultdict(list)
    for name, each in known.items():
        for need in each.needs:
            needed[need].append(name)
    place = {name: at for at, name in enumerate(known)}
    found: list[tuple[int, str, StoreLine]] = []
    for (kinds, dims), names in needed.items():
        right = [name for name, each in known.items() if each.agrees(kinds, dims)]
        for pattern in cover_patterns(names, right, list(known)):
            line = StoreLine(pattern, dims, kinds)
            found.append((min(place[name] for name in names if line.matches(name)), str(line), line))
    return tuple(line for *_, line in sorted(found, key=lambda one: one[:2]))


class _StoredParameter:
    """How one parameter lies, as lines would say it.

    dims   by kind;  open  likewise, where nothing need be said of what is whole
    needs  the lines that it cannot do without
    """

    def __init__(self, name: str, wanted: Storage, given: Storage) -> None:
        exact = any(not given[name, kind].split_axes() <= wanted[name, kind].split_axes() for kind in CLAUSE)
        self.dims = {word: _dims(wanted[name, kind], exact) for kind, word in CLAUSE.items()}
        self.open = {word: _dims(wanted[name, kind], False) for kind, word in CLAUSE.items()}
        self.lies = {word for kind, word in CLAUSE.items() if wanted[name, kind] == given[name, kind]}
        changed = dict.fromkeys(dims for word, dims in self.dims.items() if word not in self.lies)
        self.needs = [(tuple(word for word, each in self.dims.items() if each == dims), dims) for dims in changed]

    def agrees(self, kinds: Sequence[str], dims: tuple[PinDim, ...]) -> bool:
        """Whether a line says what is so, be it needless."""
        return all(dims == self.dims[word] or (word in self.lies and dims == self.open[word]) for word in kinds)


def _dims(lies: Sharding, exact: bool) -> tuple[PinDim, ...]:
    """Each dim's factors with the axes that split them. Those without are left open if all axes that could split them split others."""
    return tuple(_dim(parts, exact) for parts in lies.dims)


def _dim(parts: Sequence[Part], exact: bool) -> PinDim:
    """A factor after which another of its name is split is mentioned, so that the other is known for the second."""
    names = [factor_of_layers(part.factor) for part in parts]
    split = [name for name, part in zip(names, parts, strict=True) if part.axes]
    said = []
    for at, (name, part) in enumerate(zip(names, parts, strict=True)):
        if part.axes or exact:
            said.append(PinFactor(name, part.axes, whole=not part.axes))
        elif name in split and any(later == name and other.axes for later, other in zip(names[at + 1 :], parts[at + 1 :], strict=True)):
            said.append(PinFactor(name))
    return PinDim(tuple(said))
