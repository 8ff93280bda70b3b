"""Kinds of faults in the lines of a program, by name: operands and numbers, collectives, tiles and masks.

A kind changes one place of a program, in a way that someone who writes a pass might: another operand of the same shape, a reduction left
out, a tile of another axis. Others are in `edited_schedules.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any, Final

import sympy
import torch
from torch.fx import Node

from meshc import ir
from meshc.ir import is_getitem, is_integer, record, records, spmd
from meshc.ir.graph import call
from meshc.ir.nodes import is_tensor
from meshc.ir.sizes import Size, number_from_expression
from meshc.program.program import PlainProgram

aten = torch.ops.aten
Edit = Callable[[PlainProgram, Random], "PlainProgram | None"]
"""Changes a program whose graphs are its own, or returns another; None if there is no place for it."""
SIMILAR: Final[dict[Any, Any]] = {
    aten.add.Tensor: aten.sub.Tensor, aten.sub.Tensor: aten.add.Tensor, aten.mul.Tensor: aten.div.Tensor, aten.div.Tensor: aten.mul.Tensor,
    aten.exp.default: aten.sigmoid.default, aten.relu.default: aten.sigmoid.default, aten.neg.default: aten.abs.default,
    aten.rsqrt.default: aten.sqrt.default, aten.sqrt.default: aten.rsqrt.default, aten.amax.default: aten.amin.default,
    aten.mul.Scalar: aten.div.Scalar, aten.div.Scalar: aten.mul.Scalar, aten.sum.default: aten.mean.default,
    aten.sum.dim_IntList: aten.mean.dim, aten.mean.dim: aten.sum.dim_IntList, aten.log.default: aten.exp.default,
    aten.gelu.default: aten.silu.default, aten.gelu_backward.default: aten.silu_backward.default,
}  # fmt: skip
KINDS: Final[dict[str, Edit]] = {}


def kind(function: Edit) -> Edit:
    assert function.__name__ not in KINDS
    KINDS[function.__name__] = function
    return function


# ----------------------------------------------------------------------------------------------------------------------- places


def nodes(program: PlainProgram, *targets: Any, where: Callable[[Node], bool] = lambda node: True) -> list[Node]:
    found = [node for stage in program.stages.values() for node in stage.graph.nodes if node.op == "call_function"]
    return [node for node in found if (not targets or node.target in targets) and where(node)]


def pick(chance: Random, rows: Iterable[Any]) -> Any:
    """One of them; None if there is none."""
    every = list(rows)
    return chance.choice(every) if every else None


def put(node: Node, place: int, value: Any) -> None:
    node.args = (*node.args[:place], value, *node.args[place + 1 :])


def shape(node: Node) -> object:
    """Shape and dtype of a value; None for what is no single tensor."""
    return (record(node).shape, record(node).dtype) if is_tensor(node) and not isinstance(node.meta[ir.KEY], tuple) else None


def alike(node: Node, before: Node) -> list[Node]:
    """Other values of a graph with a value's shape and dtype that are there before a line."""
    there = (one for one in node.graph.nodes if one is not node and one < before and one.op != "output")
    return [one for one in there if shape(one) == shape(node) is not None]


def behind(node: Node, target: Any, *rest: Any) -> None:
    """All readers of a line read something that is computed from it."""
    users = list(node.users)
    with node.graph.inserting_after(node):
        made = call(node.graph, records(node)[0], target, node, *rest)
    for user in users:
        user.replace_input_with(node, made)


def left_out(node: Node) -> bool:
    """Whether a line could be replaced by its first operand, which has its shape; then it is."""
    first = node.args[0] if node.args else None
    if not isinstance(first, Node) or shape(first) != shape(node) or shape(node) is None:
        return False
    node.replace_all_uses_with(first)
    node.graph.erase_node(node)
    return True


def arguments(program: PlainProgram, of: type, *targets: Any) -> list[tuple[Node, int]]:
    rows = nodes(program, *targets, where=lambda node: not is_integer(node) if node.meta[ir.KEY] else True)
    return [(node, at) for node in rows for at, one in enumerate(node.args) if type(one) is of]


def lists(program: PlainProgram) -> list[tuple[Node, int, list[Any]]]:
    """Arguments that are lists, with the line and the place of each."""
    rows = [(node, at, one) for node in nodes(program) for at, one in enumerate(node.args)]
    return [(node, at, list(one)) for node, at, one in rows if isinstance(one, list | tuple)]


def draws(program: PlainProgram) -> list[Node]:
    """Lines that draw random numbers."""
    return nodes(program, where=lambda node: any(str(x).startswith("meshc_seed") for x in node.all_input_nodes))


