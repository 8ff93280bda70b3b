"""Faults of reads and writes by index in a rank's tile of the rows: places outside the tile, unmasked rows of other ranks.

    s: "i64[4]" = aten.sub.Tensor(i, tile_start)                        offset of each index from the tile's first row
    m: "b8[4]" = aten.logical_and(ge, lt)                               whether the index is in the tile: s >= 0 and s < tile_count
    p: "i64[4]" = aten.mul.Tensor(s, m)                                 place in the tile; 0 for a row of another rank
    r: "f32[4, h 8]" = aten.embedding(w, p)                             w is [vocab 256/tp, h 8]
    y: "f32[4, h 8] partial(sum: tp)" = aten.where.ScalarOther(m, r, 0.0)

Refused: a start, a count or a mask of another tile than that of the rows; unmasked rows of other ranks; an index that is no place in the
tile, where types declare the rows split; an argument that gives another start than that of the operator's tile.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Final, cast

import torch
from torch.fx import Node

from meshc import ir
from meshc.check.inferred_sharding import Parts, dim_text
from meshc.check.spmd_shardings import Place, place_of
from meshc.check.types import Wrong
from meshc.ir import spmd
from meshc.ir.schemas import named_arguments
from meshc.ir.sharding import is_padded
from meshc.ir.window import tile_length
from meshc.ops import expert_copies as _expert_copies  # noqa: F401 - registers them
from meshc.ops import expert_groups as _expert_groups  # noqa: F401 - likewise
from meshc.ops import take as _take  # noqa: F401 - likewise

aten, meshc = torch.ops.aten, torch.ops.meshc

Arguments = list[object]
INTEGERS: Final = (torch.int64, torch.int32)
RESHAPES: Final = (
    aten.reshape.default, aten.view.default, aten.unsqueeze.default, aten.squeeze.dims, aten.squeeze.dim, aten.clone.default,
)  # fmt: skip
READS: Final[Mapping[object, int]] = {
    aten.embedding.default: 1, aten.gather.default: 2, aten.index_select.default: 2, meshc.copies_of.default: 1,
}  # fmt: skip
"""Readers of rows of their first operand -> position of the index; the dim is the argument between the two, or 0."""
ADDS: Final[Mapping[object, int]] = {aten.embedding_dense_backward.default: 1, meshc.added_copies.default: 1}
"""Operators that add rows of their first operand to the rows of the result that an index selects -> position of the index."""
WRITES: Final = (
    aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce, aten.scatter_add.default,
    aten.scatter_reduce.two, aten.index_add.default, aten.index_copy.default, aten.index_fill.int_Scalar, aten.index_fill.int_Tensor,
    aten.index_reduce.default,
)  # fmt: skip
"""Operators that write into their first operand by an index along a dim: (x, dim, index, ..)."""
BY_START: Final[Mapping[object, tuple[int, int | None, int]]] = {
    meshc.take.default: (3, 0, -1), meshc.take_backward.default: (4, None, -1), meshc.one_hot.default: (2, None, -1),
    meshc.group_choices.default: (4, None, 0),
}  # fmt: skip
"""Operators with an argument for the start of a tile -> (its position, position of the tile's operand or None for the result, dim)."""
SKIPS_OTHERS: Final = (meshc.copies_of.default, meshc.added_copies.default)
"""Operators that skip places outside the tile."""


@dataclass(frozen=True)
class RankTile:
    """A rank's tile of `size` positions in `counts` tiles over `axes`, each position being `unit` rows."""

    axes: tuple[str, ...]
    size: int
    counts: tuple[int, ...]
    unit: int = 1

    @staticmethod
    def of(place: Place | None) -> RankTile | None:
        """The rank's own tile, by an integer that is its start or its number of positions; else None."""
        if place is None or place.size is None or place.back:
            return None
        return RankTile(place.axes, place.size, place.counts, place.unit)

    @property
    def rows(self) -> int:
        """Number of rows on a rank, padding included."""
        return tile_length(self.size, self.counts) * self.unit

    def __str__(self) -> str:
        return f"a tile of {self.size * self.unit} over {'/'.join(self.axes)}"


@dataclass(frozen=True)
class Index:
    """Integers, booleans or rows computed from the index `of`.

    index      a global index; with `tile`: replaced by `other` past the end of that tile
    negative   index < 0;  raised  index + `other`;  from_end  raised where negative, else the index
    shifted    offset of the index from the tile's start
    behind, before, inside   offset >= 0, offset < number of positions in the tile, both
    place      place in the tile, `other` for rows of other ranks
    rows       rows of the tile at such places, arbitrary for other ranks, to be masked by a mask of shape `other`
    masked     any values, with 0 for rows of other ranks by a mask of shape `other`
    longer     a tile and one row after it, written by such places along dim `other`
    unknown    anything else computed from an index
    """

    kind: str
    of: Node
    tile: RankTile | None = None
    other: object = None


class TileIndices:
    """Indices in the lines of a program, stage by stage."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = sizes
        self.found: dict[Node, Index] = {}
        self._places: dict[object, Place | None] = {}
        self._handed: dict[str, Index] = {}

    def enter(self, keys: Mapping[Node, str]) -> None:
        """Begins a stage with inputs under `keys`, as earlier stages returned them."""
        self.found.update({node: self._handed[key] for node, key in keys.items() if key in self._handed})

    def leave(self, results: Mapping[str, object]) -> None:
        self._handed.update({key: self.found[node] for key, node in results.items() if isinstance(node, Node) and node in self.found})

    def visit(self, node: Node) -> None:
        """Records a line. Raises Wrong if it takes rows of other ranks for rows of its own tile."""
        if node.target in spmd.INTEGERS.values():
            self._places[node] = place_of(node, self._places, self.sizes)
        if node.op != "call_function" or ir.is_integer(node):
            return
        self._check_rows(node)
        if node.target in BY_START:
            self._check_start(node)
        made = _MAKES.get(node.target)
        typed = ir.records(node)[0].sharding is not None  # a global index, whatever it is computed from
        found = made(self, arguments(node)) if made is not None and not typed else None
        if node.target in READS:
            found = self._rows_of_read(node)
        elif node.target in ADDS:
            self._check_sum_of_rows(node)
        elif node.target in WRITES:
            found = self._rows_of_write(node)
        found = found or self._unknown_index(node)
        if found is not None:
            self.found[node] = found

    def origin(self, node: Node) -> Node | None:
        """The index that a line's integers are computed from, if they are places in a tile or a step towards such places."""
        found = self.found.get(node)
        return found.of if found is not None and found.kind in ("index", "from_end", "shifted", "place") and found.of is not node else None

    def whole_rows(self, index: Node) -> int | None:
        """Global number of rows, if `index` is a place in a rank's tile of them; else None."""
        tile = self._tile(index)
        return tile.size * tile.unit if tile is not None else None

    def _tile(self, index: Node) -> RankTile | None:
        found = self.found.get(index)
        return found.tile if found is not None and found.kind == "place" else None

    # ------------------------------------------------------------------------------------------------ results of lines

    def _index(self, x: object) -> Index | None:
        """What is known of an operand; integers with a declared sharding are a global index."""
        if not isinstance(x, Node) or ir.is_integer(x):
            return None
        record = ir.records(x)[0]
        whole = record.dtype in INTEGERS and record.sharding is not None
        return self.found.get(x) or (Index("index", x) if whole else None)

    def _unknown_index(self, node: Node) -> Index | None:
        """The operand of a reshape; `unknown` for integers that a pointwise operator computes from an index; else None."""
        if isinstance(node.meta[ir.KEY], tuple) or ir.record(node).sharding is not None:
            return None
        operands = [found for one in ir.operands(node) if (found := self._index(one)) is not None]
        if not operands:
            return None
        if node.target in RESHAPES:
            return operands[0]
        pointwise = node.target in _MAKES or torch.Tag.pointwise in getattr(node.target, "tags", ())
        return Index("unknown", operands[0].of) if pointwise and ir.record(node).dtype in INTEGERS else None

    def _shift(self, args: Arguments) -> Index | None:
        x, place = self._index(args[0]), self._places.get(args[1])
        tile = RankTile.of(place)
        if x is None or place is None or tile is None or not place.starts or x.kind not in ("index", "from_end"):
            return None
        if x.kind == "from_end" and x.other != tile.size * tile.unit:
            raise Wrong(f"{args[0]} counts from the end of {x.other} rows, and {args[1]} is the start of {tile}")
        return Index("shifted", x.of, tile)

    def _offset(self, args: Arguments) -> Index | None:
        x, more = self._index(args[0]), args[1]
        return Index("raised", x.of, None, more) if x is not None and x.kind == "index" and type(more) is int else None

    def _lower_bound(self, args: Arguments) -> Index | None:
        x = self._index(args[0])
        return Index("behind", x.of, x.tile) if x is not None and x.kind == "shifted" and args[1] == 0 else None

    def _upper_bound(self, args: Arguments) -> Index | None:
        x, count = self._index(args[0]), self._places.get(args[1])
        if x is not None and x.kind == "index" and args[1] == 0:
            return Index("negative", x.of)
        if x is None or x.kind != "shifted" or count is None or count.starts or RankTile.of(count) != x.tile:
            return None
        return Index("before", x.of, x.tile)

    def _pair(self, args: Arguments) -> tuple[Index, Index] | None:
        """What is known of two operands, if both are about one index and one tile."""
        one, other = (self._index(x) for x in args[:2])
        return (one, other) if one is not None and other is not None and (one.of, one.tile) == (other.of, other.tile) else None

    def _both_bounds(self, args: Arguments) -> Index | None:
        pair = self._pair(args)
        return replace(pair[0], kind="inside") if pair and {one.kind for one in pair} == {"behind", "before"} else None

    def _masked_place(self, args: Arguments) -> Index | None:
        pair = self._pair(args)
        return replace(pair[0], kind="place", other=0) if pair and [one.kind for one in pair] == ["shifted", "inside"] else None

    def _where_number(self, args: Arguments) -> Index | None:
        """where(mask, x, number)."""
        mask, x, other = self._index(args[0]), self._index(args[1]), args[2]
        if mask is None or mask.kind not in ("inside", "before"):
            return None
        same = x is not None and (x.of, x.tile) == (mask.of, mask.tile)
        if mask.kind == "before":
            return replace(mask, kind="index", other=other) if x is not None and x.kind == "index" and x.of is mask.of else None
        if x is not None and x.kind in ("shifted", "place"):
            return replace(x, kind="place", other=other) if same else None
        return replace(mask, kind="masked", other=_shape(cast(Node, args[0]))) if other == 0 else None

    def _where_index(self, args: Arguments) -> Index | None:
        """where(index < 0, index + rows, index)."""
        found = [self._index(x) for x in args[:3]]
        if [one and one.kind for one in found] != ["negative", "raised", "index"] or len({one.of for one in found if one}) > 1:
            return None
        return replace(cast(Index, found[1]), kind="from_end")

    # ------------------------------------------------------------------------------------------------ readers and writers

    def _check_rows(self, node: Node) -> None:
        """Raises Wrong for a line that reads unmasked rows of other ranks, or the row after a tile."""
        for one in ir.operands(node):
            found = self.found.get(one)
            reshapes = node.target in RESHAPES and ir.record(node).sharding is None
            if found is None or found.kind not in ("rows", "longer") or reshapes:
                continue
            args = arguments(node)
            if found.kind == "longer":
                if node.target is not aten.slice.Tensor or args[1:] != [found.other, 0, cast(RankTile, found.tile).rows, 1]:
                    raise Wrong(f"{one} has a row behind its tile for what is written to other ranks' rows: it is to be cut off")
                continue
            mask = self._index(args[0]) if node.target is aten.where.ScalarOther and args[1] is one else None
            told = f"{one} has any row where an index points into another rank's tile"
            if mask is None or args[2] != 0:
                raise Wrong(f"{told}, and {ir.op_name(node)} takes it as it is: mask it")
            if mask.kind != "inside" or (mask.of, mask.tile, _shape(args[0])) != (found.of, found.tile, found.other):
                raise Wrong(f"{told}, and {args[0]} does not say where that is")

    def _check_place(self, index: Node, who: str, parts: Parts | None, other: object) -> Index | None:
        """What is known of `index`, if it is a place. Raises Wrong unless it is a place in a rank's tile of `parts`, with `other` for rows
        of other ranks."""
        found = self._index(index)
        if parts is None or found is None:
            return found if found is not None and found.kind == "place" and found.other == other else None
        tile, lies = self._tile_of_dim(parts), f"{who} is [{dim_text(parts)}] there"
        if tile is None:
            if found.kind in ("index", "unknown"):
                return None
            raise Wrong(f"{index} is a place in {found.tile}, and {lies}")
        if found.kind != "place":
            raise Wrong(f"{index} is no place in a rank's tile, and {lies}")
        if found.tile != tile:
            raise Wrong(f"{index} is a place in {found.tile}, and {lies}")
        if found.other != other:
            raise Wrong(f"{index} is {found.other} for rows of other ranks, and not {other}")
        return found

    def _tile_of_dim(self, parts: Parts) -> RankTile | None:
        """A rank's tile of a dim; None if no axis splits the dim."""
        rows = [part for part in parts if part.size != 1 or part.axes]
        if not any(part.axes for part in rows):
            return None
        first = rows[0]
        return RankTile(first.axes, first.size, tuple(self.sizes[axis] for axis in first.axes), prod(part.size for part in rows[1:]))

    def _rows_of_read(self, node: Node) -> Index | None:
        args, dim = arguments(node), dim_of(node)
        x, index = cast(Node, args[0]), cast(Node, args[READS[node.target]])
        if not ir.record(x).shape:
            return None
        found = self._check_place(index, str(x), _parts(x, dim), -1 if node.target in SKIPS_OTHERS else 0)
        if found is None or found.kind != "place" or node.target in SKIPS_OTHERS:
            return None
        if cast(RankTile, found.tile).rows != ir.record(x).shape[dim]:
            raise Wrong(f"{index} is a place in {found.tile}, and {x} has {ir.record(x).shape[dim]} rows")
        return replace(found, kind="rows", other=_shape_of_mask(node, index, dim))

    def _check_sum_of_rows(self, node: Node) -> None:
        grad, index = (cast(Node, one) for one in arguments(node)[:2])
        skips = node.target in SKIPS_OTHERS
        found = self._check_place(index, node.name, _parts(node, 0), -1 if skips else 0)
        if found is None or found.kind != "place" or skips:
            return
        mask = self._index(grad)
        if mask is None or (mask.kind, mask.of, mask.tile, mask.other) != ("masked", found.of, found.tile, (*_shape(index), 1)):
            raise Wrong(f"it adds what {grad} has for rows of other ranks to the first of its own: mask {grad}")

    def _rows_of_write(self, node: Node) -> Index | None:
        """The result of a write into a tile and one row after it, which collects the writes to rows of other ranks."""
        x, _, index = (cast(Node, one) for one in arguments(node)[:3])
        shape, tile, dim = ir.record(x).shape, self._tile(index), dim_of(node)
        inner = ir.operands(x)[0] if ir.record(x).sharding is None and x.target is aten.cat.default else x
        if not shape or self._check_place(index, str(inner), _parts(inner, dim), tile and tile.rows) is None or tile is None:
            return None
        if shape[dim] != tile.rows + 1:
            raise Wrong(f"{index} is a place in {tile} or behind it, and {x} has {shape[dim]} rows")
        return Index("longer", self.found[index].of, tile, dim)

    def _check_start(self, node: Node) -> None:
        """Raises Wrong if the argument for the start is not the start of the operator's tile."""
        at, argument, dim = BY_START[node.target]
        args = arguments(node)
        x, start = node if argument is None else cast(Node, args[argument]), args[at]
        parts = _parts(x, dim)
        if parts is None:
            return
        tile, place = self._tile_of_dim(parts), self._places.get(start)
        told = RankTile.of(place) if place is not None and place.starts else None
        if told != tile or tile is None and start != 0 and node.target is not meshc.group_choices.default:
            says = f"is the start of {told}" if told is not None else "is no start of its tile"
            raise Wrong(f"{start} {says}, and {x} is [{dim_text(parts)}] there")
        index = self._index(args[1 if argument is not None else 0])
        if index is not None and index.kind in ("shifted", "place"):
            raise Wrong(f"{node.name} counts its index from the start of its tile, as has been done already")
        if index is None or tile is None or argument is None or len(tile.axes) == 1:
            return
        if any(is_padded(part, self.sizes) for part in parts) and (index.kind, index.tile, index.other) != ("index", tile, args[2]):
            raise Wrong(f"{args[1]} may point behind {tile} into its padding: it is to be {args[2]} there")


_MAKES: Final[Mapping[object, Callable[[TileIndices, Arguments], Index | None]]] = {
    aten.sub.Tensor: TileIndices._shift,
    aten.add.Tensor: TileIndices._offset,
    aten.ge.Scalar: TileIndices._lower_bound,
    aten.lt.Scalar: TileIndices._upper_bound,
    aten.logical_and.default: TileIndices._both_bounds,
    aten.mul.Tensor: TileIndices._masked_place,
    aten.where.ScalarOther: TileIndices._where_number,
    aten.where.self: TileIndices._where_index,
}


def arguments(node: Node) -> Arguments:
    """All arguments of a call, in the order of the operator's schema."""
    return list(named_arguments(node).values())


def dim_of(node: Node) -> int:
    """The dim along which the index of a reader or writer selects."""
    x, dim, *_ = arguments(node)
    by_rows = READS.get(node.target) == 1 or node.target in ADDS
    return 0 if by_rows else cast(int, dim) % max(len(_shape(x)), 1)


def _shape(x: object) -> tuple[int, ...]:
    return tuple(ir.record(cast(Node, x)).shape)


def _shape_of_mask(node: Node, index: Node, dim: int) -> tuple[int, ...]:
    """Shape of the mask for what `node` reads by `index`."""
    if node.target is aten.gather.default:
        return _shape(index)
    if node.target is aten.embedding.default:
        return (*_shape(index), 1)
    return tuple(extent if at == dim else 1 for at, extent in enumerate(_shape(node)))


def _parts(x: Node, dim: int) -> Parts | None:
    """Declared parts of a dim of `x`, or of its first result by that result's `getitem` line; None for a plain type."""
    several = isinstance(x.meta[ir.KEY], tuple)
    lines = [user for user in x.users if ir.is_getitem(user) and user.args[1] == 0] if several else [x]
    return next((sharding.dims[dim] for one in lines if (sharding := ir.record(one).sharding) is not None), None)
