"""Layers that texts mention, and renaming of texts, records and shardings to other layers of a stretch.

    "mm of model.layers.1.mlp, for add"     one block on      "mm of model.layers.2.mlp, for add"

Module paths, names of parameters, of factors, and reasons all mention layers by the path of their list and their number in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Final

from meshc.ir import Record, Source
from meshc.ir.sharding import Part, Sharding
from meshc.passes.depth.order import order_with_copies
from meshc.passes.depth.unequal import Unequal
from meshc.passes.phases.captured_depth import Stretch

# Unnamed factors (f0, f1, ... by their order in the graph), renumbered from block to block and in the whole model.
#
#     captured   f0 (block 0)  f1 (block 1)  f2 (block 2)  f3 (block 3)
#     grown      f0            f1            f2, f3, ... the copies'     f30           f31


NAME: Final = re.compile(r"\bf(\d+)\b(?!\.)")


@dataclass(frozen=True)
class UnnamedFactors:
    """
    next    number of a block's factor -> its number in the next block
    names   (number, copy) -> number in the whole model; copy 0: of what is captured
    """

    next: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def one_further(self, text: str) -> str:
        """A text about block 1, for block 2."""
        return NAME.sub(lambda found: f"f{self.next.get(int(found[1]), found[1])}", text) if self.next else text

    def in_copy(self, text: str, copy: int) -> str:
        """A text about a captured value (copy 0), or about block 1, for the whole model."""
        if not self.names:
            return text
        return NAME.sub(lambda found: f"f{self.names.get((int(found[1]), copy), self.names.get((int(found[1]), 0), found[1]))}", text)


def unnamed_factors(pairs: Iterable[tuple[Sharding | None, Sharding | None]], count: int, copies: int) -> UnnamedFactors:
    """`pairs`: shardings in block 1, and of the same values in block 2; `count`: the number of unnamed factors. Raises Unequal."""
    following: dict[int, int] = {}
    for one, other in pairs:
        if one is None or other is None or one is other:
            continue
        for (_, _, mine), (_, _, theirs) in zip(one.parts(), other.parts(), strict=False):
            a, b = NAME.fullmatch(mine.factor), NAME.fullmatch(theirs.factor)
            if a and b and a[1] != b[1] and following.setdefault(int(a[1]), int(b[1])) != int(b[1]):
                raise Unequal(f"dims that nothing names ({mine.factor}) do not go on from layer to layer")
    if not following:
        return UnnamedFactors()
    if set(following) & set(following.values()) or len(set(following.values())) < len(following):
        raise Unequal("dims that nothing names are shared by neighbouring layers")
    blocks = dict.fromkeys(following, 1) | dict.fromkeys(following.values(), 2)
    order = order_with_copies(range(count), blocks, following, copies)
    return UnnamedFactors(following, {found: place for place, found in enumerate(order)})


# Renaming of texts about layers.


class Mentions:
    """Mentions of layers of one stretch's list. `unnamed`: factors that are called by numbers of their own."""

    def __init__(self, stretch: Stretch, unnamed: UnnamedFactors | None = None) -> None:
        self.stretch, self.unnamed = stretch, unnamed or UnnamedFactors()
        self._pattern = re.compile(rf"(?<![\w.]){re.escape(stretch.path)}\.(\d+)(?![^.\s,;:\]\[/])")
        self._split = lru_cache(maxsize=None)(self._pattern.split)
        self._made: dict[tuple[frozenset[int], int], LayerRenaming] = {}
        self._named: dict[int, tuple[Sharding, bool]] = {}

    def block(self, name: str) -> int | None:
        """The captured block of a named parameter, module or value, from the stretch's first; below 0 or above the last outside the
        stretch. None: in no layer of the list."""
        layer = self.layer(name)
        return None if layer is None else self.stretch.block(layer)

    def layer(self, name: str) -> int | None:
        """The number of the list's layer that `name` begins with; None if there is none."""
        found = self._split(name)
        return None if len(found) < 2 or found[0] else int(found[1])

    def numbers(self, text: str) -> tuple[int, ...]:
        """Numbers of the layers that a text mentions, in order."""
        return tuple(map(int, self._split(text)[1::2]))

    def _build_renaming(self, number: Callable[[int], int], factors: Callable[[str], str]) -> LayerRenaming:
        def rename_text(text: str) -> str:
            parts = self._split(text)
            if len(parts) > 1:
                text = "".join(f"{self.stretch.path}.{number(int(part))}" if index % 2 else part for index, part in enumerate(parts))
            return factors(text)

        return LayerRenaming(rename_text, self._names)

    def _names(self, sharding: Sharding) -> bool:
        """Whether the sharding has factors that are named by a layer or by a number; few have."""
        found = self._named.get(id(sharding))
        if found is None:
            factors = [part.factor for _, _, part in sharding.parts()]
            named = any(len(self._split(factor)) > 1 for factor in factors) or any(map(NAME.search, factors))
            found = self._named[id(sharding)] = sharding, named  # the first keeps the key's object alive
        return found[1]

    # ---------------------------------------------------------------------------------------------------------- from layers to others

    def next(self, fixed: frozenset[int]) -> LayerRenaming:
        """From block 1 to block 2; layers of `fixed` stay."""
        return self._build_renaming(lambda layer: layer if layer in fixed else layer + self.stretch.period, self.unnamed.one_further)

    def later(self) -> LayerRenaming:
        """From the captured layers to the whole model."""
        return self._cached_renaming(frozenset(), 0, self._later)

    def inside(self, fixed: frozenset[int], number: int) -> LayerRenaming:
        """From block 1 to its copy `number` in the whole model."""
        period = self.stretch.period
        return self._cached_renaming(fixed, number, lambda layer: self._later(layer) if layer in fixed else layer + number * period)

    def other(self, fixed: frozenset[int]) -> LayerRenaming:
        """From block 2 to its place in the whole model."""
        further = self.stretch.left_out * self.stretch.period
        return self._cached_renaming(fixed, -1, lambda layer: self._later(layer) if layer in fixed else layer + further)

    def _cached_renaming(self, fixed: frozenset[int], number: int, layers: Callable[[int], int]) -> LayerRenaming:
        if (fixed, number) not in self._made:
            self._made[fixed, number] = self._build_renaming(layers, lambda text: self.unnamed.in_copy(text, max(0, number)))
        return self._made[fixed, number]

    def _later(self, layer: int) -> int:
        stretch = self.stretch
        return layer + stretch.left_out * stretch.period if layer >= stretch.seam else layer


