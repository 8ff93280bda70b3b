"""Rewrite of mask-selected rows as all rows with a mask: gathers by the mask's indices, and writes back to the selected places.

    s = h[keep]                  where(keep.flatten()[:, None], h.flatten(0, 1), 0)
    i, j = torch.where(mask)     for each entry of the mask its index;  x[i] is x, once for each j
    out[keep] = s                out.copy_(where(keep[..., None], s, out))
    out.index_add_(0, i, s)      out plus the sum over j of what counts
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from meshc.frontend.in_place_changes import changed_operand, is_changed_later
from meshc.frontend.inner_transforms import storage_of
from meshc.frontend.inserted_calls import InsertedCalls, map_arguments
from meshc.ops.signatures import bind_arguments, bind_with_defaults

WRITES: Final = frozenset(
    "setitem index_add_ index_add index_put_ index_put index_copy_ index_copy masked_scatter_ scatter_ scatter scatter_add_ scatter_add "
    "scatter_reduce_ scatter_reduce".split()
)
PURE: Final = frozenset(
    "ne eq gt ge lt le and_ or_ xor invert not_ logical_and logical_or logical_not getitem view reshape flatten squeeze unsqueeze to bool "
    "isnan isfinite isinf __and__ __or__ __invert__".split()
)
"""Calls whose result depends on their operands alone: two masks computed by equal calls are one."""

IN_PLACE: Final[Mapping[object, Callable[..., object]]] = {
    getattr(operator, f"i{name}"): getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "pow", "floordiv", "mod")
}
"""In-place operator -> the operator that returns a new value."""


class NotFollowed(Exception):
    """Raised where selected rows cannot be followed through a call; the text says why."""


@dataclass(frozen=True)
class RowSelection:
    """A selection of rows: a mask, and its shape."""

    mask: Node
    dims: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.dims)


@dataclass(frozen=True)
class SelectedRows:
    """The value that stands for selected rows.

    value  of all rows
    zero   rows that are not selected are zero
    along  the dims of the mask of which the rows are indices, as `torch.where` gives them; one column for each with `columns`
    at     the dim of the rows in the model's value; in `value` it is the first
    """

    value: Node
    chosen: RowSelection
    zero: bool = False
    along: tuple[int, ...] = ()
    columns: bool = False
    at: int = 0


@dataclass
class DataNumber:
    """A number that a tensor holds, or that depends on how many rows are selected: a 0-dim tensor, and the selection."""

    tensor: Node
    chosen: RowSelection | None


@dataclass
class RowIndex:
    """An index by selected rows: the dims of the mask that it runs along, and the rest of the index behind them."""

    chosen: RowSelection
    along: tuple[int, ...]
    rest: tuple[Any, ...] = ()


class SelectedPlaces(InsertedCalls):
    """Selections of one graph, and writes to the places that they select.

    rows     the `SelectedRows` that stand for each value of selected rows; a tuple for a node with several values
    numbers  the `Number` that stands for each number that data decides
    inputs   numbers among these that are inputs of the program
    begun    by value or number, the selections that it comes from
    """

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.rows: dict[Node, SelectedRows | tuple[SelectedRows, ...]] = {}
        self.numbers: dict[Node, DataNumber] = {}
        self.inputs: set[Node] = set()
        self.begun: dict[Node, tuple[Node, ...]] = {}
        self.stopped: set[Node] = set()
        self.done: list[Node] = []
        self._masks: dict[object, RowSelection] = {}

    def rows_of(self, x: Any) -> SelectedRows | None:
        """The rows that stand for an operand; None for one that is not selected rows."""
        rows = self.rows.get(x) if isinstance(x, Node) else None
        return rows if isinstance(rows, SelectedRows) else None

    def coordinates(self, node: Node, x: Any, columns: bool) -> None:
        mask = x if value_of(x).dtype == torch.bool else self._call(node, torch.ne, x, 0)
        chosen = self.selection(node, mask)
        if not chosen.dims:
            raise NotFollowed("a number has no places")
        each = [self.along(node, chosen, dim) for dim in range(len(chosen.dims))]
        if columns:
            whole = self._call(node, torch.stack, each, 1)
            self.rows[node] = SelectedRows(whole, chosen, along=tuple(range(len(each))), columns=True)
        else:
            self.rows[node] = tuple(SelectedRows(one, chosen, along=(dim,)) for dim, one in enumerate(each))

    def along(self, like: Node, chosen: RowSelection, dim: int) -> Node:
        """The indices of all rows along a dim of the mask."""
        numbers = self._call(like, torch.arange, chosen.dims[dim])
        shaped = self._call(like, "reshape", numbers, [-1 if one == dim else 1 for one in range(len(chosen.dims))])
        return self._call(like, "reshape", self._call(like, "expand", shaped, list(chosen.dims)), [-1])

    def selection(self, like: Node, mask: Node) -> RowSelection:
        """The selection of a mask at a call. A mask that depends on a value changed in place is copied there, and equals no other
        selection."""
        shape = value_of(mask).shape
        if mask in self.begun or any(not isinstance(size, int) for size in shape):
            raise NotFollowed("the mask's own size is not known beforehand")
        written = mask_key(mask)
        if written is None:
            mask = self._call(like, "clone", mask)
        return self._masks.setdefault(written or mask, RowSelection(mask, tuple(shape)))

    def repeat_selection(self, like: Node, chosen: RowSelection, each: int) -> RowSelection:
        """The selection with each row repeated `each` times."""
        if (chosen, each) not in self._masks:
            column = self._call(like, "reshape", chosen.mask, [chosen.count, 1])
            mask = self._call(like, "reshape", self._call(like, "expand", column, [chosen.count, each]), [-1])
            self._masks[chosen, each] = RowSelection(mask, (chosen.count * each,))
        return self._masks[chosen, each]

    def take(self, node: Node, name: str) -> None:
        x = node.args[0]
        assert isinstance(x, Node)
        if name == "index_select":
            named = bind_arguments(node.target, node.args, node.kwargs)
            if named["dim"] % value_of(x).dim() != 0:
                raise NotFollowed("they are taken along another dim than the first")
            index: Any = named["index"]
        else:
            index = node.args[1]
        rows = self.rows_of(index)
        if rows is not None and not rows.along and not value_of(rows.value).is_floating_point():  # a lookup of rows in a table
            value = self._call(node, operator.getitem, x, self.fill_unselected(node, rows).value)
            self.rows[node] = self.fill_unselected(node, SelectedRows(value, rows.chosen))
            return
        self.rows[node] = self.index_rows(node, x, self.place(node, index))

    def place(self, like: Node, index: Any) -> RowIndex:
        """An index as indices of selected rows."""
        given = index if isinstance(index, tuple) else (index,)
        if is_mask(given[0]) and given[0] not in self.begun:
            if any(isinstance(one, Node) for one in given[1:]):
                raise NotFollowed("of an index only a mask that stands first is followed")
            chosen = self.selection(like, given[0])
            return RowIndex(chosen, tuple(range(len(chosen.dims))), given[1:])
        found = [self.rows_of(one) for one in given]
        rows = [one for one in found if one is not None]
        front = found[: len(rows)]
        if not rows or any(one not in rows for one in front) or any(isinstance(one, Node) for one in given[len(rows) :]):
            raise NotFollowed("of an index only places of selected rows that stand first are followed")
        along = tuple(one.along[0] for one in rows if len(one.along) == 1 and not one.columns)
        if len(along) != len(rows) or list(along) != sorted(set(along)) or any(one.chosen != rows[0].chosen for one in rows):
            raise NotFollowed("they are an index, and no longer the places that a mask has")
        return RowIndex(rows[0].chosen, along, given[len(rows) :])

    def index_rows(self, node: Node, x: Node, place: RowIndex) -> SelectedRows:
        """The rows `x[place]`."""
        chosen, shape = place.chosen, list(value_of(x).shape)
        for dim, of in enumerate(place.along):
            if dim >= len(shape) or not isinstance(shape[dim], int) or shape[dim] < chosen.dims[of]:
                raise NotFollowed("what they are taken from is smaller than the mask")
            if shape[dim] > chosen.dims[of]:
                x = self._call(node, "narrow", x, dim, 0, chosen.dims[of])
        rest = list(value_of(x).shape)[len(place.along) :]
        if len(place.along) < len(chosen.dims):
            for dim in range(len(chosen.dims)):
                if dim not in place.along:
                    x = self._call(node, "unsqueeze", x, dim)
            x = self._call(node, "expand", x, [*chosen.dims, *rest])
        value = self._call(node, "reshape", x, [chosen.count, *rest])
        made = self.fill_unselected(node, SelectedRows(value, chosen))
        if not place.rest:
            return made
        kept = slice(None)
        return replace(made, value=self._call(node, operator.getitem, made.value, (kept, *place.rest)))

    def fill_unselected(self, node: Node, rows: SelectedRows, fill: object = 0) -> SelectedRows:
        """The rows, with `fill` where they are not selected."""
        if rows.zero and fill == 0:
            return rows
        mask = self._call(node, "reshape", rows.chosen.mask, [rows.chosen.count, *[1] * (value_of(rows.value).dim() - 1)])
        filling = bool(fill) if is_mask(rows.value) else fill
        return SelectedRows(self._call(node, torch.where, mask, rows.value, filling), rows.chosen, zero=fill == 0)

    # Indices that a tensor holds.

    def at_number(self, node: Node, name: str, dim: int) -> None:
        """`x[.., i : i + 4]` and `x[.., i]`, read or written, where a tensor holds i: by computed indices."""
        x, index = node.args[0], index_of(node)
        entry = index[dim]
        assert isinstance(x, Node)
        sliced = isinstance(entry, slice)
        if name == "setitem" and sliced and self.write_span(node, x, index, dim):
            return
        count = self.length(entry) if sliced else 1
        first = entry.start if sliced else entry
        if any(one != slice(None) for one in index[:dim]) or first not in self.numbers:
            raise NotFollowed("a number that a tensor holds says where, behind another index")
        at = self._call(node, operator.add, self.numbers[first].tensor, self._call(node, torch.arange, count))
        if name == "getitem":
            if is_changed_later(node):
                self.write_back(node)
            elif self.outlives(node, x):
                raise NotFollowed("a view of what a number says is read after its tensor has changed")
            found = self._call(node, "index_select", x, dim, at)
            rest = (*index[:dim], slice(None) if sliced else 0, *index[dim + 1 :])
            node.replace_all_uses_with(self._call(node, operator.getitem, found, rest))
            return
        if any(one != slice(None) for one in index[dim + 1 :]):
            raise NotFollowed("a number that a tensor holds says where, in front of another index")
        value = node.args[2]
        if isinstance(value, Node):
            value = self.numbers[value].tensor if value in self.numbers else value
            value = self._call(node, "to", value, value_of(x).dtype)
            shape = list(value_of(x).shape)
            value = value if sliced or value_of(value).dim() <= dim else self._call(node, "unsqueeze", value, dim)
            value = self._call(node, "expand", value, [*shape[:dim], count, *shape[dim + 1 :]])
        self._call(node, "index_copy_" if isinstance(value, Node) else "index_fill_", x, dim, at, value)

    def write_span(self, node: Node, x: Node, index: tuple[Any, ...], dim: int) -> bool:
        """`x[i, : n] = v`, where a tensor holds n and v is one number, as a masked write; False for any other write."""
        entry, value = index[dim], node.args[2]
        ends = [self.numbers[one].tensor if one in self.numbers else one for one in (entry.start, entry.stop)]
        several = isinstance(value, Node) and (value in self.begun or value_of(value).dim() > 0)
        places = (*index[:dim], *index[dim + 1 :])
        if several or entry.step not in (None, 1) or any(not isinstance(one, int) and one != slice(None) for one in places):
            return False
        part = self._call(node, operator.getitem, x, (*index[:dim], slice(None), *index[dim + 1 :]))
        along = sum(isinstance(one, slice) for one in index[:dim])
        size = value_of(part).shape[along]
        at = self._call(node, torch.arange, size)
        inside = self._call(node, torch.ones_like, at, dtype=torch.bool)
        for end, compare in zip(ends, (operator.ge, operator.lt), strict=True):
            if end is not None:
                counted = self._call(node, torch.as_tensor, end)
                behind = self._call(node, operator.add, counted, size)  # a negative number counts from the end
                counted = self._call(node, torch.where, self._call(node, operator.lt, counted, 0), behind, counted)
                inside = self._call(node, torch.logical_and, inside, self._call(node, compare, at, counted))
        inside = self._call(node, "view", inside, [-1, *[1] * (value_of(part).dim() - along - 1)])
        self._call(node, "copy_", part, self._call(node, torch.where, inside, value, part))
        return True

    def outlives(self, view: Node, x: Node) -> bool:
        """Whether a view of a tensor may be read after the tensor has been changed in place."""
        memory, views, changed = storage_of(x), {view}, False
        for one in itertools.islice(itertools.dropwhile(lambda one: one is not view, self._graph.nodes), 1, None):
            read = any(given in views for given in one.all_input_nodes)
            if read and changed:
                return True
            views |= {one} if read and storage_of(one) == memory else set()
            of = changed_operand(one)
            changed = changed or of is not None and storage_of(of) == memory
        return False

    def write_back(self, node: Node) -> None:
        """The sum in `x[i : i + 4] += y`, written back where it was read, so that no view has to be changed."""
        changed = next(iter(node.users))
        back = next(iter(changed.users), None)
        alone = len(node.users) == len(changed.users) == 1 and changed.target in IN_PLACE
        if not alone or back is None or name_of(back) != "setitem" or back.args != (*node.args, changed):
            raise NotFollowed("a view of what a number says is changed in place")
        changed.target = IN_PLACE[changed.target]

    def length(self, entry: slice) -> int:
        """The length of a slice between two numbers."""
        first, last = (value_of(one) if isinstance(one, Node) else one for one in (entry.start, entry.stop))
        found = last - first if None not in (first, last) and entry.step in (None, 1) else None
        if isinstance(found, torch.SymInt):
            found = int(found.node.expr) if found.node.expr.is_number else None
        if not isinstance(found, int) or found < 0:
            raise NotFollowed("how long a slice is, a tensor decides")
        return found

    # Writes to the selected places.

    def write(self, node: Node, name: str) -> None:
        y = node.args[0]
        assert isinstance(y, Node)
        adds = False
        if name == "setitem":
            index, value = node.args[1:]
        elif name == "masked_scatter_":
            raise NotFollowed("masked_scatter_() takes its rows in their order")
        else:
            named = bind_with_defaults(node.target, node.args, node.kwargs)
            adds = name.startswith("index_add") or bool(named.get("accumulate"))
            index = tuple(named["indices"]) if "indices" in named else named["index"]
            value = named.get("source", named.get("values"))
            if "dim" in named and named["dim"] % value_of(y).dim() != 0 or named.get("alpha", 1) != 1:
                raise NotFollowed("they are written along another dim than the first, or scaled by alpha")
        self.write_rows(node, y, index, value, adds)

    def write_rows(self, node: Node, y: Node, index: Any, value: Any, adds: bool) -> None:
        name, place = name_of(node), self.place(node, index)
        if place.rest and any(one not in (slice(None), ...) for one in place.rest):
            raise NotFollowed("parts of rows are written")
        written = self.written_part(node, y, place, value, adds)
        if name.endswith("_") or name == "setitem":
            written = self._call(node, "copy_", self.part(node, y, place), written)
            node.replace_all_uses_with(y, propagate_meta=False)
            return
        if value_of(written).shape != value_of(y).shape:
            raise NotFollowed("what they are written to is larger than the mask")
        node.replace_all_uses_with(written)

    def rows_written(self, value: Any, chosen: RowSelection) -> SelectedRows | None:
        """The selected rows that are written; None for another value. Raises NotFollowed for those of another selection."""
        rows = self.rows_of(value)
        if isinstance(value, Node) and value in self.begun and (rows is None or rows.chosen != chosen):
            raise NotFollowed("rows of another selection, or a number, are written there")
        return rows

    def part(self, node: Node, y: Node, place: RowIndex) -> Node:
        """The part of `y` that the mask's indices reach."""
        for dim, of in enumerate(place.along):
            size = place.chosen.dims[of]
            if dim >= value_of(y).dim() or value_of(y).shape[dim] < size:
                raise NotFollowed("what they are written to is smaller than the mask")
            if value_of(y).shape[dim] > size:
                y = self._call(node, "narrow", y, dim, 0, size)
        return y

    def written_part(self, node: Node, y: Node, place: RowIndex, value: Any, adds: bool) -> Node:
        """The value of that part of `y` after the write."""
        chosen, y = place.chosen, self.part(node, y, place)
        rest = list(value_of(y).shape)[len(place.along) :]
        rows = self.rows_written(value, chosen)
        at = self._call(node, "reshape", chosen.mask, [*chosen.dims, *[1] * len(rest)])
        given = value
        if rows is not None:
            inner = list(value_of(rows.value).shape)[1:]
            if len(inner) > len(rest) or value_of(rows.value).dtype != value_of(y).dtype:
                raise NotFollowed("they are written as another dtype, or in another shape")
            given = self._call(node, "reshape", rows.value, [*chosen.dims, *[1] * (len(rest) - len(inner)), *inner])
        missing = [dim for dim in range(len(chosen.dims)) if dim not in place.along]
        if not missing and not adds:
            return self._call(node, torch.where, at, given, y)
        if isinstance(given, Node) and value_of(given).dtype != value_of(y).dtype:
            raise NotFollowed("they are written as another dtype")
        last = at if adds else self.last(node, at, missing)
        filled_in = self._call(node, torch.where, last, given, 0)
        filled_in = self._call(node, "to", filled_in, value_of(y).dtype)
        summed = self._call(node, "sum", filled_in, missing) if missing else filled_in
        if adds:
            return self._call(node, operator.add, y, summed)
        return self._call(node, torch.where, self._call(node, torch.any, at, missing[0]) if len(missing) == 1 else at, summed, y)

    def last(self, node: Node, at: Node, missing: Sequence[int]) -> Node:
        """The last write to each place that is written more than once."""
        if len(missing) != 1:
            raise NotFollowed("they are written to places of fewer dims")
        count = self._call(node, "to", at, torch.int64)
        (dim,) = missing
        total = self._call(node, "sum", count, [dim], True)
        before = self._call(node, "cumsum", count, dim)
        return self._call(node, torch.logical_and, at, self._call(node, torch.eq, before, total))


