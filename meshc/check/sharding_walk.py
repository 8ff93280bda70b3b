"""Sharding of each value of a stage, and tile of each random draw: the declared one against the one inferred from the operands.

    mm: "f32[batch 8/dp, ffn 12]" = aten.mm(x, w)      refused: w is [hidden 6, ffn 12/tp], so dim 1 of the product is [ffn 12/tp]

Shapes have been checked (`stage.py`). Readers of a wrong line take its declared sharding, so that a fault is reported once. Without
operator rules shardings are followed only through collectives, views and slices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, cast

import torch
from torch.fx import Node

from meshc import ir
from meshc.check import orders, rings
from meshc.check.inferred_sharding import InferredSharding, Parts, alike, dim_text, fit_together, flat, partial_text, run_of
from meshc.check.padding import check_claims, check_sums
from meshc.check.rings import BACKWARD, FORWARD
from meshc.check.rule_queries import RuleQueries
from meshc.check.rule_shardings import RuledCall, RulesProtocol, shardings_by_rule
from meshc.check.spmd_shardings import Place, Places, infer_sharding, place_of, positions
from meshc.check.types import Wrong
from meshc.check.view_shardings import check_view, piece_at, slice_dim, view_sharding
from meshc.check.windows import check_windows
from meshc.ir import Record, spmd
from meshc.ir.schemas import RESHAPES, named_arguments
from meshc.ir.sharding import Sharding, local_size
from meshc.ir.window import tile_length
from meshc.ops import check_index as _check_index  # noqa: F401 - registers it
from meshc.ops.in_place import WRITERS
from meshc.ops.optim import MANY
from meshc.program.program import PlainProgram, Stage
from meshc.text.allowed_operators import spelling

aten = torch.ops.aten


def faults(
    stage: Stage, sizes: Mapping[str, int], rules: RulesProtocol | None, handed: CrossStageShardings | None = None
) -> Iterator[tuple[str, str]]:
    """(value, message) for every line with another sharding than its operands give. `handed`: shardings of values of earlier stages, to
    which those of this stage are added."""
    walk = _ShardingWalk(stage, sizes, rules, handed)
    for node in stage.graph.nodes:
        if node.op == "output":
            return walk.hand_on(stage)
        try:
            walk.visit(node)
        except Wrong as wrong:
            yield node.name, f"{node.name} = {spelling(node.target)}(...): {wrong}"


class CrossStageShardings:
    """Shardings of values with plain types across stages, by key: inferred in the stage that computes a value, for the stages that read it.

    before    keep_first_1: "f64[4, 2, 2]" = keep_first(zeros, coordinate_1)      inferred: [experts 4, in 2, out 2] partial(sum: a)
    each      keep_first_1: "f64[4, 2, 2]" = "value:keep_first_1"                 read with this sharding

    A rule's lowering of one operator consists of lines with plain types; those that are equal for all microbatches are in another stage.
    """

    def __init__(self, program: PlainProgram) -> None:
        self._makers = Counter(key for stage in program.stages.values() for key in stage.outputs)
        self._others = {port.key for port in program.inputs} | {step.into for step in program.schedule}
        self._found: dict[str, list[tuple[tuple[int, ...], InferredSharding]]] = {}

    def give(self, key: str, value: Node, spread: InferredSharding) -> None:
        self._found.setdefault(key, []).append((tuple(ir.record(value).shape), spread))

    def of(self, key: str, record: Record) -> InferredSharding | None:
        """The sharding inferred under `key`; None if unknown, if writers disagree, or if a port or an accumulation has the same key."""
        found = self._found.get(key, [])
        if not found or len(found) < self._makers[key] or key in self._others:
            return None
        shape, spread = found[0]
        return spread if shape == tuple(record.shape) and all(one == found[0] for one in found) else None


class _ShardingWalk:
    def __init__(self, stage: Stage, sizes: Mapping[str, int], rules: RulesProtocol | None, handed: CrossStageShardings | None) -> None:
        self.sizes = sizes
        self.handed = handed
        self.keys = stage.keys()
        self.spreads: dict[Node, tuple[InferredSharding, ...]] = {}
        self.places: dict[object, Place | None] = {}
        self.asked = RuleQueries(rules, sizes) if rules is not None else None
        self.calls: dict[object, tuple[InferredSharding, ...]] = {}
        """Call -> shardings of its results at the first line with that call, without dims that no operand has."""
        self.operand_dims: dict[Node, list[list[bool]]] = {}
        """By call with a rule, whether an operand has each dim of each result: if none has, all its positions hold the same, and its tiles
        may be those of any axis."""

    def visit(self, node: Node) -> None:
        records = ir.records(node)
        declared = self._declared_shardings(node)
        self.spreads[node] = declared
        if self.asked is not None:
            self.asked.add(node)
        if node.target in spmd.INTEGERS.values():
            self.places[node] = place_of(node, self.places, self.sizes)
        if node.target in WRITERS:
            self._check_updates(node)
        if ir.is_integer(node):
            return
        if node.op != "call_function":
            return
        found = self._result_shardings(node, declared)
        check_offsets(node, self.places, self.sizes)
        several = isinstance(node.meta[ir.KEY], tuple)
        self.spreads[node] = tuple(
            (_fill_unknown_dims if several else _merge_declared)(one, told) for one, told in zip(found, declared, strict=True)
        )
        before = self.calls.setdefault(_call_key(node), self._over_operand_dims(node))
        for one, other, told, record in zip(found, before, declared, records, strict=True):
            if record.sharding is not None:
                _compare(other, told, record.shape, self.sizes)
                _compare(one, told, record.shape, self.sizes)
                for axes, back in one.back.items():
                    if back:
                        raise Wrong(f"it is {rings.whose(back, axes)}, and no type says so")
                check_claims(one.padding, record.sharding, self.sizes)

    def hand_on(self, stage: Stage) -> None:
        if self.handed is None:
            return
        for key, value in stage.results().items():
            if isinstance(value, Node) and not isinstance(value.meta[ir.KEY], tuple):
                self.handed.give(key, value, self._sharding(value))

    def _declared_shardings(self, node: Node) -> tuple[InferredSharding, ...]:
        """Declared shardings: of several results by their `getitem` lines; of an input with a plain type the one from earlier stages."""
        if node.op == "placeholder" and self.handed is not None and ir.record(node).sharding is None:
            known = self.handed.of(self.keys[node], ir.record(node))
            return (known or InferredSharding.of(ir.record(node), self.sizes),)
        found = [InferredSharding.of(record, self.sizes) for record in ir.records(node)]
        if isinstance(node.meta[ir.KEY], tuple):
            for user in node.users:
                if ir.is_getitem(user) and isinstance(user.args[1], int) and 0 <= user.args[1] < len(found):
                    found[user.args[1]] = InferredSharding.of(ir.record(user), self.sizes)
        return tuple(found)

    def _sharding(self, node: Node) -> InferredSharding:
        return self.spreads[node][0]

    def _result_shardings(self, node: Node, declared: Sequence[InferredSharding]) -> Sequence[InferredSharding]:
        target = node.target
        if ir.is_getitem(node):
            return [self.spreads[node.args[0]][node.args[1]]]  # type: ignore[index]
        if target in spmd.FUNCTIONS.values():
            told = declared[0] if ir.record(node).sharding is not None else None
            return [infer_sharding(node, self._sharding(cast(Node, node.args[0])), told, self.places, self.sizes)]
        if target in RESHAPES:
            given = replace(self._sharding(cast(Node, node.args[0])), windows={})
            if ir.record(node).sharding is None:
                return [view_sharding(given, ir.record(node).shape, self.sizes)]
            check_view(given, declared[0])
            return [replace(given, dims=(None,) * len(declared[0].dims), runs=given.axis_runs())]
        if (counted := positions(node, self.places, self.sizes)) is not None:
            return [counted]
        if target is torch.ops.meshc.check_index.default:
            return [self._sharding(cast(Node, node.args[0]))]
        if target is aten.slice.Tensor:
            return [self._slice_sharding(node)]
        if target is aten.constant_pad_nd.default and ir.record(node).sharding is None:
            given = replace(self._sharding(cast(Node, node.args[0])), windows={})
            shapes = zip(ir.records(cast(Node, node.args[0]))[0].shape, ir.record(node).shape, strict=True)
            dims = tuple(parts if one == other else None for (one, other), parts in zip(shapes, given.dims, strict=True))
            return [replace(given, dims=dims, runs=given.axis_runs(), filled=given.filled and node.args[2:3] in ((), (0,)))]
        if target is aten.cat.default and ir.record(node).sharding is None:
            return [self._cat_sharding(node)]
        if self.asked is None:  # without rules the declared padding is taken as true
            return [InferredSharding((None,) * len(spread.dims), padding=spread.padding) for spread in declared]
        found = self._infer_by_rule(node, declared)
        if target is aten.full.default and named_arguments(node)["fill_value"] == 0 and {*(declared[0].partial or {}).values()} == {"sum"}:
            found = [replace(found[0], partial=None)]  # zeros are a partial sum over any axis
        operands = {one: self._sharding(one) for one in ir.operands(node) if not ir.is_integer(one)}
        backs = rings.ring_offsets(node, operands, self.places, self.sizes, len(found))
        return [replace(one, back=back) for one, back in zip(found, backs, strict=True)]

    def _over_operand_dims(self, node: Node) -> tuple[InferredSharding, ...]:
        found = list(self.spreads[node])
        for at, taken in enumerate(self.operand_dims.get(node, ())):
            if not all(taken):
                dims = tuple(parts if is_taken else None for parts, is_taken in zip(found[at].dims, taken, strict=True))
                found[at] = replace(found[at], dims=dims, runs=None)
        return tuple(found)

    def _slice_sharding(self, node: Node) -> InferredSharding:
        """The sharding of a slice of a value, or of a bucket."""
        x = cast(Node, node.args[0])
        given, shape = self._sharding(x), ir.record(x).shape
        dim, start, length, step = _bounds(node, shape)
        parts = given.dims[dim]
        found: Parts | None = None
        of = given
        if parts is not None:
            found = slice_dim(parts, start, length, step, self.sizes, ir.record(node).sharding is None)
        elif given.pieces is not None and step == 1 and shape[dim] == sum(size for size, _ in given.pieces):
            of = piece_at(given.pieces, start, length) or replace(given, runs=None, padding={}, filled=False)
            found = of.dims[0] if len(of.dims) == 1 else None
        dims = given.with_dim(dim, found).dims
        if given.pieces is not None and found is not None:
            dims = tuple(found if d == dim else () if extent == 1 else None for d, extent in enumerate(shape))
        return replace(given, dims=dims, runs=of.axis_runs(), pieces=None, padding=of.padding, filled=of.filled, windows={})

    def _cat_sharding(self, node: Node) -> InferredSharding:
        """The sharding of a bucket, with the sharding of each value in it; `partial` and `runs` are unknown where the values differ."""
        operands = ir.operands(node)
        given = [self._sharding(one) for one in operands]
        waiting = [one.partial for one in given]
        same = None not in waiting and all(dict(one or {}) == dict(waiting[0] or {}) for one in waiting)
        split = {one.axis_runs() for one in given}
        dims = (None,) * len(ir.record(node).shape)
        dim = node.args[1] if len(node.args) > 1 else 0
        pieces = tuple((ir.record(one).shape[cast(int, dim)], spread) for one, spread in zip(operands, given, strict=True))
        partial, runs = waiting[0] if same else None, split.pop() if len(split) == 1 else None
        filled = all(one.filled for one in given)
        return InferredSharding(
            dims, partial, runs, pieces, any(one.varies for one in given), filled=filled, back=rings.common_offsets(given)
        )

    def _check_updates(self, node: Node) -> None:
        many = node.target in MANY.values()
        rows = [row for row in node.args if isinstance(row, list | tuple)] if many else [[operand] for operand in node.args[:2]]
        for operands in zip(*rows, strict=False):
            tensors = [(one, self._sharding(one)) for one in operands if isinstance(one, Node)]
            for one, spread in tensors:
                if spread.partial:
                    raise Wrong(f"{one} is {partial_text(spread.partial)}: an update takes what has been reduced")
            first, known = tensors[0]
            for one, spread in tensors[1:]:
                if len(spread.dims) == len(known.dims) and not _is_alike(known, spread):
                    raise Wrong(f"{first} is [{_dims_text(known)}] and {one} is [{_dims_text(spread)}]: an update takes them alike")

    def _infer_by_rule(self, node: Node, declared: Sequence[InferredSharding]) -> Sequence[InferredSharding]:
        assert self.asked is not None
        operands = ir.operands(node)
        tensors = [one for one in operands if not ir.is_integer(one)]
        given = [self._sharding(one) for one in tensors]
        unknown = [InferredSharding((None,) * len(spread.dims), varies=True) for spread in declared]
        numbers = len(tensors) < len(operands) and torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]
        varies = numbers or any(one.varies for one in given)
        if numbers:
            given = [replace(one, partial=None) for one in given]
        rule, deferrals = self.asked.rule(node, tensors, given, declared)
        piece = all(spread.runs is None for spread in declared)
        if rule is None and deferrals is not None and not piece:
            _check_whole(node, tensors, given)
        if rule is None or deferrals is None:
            return unknown
        taken = {letter for dims in rule.operands for letter in dims}
        if [len(dims) for dims in rule.results] == [len(spread.dims) for spread in declared]:
            self.operand_dims[node] = [[letter in taken for letter in dims] for dims in rule.results]
        call = RuledCall(node, rule, tensors, given, declared, self.sizes)
        orders.check(call, self.asked.rules, piece)
        check_sums(call)
        found = shardings_by_rule(call, deferrals)
        read = [one if len(one.dims) == len(told.dims) else other for one, told, other in zip(found, declared, unknown, strict=True)]
        made = [_rank_dependent_sharding(one) for one in read] if varies else read
        goes = check_windows(call) if rule.windows else [{} for _ in made]
        return [replace(one, windows=windows) for one, windows in zip(made, goes, strict=True)]


def _check_whole(node: Node, names: Sequence[Node], given: Sequence[InferredSharding]) -> None:
    """Raises Wrong for a split or partial operand of an operator of torch that has no rule."""
    for name, spread in zip(names, given, strict=True):
        if spelling(node.target).startswith("aten.") and (spread.split_axes() or spread.partial):
            lies = ", ".join(sorted(spread.split_axes() or spread.partial or ()))
            told = f"{name} is split or partial over {lies}, and {spelling(node.target)} takes whole values"
            raise Wrong(f"{told}: no rule says what it makes of tiles")


def _call_key(node: Node) -> object:
    """A key that calls of one operator with the same operands and arguments share."""
    return (node.target, repr(node.args), repr(node.kwargs)) if node.all_input_nodes else node


def _rank_dependent_sharding(found: InferredSharding) -> InferredSharding:
    """The sharding of a result that depends on the rank's coordinates: only split dims stay known."""
    dims = tuple(parts if parts is not None and any(part.axes for part in parts) else None for parts in found.dims)
    return InferredSharding(dims, found.partial or None, varies=True, padding=found.padding, filled=found.filled)


