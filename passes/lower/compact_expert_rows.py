"""Compaction of expert rows: experts run on the rows that are used, not on a row for each possible choice.

    rows = to_groups(x, own) as [1, t * m, h]          used, ends = used_rows(own, 4)
    h = group_mm(rows, w1, own, ..)                    rows: ".. used(1)" = rows_of_tokens(x, used, m)
    a = silu(h)                             becomes    h: ".. used(1)" = used_mm(rows, w1, ends, ..)
    y = group_mm(a, w2, own, ..)                       a: ".. used(1)" = silu(h)
    out = from_groups(y as [1, t, m, h], own)          y: ".. used(1)" = used_mm(a, w2, ends, ..)
                                                       out = tokens_of_rows(y, used, t, m)

and so backward. There is a row for each choice that a token could have made in the group. The rows of actual choices are gathered once,
sorted by expert, and the operators between run on them alone. Their number is data: types keep the bound, and say `used`
(`meshc/ir/used_rows_dims.py`). A layer with an operator that does not treat each row by itself stays as it is.

A backend that compiles needs sizes: operators on these rows are outside its regions. On CUDA the host would wait for the sizes, so layers
are changed only where rows are dispatched, which the host waits for in any case (`dispatch_and_combine.py`); elsewhere a step may be
captured as a CUDA graph. Nor are they changed on CUDA where regions are compiled: which of the two is faster has not been measured.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.fx import Graph, Node
from torch.fx.node import Argument, map_arg

from meshc.ir import is_getitem, record, records, spmd
from meshc.ir.graph import call
from meshc.ir.nodes import KEY, Record, is_tensor
from meshc.ir.sharding import Sharding
from meshc.ir.used_rows_dims import rows_dim, with_open_rows
from meshc.ops import used_rows as _used_rows  # noqa: F401 - registers them
from meshc.passes.phases.lowered_program import LoweredProgram

aten, meshc = torch.ops.aten, torch.ops.meshc

HANDED: Final = (meshc.to_groups.default, meshc.in_slots.default)
BROUGHT: Final = (meshc.from_groups.default, meshc.over_slots.default)
SPREADING: Final = (aten.slice_backward.default, aten.select_backward.default)
"""Operators that put a slice into zeros of a given shape."""
FILLED: Final[Mapping[object, int]] = {
    aten.zeros.default: 0, aten.full.default: 0, aten.ones.default: 0, aten.new_zeros.default: 1, aten.new_full.default: 1,
}  # fmt: skip
"""Operators that fill a tensor with one number, each with the position of its shape argument."""


def compact_expert_rows(lowered: LoweredProgram) -> LoweredProgram:
    """Compacts the rows of each layer of routed experts that allows it."""
    cuda = lowered.mesh.device_type == "cuda"
    if cuda and lowered.request.backend != "eager":
        return lowered
    for stage in lowered.stages.values():
        if not cuda or any(node.target in spmd.OF_ROWS for node in stage.graph.nodes):
            compact_graph(stage.graph)
    return lowered


def compact_graph(graph: Graph) -> None:
    """Compacts the rows of expert layers in a per-rank graph, in place."""
    nodes = list(graph.nodes)
    found = [layer for node in nodes if (layer := _expert_rows(node, nodes)) is not None]
    for layer in found:
        writer = _CompactRowsWriter(graph, layer)
        for node in nodes:
            with graph.inserting_before(node):
                writer.write(node)
    if found:
        graph.eliminate_dead_code()


@dataclass(frozen=True)
class _ExpertRows:
    """The rows of one group's experts.

    own             [1, tokens, chosen]: the expert of each place (a token and one of its choices)
    count           number of experts
    dims            nodes whose values are rows, with the dim of the rows
    ends            reshapes of rows that operators read which put rows back in their places
    products        matrix products with the expert of each row
    """

    own: Node
    count: int
    dims: Mapping[Node, int]
    ends: Sequence[Node]
    products: Sequence[Node]

    @property
    def tokens(self) -> int:
        return record(self.own).shape[1]

    @property
    def top_k(self) -> int:
        return record(self.own).shape[2]

    @property
    def choice_count(self) -> int:
        return self.tokens * self.top_k


def _expert_rows(own: Node, nodes: Sequence[Node]) -> _ExpertRows | None:
    """The layer of a group of experts whose choices are `own`; None if there is none, or an operator does not treat each row by itself."""
    made = own.args[0] if is_getitem(own) and own.args[1] == 0 else None
    if not isinstance(made, Node) or made.target is not meshc.group_choices.default or made.args[1] != 1:
        return None
    count, choices = made.args[2], [own]
    for node in choices:
        choices += [user for user in node.users if user.target is aten.reshape.default]
    products = [user for choice in choices for user in choice.users if user.target in (meshc.group_mm.default, meshc.group_outer.default)]
    if not isinstance(count, int) or not products or not all(_fits(product, choices, count) for product in products):
        return None
    layer = _ExpertRows(own, count, {}, [], products)
    found = _trace_rows(layer, nodes) if layer.choice_count > 1 else None
    return None if found is None else replace(layer, dims=found[0], ends=found[1])


def _fits(product: Node, choices: Sequence[Node], count: int) -> bool:
    """Whether a product goes by these choices and has one matrix for each of `count` experts."""
    of, each = product.args[2:4]
    matrices = product if product.target is meshc.group_outer.default else product.args[1]
    assert isinstance(matrices, Node)
    return of in choices and isinstance(each, int) and each == count == record(matrices).shape[0]


def _trace_rows(layer: _ExpertRows, nodes: Sequence[Node]) -> tuple[dict[Node, int], list[Node]] | None:
    """(nodes whose values are rows, with the dim of the rows; `ends` of the layer); None if another operator reads rows."""
    dims: dict[Node, int] = {}
    ends: list[Node] = []
    for node in nodes:
        reads_rows = not dims.keys().isdisjoint(node.all_input_nodes)
        if node.target in HANDED and node.args[1] is layer.own:
            if reads_rows or not all(_are_rows(user, layer) for user in node.users):
                return None
            dims |= dict.fromkeys(node.users, 1)
        elif node in layer.products:
            if node.target is meshc.group_mm.default:
                dims[node] = 1
        elif node in dims or not reads_rows:
            continue
        elif _puts_back(node, layer):
            ends.append(node)
        elif node.op == "call_function" and (dim := _result_dim(node, dims, layer)) is not None:
            dims[node] = dim
        else:
            return None
    return dims, ends


def _result_dim(node: Node, dims: Mapping[Node, int], layer: _ExpertRows) -> int | None:
    """The dim of the rows in a node's result; None if the node may not treat each row by itself."""
    if node.target in SPREADING:
        sizes, along = node.args[1:3]
        assert isinstance(sizes, list | tuple) and isinstance(along, int)
        fits = dims.get(node.all_input_nodes[0]) == 1 and tuple(sizes[:2]) == (1, layer.choice_count)
        return 1 if fits and along % len(sizes) > 1 else None
    return rows_dim(node, lambda operand: _dim(operand, node, dims, layer))


