"""Rewrite of mask-selected columns as all rows with a mask, through concatenation and scatters by index (a graph's edges with self-loops).

    e = edges[:, keep]                      a row for each entry of the mask, moved to the front
    e = torch.cat([e, loops], dim=1)        all of them and the loops, with a mask that is true of loops
    i, j = e[0], e[1]                       rows of indices;  torch.ones(e.size(1)) has as many rows
    out.scatter_add_(0, i, s)               out.scatter_add(0, where(mask, i, 0), where(mask, s, 0))
    out.scatter_reduce_(0, i, s, "amax")    rows that do not count are written to one more row, which is cut off
"""

from __future__ import annotations

import operator
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_symbols, free_unbacked_symbols

from meshc.frontend.expert_tape import ROWS
from meshc.frontend.selected_places import NotFollowed, RowIndex, RowSelection, SelectedPlaces, SelectedRows, name_of, value_of
from meshc.ops.signatures import bind_arguments, bind_with_defaults

JOINS: Final = ("cat", "concat", "concatenate")
SAME: Final = ("to", "clone", "contiguous", "detach", "long", "int", "float", "double")
"""Calls that keep all dims."""


class JoinedRows(SelectedPlaces):
    """counts  by a number of rows, as torch's symbolic expression: the selection with so many rows"""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.counts: dict[object, RowSelection] = {}

    def note_count(self, node: Node) -> None:
        held, value = self.rows.get(node), value_of(node)
        pairs = zip(held, value, strict=False) if isinstance(held, tuple) else [(held, value)]
        for rows, each in pairs:
            if isinstance(rows, SelectedRows) and not is_fixed(size := each.shape[rows.at]):
                self.counts.setdefault(size.node.expr, rows.chosen)

    def selection_of_size(self, size: Any) -> RowSelection | None:
        """The selection with `size` rows; None for a fixed or unknown size."""
        return None if is_fixed(size) else self.counts.get(size.node.expr)

    def size_of_all(self, size: Any) -> int:
        """A size computed from numbers of selected rows, with the numbers of all rows in their place."""
        if is_fixed(size):
            return int(size)
        _refuse_open(size)
        symbols = free_unbacked_symbols(size)
        if not symbols <= self.counts.keys():
            raise NotFollowed("a tensor's size is a number that another holds")
        return int(size.node.expr.xreplace({one: self.counts[one].count for one in symbols}))

    # Columns.

    def select_columns(self, node: Node, x: Node, index: tuple[Any, ...]) -> SelectedRows:
        """`x[:, mask]`"""
        at, chosen = len(index) - 1, self.selection(node, index[-1])
        dims = tuple(range(len(chosen.dims)))
        moved = self._call(node, torch.movedim, x, tuple(at + dim for dim in dims), dims)
        return replace(self.index_rows(node, moved, RowIndex(chosen, dims)), at=at)

    def column(self, node: Node, name: str) -> SelectedRows:
        """A call that takes columns."""
        first, *more = node.args
        held = self.rows_of(first)
        if held is None or len(node.all_input_nodes) != 1:
            raise NotFollowed("columns that a mask selects meet others")
        if name == "getitem" and isinstance(more[0], int):
            value = self._call(node, operator.getitem, held.value, (slice(None), more[0]))
            return replace(held, value=value, at=held.at - 1)
        if name in ("t", "transpose") and value_of(held.value).dim() == 2:
            return replace(held, at=0)
        if name in SAME:
            return replace(held, value=self._call(node, node.target, held.value, *more, **node.kwargs))
        raise NotFollowed(f"{name}() takes columns that a mask selects")

    # Joined with other rows.

    def join_rows(self, node: Node) -> bool:
        """`torch.cat` of rows with others along the dim of the rows; False if it is along another dim."""
        named = bind_arguments(torch.cat, node.args, node.kwargs)
        given: Any = named["tensors"]
        dim = named.get("dim", 0) % value_of(node).dim()
        held = [self.rows_of(one) for one in given]
        if not any(rows is not None and rows.at == dim for rows in held):
            return False
        parts, counted = [], []
        for one, rows in zip(given, held, strict=True):
            if rows is not None and rows.at != dim:
                raise NotFollowed("columns that a mask selects meet rows")
            parts.append(rows.value if rows is not None else self._call(node, torch.movedim, one, dim, 0))
            counted.append(rows.chosen if rows is not None else int(value_of(one).shape[dim]))
        self.rows[node] = SelectedRows(self._call(node, torch.cat, parts), self.join_selections(node, tuple(counted)), at=dim)
        return True

    def join_selections(self, like: Node, counted: tuple[RowSelection | int, ...]) -> RowSelection:
        """The selection of concatenated rows: `counted` has selections, and numbers of rows that all count."""
        key = "beside", counted
        if key not in self._masks:
            masks = [
                self._call(like, torch.ones, one, dtype=torch.bool) if isinstance(one, int) else self._call(like, "reshape", one.mask, [-1])
                for one in counted
            ]
            whole = self._call(like, torch.cat, masks)
            self._masks[key] = RowSelection(whole, (int(value_of(whole).shape[0]),))
        return self._masks[key]

    def without_rows(self, node: Node) -> None:
        """Replaces `s.new_zeros(8)`, which reads no rows, by the same call on the tensor of all rows."""
        rows = self.rows_of(node.args[0])
        assert rows is not None
        node.replace_all_uses_with(self._call(node, node.target, rows.value, *node.args[1:], **node.kwargs))

    # Scattered by index.

    def numbers_of(self, index: Any) -> SelectedRows | None:
        """Selected rows of integers that are an index, and not the places of a mask."""
        index = index[0] if isinstance(index, tuple) and len(index) == 1 else index
        rows = self.rows_of(index)
        return rows if rows is not None and not rows.along and value_of(rows.value).dtype in (torch.int64, torch.int32) else None

    def scatter(self, node: Node, name: str) -> None:
        named = bind_with_defaults(node.target, node.args, node.kwargs)
        y, index, value = named["input"], self.numbers_of(named["index"]), named.get("src", named.get("value"))
        if named["dim"] % value_of(y).dim() != 0:
            raise NotFollowed("they are written along another dim than the first")
        more = {key: named[key] for key in ("reduce", "include_self") if named.get(key) is not None}
        adds = "add" in name or more.get("reduce") in ("sum", "add") and more.get("include_self", True)
        self.write_by_numbers(node, y, index, value, adds, lambda y, at, x: self._call(node, name.rstrip("_"), y, 0, at, x, **more))

    def write_rows(self, node: Node, y: Node, index: Any, value: Any, adds: bool) -> None:
        """`y[i] = s`, `y.index_add(0, i, s)`"""
        numbers, dtype = self.numbers_of(index), value_of(y).dtype
        if numbers is None:
            super().write_rows(node, y, index, value, adds)
            return

        def put_rows(y: Node, at: Node, x: Any) -> Node:
            x = self._call(node, "to", x if isinstance(x, Node) else self._call(node, torch.tensor, x), dtype)
            return self._call(node, torch.index_put, y, (at,), x, accumulate=adds)

        self.write_by_numbers(node, y, numbers, value, adds, put_rows)

    def write_by_numbers(self, node: Node, y: Node, index: SelectedRows | None, value: Any, adds: bool, write: Any) -> None:
        """`write(y, index, value)` of the rows that count. Others add 0 to row 0, or are written to one more row."""
        if index is None:
            raise NotFollowed("rows of another selection, or a number, are written there")
        rows, count = self.rows_written(value, index.chosen), value_of(y).shape[0]
        value = value if rows is None else self.fill_unselected(node, rows).value
        if adds and rows is not None:
            made = write(y, self.fill_unselected(node, index).value, value)
        else:
            behind = self._call(node, torch.cat, [y, self._call(node, "new_zeros", y, [1, *value_of(y).shape[1:]])])
            written = write(behind, self.fill_unselected(node, replace(index, zero=False), fill=count).value, value)
            made = self._call(node, "narrow", written, 0, 0, count)
        if name_of(node).endswith("_") or node.target is operator.setitem:
            self._call(node, "copy_", y, made)
            node.replace_all_uses_with(y, propagate_meta=False)
            return
        node.replace_all_uses_with(made)


