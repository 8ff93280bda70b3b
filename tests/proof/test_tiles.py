"""Tiles against positions that are counted out: what moves on all ranks is where its tiles say that it is."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch.fx import Graph, Node

from meshc.ir import Record, set_record, spmd
from meshc.ir.sharding import Part, Sharding, tile_sizes
from meshc.proof.evaluate import Evaluator
from meshc.proof.exchanged_tiles import all_gather
from meshc.proof.held import Integer
from meshc.proof.places import mask, shard
from meshc.proof.replay import _padding_axes
from meshc.proof.terms import TermTable
from meshc.proof.tile_moves import expand_dims, lengthen_dim, narrow_dim, reshape_dims
from meshc.proof.tiles import Tiles, Unfit, dims_of_shape, tiles_of

aten = torch.ops.aten
SIZES = {"a": 2, "b": 3, "c": 4}
PADDING = -1
ZERO = -2
Ranks = Mapping[tuple[int, ...], torch.Tensor]
"""What each rank has, by its coordinates: positions of a value; where there is none ZERO if there are zeros, PADDING for whatever else."""


def ranks() -> Iterator[tuple[int, ...]]:
    return product(*map(range, SIZES.values()))


def cut(whole: torch.Tensor, sharding: Sharding, beyond: Callable[[int], int] = lambda _: PADDING) -> Ranks:
    """The tiles of a value on all ranks, cut out one axis after the other; `beyond`: what uneven tiles of a part add."""

    def tile(at: Mapping[str, int]) -> torch.Tensor:
        x = whole.reshape([part.size for parts in sharding.dims for part in parts])
        for dim, part in enumerate(part for parts in sharding.dims for part in parts):
            extents = tile_sizes(part.size, [SIZES[axis] for axis in part.axes])
            for axis, extent in zip(part.axes, extents[1:], strict=True):
                rest = SIZES[axis] * extent - x.shape[dim]
                if rest > 0:
                    shape = [*x.shape]
                    shape[dim] = rest
                    x = torch.cat([x, torch.full(shape, beyond(dim))], dim)
                x = x.narrow(dim, at[axis] * extent, extent)
        return x

    local = [prod(tile_sizes(part.size, [SIZES[axis] for axis in part.axes])[-1] for part in parts) for parts in sharding.dims]
    return {at: tile(dict(zip(SIZES, at, strict=True))).reshape(local) for at in ranks()}


def told(tiles: Tiles, at: tuple[int, ...]) -> torch.Tensor:
    """The positions that tiles say a rank has."""
    here = dict(zip(SIZES, at, strict=True))
    found = torch.tensor(sum(stride * here[axis] for axis, stride in tiles.axes))
    for dim in tiles.dims:
        digits = torch.zeros(1, dtype=torch.int64)
        for stride, extent in dim:
            digits = (digits[:, None] + stride * torch.arange(extent)).flatten()
        found = found[..., None] + digits
    return found


class Form:
    """A value in a sharding, and what all ranks have of it."""

    def __init__(self, value: Tiles, whole: torch.Tensor, sharding: Sharding) -> None:
        self.sharding, self.tiles, self.have = sharding, tiles_of(value, sharding, SIZES), cut(whole, sharding)
        parts = [part for parts in sharding.dims for part in parts]
        nothing = torch.zeros_like(whole)
        self.beyond = {at: cut(nothing, sharding, lambda one, at=at: int(one == at)) for at in range(len(parts))}  # type: ignore[misc]
        self.axes = {at: _padding_axes(part, SIZES) for at, part in enumerate(parts)}

    def agree(self, tiles: Tiles, have: Ranks) -> None:
        """What serves as a value in a sharding has all that the value has so, and zeros where it says so."""
        if not tiles.serves(self.tiles):
            return
        zero = {name for name, value in tiles.padding if value == 0.0}
        for at, x in have.items():
            assert (x[self.have[at] >= 0] >= 0).all(), (tiles, self.tiles)
            if all(zero.issuperset(axes) for axes in self.axes.values()):
                assert (x[self.have[at] < 0] == ZERO).all(), (tiles, self.tiles)
            for part, axes in self.axes.items():
                others = sum(marks[at] for one, marks in self.beyond.items() if one != part)
                if zero.issuperset(axes):
                    assert (x[(self.beyond[part][at] == 1) & (others == 0)] == ZERO).all(), (tiles, self.tiles, part)


def agree(tiles: Tiles, have: Ranks, forms: Iterable[Form]) -> None:
    """Where tiles say that a rank has a position it has that, and they agree with what they serve as."""
    for form in forms:
        form.agree(tiles, have)
    for at, x in have.items():
        where = told(tiles, at)
        assert where.shape == x.shape
        real = x >= 0
        assert torch.equal(where[real], x[real]), (tiles, at)
        assert tiles.uneven or any(stride for dim in tiles.dims for stride, _ in dim) or real.all(), (tiles, at)


def draw_dims(pick: random.Random, is_small: bool) -> Sharding:
    """Two dims of up to three parts; of small values one or two of one or two, whose tiles often end where others do."""
    sizes, counts = ([1, 2, 2, 3, 4, 7, 8], (1, 1, 2)) if is_small else ([1, 2, 3, 4, 5, 6, 12], (1, 2, 3))
    dims = range(pick.choice((1, 1, 2)) if is_small else 2)
    return Sharding(tuple(tuple(Part(f"{d}{p}", pick.choice(sizes)) for p in range(pick.choice(counts))) for d in dims))


def split_by_some(pick: random.Random, whole: Sharding) -> Sharding:
    """Split by some of the axes."""
    dims = [[*parts] for parts in whole.dims]
    for axis in pick.sample(list(SIZES), pick.randint(0, 3)):
        row = pick.choice(dims)
        at = pick.randrange(len(row))
        row[at] = replace(row[at], axes=(*row[at].axes, axis))
    return Sharding(tuple(map(tuple, dims)))


MOVES = ["gather", "shard", "shard at once", "exchange", "turn", "apart", "together", "cut", "pad", "mask"]


class World:
    """A value on all ranks, and its tiles, through the same moves."""

    def __init__(self, pick: random.Random, repeats: Collection[int] = (), is_small: bool = False) -> None:
        """`repeats`: dims along which all elements are the same. Small values are cut, and have zeros added, more often."""
        self.pick = pick
        self.moves = [*MOVES, *(["shard", "cut", "pad"] if is_small else [])]
        self.whole = draw_dims(pick, is_small)
        self.sharding = split_by_some(pick, self.whole)
        shape = self.sharding.shape
        once = [1 if dim in repeats else size for dim, size in enumerate(shape)]
        terms = TermTable()
        root = terms.number("port", "x")
        self.of = Evaluator(terms, SIZES, {root}, {root: prod(once)})
        self.value = expand_dims(Tiles(root, dims_of_shape(once)), shape)
        self.repeats = bool(repeats)
        self.tiles = tiles_of(self.value, self.sharding, SIZES)
        whole = torch.arange(prod(once)).reshape(once).expand(shape)
        self.have = cut(whole, self.sharding)
        self.forms = list(self.draw_forms(whole))
        self.graph = Graph()

    def shardings(self) -> Iterator[Sharding]:
        """The value's, without some of the axes; and others."""
        split = self.sharding.split_axes()
        for left in {frozenset(self.pick.sample(sorted(split), count)) for count in range(len(split) + 1) for _ in range(2)}:
            dims = [
                [replace(part, axes=tuple(axis for axis in part.axes if axis in left)) for part in parts] for parts in self.sharding.dims
            ]
            yield replace(self.sharding, dims=tuple(map(tuple, dims)))
        yield from (split_by_some(self.pick, self.whole) for _ in range(4))

    def draw_forms(self, whole: torch.Tensor) -> Iterator[Form]:
        for one in self.shardings():
            with contextlib.suppress(Unfit):
                yield Form(self.value, whole, one)

    def call(self, target: Callable[..., object], *args: object) -> Tiles:
        """What the evaluator makes of a call, of what all ranks have now."""
        x, rest = self.graph.placeholder("x"), []
        held: dict[Node, object] = {x: self.tiles}
        for argument in args:
            if isinstance(argument, Integer):
                node = self.graph.placeholder("i")
                held[node] = argument
                rest.append(node)
            else:
                rest.append(argument)
        node = self.graph.create_node("call_function", target, (x, *rest))
        shape = next(iter(self.have.values())).shape
        if not spmd.is_function(target):
            shape = target(torch.empty(shape, device="meta"), *args).shape  # type: ignore[attr-defined]
        set_record(node, Record(tuple(shape), torch.int64))
        found = self.of.call(node, held.__getitem__)  # type: ignore[arg-type]
        assert isinstance(found, Tiles)
        return found

    def each(self, make: Callable[[torch.Tensor], torch.Tensor]) -> Ranks:
        return {at: make(x) for at, x in self.have.items()}

    def along(self, axis: str, at: tuple[int, ...]) -> list[torch.Tensor]:
        """What the ranks along an axis have, beside the one at `at`."""
        place = list(SIZES).index(axis)
        return [self.have[(*at[:place], number, *at[place + 1 :])] for number in range(SIZES[axis])]

    def step(self) -> bool:
        """One move, drawn by chance; whether there was one that fits."""
        shape = list(next(iter(self.have.values())).shape)
        dim = self.pick.randrange(len(shape))
        axis = self.pick.choice(list(SIZES))
        split, index = {name for name, _ in self.tiles.axes}, list(SIZES).index(axis)
        kind = self.pick.choice(self.moves)
        if kind == "gather" and (axis in split or self.repeats):
            found = self.call(spmd.all_gather, [axis], dim)
            have = {at: torch.cat(self.along(axis, at), dim) for at in ranks()}
        elif kind == "shard" and axis not in split and shape[dim] > 1:
            found = self.call(spmd.shard, dim, SIZES[axis], Integer(("coordinate", axis)))
            have = {at: padded_shard(x, dim, SIZES[axis], at[index]) for at, x in self.have.items()}
        elif kind == "shard at once" and len(free := [name for name in SIZES if name not in split]) > 1 and shape[dim] > 1:
            axes = self.pick.sample(free, 2)
            counts = [SIZES[name] for name in axes]
            starts = Integer(("tile_start", prod(counts), tuple(counts), tuple(Integer(("coordinate", name)) for name in axes)))
            found = self.call(spmd.shard, dim, prod(counts), starts)
            have = {at: padded_shard(x, dim, prod(counts), number_of(axes, at)) for at, x in self.have.items()}
        elif kind == "mask":
            axes = self.pick.sample(list(SIZES), self.pick.choice([1, 1, 2]))
            counts = tuple(SIZES[name] for name in axes)
            size = self.pick.choice([*{part.size for parts in self.sharding.dims for part in parts}])
            if tile_sizes(size, counts)[-1] != shape[dim]:
                return False  # the text of a program has none
            valid = Integer(("tile_count", size, counts, tuple(Integer(("coordinate", name)) for name in axes)))
            found = self.call(spmd.mask, dim, valid, 0.0)
            have = {
                at: masked(x, dim, spmd.tile_count(size, counts, [at[list(SIZES).index(name)] for name in axes]))
                for at, x in self.have.items()
            }
        elif kind == "exchange" and (axis in split or self.repeats) and shape[dim] % SIZES[axis] == 0 and len(shape) > 1:
            other = (dim + 1) % len(shape)
            found = self.call(spmd.all_to_all, [axis], dim, other)
            have = {at: torch.cat([x.chunk(SIZES[axis], dim)[at[index]] for x in self.along(axis, at)], other) for at in ranks()}
        elif kind == "turn" and len(shape) > 1:
            order = self.pick.sample(range(len(shape)), len(shape))
            found, have = self.call(aten.permute.default, order), self.each(lambda x: x.permute(order))
        elif kind == "apart" and shape[dim] > 1:
            rows = next(count for count in range(2, shape[dim] + 1) if shape[dim] % count == 0)
            new = [*shape[:dim], rows, shape[dim] // rows, *shape[dim + 1 :]]
            found, have = self.call(aten.reshape.default, new), self.each(lambda x: x.reshape(new))
        elif kind == "together" and len(shape) > 1:
            at = min(dim, len(shape) - 2)
            new = [*shape[:at], shape[at] * shape[at + 1], *shape[at + 2 :]]
            found, have = self.call(aten.reshape.default, new), self.each(lambda x: x.reshape(new))
        elif kind == "cut" and shape[dim] > 1:
            found = self.call(aten.slice.Tensor, dim, 0, shape[dim] - 1)
            have = self.each(lambda x: x.narrow(dim, 0, shape[dim] - 1))
        elif kind == "pad":
            pad = [0, 0] * (len(shape) - 1 - dim) + [0, 1]
            found = self.call(aten.constant_pad_nd.default, pad, 0)
            have = self.each(lambda x: torch.nn.functional.pad(x, pad, value=ZERO))
        else:
            return False
        if found.root != self.tiles.root:
            return False  # digits cannot say it: it is a term of its own
        self.tiles, self.have = found, have
        return True


def padded_shard(x: torch.Tensor, dim: int, tiles: int, index: int) -> torch.Tensor:
    length = -(-x.shape[dim] // tiles)
    rest = length * tiles - x.shape[dim]
    whole = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rest], value=ZERO)
    return whole.narrow(dim, index * length, length)