def rows_of(node: Node) -> list[list[Any]]:
    return [list(row) if isinstance(row, list | tuple) else row for row in node.args]


def pair(chance: Random, rows: Sequence[Any], same: Callable[[Any], object]) -> tuple[int, int] | None:
    found = [(i, j) for i in range(len(rows)) for j in range(i) if same(rows[i]) == same(rows[j]) and rows[i] is not rows[j]]
    return pick(chance, found)


def exchanged(rows: list[Any], places: tuple[int, int] | None) -> bool:
    if places is None:
        return False
    rows[places[0]], rows[places[1]] = rows[places[1]], rows[places[0]]
    return True


def on(program: PlainProgram, found: bool) -> PlainProgram | None:
    return program if found else None


# ------------------------------------------------------------------------------------------------------------ operands and numbers


@kind
def reads_another_value_of_its_shape(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, where=lambda node: any(alike(x, node) for x in node.all_input_nodes if not is_integer(x))))
    if node is None:
        return None
    x = pick(chance, [x for x in node.all_input_nodes if not is_integer(x) and alike(x, node)])
    node.replace_input_with(x, pick(chance, alike(x, node)))
    return program


@kind
def exchanges_two_operands(program: PlainProgram, chance: Random) -> PlainProgram | None:
    def places(node: Node) -> list[int]:
        return [at for at, one in enumerate(node.args) if isinstance(one, Node)]

    node = pick(chance, nodes(program, where=lambda node: len({node.args[at] for at in places(node)}) > 1))
    if node is None:
        return None
    one, other = chance.sample(places(node), 2)
    args = list(node.args)
    args[one], args[other] = args[other], args[one]
    node.args = tuple(args)
    return program


@kind
def leaves_a_line_out(program: PlainProgram, chance: Random) -> PlainProgram | None:
    for node in chance.sample(rows := nodes(program), len(rows)):
        if left_out(node):
            return program
    return None


def _behind_kind(name: str, target: Any, *rest: Any) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        floating = nodes(program, where=lambda node: shape(node) is not None and record(node).dtype.is_floating_point)  # type: ignore[union-attr]
        node = pick(chance, floating)
        if node is not None:
            behind(node, target, *rest)
        return on(program, node is not None)

    edit.__name__ = name
    kind(edit)


_behind_kind("doubles_a_value", aten.mul.Scalar, 2.0)
_behind_kind("halves_a_value", aten.div.Scalar, 2.0)
_behind_kind("negates_a_value", aten.neg.default)
_behind_kind("adds_to_a_value", aten.add.Scalar, 1.0)
_behind_kind("makes_a_value_zero", aten.mul.Scalar, 0.0)


@kind
def calls_a_similar_operator(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, *SIMILAR))
    if node is not None:
        node.target = SIMILAR[node.target]
    return on(program, node is not None)


def _number_kind(name: str, of: type, change: Callable[[Any], Any]) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        found = pick(chance, arguments(program, of))
        if found is not None:
            put(*found, change(found[0].args[found[1]]))
        return on(program, found is not None)

    edit.__name__ = name
    kind(edit)


_number_kind("adds_to_an_integer", int, lambda number: number + 1)
_number_kind("takes_from_an_integer", int, lambda number: number - 1)
_number_kind("enlarges_a_number", float, lambda number: number * 1.5 + 0.01)
_number_kind("turns_a_flag", bool, lambda flag: not flag)


@kind
def changes_an_entry_of_a_list(program: PlainProgram, chance: Random) -> PlainProgram | None:
    found = pick(chance, [(*place, row) for *place, row in lists(program) if row and type(row[0]) is int])
    if found is None:
        return None
    node, place, entries = found
    entries[chance.randrange(len(entries))] += chance.choice([1, -1])
    put(node, place, entries)
    return program


@kind
def writes_a_number_for_an_open_size(program: PlainProgram, chance: Random) -> PlainProgram | None:
    """The integer that stood for the size while it was compiled."""
    places = [(node, at) for node in nodes(program) for at, one in enumerate(node.args) if isinstance(one, Size)]
    places += [(node, at) for node, at, row in lists(program) if any(isinstance(one, Size) for one in row)]
    found = pick(chance, places)
    if found is None:
        return None
    argument = found[0].args[found[1]]
    put(*found, int(argument) if isinstance(argument, Size) else [int(one) if isinstance(one, Size) else one for one in argument])
    return program