def numbers_for_proof(size: Any) -> dict[object, int]:
    """Values for symbolic numbers of rows, so that there are `ROWS` rows, or a multiple for each; {} where the model fixes the number."""
    if is_fixed(size):
        return {}
    _refuse_open(size)
    first, *others = sorted(free_unbacked_symbols(size), key=str)
    expr = size.node.expr.xreplace(dict.fromkeys(others, 0))
    each, rest = expr.coeff(first, 1), expr.coeff(first, 0)
    if each == 0 or rest % each != 0:
        raise NotFollowed("how many there are follows from several numbers")
    return {**dict.fromkeys(others, 0), first: ROWS - int(rest // each)}


def is_fixed(size: Any) -> bool:
    """Whether a number of rows is one that the model fixes, as `h[mask] + x` does."""
    return not isinstance(size, torch.SymInt) or not free_symbols(size)


def size_for_proof(size: Any, numbers: dict[object, int]) -> int:
    if is_fixed(size):
        return int(size)
    _refuse_open(size)
    return int(size.node.expr.xreplace({**dict.fromkeys(free_unbacked_symbols(size), ROWS), **numbers}))


def without_values(value: Any, numbers: dict[object, int], rows: bool = False) -> Any:
    """A meta tensor like one of the trace, for a proof; `rows`: with `ROWS` rows, where the model fixes their number."""
    if isinstance(value, Tensor):
        shape = [size_for_proof(size, numbers) for size in value.shape]
        if rows and not numbers:
            shape[0] = ROWS
        return torch.empty(shape, dtype=value.dtype, device="meta")
    if isinstance(value, tuple | list):
        return type(value)(without_values(one, numbers, rows) for one in value)
    return value


def _refuse_open(size: Any) -> None:
    if not all(one in free_unbacked_symbols(size) for one in free_symbols(size)):
        raise NotFollowed("sizes are left open beside it")