def number_of(axes: Sequence[str], at: tuple[int, ...]) -> int:
    """A rank's number along some axes, major to minor."""
    number = 0
    for axis in axes:
        number = number * SIZES[axis] + at[list(SIZES).index(axis)]
    return number


def masked(x: torch.Tensor, dim: int, count: int) -> torch.Tensor:
    """Zeros behind the first `count` places of a dim."""
    made = x.clone()
    made.narrow(dim, count, x.shape[dim] - count).fill_(ZERO)
    return made


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("repeats", [(), (0, 1), (0,), (1,)], ids=["apart", "repeated", "rows repeated", "columns repeated"])
@pytest.mark.parametrize("is_small", [False, True], ids=["of many parts", "small"])
def test_tiles_are_where_they_say(seed: int, repeats: tuple[int, ...], is_small: bool) -> None:
    pick, done = random.Random(seed), 0
    for _ in range(60):
        try:
            world = World(pick, repeats, is_small)
        except Unfit:
            continue
        agree(world.tiles, world.have, world.forms)
        for _ in range(8):
            with contextlib.suppress(Unfit):
                if world.step():
                    done += 1
                    agree(world.tiles, world.have, world.forms)
    assert done > 100


def value_of_shape(shape: tuple[int, ...], once: tuple[int, ...]) -> tuple[Evaluator, Tiles]:
    """A value, of which dims of one position are repeated."""
    root = TermTable().number("port", "x")
    return Evaluator(TermTable(), SIZES, {root}, {root: prod(once)}), expand_dims(Tiles(root, dims_of_shape(once)), shape)