@kind
def rounds_an_open_size_another_way(program: PlainProgram, chance: Random) -> PlainProgram | None:
    """Half of it, rounded down where it was rounded up, which is the same of even sizes; or the other way round."""
    places = [(node, at, place) for node, at, row in lists(program) for place, one in enumerate(row) if _is_rounded(one)]
    places += [(node, at, -1) for node in nodes(program) for at, one in enumerate(node.args) if _is_rounded(one)]
    found = pick(chance, places)
    if found is None:
        return None
    node, at, place = found
    made = [*node.args[at]] if place >= 0 else [node.args[at]]
    expr = made[place].expr
    other = expr.replace(sympy.ceiling, sympy.floor) if expr.has(sympy.ceiling) else expr.replace(sympy.floor, sympy.ceiling)
    made[place] = number_from_expression(other, made[place] - 1)
    put(node, at, made if place >= 0 else made[0])
    return program


def _is_rounded(one: object) -> bool:
    return isinstance(one, Size) and one.expr.has(sympy.floor, sympy.ceiling)


@kind
def exchanges_entries_of_a_list(program: PlainProgram, chance: Random) -> PlainProgram | None:
    found = pick(chance, [(*place, row) for *place, row in lists(program) if len(set(row)) > 1])
    if found is None:
        return None
    node, place, entries = found
    one, other = chance.sample(range(len(entries)), 2)
    entries[one], entries[other] = entries[other], entries[one]
    put(node, place, entries)
    return program


@kind
def takes_another_result(program: PlainProgram, chance: Random) -> PlainProgram | None:
    def others(node: Node) -> list[int]:
        made = records(node.args[0])  # type: ignore[arg-type]
        return [at for at, one in enumerate(made) if at != node.args[1] and (one.shape, one.dtype) == shape(node)]

    node = pick(chance, nodes(program, where=lambda node: is_getitem(node) and bool(others(node))))
    if node is not None:
        put(node, 1, pick(chance, others(node)))
    return on(program, node is not None)


# ---------------------------------------------------------------------------------------------------------------- collectives


def _left_out_kind(name: str, *targets: Any) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        node = pick(chance, nodes(program, *targets, where=lambda node: shape(node) == shape(node.args[0]) is not None))  # type: ignore[arg-type]
        return on(program, node is not None and left_out(node))

    edit.__name__ = name
    kind(edit)


_left_out_kind("leaves_an_all_reduce_out", spmd.all_reduce)
_left_out_kind("leaves_a_mask_out", spmd.mask)
_left_out_kind("leaves_a_keep_first_out", spmd.keep_first)
_left_out_kind("leaves_a_ring_shift_out", spmd.ring_shift)
_left_out_kind("leaves_an_order_out", *spmd.OF_ORDER)
_left_out_kind("leaves_a_broadcast_out", spmd.broadcast)


@kind
def reduces_twice(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.all_reduce, where=lambda node: node.args[2] == "sum"))
    if node is not None:
        behind(node, spmd.all_reduce, *node.args[1:])
    return on(program, node is not None)


@kind
def reduces_once_more_elsewhere(program: PlainProgram, chance: Random) -> PlainProgram | None:
    axes = [axis.name for axis in program.mesh.axes if axis.size > 1 and axis.name != "pp"]
    node = pick(chance, nodes(program, where=lambda node: shape(node) is not None and record(node).dtype.is_floating_point))  # type: ignore[union-attr]
    if node is None or not axes:
        return None
    behind(node, spmd.all_reduce, [pick(chance, axes)], "sum")
    return program


@kind
def reduces_over_another_axis(program: PlainProgram, chance: Random) -> PlainProgram | None:
    axes = [axis.name for axis in program.mesh.axes if axis.size > 1]
    node = pick(chance, nodes(program, spmd.all_reduce, where=lambda node: [axis for axis in axes if axis not in node.args[1]]))  # type: ignore[operator]
    if node is not None:
        put(node, 1, [pick(chance, [axis for axis in axes if axis not in node.args[1]])])
    return on(program, node is not None)


def _reduction_kind(name: str, target: Any, place: int) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        node = pick(chance, nodes(program, target))
        if node is not None:
            put(node, place, {"sum": "max", "max": "sum", "min": "max"}[node.args[place]])
        return on(program, node is not None)

    edit.__name__ = name
    kind(edit)


_reduction_kind("reduces_otherwise", spmd.all_reduce, 2)
_reduction_kind("scatters_otherwise", spmd.reduce_scatter, 3)


@kind
def scatters_without_a_sum(program: PlainProgram, chance: Random) -> PlainProgram | None:
    """Each rank takes its tile of its own part."""
    node = pick(chance, nodes(program, spmd.reduce_scatter, where=lambda node: len(node.args[1]) == 1))  # type: ignore[arg-type]
    if node is None:
        return None
    x, axes, dim, _ = node.args
    with node.graph.inserting_before(node):
        place = call(node.graph, ir.Record(), spmd.coordinate, axes[0])
        made = call(node.graph, records(node)[0], spmd.shard, x, dim, program.axis_sizes[axes[0]], place)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return program


