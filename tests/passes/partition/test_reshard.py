"""Reshards: from any sharding of a value to any other, on simulated ranks with NaN in the padding, by the shortest way."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshc.ir import Record
from meshc.ir.mesh import Mesh
from meshc.ir.sharding import Part, Sharding, is_padded, local_shape
from meshc.ir.spmd import is_collective
from meshc.passes.partition.builder import Builder
from meshc.passes.partition.reshard import apply, cost, merge, reshard, steps
from meshc.program.program import Stage
from meshc.runtime.simulator.simulate import run_stage
from meshc.testing.brute_force import check_record
from meshc.testing.rank_tiles import assemble, tiles

MESHES = [Mesh("a=2"), Mesh("a=3"), Mesh("a=4"), Mesh("a=2,b=3"), Mesh("a=4,b=2"), Mesh("a=2,b=3,c=2")]
SIZES = {"a": 2, "b": 3, "c": 4}


def axis_sizes(mesh: Mesh) -> dict[str, int]:
    return {axis.name: axis.size for axis in mesh.axes}


@st.composite
def values(draw: st.DrawFn) -> Sharding:
    """A value of 1 to 3 dims, each a product of 1 to 3 factors."""
    dims = draw(st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=3), min_size=1, max_size=3))
    rows = tuple(tuple(Part(f"f{dim}{k}", size) for k, size in enumerate(row)) for dim, row in enumerate(dims))
    return Sharding(rows)


@st.composite
def shardings(draw: st.DrawFn, whole: Sharding, mesh: Mesh, reduction: str) -> Sharding:
    """Every axis splits some part, is waited for, or neither, in any order; some padding is known to be zero."""
    places = [(dim, position) for dim, position, _ in whole.parts()]
    found = whole
    for axis in draw(st.permutations(mesh.names)):
        place = draw(st.sampled_from(["nowhere", "partial", *places]))
        if place == "partial":
            found = replace(found, partial=(*found.partial, (axis, reduction)))
        elif place != "nowhere":
            found = found.with_axes(*place, (*found.dims[place[0]][place[1]].axes, axis))
    padded = [(dim, position) for dim, position, part in found.parts() if is_padded(part, axis_sizes(mesh))]
    known = draw(st.sets(st.sampled_from(padded))) if padded and reduction == "sum" else set()
    return replace(found, zero=frozenset(known))


@st.composite
def changes(draw: st.DrawFn) -> tuple[Mesh, Sharding, Sharding]:
    mesh, whole = draw(st.sampled_from(MESHES)), draw(values())
    reduction = draw(st.sampled_from(["sum", "sum", "max", "min"]))
    source = draw(shardings(whole, mesh, reduction))
    target = draw(shardings(whole, mesh, "sum" if not source.partial else reduction))
    if reduction != "sum":  # a value can be made a partial sum; it stays a partial maximum, but is not made one
        target = replace(target, partial=tuple(entry for entry in target.partial if entry in source.partial))
    return mesh, source, replace(target, zero=frozenset())


def build(mesh: Mesh, source: Sharding, target: Sharding, sequential: frozenset[str] = frozenset()) -> tuple[Builder, Sharding]:
    maker = Builder(axis_sizes(mesh))
    x = maker.placeholder("x", Record(local_shape(source, maker.sizes), torch.float64, source))
    made, sharding = reshard(maker, x, source, target, "test", sequential)
    maker.graph.output((made,))
    return maker, sharding


@settings(max_examples=300)
@given(changes(), st.integers(0, 100))
def test_the_ranks_hold_the_target(change: tuple[Mesh, Sharding, Sharding], seed: int) -> None:
    mesh, source, target = change
    whole = torch.randn(source.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    maker, sharding = build(mesh, source, target)
    assert sharding == target
    rows = [[x] for x in tiles(whole, source, mesh, seed)]
    found = run_stage(
        Stage("main", maker.graph, (), ()), rows, mesh, axis_sizes(mesh), observe=lambda node, seen: check_record(node, seen, mesh)
    )
    assert {tuple(row[0].shape) for row in found} == {local_shape(target, axis_sizes(mesh))}
    torch.testing.assert_close(assemble([row[0] for row in found], target, mesh), whole)


@settings(max_examples=300)
@given(changes())
def test_no_detours(change: tuple[Mesh, Sharding, Sharding]) -> None:
    """What only becomes more split gathers nothing, what only becomes less split is never cut, and each axis moves once a kind."""
    mesh, source, target = change
    found = steps(source, target)
    now = source
    for step in found:
        now = apply(now, step)
    assert replace(now, partial=tuple(sorted(now.partial))) == replace(target, partial=tuple(sorted(target.partial)))
    kinds = {step.kind for step in found}
    pairs = [(a.axes, b.axes) for (*_, a), (*_, b) in zip(source.parts(), target.parts(), strict=True)]
    if all(b[: len(a)] == a for a, b in pairs):
        assert kinds <= {"slice", "reduce_scatter", "all_reduce", "first"}
    if all(a[: len(b)] == b for a, b in pairs):
        assert kinds <= {"all_gather", "all_reduce", "first"}
    moves = [(step.kind, axis) for step in found for axis in step.axes]
    assert len(moves) == len(set(moves))
    if source == target:
        assert found == []
    assert (cost(source, target, axis_sizes(mesh)) == 0) == (kinds <= {"slice", "first"} or mesh.world_size == 1)


# ------------------------------------------------------------------------------------------------------------------ one by one


def value(text: str) -> Sharding:
    """`[a 6/x * b 4, c 8] partial(sum: y)`, as it prints; names of axes are a, b and c, of the sizes in SIZES."""
    shape, _, rest = text.partition("]")
    rows = []
    for dim in shape.removeprefix("[").split(", "):
        parts = []
        for part in dim.split(" * "):
            name, _, spec = part.partition(" ")
            size, *axes = spec.split("/")
            parts.append(Part(name, int(size), tuple(axes)))
        rows.append(tuple(parts))
    waits = [tuple(entry.split(": ")[::-1]) for entry in rest.strip().removeprefix("partial(").removesuffix(")").split(", ") if entry]
    found = Sharding(tuple(rows), tuple(waits))  # type: ignore[arg-type]
    assert str(found) == text
    return found


CASES = [
    ("[m 24, n 24]", "[m 24/a, n 24]", "slice a"),
    ("[m 24, n 24]", "[m 24, n 24] partial(sum: a)", "first a"),
    ("[m 24/a, n 24]", "[m 24, n 24]", "all_gather a"),
    ("[m 24/a, n 24]", "[m 24, n 24/a]", "all_to_all a"),
    ("[m 24, n 24] partial(sum: a)", "[m 24, n 24]", "all_reduce a"),
    ("[m 24, n 24] partial(sum: a)", "[m 24, n 24/a]", "reduce_scatter a"),
    ("[m 24, n 24] partial(max: a)", "[m 24, n 24/a]", "reduce_scatter a max"),
    ("[m 24, n 24] partial(sum: a)", "[m 24, n 24] partial(sum: a)", ""),
    # one factor of a dim, minor or major, is as good as a dim
    ("[h 4/a * d 6, n 24]", "[h 4 * d 6/a, n 24]", "all_to_all a"),
    ("[h 4 * d 6, n 24]", "[h 4 * d 6/a, n 24]", "slice a"),
    # several axes
    ("[m 24/a/b, n 24]", "[m 24, n 24]", "all_gather ab"),
    ("[m 24/a/b, n 24]", "[m 24/a, n 24]", "all_gather b"),
    ("[m 24/a/b, n 24]", "[m 24/a, n 24/b]", "all_to_all b"),
    ("[m 24/a, n 24/b]", "[m 24, n 24]", "all_gather a; all_gather b"),
    ("[m 24/a, n 24/b]", "[m 24/b, n 24/a]", "all_gather a; all_to_all b; slice a"),
    ("[m 24, n 24] partial(sum: a, sum: b)", "[m 24, n 24]", "all_reduce ab"),
    ("[m 24, n 24] partial(sum: a, max: b)", "[m 24, n 24]", "all_reduce a; all_reduce b max"),
    ("[m 24, n 24] partial(sum: a, sum: b)", "[m 24/a/b, n 24]", "reduce_scatter ab"),
    ("[m 24, n 24] partial(sum: a, max: b)", "[m 24/a/b, n 24]", "reduce_scatter a; reduce_scatter b max"),
    ("[m 24, n 24] partial(sum: a, sum: b)", "[m 24/a, n 24/b]", "reduce_scatter a; reduce_scatter b"),
    ("[m 24, n 24] partial(sum: a, sum: b)", "[m 24/b, n 24]", "reduce_scatter b; all_reduce a"),
    # what makes the rest smaller goes first
    ("[m 24/a, n 24]", "[m 24, n 24/b]", "slice b; all_gather a"),
    ("[m 24, n 24] partial(sum: a)", "[m 24, n 24/b]", "slice b; all_reduce a"),
    ("[m 24/b, n 24] partial(sum: a)", "[m 24/b/a, n 24]", "reduce_scatter a"),
    ("[m 24/b, n 24] partial(sum: a)", "[m 24, n 24/a]", "reduce_scatter a; all_gather b"),
    # padding between the tiles of two axes is cut out and put in on each rank
    ("[m 13/a/b, n 24]", "[m 13, n 24]", "all_gather ab"),
    ("[m 13, n 24] partial(sum: a, sum: b)", "[m 13/a/b, n 24]", "reduce_scatter ab"),
]


@pytest.mark.parametrize(("source", "target", "expected"), CASES, ids=[f"{source} to {target}" for source, target, _ in CASES])
def test_steps(source: str, target: str, expected: str) -> None:
    found = merge(steps(value(source), value(target)))
    said = [f"{step.kind} {''.join(step.axes)}{'' if step.reduction == 'sum' else ' ' + step.reduction}" for step in found]
    assert "; ".join(said) == expected


def test_another_reduction_is_finished_first() -> None:
    found = steps(value("[m 24] partial(max: a)"), value("[m 24] partial(sum: a)"))
    assert [(step.kind, step.reduction) for step in found] == [("all_reduce", "max"), ("first", "sum")]


def test_microbatches_are_reduced_on_their_own() -> None:
    """The axis `mb` is no group of ranks: its reductions become a loop's accumulation."""
    found = steps(value("[m 24] partial(sum: mb, sum: a)"), value("[m 24]"), frozenset({"mb"}))
    assert [(step.kind, step.axes) for step in found] == [("all_reduce", ("mb",)), ("all_reduce", ("a",))]