def shard_over(of: Evaluator, x: Tiles, dim: int, *axes: str) -> Tiles:
    counts = tuple(of.sizes[axis] for axis in axes)
    places = tuple(Integer(("coordinate", axis)) for axis in axes)
    return shard(of, x, dim, prod(counts), places[0] if len(axes) == 1 else Integer(("tile_start", prod(counts), counts, places)))


def split_parts(*parts: tuple[int, str]) -> Sharding:
    return Sharding(tuple((Part("p", size, tuple(axes)),) for size, axes in parts))


@pytest.mark.parametrize("size", range(1, 14))
@pytest.mark.parametrize("axes", ["ab", "ac", "bc", "ca", "cb", "abc", "bac"])
def test_a_dim_padded_for_each_axis_and_cut_over_all_is_split_by_them(size: int, axes: str) -> None:
    """A tile of a tile with zeros, of several axes at once: [3] as 2 of 2, 2 with zeros of 4, all 8 over both."""
    of, value = value_of_shape((size, 5), (size, 5))
    x, extents = value, tile_sizes(size, [SIZES[axis] for axis in axes])
    for at, (extent, axis) in enumerate(zip(extents[1:], axes, strict=True)):
        x = lengthen_dim(x, at, extent * SIZES[axis] - x.shape[at])
        x = reshape_dims(x, (*x.shape[:at], SIZES[axis], extent, 5))
    made = shard_over(of, reshape_dims(x, (prod(x.shape[:-1]), 5)), 0, *axes)
    wanted = tiles_of(value, split_parts((size, axes), (5, "")), SIZES)
    assert made.serves(wanted) and {axis for axis, *_ in wanted.uneven} <= {axis for axis, zero in made.padding if zero == 0.0}