def _merge_declared(found: InferredSharding, declared: InferredSharding) -> InferredSharding:
    """The sharding of a value for its readers: the declared one with known padding, or the inferred one of a plain type."""
    if declared.partial is None:
        return found
    held = {axis: value for axis, value in found.padding.items() if axis in declared.padding and value is not None}
    return replace(declared, padding={**declared.padding, **held})


def _fill_unknown_dims(found: InferredSharding, declared: InferredSharding) -> InferredSharding:
    """The inferred sharding of one of several results, with unknown dims and `partial` as declared."""
    dims = tuple(told if one is None else one for one, told in zip(found.dims, declared.dims, strict=True))
    return replace(found, dims=dims, partial=declared.partial if found.partial is None else found.partial)


def _bounds(node: Node, shape: Sequence[int]) -> tuple[int, int, int, int]:
    """(dim, start, length, step) of a slice of a value of local shape `shape`; `stage.py` has checked the arguments."""
    _, dim, start, end, step = named_arguments(node).values()
    dim = dim % len(shape) if isinstance(dim, int) else 0
    size = shape[dim]
    low, high = (default if not isinstance(bound, int) else bound for bound, default in ((start, 0), (end, size)))
    low, high = (max(0, min(size, bound + size if bound < 0 else bound)) for bound in (low, high))
    step = step if isinstance(step, int) and step > 0 else 1
    return dim, low, -(-max(high - low, 0) // step), step


def _compare(found: InferredSharding, declared: InferredSharding, shape: Sequence[int], sizes: Mapping[str, int]) -> None:
    if found.partial is not None and dict(found.partial) != dict(declared.partial or {}):
        raise Wrong(f"its operator makes it {partial_text(found.partial)}, declared is {partial_text(declared.partial or {})}")
    moved = declared.has_all_dims and _cuts(found) != _cuts(declared) and _is_moved(found, declared, shape, sizes)
    for dim, (one, told) in enumerate(zip(found.dims, declared.dims, strict=True)):
        if one is not None and told is not None and not alike(one, told) and not moved:  # a tile of one may be in either dim
            raise Wrong(f"its operator makes dim {dim} [{dim_text(one)}], declared is [{dim_text(told)}]")
    split, told_split = found.split_axes(), declared.split_axes()
    if split is not None and told_split is not None and split != told_split and not moved:
        made, told_ = (", ".join(sorted(axes)) or "nothing" for axes in (split, told_split))
        raise Wrong(f"its operator makes it split over {made}, declared is a value split over {told_}")
    runs, told_runs = found.axis_runs(), declared.axis_runs()
    if runs is not None and told_runs is not None and not fit_together(runs, told_runs):
        made, told_ = (", ".join(sorted("/".join(run) for run in some)) for some in (runs, told_runs))
        raise Wrong(f"its operator makes it split over {made}, in this order, declared is a value split over {told_}")


def _is_alike(one: InferredSharding, other: InferredSharding) -> bool:
    return all(a is None or b is None or alike(a, b) for a, b in zip(one.dims, other.dims, strict=True))


def _is_moved(found: InferredSharding, declared: InferredSharding, shape: Sequence[int], sizes: Mapping[str, int]) -> bool:
    """Whether `found` and `declared` differ only in the dims that tiles of one position are in; such dims may be unknown."""
    unknown = [extent for parts, extent in zip(found.dims, shape, strict=True) if parts is None]
    if any(extent != 1 for extent in unknown):
        return False
    one, other = ([part for part in flat(spread) if not unknown or local_size(part, sizes) != 1] for spread in (found, declared))
    return run_of(one) == run_of(other)


def _cuts(spread: InferredSharding) -> list[list[int]]:
    return [[part.size for part in dim] for dim in spread.dims if dim is not None]


def _dims_text(spread: InferredSharding) -> str:
    return ", ".join("?" if dim is None else dim_text(dim) for dim in spread.dims)


TILE = ("global_shape", "local_shape", "offsets")
"""Arguments that give a tile of a random draw, or of a value cut into blocks (coded states)."""


def check_offsets(node: Node, places: Places, sizes: Mapping[str, int]) -> None:
    """Raises Wrong for offsets of another tile than a rank has of the drawn value.

    u: "f32[2, 8]" = meshc.uniform(seed, 3, [4, 8], [2, 8], [tile_start, 0], f32)      rows from tile_start on, of 4 over dp
    y: "f32[batch 4/dp, width 8]" = aten.reshape(u, [2, 8])                            accepted
    u: "f32[2, 8]" = meshc.uniform(seed, 3, [4, 8], [2, 8], [0, 0], f32)               refused: all ranks would draw the first rows
    """
    if node.target in spmd.FUNCTIONS.values() or ir.is_getitem(node):
        return
    named = named_arguments(node)
    whole, local, offsets = (cast(Sequence[int], named.get(name)) for name in TILE)
    if not whole or not local or not offsets:
        return
    if not len(whole) == len(local) == len(offsets):
        raise Wrong(f"its {', '.join(TILE)} are not of one length")
    round_ring = node.target in (*FORWARD, *BACKWARD)  # `rings.py` checks the owner of the tile
    split: list[tuple[str, ...]] = []
    for size, extent, offset in zip(whole, local, offsets, strict=True):
        place = places.get(offset)
        if isinstance(offset, int) and size == extent and offset == 0:
            continue
        if place is None or not place.starts or place.unit != 1 or place.back and not round_ring:
            raise Wrong(f"{offset} is not where a rank's {extent} of {size} positions start")
        counts = tuple(sizes[axis] for axis in place.axes)
        if (place.size, place.counts) != (size, counts) or tile_length(size, counts) != extent:
            tile = f"{place.size} positions over {'/'.join(place.axes)}"
            raise Wrong(f"{offset} is the start of a tile of {tile}, and {extent} of {size} are drawn")
        split.append(place.axes)
    lies = next(_of_weights(named) if round_ring else _drawn_sharding(node, prod(local)), None)
    if lies is not None and _of_ranks(split) != _of_ranks([part.axes for _, _, part in lies.parts()]):
        raise Wrong(f"it draws a tile over {_axes_text(split)}, and what is drawn for is {lies}")


def _drawn_sharding(node: Node, count: int) -> Iterator[Sharding]:
    """Declared shardings of the drawn value, of `count` elements on a rank: of its line, of its readers, of its operands."""
    for one in (node, *(user for user in node.users if user.op != "output"), *node.all_input_nodes):
        record = ir.records(one)[0]
        if record.sharding is not None and prod(record.shape) == count:
            yield record.sharding


def _of_weights(named: Mapping[str, Any]) -> Iterator[Sharding]:
    """The sharding of an attention's weights, if queries and keys have declared shardings."""
    queries, keys = (ir.record(named[name]).sharding for name in ("q", "k"))
    if queries is not None and keys is not None:
        yield Sharding((*queries.dims[:3], keys.dims[2]))


def _of_ranks(runs: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """`runs` without sequential axes (microbatches, chunks)."""
    return [found for run in runs if (found := tuple(axis for axis in run if axis not in spmd.SEQUENTIAL))]


def _axes_text(runs: Sequence[tuple[str, ...]]) -> str:
    return ", ".join("/".join(run) for run in runs) or "nothing"