def text(mesh: str, source: str, target: str) -> str:
    maker, _ = build(Mesh(mesh), value(source), value(target))
    calls = [node for node in maker.graph.nodes if node.op == "call_function"]
    return "\n".join(f"{node.name} = {node.target.__name__}({', '.join(map(str, node.args))})" for node in calls)


def test_text_of_an_even_gather_is_one_call() -> None:
    assert text("a=2", "[m 24/a, n 5]", "[m 24, n 5]") == "all_gather = all_gather(x, ['a'], 0)"


def test_text_of_an_uneven_gather_cuts_the_padding() -> None:
    assert text("a=2", "[m 5/a]", "[m 5]") == "all_gather = all_gather(x, ['a'], 0)\nslice_tensor = slice.Tensor(all_gather, 0, 0, 5)"


def test_text_of_a_gather_over_two_axes_cuts_the_padding_within_tiles_too() -> None:
    """Tiles of 5, then of 3: 12 positions, 2 rows of 6, of which 5 each are real, and 9 of these 10."""
    assert text("a=2,b=2", "[m 9/a/b]", "[m 9]") == (
        "all_gather = all_gather(x, ['a', 'b'], 0)\n"
        "reshape_default = reshape.default(all_gather, [2, 6])\n"
        "slice_tensor = slice.Tensor(reshape_default, 1, 0, 5)\n"
        "reshape_default_1 = reshape.default(slice_tensor, [10])\n"
        "slice_tensor_1 = slice.Tensor(reshape_default_1, 0, 0, 9)"
    )