def test_zeros_behind_equal_rows_stay_where_rows_are_cut_with_columns() -> None:
    of, value = value_of_shape((4, 6), (1, 6))
    x = reshape_dims(lengthen_dim(narrow_dim(value, 0, 3), 0, 1), (24,))
    made = reshape_dims(shard_over(of, x, 0, "a"), (2, 6))
    assert not made.serves(tiles_of(value, split_parts((4, "a"), (6, "")), SIZES))


def test_zeros_stay_where_an_axis_of_one_rank_cuts() -> None:
    of, value = value_of_shape((6,), (6,))
    of.sizes["one"] = 1
    assert not shard_over(of, lengthen_dim(narrow_dim(value, 0, 5), 0, 1), 0, "one").serves(value)


def test_zeros_of_one_dim_say_nothing_of_another() -> None:
    """What a gather leaves of padding is not zero since zeros were added to columns, or behind it."""
    of, value = value_of_shape((5, 4), (5, 4))
    gathered = all_gather(of, tiles_of(value, split_parts((5, "a"), (4, "")), SIZES), ["a"], 0)
    assert "a" not in dict(shard_over(of, lengthen_dim(gathered, 1, 1), 0, "a").padding)
    assert "b" not in dict(shard_over(of, lengthen_dim(gathered, 0, 3), 0, "b").padding)
    one = tiles_of(value_of_shape((1,), (1,))[1], split_parts((1, "a")), SIZES)
    assert "b" not in dict(shard_over(of, all_gather(of, one, ["a"], 0), 0, "b").padding)