def _are_rows(node: Node, layer: _ExpertRows) -> bool:
    return node.target is aten.reshape.default and record(node).shape[:2] == (1, layer.choice_count) and len(record(node).shape) == 3


def _puts_back(node: Node, layer: _ExpertRows) -> bool:
    """Whether all readers of a reshape, further reshapes aside, add rows up or take weights' gradients to their tokens."""
    if node.target is not aten.reshape.default:
        return False
    return bool(node.users) and all(_reads_places(user, node, layer) or _puts_back(user, layer) for user in node.users)


def _reads_places(reader: Node, rows: Node, layer: _ExpertRows) -> bool:
    takes = reader.target in (*BROUGHT, meshc.weights_to_tokens.default)
    return takes and reader.args[0] is rows and reader.args[1] is layer.own


def _dim(operand: Node, reader: Node, dims: Mapping[Node, int], layer: _ExpertRows) -> int | None:
    """The dim of an operand's rows, or of its places, from which rows can be picked; None if it has neither."""
    if operand in dims:
        return dims[operand]
    if not is_tensor(operand):
        return None
    shape = record(operand).shape
    behind = {len(records(other)[0].shape) - dims[other] for other in reader.all_input_nodes if other in dims}
    return next((dim for dim in (0, 1) if shape[: dim + 1] == (1,) * dim + (layer.choice_count,) and {len(shape) - dim} == behind), None)