@kind
def gathers_its_own_tile(program: PlainProgram, chance: Random) -> PlainProgram | None:
    """In place of those of all ranks."""
    node = pick(chance, nodes(program, spmd.all_gather, where=lambda node: len(node.args[1]) == 1))  # type: ignore[arg-type]
    if node is None:
        return None
    x, axes, dim = node.args
    count = program.axis_sizes[axes[0]]
    with node.graph.inserting_before(node):
        made = call(node.graph, records(node)[0], aten.cat.default, [x] * count, dim)
    node.replace_all_uses_with(made)
    node.graph.erase_node(node)
    return program


@kind
def exchanges_along_other_dims(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.all_to_all))
    if node is not None:
        node.args = (*node.args[:2], node.args[3], node.args[2])
    return on(program, node is not None)


@kind
def passes_further_round(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.ring_shift))
    if node is not None:
        put(node, 2, node.args[2] + 1)
    return on(program, node is not None)


@kind
def exchanges_another_edge(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.halo, spmd.halo_sum))
    if node is not None:
        entries = list(node.args[4])
        at = chance.randrange(len(entries))
        entries[at] += 1
        put(node, 4, entries)
    return on(program, node is not None)


@kind
def fills_an_edge_otherwise(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.halo))
    if node is not None:
        put(node, 5, node.args[5] + 1.0)
    return on(program, node is not None)


@kind
def sends_rows_by_other_experts(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, *spmd.OF_ROWS))
    if node is not None:
        put(node, 3, node.args[3] + 1)
    return on(program, node is not None)


@kind
def broadcasts_from_another(program: PlainProgram, chance: Random) -> PlainProgram | None:
    rows = nodes(program, spmd.broadcast)
    sources = {node.args[2] for node in rows}
    if not rows:
        return None
    for node in rows:
        put(node, 2, 1 - next(iter(sources)))
    return program


# ------------------------------------------------------------------------------------------------------- tiles, masks, coordinates


@kind
def masks_with_another_value(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.mask))
    if node is not None:
        put(node, 3, 1.0 if node.args[3] == 0.0 else 0.0)
    return on(program, node is not None)


@kind
def masks_another_dim(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.mask, where=lambda node: len(record(node).shape) > 1))
    if node is not None:
        put(node, 1, pick(chance, [dim for dim in range(len(record(node).shape)) if dim != node.args[1]]))
    return on(program, node is not None)


@kind
def cuts_the_first_tile(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.shard))
    if node is not None:
        put(node, 3, 0)
    return on(program, node is not None)


@kind
def cuts_by_another_place(program: PlainProgram, chance: Random) -> PlainProgram | None:
    def others(node: Node) -> list[Node]:
        return [one for one in node.graph.nodes if one < node and one.op == "call_function" and is_integer(one) and one is not node.args[3]]

    node = pick(chance, nodes(program, spmd.shard, where=lambda node: bool(others(node))))
    if node is not None:
        put(node, 3, pick(chance, others(node)))
    return on(program, node is not None)


@kind
def cuts_along_another_dim(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.shard, where=lambda node: len(record(node).shape) > 1))
    if node is not None:
        put(node, 1, pick(chance, [dim for dim in range(len(record(node).shape)) if dim != node.args[1]]))
    return on(program, node is not None)


@kind
def asks_for_its_place_on_another_axis(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.coordinate))
    axes = [axis for axis in program.axis_sizes if node is not None and axis != node.args[0]]
    if not axes:
        return None
    put(node, 0, pick(chance, axes))
    return program


def _size_kind(name: str, target: Any) -> None:
    def edit(program: PlainProgram, chance: Random) -> PlainProgram | None:
        node = pick(chance, nodes(program, target))
        if node is not None:
            put(node, 0, node.args[0] + chance.choice([1, -1]) if type(node.args[0]) is int else 0)
        return on(program, node is not None)

    edit.__name__ = name
    kind(edit)


_size_kind("counts_a_tile_of_another_size", spmd.tile_count)
_size_kind("begins_a_tile_of_another_size", spmd.tile_start)


@kind
def is_at_another_place_in_the_ring(program: PlainProgram, chance: Random) -> PlainProgram | None:
    node = pick(chance, nodes(program, spmd.ring_place))
    if node is not None:
        put(node, 1, node.args[1] + 1)
    return on(program, node is not None)
