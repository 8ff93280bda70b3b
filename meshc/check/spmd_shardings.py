"""Sharding of the results of `meshc.ir.spmd` functions: collectives, tiles, masks.

    all_reduce(y: "f32[a 4, b 6/tp] partial(sum: dp)", ["dp"], "sum")     gives f32[a 4, b 6/tp]
    all_gather(y: "f32[a 4/dp, b 6/tp]", ["dp"], 0)                       gives f32[a 4, b 6/tp]
    shard(y: "f32[a 4, b 6]", 0, 2, coordinate_of_dp)                     gives f32[a 4/dp, b 6]
    all_gather(y: "f32[a 8/dp/tp]", ["tp", "dp"], 0)                      refused: tiles are split over dp, then tp
    all_gather(y: "f32[a 4 * b 6/tp]", ["tp"], 0)                         refused: a rank has its tile of b four times
    broadcast(y: "f32[a 4/dp]", ["dp"], 0)                                refused: all ranks would have the first rank's tile
    shard(y: "f32[a 4, b 6]", 0, 2, 1)                                    gives every rank the same rows: split over nothing

Results of collectives between pipeline stages are unknown: each stage has a graph and values of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Final, cast

import torch
from torch.fx import Node

from meshc.check.inferred_sharding import UNNAMED, Halo, InferredSharding, Parts, WindowedDim, dim_text, partial_text, tile
from meshc.check.orders import check_natural, reorder_dim
from meshc.check.types import Wrong
from meshc.check.view_shardings import slice_dim
from meshc.check.windows import check_halo, check_place
from meshc.ir import record, spmd
from meshc.ir.reductions import REDUCTIONS
from meshc.ir.sharding import ZIGZAG, Part, local_size
from meshc.ir.window import tile_length

aten = torch.ops.aten
COUNTS_UP: Final = (aten.arange.default, aten.arange.start, aten.arange.start_step)
Axes = Sequence[str]


@dataclass(frozen=True)
class Place:
    """An integer that depends on the rank: its coordinate on `axes`, or with `size` the first position (`starts`), or else the number of
    real positions, of its tile of `size` positions in `counts` tiles over `axes`, times `unit`. `back`: the integer is that of the rank
    so many places before, round the ring of `axes`."""

    axes: tuple[str, ...]
    starts: bool = True
    size: int | None = None
    counts: tuple[int, ...] = ()
    unit: int = 1
    back: int = 0

    @property
    def is_own(self) -> bool:
        return self.unit == 1 and not self.back

    def counts_tiles(self, sizes: Mapping[str, int]) -> bool:
        """Whether the integer is the rank's number along `axes`, major to minor."""
        counts = tuple(sizes[axis] for axis in self.axes)
        return self.starts and self.unit == 1 and (self.size is None or self.counts == counts and self.size == prod(counts))


Places = Mapping[object, Place | None]
"""Integer -> its `Place`; None: unknown."""