class _CompactRowsWriter:
    """Emits a layer's operators on used rows alone."""

    def __init__(self, graph: Graph, layer: _ExpertRows) -> None:
        self.graph, self.layer = graph, layer
        self.rows: dict[Node, Node] = {}
        """Replacement of each value of rows."""
        self.picked: dict[tuple[Node, int], Node] = {}
        """Rows picked from values that have a position for each place."""
        own = record(layer.own)
        used = replace(own, shape=(1, layer.choice_count), dtype=torch.int64, sharding=_flat(own.sharding), used=1)
        ends = replace(own, shape=(layer.count,), dtype=torch.int64, sharding=None)
        with graph.inserting_after(layer.own):
            both = call(graph, (used, ends), meshc.used_rows.default, layer.own, layer.count)
        with graph.inserting_after(both):
            self.ends = call(graph, ends, operator.getitem, both, 1)
            self.used = call(graph, used, operator.getitem, both, 0)

    def write(self, node: Node) -> None:
        """Emits what replaces a node, if it is one of the layer's."""
        if node in self.layer.dims:
            self.rows[node] = self._write_rows(node)
        elif node in self.layer.products:
            self._sum_of_outer(node)
        elif node in self.layer.ends:
            self._put_back(node, self.rows[node.all_input_nodes[0]])

    def _write_rows(self, node: Node) -> Node:
        """The replacement of a node whose value is rows."""
        source, layer = node.args[0], self.layer
        if isinstance(source, Node) and source.target in HANDED and source.args[1] is layer.own:
            x = source.args[0]
            assert isinstance(x, Node)
            tokens = self._reshape(x, [layer.tokens, record(x).shape[-1]])
            return self._call(_of_rows(node, 1), meshc.rows_of_tokens.default, tokens, self.used, layer.top_k)
        if node in layer.products:
            return self._call(_of_rows(node, 1), meshc.used_mm.default, self._rows(source, 1), node.args[1], self.ends, node.args[-1])
        if node.target in SPREADING:
            return self._write_spread(node)

        def there(operand: Node) -> Node:
            dim = _dim(operand, node, layer.dims, layer)
            return operand if dim is None else self._rows(operand, dim)

        dim = layer.dims[node]
        args = [map_arg(each, there) for each in with_open_rows(node, dim)]
        kwargs = {name: map_arg(each, there) for name, each in node.kwargs.items()}
        return self._call(_of_rows(node, dim), node.target, *args, **kwargs)

    def _write_spread(self, node: Node) -> Node:
        x, sizes, along, start, *end = node.args
        assert isinstance(sizes, list | tuple) and isinstance(along, int) and isinstance(start, int)
        rows, dim = self._rows(x, 1), along % len(sizes)
        if node.target is aten.select_backward.default:
            own = record(rows)
            shape = (*own.shape[:dim], 1, *own.shape[dim:])
            rows = self._call(replace(own, shape=shape, sharding=None), aten.unsqueeze.default, rows, dim)
        step, size = end[1] if len(end) > 1 else 1, sizes[dim]
        assert isinstance(size, int)
        start = start % size if start < 0 else start
        return self._call(_of_rows(node, 1), meshc.rows_spread.default, rows, dim, size, start, step)

    def _sum_of_outer(self, node: Node) -> None:
        """Replaces a product that sums over rows; computed transposed where all readers transpose it."""
        left, right = (self._rows(operand, 1) for operand in node.args[:2])
        made, readers = record(node), list(node.users)
        if readers and all(map(_transposes, readers)):
            left, right, made = right, left, replace(record(readers[0]), phase=made.phase)
        else:
            readers = [node]
        outer = self._call(made, meshc.used_outer.default, left, right, self.ends, node.args[-1])
        for reader in readers:
            reader.replace_all_uses_with(outer)

    def _put_back(self, end: Node, rows: Node) -> None:
        """Replaces the readers of `end`, or of reshapes of it, which read rows in their places, by operators on used rows."""
        layer = self.layer
        for reader in list(end.users):
            made = record(reader)
            with self.graph.inserting_before(reader):
                if reader.target is aten.reshape.default:
                    self._put_back(reader, rows)
                elif reader.target in BROUGHT:
                    flat = self._reshape(rows, [1, -1, made.shape[-1]])
                    like = replace(made, shape=(layer.tokens, made.shape[-1]))
                    like = like if like.shape == made.shape else replace(like, sharding=None)
                    summed = self._call(like, meshc.tokens_of_rows.default, flat, self.used, layer.tokens, layer.top_k)
                    reader.replace_all_uses_with(self._reshape(summed, list(made.shape), made))
                else:
                    flat = self._reshape(rows, [1, -1])
                    placed = self._call(replace(record(flat), used=None), meshc.places_of_rows.default, flat, self.used, layer.choice_count)
                    reader.replace_input_with(end, self._reshape(placed, list(record(end).shape), record(end)))

    def _rows(self, operand: Argument, dim: int) -> Node:
        """The replacement of an operand; rows picked from it if it has a position for each place."""
        assert isinstance(operand, Node)
        if operand not in self.rows and (operand, dim) not in self.picked:
            self.picked[operand, dim] = self._pick_rows(operand, dim)
        return self.rows.get(operand) or self.picked[operand, dim]

    def _pick_rows(self, operand: Node, dim: int) -> Node:
        made, places = record(operand), self.layer.choice_count
        behind = list(made.shape[dim + 1 :])
        if operand.target in FILLED and behind:  # one number a row, as wide as it is read
            sizes = FILLED[operand.target]
            args = [[1, places, *[1] * len(behind)] if place == sizes else value for place, value in enumerate(operand.args)]
            thin = replace(made, shape=(1, places, *[1] * len(behind)), sharding=None)
            number = self._call(thin, operand.target, *args, **operand.kwargs)
            picked = self._call(replace(thin, used=1), meshc.rows_of_places.default, number, self.used)
            wide = self._call(replace(thin, shape=(1, places, *behind), used=1), aten.expand.default, picked, [1, -1, *behind])
            rows = self._call(record(wide), aten.clone.default, wide, memory_format=torch.contiguous_format)
        else:
            whole = self._reshape(operand, [1, places, *behind])
            rows = self._call(replace(record(whole), used=1), meshc.rows_of_places.default, whole, self.used)
        return self._reshape(rows, [*[1] * dim, -1, *behind])

    def _reshape(self, x: Node, shape: list[int], made: Record | None = None) -> Node:
        """A reshape of `x`, where -1 in `shape` is the dim of rows; `x` itself if it has that shape."""
        own, dim = record(x), shape.index(-1) if -1 in shape else None
        whole = tuple(self.layer.choice_count if size == -1 else size for size in shape)
        if own.shape == whole:
            return x
        return self._call(made or replace(own, shape=whole, sharding=None, used=dim), aten.reshape.default, x, shape)

    def _call(self, made: Record | tuple[Record, ...], target: Any, *args: Argument, **kwargs: Argument) -> Node:
        return call(self.graph, made, target, *args, **kwargs)


def _of_rows(node: Node, dim: int) -> Record | tuple[Record, ...]:
    """The records of a node's results, marked as used rows along `dim`."""
    rows = tuple(replace(one, used=dim) for one in records(node))
    return rows if isinstance(node.meta[KEY], tuple) else rows[0]


def _transposes(reader: Node) -> bool:
    """Whether a node transposes each matrix of a batch."""
    return reader.target is aten.transpose.int and sorted(dim % 3 for dim in reader.args[1:]) == [1, 2]  # type: ignore[operator]


def _flat(sharding: Sharding | None) -> Sharding | None:
    """The sharding of [q, t, m] reshaped to [q, t * m]."""
    if sharding is None:
        return None
    groups, *places = sharding.dims
    return Sharding((groups, tuple(part for dim in places for part in dim)))
