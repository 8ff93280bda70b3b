"""Tiles against positions that are counted out: what moves on all ranks is where its tiles say that it is."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
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
from meshc.proof.places import shard
from meshc.proof.terms import TermTable
from meshc.proof.tile_moves import expand_dims, lengthen_dim
from meshc.proof.tiles import Tiles, Unfit, dims_of_shape, tiles_of

aten = torch.ops.aten
SIZES = {"a": 2, "b": 3, "c": 2}
PADDING = -1
Ranks = Mapping[tuple[int, ...], torch.Tensor]
"""What each rank has, by its coordinates: positions of a value, PADDING where there is none."""


def ranks() -> Iterator[tuple[int, ...]]:
    return product(*map(range, SIZES.values()))


def cut(whole: torch.Tensor, sharding: Sharding) -> Ranks:
    """The tiles of a value on all ranks, cut out one axis after the other."""

    def tile(at: Mapping[str, int]) -> torch.Tensor:
        x = whole.reshape([part.size for parts in sharding.dims for part in parts])
        for dim, part in enumerate(part for parts in sharding.dims for part in parts):
            extents = tile_sizes(part.size, [SIZES[axis] for axis in part.axes])
            for axis, extent in zip(part.axes, extents[1:], strict=True):
                rest = SIZES[axis] * extent - x.shape[dim]
                if rest > 0:
                    shape = [*x.shape]
                    shape[dim] = rest
                    x = torch.cat([x, torch.full(shape, PADDING)], dim)
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


def agree(tiles: Tiles, have: Ranks, forms: Iterable[tuple[Tiles, Ranks]]) -> None:
    """Where tiles say that a rank has a position it has that; what serves as a value in a sharding has all that the value has so."""
    for wanted, real in forms:
        if tiles.serves(wanted):
            assert all((have[at][real[at] != PADDING] != PADDING).all() for at in have), (tiles, wanted)
    for at, x in have.items():
        where = told(tiles, at)
        assert where.shape == x.shape
        real = x != PADDING
        assert torch.equal(where[real], x[real]), (tiles, at)
        assert tiles.uneven or any(stride for dim in tiles.dims for stride, _ in dim) or real.all(), (tiles, at)


def draw_sharding(pick: random.Random) -> Sharding:
    """Two dims of up to three parts, split by some of the axes."""
    dims = [[Part(f"{d}{p}", pick.choice([1, 2, 3, 4, 5, 6, 12])) for p in range(pick.randint(1, 3))] for d in range(2)]
    for axis in pick.sample(list(SIZES), pick.randint(0, 3)):
        row = pick.choice(dims)
        at = pick.randrange(len(row))
        row[at] = Part(row[at].factor, row[at].size, (*row[at].axes, axis))
    return Sharding(tuple(map(tuple, dims)))


class World:
    """A value on all ranks, and its tiles, through the same moves."""

    def __init__(self, pick: random.Random, repeats: Collection[int] = ()) -> None:
        """`repeats`: dims along which all elements are the same."""
        self.pick = pick
        self.sharding = draw_sharding(pick)
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
        self.forms = [(tiles_of(self.value, one, SIZES), cut(whole, one)) for one in self.shardings()]
        self.graph = Graph()

    def shardings(self) -> Iterator[Sharding]:
        """The value's, without some of the axes."""
        split = self.sharding.split_axes()
        for left in {frozenset(self.pick.sample(sorted(split), count)) for count in range(len(split) + 1) for _ in range(2)}:
            dims = [
                [replace(part, axes=tuple(axis for axis in part.axes if axis in left)) for part in parts] for parts in self.sharding.dims
            ]
            yield replace(self.sharding, dims=tuple(map(tuple, dims)))

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
        kind = self.pick.choice(["gather", "shard", "exchange", "turn", "apart", "together", "cut", "pad"])
        if kind == "gather" and (axis in split or self.repeats):
            found = self.call(spmd.all_gather, [axis], dim)
            have = {at: torch.cat(self.along(axis, at), dim) for at in ranks()}
        elif kind == "shard" and axis not in split and shape[dim] > 1:
            found = self.call(spmd.shard, dim, SIZES[axis], Integer(("coordinate", axis)))
            have = {at: padded_shard(x, dim, SIZES[axis], at[index]) for at, x in self.have.items()}
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
            have = self.each(lambda x: torch.nn.functional.pad(x, pad, value=PADDING))
        else:
            return False
        if found.root != self.tiles.root:
            return False  # digits cannot say it: it is a term of its own
        self.tiles, self.have = found, have
        return True


def padded_shard(x: torch.Tensor, dim: int, tiles: int, index: int) -> torch.Tensor:
    length = -(-x.shape[dim] // tiles)
    rest = length * tiles - x.shape[dim]
    whole = torch.nn.functional.pad(x, [0, 0] * (x.dim() - 1 - dim) + [0, rest], value=PADDING)
    return whole.narrow(dim, index * length, length)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("repeats", [(), (0, 1), (0,), (1,)], ids=["apart", "repeated", "rows repeated", "columns repeated"])
def test_tiles_are_where_they_say(seed: int, repeats: tuple[int, ...]) -> None:
    pick, done = random.Random(seed), 0
    for _ in range(60):
        try:
            world = World(pick, repeats)
        except Unfit:
            continue
        agree(world.tiles, world.have, world.forms)
        for _ in range(8):
            if world.step():
                done += 1
                agree(world.tiles, world.have, world.forms)
    assert done > 100


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