def mask_key(node: Node) -> object | None:
    """A key of a mask, equal for masks computed by equal calls; None if an operand is changed in place."""
    if is_changed_later(node):
        return None
    if name_of(node) not in PURE:
        return node
    given = [mask_key(one) for one in node.all_input_nodes]
    return None if None in given else (node.op, node.target, repr(map_arguments(node, lambda one: "")), *given)


def first_of(node: Node) -> Node | None:
    return node.args[0] if node.args and isinstance(node.args[0], Node) else None


def name_of(node: Node) -> str:
    packet = getattr(node.target, "overloadpacket", node.target)
    return node.target if isinstance(node.target, str) else getattr(packet, "__name__", "")


def value_of(node: Any) -> Any:
    """A node's value on the fake tensors of a trace; None for an operand that is no node."""
    return node.meta.get("example_value") if isinstance(node, Node) else None


def is_mask(x: Any) -> bool:
    return isinstance(value := value_of(x), Tensor) and value.dtype == torch.bool


def index_of(node: Node) -> tuple[Any, ...]:
    """The entries of the index of a `getitem` or `setitem`."""
    return node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)


def is_by_mask(node: Node) -> bool:
    """Whether a node is a tensor indexed by a mask with a fixed number of selected rows, which the model implies."""
    return name_of(node) == "getitem" and first_of(node) is not None and any(map(is_mask, index_of(node)))


def is_unbacked(node: Node) -> bool:
    """Whether a node is a number that data decides, or has such a size."""
    value = value_of(node)
    found = value if isinstance(value, tuple | list) else [value]
    sizes = [size for one in found for size in (one.shape if isinstance(one, Tensor) else [one])]
    return any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) and bool(free_unbacked_symbols(size)) for size in sizes)