@dataclass
class LayerRenaming:
    """Rewrites texts, records and shardings for the same values in other layers, memoised. `said` rewrites a text; `named`: whether a
    sharding mentions layers at all."""

    said: Callable[[str], str]
    named: Callable[[Sharding], bool]
    _texts: dict[str, str] = field(default_factory=dict)
    _sources: dict[Source, Source] = field(default_factory=dict)
    _shardings: dict[int, tuple[Sharding, Sharding]] = field(default_factory=dict)

    def text(self, text: str) -> str:
        if text not in self._texts:
            self._texts[text] = self.said(text)
        return self._texts[text]

    def record(self, record: Record, of: str) -> Record:
        """The rewritten record, with `of` as the name of the global view's value."""
        sharding = None if record.sharding is None else self.sharding(record.sharding)
        returned = tuple(map(self.text, record.returned_by)) if record.returned_by else ()
        source = self._source(record.source)
        return Record(record.shape, record.dtype, sharding, source, self.text(record.reason), record.phase, of, returned)

    def _source(self, source: Source) -> Source:
        if source not in self._sources:
            self._sources[source] = replace(source, module=self.text(source.module), region=self.text(source.region))
        return self._sources[source]

    def sharding(self, sharding: Sharding) -> Sharding:
        if not self.named(sharding):
            return sharding
        known = self._shardings.get(id(sharding))
        if known is None:
            dims = tuple(tuple(Part(self.text(part.factor), part.size, part.axes) for part in row) for row in sharding.dims)
            known = self._shardings[id(sharding)] = sharding, replace(sharding, dims=dims)  # the first keeps the key's object alive
        return known[1]
