"""Letters of an operator in a lowering that is recorded for a proof: parts of dims, their tiles, and a rank's places in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from torch.fx import Node

from meshc.ir import spmd
from meshc.ir.schemas import place_of
from meshc.ir.sharding import Part, Sharding, local_size
from meshc.ir.spmd import MICROBATCH
from meshc.proof.emitter import Emitter
from meshc.rules.rule import CPU, Extents, Local, Rule

aten = torch.ops.aten
Parts = tuple[Part, ...]


@dataclass(frozen=True)
class Letters:
    """An operator's letters, solved for one call.

    parts    of each letter; no letter stands for a dim of size 1
    results  the sharding of each result
    """

    node: Node
    rule: Rule
    parts: Mapping[str, Parts]
    results: tuple[Sharding | None, ...]


class RecordedLetters(Local):
    emitter: Emitter
    sizes: Mapping[str, int]
    _letters: Letters

    def _parts(self, letter: str) -> Parts:
        return self._letters.parts.get(letter, ())

    def letters(self) -> set[str]:
        return {letter for letter, parts in self._letters.parts.items() if parts}

    def axes(self, letter: str) -> tuple[str, ...]:
        return tuple(axis for part in self._parts(letter) for axis in part.axes)

    def global_size(self, letter: str) -> int:
        return prod(part.size for part in self._parts(letter))

    def local_size(self, letter: str) -> int:
        return prod(local_size(part, self.sizes) for part in self._parts(letter))

    def has_whole_groups(self, letter: str, count: int) -> bool:
        minor = 1
        for part in self._parts(letter)[::-1]:
            if minor >= count:
                break
            if part.axes:
                return False
            minor *= part.size
        return minor % count == 0

    def start(self, letter: str, back: int = 0) -> Node | int:
        first, *rest = self._parts(letter) or (Part(letter, 1),)
        if any(part.axes for part in rest):
            raise ValueError(f"only the major part of {letter} has a start")
        return self._in_positions(self.emitter.tile(spmd.tile_start, first, back), rest) if first.axes else 0

    def count(self, letter: str, back: int = 0) -> Node | int:
        first, *rest = self._parts(letter) or (Part(letter, 1),)
        return self._in_positions(self.emitter.tile(spmd.tile_count, first, back), rest) if first.axes else self.global_size(letter)

    def _in_positions(self, number: Node, minor: Sequence[Part]) -> Node:
        each = prod(part.size for part in minor)
        return number if each == 1 else self.emit(spmd.tile_start, 2 * each, [2], [number])

    def positions(self, letter: str, dtype: torch.dtype = torch.int64, device: torch.device = CPU) -> Node:
        parts = self._parts(letter)
        found: Node | None = None
        for at, part in enumerate(parts):
            here = self.emit(aten.arange.default, local_size(part, self.sizes), dtype=dtype, device=device)
            if part.axes:
                here = self.emit(aten.add.Tensor, here, self.emitter.tile(spmd.tile_start, part))
            if (each := prod(minor.size for minor in parts[at + 1 :])) != 1:
                here = self.emit(aten.mul.Tensor, here, each)
            if found is not None:
                here = self.emit(aten.add.Tensor, self.emit(aten.unsqueeze.default, found, -1), here)
            found = here
        if found is None:
            return self.emit(aten.arange.default, 1, dtype=dtype, device=device)
        return found if len(parts) == 1 else self.emit(aten.reshape.default, found, [self.local_size(letter)])

    # ------------------------------------------------------------------------------------------------------------------- tiles

    def tiles(self, index: int) -> Extents:
        sharding = self._letters.results[index]
        assert sharding is not None
        return self._extents((part, 0) for row in self._of_whole_batch([list(parts) for parts in sharding.dims]) for part in row)

    def tile(self, letters: Sequence[str]) -> Extents:
        return self._extents((part, 0) for letter in letters for part in self._parts(letter) or (Part(letter, 1),))

    def weights_drawn(self, letters: Sequence[str], back: Mapping[str, int]) -> Extents:
        rows = self._of_whole_batch([list(self._parts(letter)) or [Part(letter, 1)] for letter in letters])
        return self._extents((part, back.get(letter, 0)) for letter, row in zip(letters, rows, strict=True) for part in row)

    def _extents(self, rows: Iterable[tuple[Part, int]]) -> Extents:
        parts = list(rows)
        starts = [self.emitter.tile(spmd.tile_start, part, back) if part.axes else 0 for part, back in parts]
        shape = [local_size(part, self.sizes) for part, _ in parts]
        return {"global_shape": [part.size for part, _ in parts], "local_shape": shape, "offsets": starts}

    def _of_whole_batch(self, rows: list[list[Part]]) -> list[list[Part]]:
        """Rows of parts, the batch's with the positions of all microbatches where the call draws for one of several."""
        whole, mine = (cast(list[int], self.node.args[place_of(self.node, name)]) for name in ("global_shape", "local_shape"))
        for row, large, small in zip(rows, whole, mine, strict=True):
            if large != small:
                first = row[0] if row else Part("batch", 1)
                row[:1] = [Part(first.factor, first.size * self.sizes[MICROBATCH], (MICROBATCH, *first.axes))]
        return rows