def test_behind_one_position_only_the_first_tile_has_it() -> None:
    of, value = value_of_shape((1,), (1,))
    made = narrow_dim(shard_over(of, lengthen_dim(value, 0, 3), 0, "a"), 0, 1)
    assert made.serves(tiles_of(value, split_parts((1, "a")), SIZES)) and not made.serves(value)


def test_a_mask_of_one_position_leaves_no_second() -> None:
    of, value = value_of_shape((1,), (1,))
    x = tiles_of(value, split_parts((1, "c")), SIZES)
    masks = [mask(of, x, 0, Integer(("tile_count", size, (4,), (Integer(("coordinate", "c")),))), 0.0) for size in (1, 2)]
    assert [dict(one.padding) for one in masks] == [{"c": 0.0}, {}]


def test_a_mask_of_equal_rows_beyond_one_position() -> None:
    """Three over four ranks have one each, which two more split: the first has it."""
    of, value = value_of_shape((3,), (1,))
    whole = tiles_of(value, split_parts((3, "ca")), SIZES)
    count = Integer(("tile_count", 3, (4, 2), tuple(Integer(("coordinate", axis)) for axis in "ca")))
    assert dict(mask(of, whole, 0, count, 0.0).padding) == {"a": 0.0, "c": 0.0}


def test_axes_that_split_equal_positions_alike_are_not_told_apart() -> None:
    """`2/c * 3/a/b` and `2/b * 3/a/c` of one number leave the same numbers of positions, of other ranks."""
    _, value = value_of_shape((6,), (1,))
    for one, other in (("c", "b"), ("b", "c")):
        with pytest.raises(Unfit):
            tiles_of(value, Sharding(((Part("p", 2, (one,)), Part("q", 3, ("a", other))),)), SIZES)