def place_of(node: Node, places: Places, sizes: Mapping[str, int]) -> Place | None:
    """The `Place` of an integer, by the integers that it is computed from; None if unknown, as for a tile of a tile."""
    if node.target is spmd.coordinate:
        return Place((str(node.args[0]),))
    if node.target is spmd.ring_place:
        return _place_back(node, places, sizes)
    size, counts, coordinates = cast(tuple[int, Sequence[int], Sequence[object]], node.args)
    found = [places.get(one) for one in coordinates]
    if len(found) == 1 and (one := found[0]) is not None and one.size is not None and list(counts) == [2] and size % 2 == 0:
        return replace(one, unit=one.unit * size // 2)
    known = [one for one in found if one is not None and one.size is None]
    axes = tuple(axis for one in known for axis in one.axes)
    if len(known) != len(found) or len(known) > 1 and any(one.back for one in known):
        return None
    return Place(axes, node.target is spmd.tile_start, size, tuple(counts), back=sum(one.back for one in known))


def _place_back(node: Node, places: Places, sizes: Mapping[str, int]) -> Place | None:
    of, steps, ranks = cast(tuple[object, int, int], node.args)
    place = places.get(of)
    if place is None or not place.counts_tiles(sizes):
        return None
    there = prod(sizes[axis] for axis in place.axes)
    if ranks != there:
        raise Wrong(f"it goes round a ring of {ranks} ranks by a place on {'/'.join(place.axes)}, which has {there}")
    return Place(place.axes, back=(place.back + steps) % ranks)


def positions(node: Node, places: Places, sizes: Mapping[str, int]) -> InferredSharding | None:
    """The sharding of consecutive positions, from the same number on all ranks or from the start of a rank's tile; None for other lines."""
    if node.target in COUNTS_UP:
        (extent,) = record(node).shape
        return InferredSharding(((Part(UNNAMED, extent),) if extent != 1 else (),), {}, filled=True)
    if node.target is not aten.add.Tensor or len(node.args) < 2 or node.kwargs:
        return None
    x, place = cast(Node, node.args[0]), places.get(node.args[1])
    if place is None or place.size is None or x.target not in COUNTS_UP:
        return None
    counts, extent = tuple(sizes[axis] for axis in place.axes), record(x).shape[0]
    if not place.starts or not place.is_own or place.counts != counts or tile_length(place.size, counts) != extent:
        raise Wrong(f"it counts {extent} positions from {node.args[1]} on, which is not where a rank's tile of so many starts")
    return InferredSharding(((Part(UNNAMED, place.size, place.axes),),), varies=True)


def infer_sharding(
    node: Node, given: InferredSharding, declared: InferredSharding | None, places: Places, sizes: Mapping[str, int]
) -> InferredSharding:
    """The sharding of the result, for checked arguments. Dims that depend on the padding of tiles are taken from `declared`."""
    if spmd.joins_stages(node):
        return InferredSharding((None,) * len(given.dims))
    return _MOVES[node.target](_Exchange(node, given, declared, places, sizes))


def _reduce_partial(given: InferredSharding, axes: Axes, how: str) -> InferredSharding:
    keeps = REDUCTIONS[how].keeps
    found = _map_pieces(
        given,
        lambda one: replace(one, padding={axis: held if held is not None and keeps(held) else None for axis, held in one.padding.items()}),
    )
    if given.partial is None:
        return found
    for axis in axes:
        if axis != spmd.MICROBATCH and given.partial.get(axis) != how:
            raise Wrong(f"its operand is not partial over {axis} for a {how}: it is {partial_text(given.partial)}")
    return replace(found, partial={axis: left for axis, left in given.partial.items() if axis not in axes})


def _map_pieces(found: InferredSharding, change: Callable[[InferredSharding], InferredSharding]) -> InferredSharding:
    """`change` applied to a sharding, and to all pieces if the value is a bucket."""
    pieces = found.pieces and tuple((size, change(one)) for size, one in found.pieces)
    return replace(change(found), pieces=pieces)


def _remove_axes(axes: Axes, does: str, one: InferredSharding) -> InferredSharding:
    """`one` no longer split by `axes`, which must be the innermost axes of one part, in this order."""
    runs, gone = one.axis_runs(), tuple(axes)
    if runs is not None:
        run = next((run for run in runs if run[-len(gone) :] == gone), None)
        if run is None:
            lies = ", ".join(sorted("/".join(run) for run in runs)) or "nothing"
            raise Wrong(f"it {does} over {', '.join(axes)}, in this order, and its operand is split over {lies}")
        runs = frozenset({*runs - {run}, run[: -len(gone)]} - {()})
    padding = {axis: held for axis, held in one.padding.items() if axis not in axes}
    back = {ring: back for ring, back in one.back.items() if not {*ring} & {*axes}}
    return replace(_without_dims(one), runs=runs, padding=padding, back=back)


def _add_axes(axes: Axes, one: InferredSharding) -> InferredSharding:
    """`one` also split by `axes`. Padding for these is zero if `one` is `filled`."""
    runs = one.axis_runs()
    padding = {**one.padding, **dict.fromkeys(axes, 0.0)} if one.filled else one.padding
    return replace(_without_dims(one), runs=None if runs is None else runs | {tuple(axes)}, padding=padding)


def _without_dims(one: InferredSharding) -> InferredSharding:
    return replace(one, dims=(None,) * len(one.dims))


def _viewed_sizes(x: Node, axes: Axes) -> list[int]:
    """Sizes of the parts that `axes` split in the declared sharding of the value that `x` is a view of."""
    while x.target is aten.reshape.default and record(x).sharding is None:
        x = cast(Node, x.args[0])
    sharding = record(x).sharding
    return [] if sharding is None else [part.size for _, _, part in sharding.parts() if part.axes == tuple(axes)]


def _comparable_parts(parts: Parts) -> list[tuple[str, int, tuple[str, ...]]]:
    return [(part.factor, part.size, part.cuts) for part in parts if part.size != 1 or part.axes]


@dataclass(frozen=True)
class _Exchange:
    """A line that calls a function of `meshc.ir.spmd`, with the sharding of its operand and the declared one of its result, if any."""

    node: Node
    given: InferredSharding
    declared: InferredSharding | None
    places: Places
    sizes: Mapping[str, int]

    def all_reduce(self) -> InferredSharding:
        axes, how = cast(tuple[Axes, str], self.node.args[1:])
        return _reduce_partial(self.given, axes, how)

    def all_gather(self) -> InferredSharding:
        axes, dim = cast(tuple[Axes, int], self.node.args[1:])
        split = self.given.split_axes()
        if split is not None and not set(axes) <= split:
            raise Wrong(f"it gathers over {', '.join(sorted(set(axes) - split))}, which does not split its operand: that is split over "
                        f"{', '.join(sorted(split)) or 'nothing'}")  # fmt: skip
        found = self._gathered_dim(dim, axes, "gathers")
        return self._with_dim(_map_pieces(self.given, partial(_remove_axes, axes, "gathers")), dim, found)

    def reduce_scatter(self) -> InferredSharding:
        axes, dim, how = cast(tuple[Axes, int, str], self.node.args[1:])
        made = _reduce_partial(_map_pieces(self.given, partial(_add_axes, axes)), axes, how)
        return self._with_dim(made, dim, self._split_dim(dim, axes))

    def all_to_all(self) -> InferredSharding:
        axes, split, concat = cast(tuple[Axes, int, int], self.node.args[1:])
        if split == concat:
            if self.declared is not None:
                raise Wrong(f"it exchanges tiles along dim {split} alone: what a rank has then no type says")
            return replace(self.given.with_dim(split, None), runs=self.given.axis_runs())
        does = "takes together"
        less = self._gathered_dim(concat, axes, does)
        moved = _map_pieces(_map_pieces(self.given, partial(_remove_axes, axes, does)), partial(_add_axes, axes))
        return self._with_dim(moved, concat, less).with_dim(split, self._split_dim(split, axes))

    def shard(self) -> InferredSharding:
        dim, tiles, index = cast(tuple[int, int, object], self.node.args[1:])
        given, sizes, own = self.given, self.sizes, self.declared is not None
        if isinstance(index, int):
            return self._same_rows(dim, tiles, index)
        place = self._own_place(index)
        if place is None and not own:
            other = self.places.get(index)
            back = {} if other is None else {other.axes: other.back}
            return replace(given.with_dim(dim, None), runs=None, varies=True, back=back)
        if place is None or not place.counts_tiles(sizes):
            raise Wrong(f"{index} is not a rank's number among {tiles}, by which it takes its tile")
        axes, ranks = place.axes, prod(sizes[axis] for axis in place.axes)
        if ranks != tiles:
            raise Wrong(f"it takes one of {tiles} tiles by a rank's place on {'/'.join(axes)}, which has {ranks} ranks")
        if spmd.MICROBATCH in axes and self.declared is not None and spmd.MICROBATCH not in (self.declared.split_axes() or ()):
            axes, found = tuple(axis for axis in axes if axis != spmd.MICROBATCH), self._microbatch_dim(dim, tiles)
        else:
            found = self._split_dim(dim, axes)
        back = {} if own else {**given.back, axes: 0}
        return self._with_dim(_add_axes(axes, replace(given, filled=True, back=back)) if axes else given, dim, found)

    def _same_rows(self, dim: int, tiles: int, index: int) -> InferredSharding:
        """Tile `index` on all ranks: a slice."""
        size = record(cast(Node, self.node.args[0])).shape[dim]
        length, parts = -(-size // tiles), self.given.dims[dim]
        whole = parts is not None and size % tiles == 0
        found = slice_dim(cast(Parts, parts), index * length, length, 1, self.sizes, self.declared is None) if whole else None
        return replace(self.given.with_dim(dim, found), runs=self.given.axis_runs())

    def keep_first(self) -> InferredSharding:
        index, given = self.node.args[1], self.given
        padding = {axis: 0.0 if held == 0 else None for axis, held in given.padding.items()}
        if index == 0:
            return given  # all ranks keep it: whole, not partial
        place = self._own_place(index)
        if place is None or not place.counts_tiles(self.sizes):
            if self.declared is not None:
                raise Wrong(f"it keeps what the first rank has, and {index} is no rank's number")
            return replace(given, partial=None, padding=padding, varies=True)
        differs = sorted(({*(given.partial or ())} | (given.split_axes() or frozenset())) & set(place.axes))
        if differs:
            told = f"it keeps what the first rank of {', '.join(differs)} has"
            raise Wrong(f"{told}, and its operand is another on each of these: the rest is lost")
        if given.partial is None:
            return replace(given, padding=padding)
        sums = dict.fromkeys((axis for axis in place.axes if axis != spmd.MICROBATCH), "sum")
        return replace(given, partial={**given.partial, **sums}, padding=padding)

    def broadcast(self) -> InferredSharding:
        """One rank's value on its whole group. Raises Wrong for a value split or partial over the group: the rest would be lost."""
        axes, given = cast(Axes, self.node.args[1]), self.given
        split, partial = (given.split_axes() or frozenset()) & set(axes), sorted(set(given.partial or ()) & set(axes))
        if split:
            raise Wrong(f"it sends one rank's tile to all of {', '.join(axes)}, and {', '.join(sorted(split))} splits its operand")
        if partial:
            raise Wrong(f"it sends one rank's part to all of {', '.join(axes)}, and its operand is {partial_text(given.partial or {})}")
        return given

    def mask(self) -> InferredSharding:
        """The sharding with padding of one dim set to the mask's value."""
        dim, count, value = cast(tuple[int, object, float], self.node.args[1:])
        given, sizes = self.given, self.sizes
        check_natural(given, dim, "counts positions")
        place = self._own_place(count)
        if place is None or place.starts:
            return replace(given, padding={}, varies=True)
        parts = given.dims[dim]
        if parts is None and (behind := _viewed_sizes(cast(Node, self.node.args[0]), place.axes)) and place.size not in behind:
            split = "/".join(place.axes)
            told = f"it counts the real positions of a tile of {place.size} over {split}"
            raise Wrong(f"{told}, and {split} splits {behind[0]} of its operand's")
        longer = [part for part in parts or () if local_size(part, sizes) != 1]
        exposed = longer[:1] or list(parts or ())  # of one position in all, any part may say that there is none
        counted = place.counts == tuple(sizes[axis] for axis in place.axes)
        fits = counted and (parts is None or any(part.axes == place.axes and part.size == place.size for part in exposed))
        if not fits:
            told = "" if parts is None else f", which is [{dim_text(parts)}]"
            tiles = f"a tile of {place.size} over {'/'.join(place.axes)}"
            raise Wrong(f"it counts the real positions of {tiles} along dim {dim} of its operand{told}")
        return replace(given, padding={**given.padding, **dict.fromkeys(place.axes, float(value))})

    def ring_shift(self) -> InferredSharding:
        """Another rank's tile, which no declared sharding can express."""
        axes, steps = cast(tuple[Axes, int], self.node.args[1:])
        ring, back = tuple(axes), self.given.back
        if self.declared is not None:
            raise Wrong("it is another rank's tile, which no type says")
        ranks = prod(self.sizes[axis] for axis in ring)
        return replace(self.given, varies=True, back={**back, ring: (back.get(ring, 0) + steps) % ranks})

    def reorder(self, before: str, after: str) -> InferredSharding:
        axes, dim = cast(tuple[Axes, int], self.node.args[1:])
        return reorder_dim(self.given, dim, axes, before, after, self.sizes)

    def halo(self) -> InferredSharding:
        given, dim, halo = self.given, cast(int, self.node.args[2]), Halo.of(self.node, self.sizes)
        check_natural(given, dim, "reads neighbours")
        before, after, sums = given.windows.get(dim), self._declared_dim(dim), self.node.target is spmd.halo_sum
        check_halo(halo, after if sums else given.dims[dim], given.dims[dim] if sums else after)
        if sums and isinstance(before, WindowedDim):
            check_place(halo, before, "its operand was made")
        windows = {**{at: one for at, one in given.windows.items() if at != dim}, **({} if sums else {dim: halo})}
        return replace(given.with_dim(dim, after), runs=None, padding={}, windows=windows)

    def gather_rows(self) -> InferredSharding:
        """Each rank has the rows sent to it: the axes of the new dim are unknown."""
        dims = self.given.dims
        return InferredSharding((None, *dims[:-2], None, dims[-1]))

    def scatter_rows(self) -> InferredSharding:
        dims = self.given.dims
        return InferredSharding((*dims[1:-2], None, dims[-1]))

    def _own_place(self, number: object) -> Place | None:
        place = self.places.get(number)
        return place if place is not None and place.is_own else None

    def _with_dim(self, made: InferredSharding, dim: int, parts: Parts | None) -> InferredSharding:
        """`made` with the dims of the operand, except `dim`."""
        return replace(made, dims=self.given.with_dim(dim, parts).dims)

    def _declared_dim(self, dim: int) -> Parts | None:
        return self.declared.dims[dim] if self.declared is not None else None

    def _gathered_dim(self, dim: int, axes: Axes, does: str) -> Parts | None:
        """`dim` of the result: sharded as the operand without `axes`, which must be the innermost axes of its major part, in this order."""
        before, sizes = self.given.dims[dim], self.sizes
        if before is None:
            return self._declared_dim(dim)
        missing = [axis for axis in axes if axis not in (cut for part in before for cut in part.cuts)]
        lies = f"along dim {dim}, which is [{dim_text(before)}]"
        if missing:
            raise Wrong(f"it {does} over {', '.join(axes)} {lies} and not split over {', '.join(missing)}")
        place = next((at for at, part in enumerate(before) if list(part.cuts[-len(axes) :]) == list(axes)), None)
        if place is None:
            raise Wrong(f"it {does} over {', '.join(axes)}, in this order, {lies}: its tiles lie otherwise")
        if any(local_size(part, sizes) != 1 for part in before[:place]):
            raise Wrong(f"it {does} over {', '.join(axes)} {lies}: a rank has its tile of {before[place].factor} more than once there")
        part = before[place]
        whole = replace(part, axes=part.axes[: -len(axes)], order=part.order if len(part.axes) > len(axes) else "")
        padded = local_size(whole, sizes) != local_size(part, sizes) * prod(sizes[axis] for axis in axes)
        told = f"its operand's dim {dim} is [{dim_text(before)}], which without {', '.join(axes)} is not"
        return self._match_dim(dim, [(*before[:place], whole, *before[place + 1 :])], told, padded)

    def _split_dim(self, dim: int, axes: Axes) -> Parts | None:
        """`dim` of the result: sharded as the operand with `axes` added as the innermost axes of its major part."""
        before, sizes = self.given.dims[dim], self.sizes
        if before is None:
            return self._declared_dim(dim)
        count, found = prod(sizes[axis] for axis in axes), []
        wanted = -(-tile(before, sizes) // count)
        for place, part in enumerate(before):
            after = (*before[:place], replace(part, axes=(*part.axes, *axes)), *before[place + 1 :])
            rest = tile(before[place + 1 :], sizes)
            even = local_size(part, sizes) % count == 0
            if tile(after, sizes) == wanted and (even or rest == 1):
                found.append(after)
            if local_size(part, sizes) != 1:
                break
        told = f"its operand's dim {dim} is [{dim_text(before)}], which split over {', '.join(axes)} is not"
        return self._match_dim(dim, found, told, not found)

    def _microbatch_dim(self, dim: int, tiles: int) -> Parts | None:
        """`dim` of the result: the rows of one microbatch, in a step that is the mean of its microbatches, with sizes of one microbatch."""
        before = self.given.dims[dim]
        if before is None:
            return self._declared_dim(dim)
        place = next((at for at, part in enumerate(before) if local_size(part, self.sizes) != 1), 0)
        rows = (*before[:place], *(replace(part, size=part.size // tiles) for part in before[place : place + 1]), *before[place + 1 :])
        return self._match_dim(dim, [rows], f"its operand's dim {dim} is [{dim_text(before)}], of which a microbatch is not", False)

    def _match_dim(self, dim: int, ways: Sequence[Parts], told: str, unlike: bool) -> Parts | None:
        """The declared parts of a dim, which must be among `ways`; without these the only one of `ways`, but if the result is padded
        otherwise (`unlike`)."""
        declared = self._declared_dim(dim)
        if declared is None:
            return ways[0] if len(ways) == 1 and not unlike else None
        if not any(_comparable_parts(way) == _comparable_parts(declared) for way in ways):
            raise Wrong(f"{told} [{dim_text(declared)}]")
        return declared


_MOVES: Final[Mapping[object, Callable[[_Exchange], InferredSharding]]] = {
    spmd.all_reduce: _Exchange.all_reduce,
    spmd.all_gather: _Exchange.all_gather,
    spmd.reduce_scatter: _Exchange.reduce_scatter,
    spmd.all_to_all: _Exchange.all_to_all,
    spmd.broadcast: _Exchange.broadcast,
    spmd.ring_shift: _Exchange.ring_shift,
    spmd.to_zigzag: lambda line: line.reorder("", ZIGZAG),
    spmd.from_zigzag: lambda line: line.reorder(ZIGZAG, ""),
    spmd.halo: _Exchange.halo,
    spmd.halo_sum: _Exchange.halo,
    spmd.gather_rows: _Exchange.gather_rows,
    spmd.scatter_rows: _Exchange.scatter_rows,
    spmd.shard: _Exchange.shard,
    spmd.mask: _Exchange.mask,
    spmd.to_host: lambda line: line.given,
    spmd.from_host: lambda line: line.given,
    spmd.keep_first: _Exchange.keep_first,
}
