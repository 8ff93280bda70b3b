"""Facts of a proof: which tiles are which traced value, in which sharding; and the shardings in which tiles may be a value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from meshc.ir.sharding import Part, Sharding
from meshc.proof.regrouped import regroup_parts, units_of_parts
from meshc.proof.tiles import Tiles, Unfit, tiles_of
from meshc.proof.uneven import counts_elements


@dataclass(frozen=True)
class Fact:
    """Some tiles are a traced value in a sharding."""

    value: Tiles
    sharding: Sharding


Form = tuple[Tiles, Fact]
"""Tiles, with what they are."""


class Facts:
    def __init__(self, sizes: Mapping[str, int]) -> None:
        self._sizes = sizes
        self._of: dict[Tiles, list[Fact]] = defaultdict(list)
        self._forms: dict[Tiles, dict[Form, None]] = defaultdict(dict)
        self._values: dict[int, dict[Tiles, None]] = defaultdict(dict)
        self._parts: dict[Tiles, dict[Sharding, None]] = defaultdict(dict)

    def add(self, tiles: Tiles, fact: Fact) -> None:
        """Notes that these tiles are what the fact says, whatever their padding holds."""
        plain = replace(tiles, padding=())
        self._forms[fact.value][tiles, fact] = None
        rows = self._of[plain]
        if fact in rows:
            return
        rows.append(fact)
        self._values[tiles.root][fact.value] = None
        self._parts[fact.value][fact.sharding.whole()] = None

    def values_of(self, root: int) -> list[Tiles]:
        """The values, whole, that are known to have this root."""
        return list(self._values.get(root, ()))

    def forms_of(self, value: Tiles) -> Sequence[Form]:
        return list(self._forms.get(value, ()))

    def of(self, tiles: Tiles, value: Tiles) -> list[Fact]:
        """The shardings in which tiles are a value: those that are known, or else one that gives these tiles."""
        plain = replace(tiles, padding=())
        found = [fact for fact in self._of.get(plain, ()) if fact.value == value]
        if not found and plain.uneven:  # masked, where every rank had the same
            rows = self._of.get(replace(plain, uneven=tuple(row for row in plain.uneven if not counts_elements(row))), ())
            found = [fact for fact in rows if fact.value == value and is_value(value, fact.sharding, tiles, self._sizes)]
        if not found and (sharding := self._sharding_of(value, tiles)) is not None:
            found = [Fact(value, sharding)]
            self._of[plain] += found
        return found

    def _sharding_of(self, value: Tiles, tiles: Tiles) -> Sharding | None:
        for whole in self._whole_shardings(value):
            units = [(d, p, unit, part) for d, parts in enumerate(whole.dims) for p, part, unit in units_of_parts(value, d, parts)]
            rows: dict[tuple[int, int], list[str]] = defaultdict(list)
            for axis, stride in sorted(tiles.axes, key=lambda row: -row[1]):
                at = next(((d, p) for d, p, unit, part in units if unit <= stride < unit * part.size), None)
                if at is not None:
                    rows[at].append(axis)
            dims = (tuple(_with_cuts(part, rows[d, p]) for p, part in enumerate(parts)) for d, parts in enumerate(whole.dims))
            made = Sharding(tuple(dims), tiles.partial)
            if is_value(value, made, tiles, self._sizes):
                return made
        return None

    def _whole_shardings(self, value: Tiles) -> Iterator[Sharding]:
        """How a value's dims may be made of parts: as types say, as they say of it in another shape, one for each digit, and one each."""
        yield from self._parts.get(value, ())
        for other in self._values.get(value.root, ()):
            turned = len(other.dims) == len(value.dims) and all(dim in other.dims for dim in value.dims)
            for sharding in self._parts.get(other, ()):
                if turned:
                    yield Sharding(tuple(sharding.dims[other.dims.index(dim)] for dim in value.dims))
                if (dims := regroup_parts([part for parts in sharding.dims for part in parts], value.shape)) is not None:
                    yield Sharding(dims)
        yield Sharding(tuple(tuple(Part(f"dim {at}", extent) for _, extent in dim) for at, dim in enumerate(value.dims)))
        yield whole_sharding(value.shape)


def is_value(value: Tiles, sharding: Sharding, tiles: Tiles, sizes: Mapping[str, int]) -> bool:
    """Whether tiles are a value in a sharding; without elements they are any that has their shape."""
    if value.root != tiles.root and 0 not in value.shape:
        return False
    try:
        wanted = tiles_of(value, sharding, sizes)
        return tiles.serves(wanted) or 0 in wanted.shape and wanted.shape == tiles.shape
    except Unfit:
        return False


def _with_cuts(part: Part, cuts: Sequence[str]) -> Part:
    """A part split by axes, of which the first may say the order of its tiles: `cp~zigzag`."""
    axes = [cut.partition("~")[0] for cut in cuts]
    return replace(part, axes=tuple(axes), order=cuts[0].partition("~")[2] if cuts else "")


def whole_sharding(shape: Sequence[int]) -> Sharding:
    """Of a value of which nothing is split, each dim a part."""
    return Sharding(tuple((Part(f"dim {at}", size),) for at, size in enumerate(shape)))