def test_text_of_a_reduce_scatter_over_two_axes_pads_tiles_within_tiles() -> None:
    assert text("a=2,b=2", "[m 9] partial(sum: a, sum: b)", "[m 9/a/b]") == (
        "constant_pad_nd_default = constant_pad_nd.default(x, [0, 1], 0)\n"
        "reshape_default = reshape.default(constant_pad_nd_default, [2, 5])\n"
        "constant_pad_nd_default_1 = constant_pad_nd.default(reshape_default, [0, 1], 0)\n"
        "reshape_default_1 = reshape.default(constant_pad_nd_default_1, [12])\n"
        "reduce_scatter = reduce_scatter(reshape_default_1, ['a', 'b'], 0, sum)"
    )


def test_text_of_an_uneven_reduce_scatter_pads_with_zeros() -> None:
    assert text("a=2", "[m 5] partial(sum: a)", "[m 5/a]") == (
        "constant_pad_nd_default = constant_pad_nd.default(x, [0, 1], 0)\n"
        "reduce_scatter = reduce_scatter(constant_pad_nd_default, ['a'], 0, sum)"
    )


def test_text_of_a_minor_factor_is_brought_out_and_back() -> None:
    assert text("a=2", "[h 3 * d 4/a]", "[h 3 * d 4]") == (
        "reshape_default = reshape.default(x, [3, 2, 1])\n"
        "all_gather = all_gather(reshape_default, ['a'], 1)\n"
        "reshape_default_1 = reshape.default(all_gather, [12])"
    )


def test_only_collectives_communicate() -> None:
    maker, _ = build(Mesh("a=2,b=3"), value("[m 24]"), value("[m 24/a/b]"))
    assert not any(is_collective(node.target) for node in maker.graph.nodes)
