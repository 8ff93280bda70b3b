"""Tiles: the arithmetic of factors split by axes, uneven and nested."""

from __future__ import annotations

import itertools
from math import prod

from hypothesis import given
from hypothesis import strategies as st

from meshc.ir.sharding import Part, Sharding, is_padded, local_shape, padded_parts, part_shape, tile_count, tile_sizes, tile_start

FACTORS = st.integers(1, 40)
COUNTS = st.lists(st.integers(1, 4), max_size=3)
SIZES = {"a": 2, "b": 3, "c": 4}


def every(counts: list[int]) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, counts)))


def held(size: int, counts: list[int], coordinates: tuple[int, ...]) -> list[int]:
    start = tile_start(size, counts, coordinates)
    return list(range(start, start + tile_count(size, counts, coordinates)))


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    axes = draw(st.permutations(list(SIZES)))
    rows: list[list[Part]] = []
    for dim in range(draw(st.integers(0, 3))):
        rows.append([Part(f"f{dim}{k}", draw(st.integers(1, 9))) for k in range(draw(st.integers(0, 3)))])
    places = [(d, p) for d, row in enumerate(rows) for p in range(len(row))]
    for axis in axes:
        place = draw(st.sampled_from([None, *places]))
        if place is not None:
            part = rows[place[0]][place[1]]
            rows[place[0]][place[1]] = Part(part.factor, part.size, (*part.axes, axis))
    return Sharding(tuple(map(tuple, rows)))


def test_the_example_of_the_docs() -> None:
    assert tile_sizes(129, [2, 2]) == [129, 65, 33]
    assert [tile_start(129, [2, 2], at) for at in every([2, 2])] == [0, 33, 65, 98]
    assert [tile_count(129, [2, 2], at) for at in every([2, 2])] == [33, 32, 33, 31]


def test_tiles_may_be_empty() -> None:
    assert tile_sizes(5, [4]) == [5, 2]
    assert [tile_count(5, [4], (at,)) for at in range(4)] == [2, 2, 1, 0]


@given(FACTORS, COUNTS)
def test_tiles_partition_the_global_range(size: int, counts: list[int]) -> None:
    """In row-major order of the coordinates the tiles are the range itself: nothing twice, nothing left out."""
    assert [index for at in every(counts) for index in held(size, counts, at)] == list(range(size))


@given(FACTORS, COUNTS)
def test_no_tile_is_longer_than_its_padded_size(size: int, counts: list[int]) -> None:
    longest = max(tile_count(size, counts, at) for at in every(counts))
    assert longest == tile_sizes(size, counts)[-1] == tile_count(size, counts, (0,) * len(counts))


@given(FACTORS, COUNTS, st.integers(1, 4))
def test_taking_the_innermost_axis_away_gives_the_layout_of_the_rest(size: int, counts: list[int], inner: int) -> None:
    """What a gather over the innermost axis joins, after cutting off its padding, is a tile of the rest."""
    for at in every(counts):
        joined = [index for last in range(inner) for index in held(size, [*counts, inner], (*at, last))]
        assert joined == held(size, counts, at)
        assert tile_start(size, [*counts, inner], (*at, 0)) == tile_start(size, counts, at)


@given(shardings())
def test_local_shape(sharding: Sharding) -> None:
    """A rank's dim is the product of its parts' padded tiles, and big enough for every rank's."""
    local = local_shape(sharding, SIZES)
    assert prod(local) == prod(part_shape(sharding, SIZES))
    for dim, parts in enumerate(sharding.dims):
        assert local[dim] == prod(tile_sizes(part.size, [SIZES[axis] for axis in part.axes])[-1] for part in parts)
    if not sharding.split_axes():
        assert local == sharding.shape
    assert local_shape(sharding.whole(), SIZES) == sharding.shape


@given(shardings())
def test_padding_is_where_a_rank_holds_less_than_the_others(sharding: Sharding) -> None:
    padded = []
    for dim, position, part in sharding.parts():
        counts = [SIZES[axis] for axis in part.axes]
        shorter = any(tile_count(part.size, counts, at) < tile_sizes(part.size, counts)[-1] for at in every(counts))
        assert is_padded(part, SIZES) == shorter
        if shorter:
            padded.append((dim, position, part))
    assert padded_parts(sharding, SIZES) == padded


@given(shardings(), st.data())
def test_with_axes(sharding: Sharding, data: st.DataObject) -> None:
    places = [(dim, position) for dim, position, _ in sharding.parts()]
    if not places:
        return
    dim, position = data.draw(st.sampled_from(places))
    changed = sharding.with_axes(dim, position, ("z",))
    assert changed.dims[dim][position].axes == ("z",)
    assert changed.shape == sharding.shape
    assert changed.with_axes(dim, position, sharding.dims[dim][position].axes) == sharding


def test_words() -> None:
    sharding = Sharding(((Part("heads", 4, ("tp",)), Part("head", 32)), ()), (("dp", "sum"),))
    assert str(sharding) == "[heads 4/tp * head 32, 1] partial(sum: dp)"
    assert (sharding.axes(), sharding.split_axes()) == ({"tp", "dp"}, {"tp"})
    assert (sharding.partial_over("dp"), sharding.partial_over("tp")) == ("sum", None)
    assert sharding.whole() == Sharding(((Part("heads", 4), Part("head", 32)), ()))
    assert sharding.without_partial() == Sharding(sharding.dims)


def test_what_is_known_of_padding_is_no_part_of_the_layout() -> None:
    plain = Sharding(((Part("batch", 5, ("dp",)),),))
    known = Sharding(plain.dims, zero=frozenset({(0, 0)}))
    assert plain == known
    assert hash(plain) == hash(known)