def test_what_a_gather_leaves_of_padding_is_no_position_of_the_value() -> None:
    """Of 5 positions over 2 ranks a gather has 6: it is the value only when the last is cut off."""
    whole = Tiles(TermTable().number("port", "x"), dims_of_shape((5,)))
    split = tiles_of(whole, Sharding(((Part("p", 5, ("a",)),),)), SIZES)
    of = Evaluator(TermTable(), SIZES, {whole.root}, {whole.root: 5})
    gathered = all_gather(of, split, ["a"], 0)
    assert gathered.shape == (6,) and not gathered.like(whole)


@pytest.mark.parametrize("stride", [1, 0], ids=["apart", "repeated"])
def test_zeros_in_the_place_of_a_value_are_not_the_value(stride: int) -> None:
    """Two of three positions, and a zero behind them; and of four over two ranks the third, where that of the second rank is."""
    root = TermTable().number("port", "x")
    value = Tiles(root, (((stride, 4),),))
    of = Evaluator(TermTable(), SIZES, {root}, {root: 4 if stride else 1})
    cut_off = replace(value, dims=(((stride, 3),),))
    with contextlib.suppress(Unfit):
        assert not lengthen_dim(cut_off, 0, 1).serves(value)
    with contextlib.suppress(Unfit):
        wanted = tiles_of(value, Sharding(((Part("p", 4, ("a",)),),)), SIZES)
        assert not shard(of, cut_off, 0, 2, Integer(("coordinate", "a"))).serves(wanted)


def test_of_uneven_tiles_of_one_number_a_gather_has_others() -> None:
    """[v, v, v] over two ranks is [v, v] and [v, zero]: all together are not four times v."""
    root = TermTable().number("port", "x")
    of = Evaluator(TermTable(), SIZES, {root}, {root: 1})
    split = tiles_of(Tiles(root, (((0, 3),),)), Sharding(((Part("p", 3, ("a",)),),)), SIZES)
    assert split.uneven and not all_gather(of, split, ["a"], 0).serves(Tiles(root, (((0, 4),),)))
    whole = tiles_of(Tiles(root, (((0, 4),),)), Sharding(((Part("p", 4, ("a",)),),)), SIZES)
    assert not whole.uneven and all_gather(of, whole, ["a"], 0) == Tiles(root, (((0, 4),),))


def test_what_is_another_value_on_other_ranks_is_told_by_what_made_it() -> None:
    terms = TermTable()
    x = Tiles(terms.number("port", "input:x"), (((1, 4),),), (("dp", 4),))
    whole = replace(x, axes=())
    place = Integer(("coordinate", "dp"))
    by_tile, by_place = (Tiles(terms.number("call", "neg", argument), (((1, 4),),)) for argument in (("list", x), ("list", whole, place)))
    of_whole = Tiles(terms.number("call", "neg", ("list", whole)), (((1, 4),),))
    other = Tiles(terms.number("item", terms.number("call", "split", ("list", by_tile)), 0), (((1, 4),),))
    known = {x.root}
    assert all(terms.varies_along(one, ("dp",), known) for one in (x, replace(whole, partial=(("dp", "sum"),)), by_tile, by_place, other))
    assert not any(terms.varies_along(one, ("dp",), known) for one in (whole, of_whole))
    assert not any(terms.varies_along(one, ("tp",), known) for one in (x, by_tile, by_place, other))
