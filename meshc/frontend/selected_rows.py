"""Rows selected by a mask in a torch-level graph, rewritten as all rows of which only the selected ones count.

    s = h[keep]                    s = where(keep.flatten()[:, None], h.flatten(0, 1), 0)         [n, ..] in the place of [u0, ..]
    e = (linear(s, w) - t).abs()   the same for all rows; after a weight, rows that do not count are set to 0 again
    e.mean()                       where(keep, e, 0).sum() / keep.sum()
    out[keep] = s                  out = where(keep, s, out)
    i, j = torch.where(mask)       indices: x[i] is x, once for each j;  out.index_add_(0, i, s) sums over j

The number of selected rows is data, and no program has such a size; the number of all rows is known. A call that computes each row
independently (`expert_tape.py` proves it) may be given all rows, and a call that sums rows, or writes them back, leaves out those that do
not count. They are left out by `where`, never by a product with 0: nothing of their values reaches a result; nor a gradient, since after a
weight they are zero, forward and backward. Where a call mixes rows in another way, the selection is left as it is, and refused with its
line and that of the call.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from meshc.errors import CaptureError
from meshc.frontend.expert_tape import ROWS, NotRows, RowProof
from meshc.frontend.in_place_changes import changed_operand
from meshc.frontend.inner_transforms import storage_of
from meshc.frontend.inserted_calls import map_arguments
from meshc.frontend.joined_rows import JOINS, numbers_for_proof, size_for_proof, without_values
from meshc.frontend.number_tensors import BY_NUMBERS, SIZED, NumberTensors, in_place_of, nodes_in
from meshc.frontend.selected_places import (
    IN_PLACE,
    WRITES,
    NotFollowed,
    RowSelection,
    SelectedRows,
    first_of,
    index_of,
    is_by_mask,
    is_mask,
    is_unbacked,
    name_of,
    value_of,
)
from meshc.frontend.side_effects import is_check
from meshc.frontend.sources import bodies_of, source_of
from meshc.ops.signatures import bind_arguments, bind_with_defaults

STOPPED: Final = "meshc_stopped"
"""Key in a selection's meta: (call at which its rows cannot be followed, why)."""
BY_CLASS: Final = ("cross_entropy", "nll_loss")
SUMMED: Final = ("sum", "mean", "any", "all", "count_nonzero")


def follow_selected_rows(module: GraphModule) -> None:
    """Rewrite the selections of a trace, and the numbers that are its inputs, in place. Selections that cannot be followed stay, with the
    reason in their meta (`STOPPED`). Raises CaptureError for a number that is an input, where a call takes no tensor."""
    for body in bodies_of(module):
        if any(is_unbacked(node) or is_by_mask(node) for node in body.graph.nodes):
            _RowFollower(body).follow_calls()
            body.recompile()


class _RowFollower(NumberTensors):
    """rows     the `SelectedRows` that stand for each value of selected rows; a tuple for a node with several values
    numbers  the `Number` that stands for each number computed from their count
    begun    by value or number, the selections that it comes from
    done     calls that were replaced
    """

    def follow_calls(self) -> None:
        nodes = list(self._graph.nodes)
        known = set(nodes)  # without nodes whose size has changed since the trace
        for node in nodes:
            given = [one for one in node.all_input_nodes if one in self.begun]
            if not given and is_unbacked(node) and any(one not in known for one in node.all_input_nodes):
                with contextlib.suppress(RuntimeError, TypeError):
                    node.meta["example_value"] = self._example(node.op, node.target, node.args, node.kwargs)
                    known.remove(node)
            if not given and not (node.op in ("call_function", "call_method") and (is_unbacked(node) or is_by_mask(node))):
                continue
            self.begun[node] = tuple(dict.fromkeys(first for one in given for first in self.begun[one])) or (node,)
            if any(one in self.stopped for one in given):
                self.stopped.add(node)
                continue
            try:
                self.follow_call(node) if given else self.begin(node)
                self.note_count(node)
            except NotFollowed as why:
                self.stop(node, str(why))
            except (RuntimeError, TypeError, LookupError, ValueError):  # from torch, for all rows
                self.stop(node, f"{name_of(node)}() does not take all rows in the place of those that are selected")
            else:
                self.done.append(node)
        for node in reversed(self.done):
            if not node.users:
                self._graph.erase_node(node)

    def stop(self, node: Node, why: str) -> None:
        if any(first in self.inputs for first in self.begun[node]):
            raise CaptureError(f"{source_of(node)}: {name_of(node)} takes the number itself, and no tensor")
        self.stopped.add(node)
        for first in self.begun[node]:
            first.meta.setdefault(STOPPED, (node, why))
        if not is_unbacked(node):
            del self.begun[node]  # its result has known sizes: calls that read it may still be followed

    # Calls that select rows.

    def begin(self, node: Node) -> None:
        name, args = name_of(node), node.args
        if name == "getitem" and isinstance(args[0], Node):
            index = index_of(node)
            masks = [one for one in index if isinstance(one, Node)]
            if len(masks) != 1 or not is_mask(masks[0]):
                raise NotFollowed("of an index only one mask is followed")
            if index[-1] is masks[0] and len(index) > 1 and all(one == slice(None) for one in index[:-1]):
                self.rows[node] = self.select_columns(node, args[0], index)
                return
            if index[0] is not masks[0]:
                raise NotFollowed("of an index only a mask is followed that stands first, or last behind `:`")
            self.rows[node] = self.index_rows(node, args[0], self.place(node, index))
        elif name == "masked_select":
            named = bind_arguments(node.target, args, node.kwargs)
            x, mask = named["input"], named["mask"]
            shape = torch.broadcast_shapes(value_of(x).shape, value_of(mask).shape)
            if tuple(value_of(mask).shape) != tuple(shape):
                mask = self._call(node, torch.broadcast_to, mask, tuple(shape))
            place = self.place(node, mask)
            self.rows[node] = self.index_rows(node, self._call(node, torch.broadcast_to, x, tuple(shape)), place)
        elif name in ("nonzero", "argwhere") or name == "where" and len(args) == 1 and not node.kwargs:
            self.coordinates(node, args[0], name != "where" and not node.kwargs.get("as_tuple", False))
        elif name == "item" and self.example_of(args[0]).dtype != torch.bool and not value_of(args[0]).is_complex():
            self.begin_number(node)
        else:
            raise NotFollowed("")

    def example_of(self, node: Any) -> Any:
        """An operand's value on fake tensors; Dynamo does not record it for the entries of a `tolist()`."""
        if value_of(node) is None:
            node.meta["example_value"] = self._example(node.op, node.target, node.args, node.kwargs)
        return value_of(node)

    # Calls that read selected rows.

    def follow_call(self, node: Node) -> None:
        name = name_of(node)
        if node.op == "output":
            raise NotFollowed("the model returns them" if node.graph is self._graph else "")
        if is_check(node) or name in ("sym_constrain_range_for_size", "sym_constrain_range", "_check", "_check_is_size"):
            return
        args: Any = node.args
        value: Any = value_of(node)
        first: Any = first_of(node)
        if isinstance(value, torch.SymBool):
            return  # of a check
        if any(one in self.begun and one not in self.rows and one not in self.numbers for one in node.all_input_nodes):
            raise NotFollowed("how many they are decides what is computed")
        if isinstance(value, torch.SymInt | torch.SymFloat):
            self.number(node, name)
        elif name in JOINS and self.join_rows(node):
            pass
        elif any((held := self.rows_of(one)) is not None and held.at > 0 for one in node.all_input_nodes):
            self.rows[node] = self.column(node, name)
        elif name.startswith("new_") and not is_unbacked(node) and self.rows_of(first) is not None:
            self.without_rows(node)
        elif name == "getitem" and isinstance(several := self.rows.get(first), tuple):
            self.rows[node] = several[args[1]]
        elif name in ("getitem", "setitem") and (dim := self.number_position(node)) is not None:
            self.at_number(node, name, dim)
        elif name == "setitem" and isinstance(given := args[2], Node) and given in self.numbers and first not in self.begun:
            number = self._call(node, "to", self.numbers[given].tensor, value_of(first).dtype)
            self._call(node, operator.setitem, first, args[1], number)
        elif name in WRITES and first not in self.begun:
            self.scatter(node, name) if name.startswith("scatter") else self.write(node, name)
        elif name in ("getitem", "index_select") and first not in self.begun:
            self.take(node, name)
        elif name in SUMMED and self.sums(node):
            pass
        elif "reduction" in (named := _loss_arguments(node)) and named["reduction"] != "none":
            self.loss(node, name, named)
        elif not any(one in self.rows for one in node.all_input_nodes):
            self.by_number(node, name)
        else:
            self.rows[node] = self.each(node, name)
            if (changed := changed_operand(node)) is not None:
                self.rows |= {one: self.rows[node] for one in self.rows if value_of(one) is value_of(changed)}

    def each(self, node: Node, name: str) -> SelectedRows | tuple[SelectedRows, ...]:
        """A call that computes each row independently, applied to all rows."""
        given = [one for one in node.all_input_nodes if one in self.rows]
        rows = [held for one in given if (held := self.rows_of(one)) is not None]
        if len(rows) < len(given):
            raise NotFollowed("places of rows are taken together")
        chosen = rows[0].chosen
        if any(one.chosen != chosen for one in rows) or any(
            self.numbers[one].chosen not in (None, chosen) for one in self.numbers_in(node)
        ):
            raise NotFollowed("rows that different masks select meet")
        if self.numbers_in(node) and name not in SIZED and name not in BY_NUMBERS:
            raise NotFollowed(f"{name}() takes how many they are")
        target, changed = node.target, changed_operand(node)
        if changed is not None:
            target = self.without_writing(node, changed)
        times = self.prove(node, target, name, value_of(given[0]).shape[0])
        old = value_of(node)
        weighs = any(
            isinstance(value := value_of(one), Tensor) and value.requires_grad and one not in self.begun
            for one in node.all_input_nodes
        )
        filled = [self.fill_unselected(node, each) if weighs and not each.along else each for each in rows]
        values = {one: each.value for one, each in zip(given, filled, strict=True)}
        args, kwargs = self.call_arguments(node, name, lambda one: values[one], self.size_of_all, lambda one: self.cast(node, one))
        made = self._call(node, target, *args, **kwargs)
        if isinstance(old, Tensor) and value_of(made).dtype != old.dtype:  # under autocast, which examples are computed without
            with self._mode:
                made.meta["example_value"] = value_of(made).to(old.dtype)
        chosen = chosen if times == 1 else self.repeat_selection(node, chosen, times)
        if isinstance(old, tuple | list):
            return tuple(
                self.zero_after_weight(node, SelectedRows(self._call(node, operator.getitem, made, at), chosen), weighs)
                for at in range(len(old))
            )
        if not isinstance(old, Tensor):
            raise NotFollowed("it gives no tensor")
        found = SelectedRows(made, chosen, along=self.still_along(rows, node, name))
        found = replace(found, columns=len(found.along) > 1 or bool(found.along) and value_of(made).dim() > 1)
        return self.zero_after_weight(node, found, weighs)

    def zero_after_weight(self, node: Node, rows: SelectedRows, weighs: bool) -> SelectedRows:
        """The result of a call, with zeros in rows that are not selected if a weight is an operand."""
        return self.fill_unselected(node, rows) if weighs and value_of(rows.value).is_floating_point() else rows

    def still_along(self, rows: Sequence[SelectedRows], node: Node, name: str) -> tuple[int, ...]:
        """The mask's dims of which a result still has the indices: a column of them taken, or reshaped."""
        first = rows[0]
        if len(rows) > 1 or not first.along or name not in ("getitem", "squeeze", "view", "reshape", "flatten", "select", "contiguous"):
            return ()
        if name == "getitem":
            index: Any = node.args[1]
            one = isinstance(index, tuple) and len(index) == 2 and index[0] in (slice(None), ...) and isinstance(index[1], int)
            return (first.along[index[1]],) if one and first.columns else ()
        return first.along if len(first.along) == 1 and name != "select" else ()

    def without_writing(self, node: Node, changed: Node) -> Any:
        """The out-of-place form of a call that changes a value in place, if nothing is a view of the value. Raises NotFollowed."""
        name = name_of(node)
        before = itertools.takewhile(lambda one: one is not node, self._graph.nodes)
        held = {storage_of(one) for one in before if value_of(one) is not value_of(changed)}
        if changed not in self.rows or storage_of(changed) in held:
            raise NotFollowed("they are changed in place, or change something")
        if node.target in IN_PLACE:
            return IN_PLACE[node.target]
        if isinstance(node.target, str) and hasattr(torch.Tensor, name[:-1]):
            return name[:-1]
        raise NotFollowed("they are changed in place")

    def prove(self, node: Node, target: Any, name: str, rows: Any) -> int:
        """Proves that a call computes each of `rows` rows independently; returns the number of results per row. Raises NotFollowed."""
        numbers = numbers_for_proof(rows)
        with torch.no_grad(), RowProof(folded=True) as proof:
            blank = lambda one: without_values(value_of(one), numbers, one in self.rows)  # noqa: E731
            size = partial(size_for_proof, numbers=numbers)
            args, kwargs = self.call_arguments(node, name, blank, size, lambda one: torch.empty((), dtype=torch.int64, device="meta"))
            args, kwargs = map_arg((args, kwargs), blank)
            try:
                made = target(*args, **kwargs) if not isinstance(target, str) else getattr(args[0], target)(*args[1:], **kwargs)
            except NotRows as why:
                raise NotFollowed(f"{name}() is not known to treat each row by itself ({why})") from why
            except Exception as why:
                raise NotFollowed(f"{name}() is not known to treat each row by itself") from why
        found = [one for one in (made if isinstance(made, list | tuple) else [made]) if isinstance(one, Tensor)]
        if proof.draws:
            raise NotFollowed(f"{name}() draws for each row that is selected")
        counts = {one.shape[0] if one.dim() else 0 for one in found}
        if len(counts) != 1 or 0 in counts:
            raise NotFollowed(f"{name}() gives no row for each row")
        return counts.pop() // (size_for_proof(rows, numbers) if numbers else ROWS)

    # Reductions over rows.

    def sums(self, node: Node) -> bool:
        """A reduction over rows; False if it is one within each row."""
        given: Any = node.args or (node.kwargs["input"],)
        first, *more = given
        named: dict[str, Any] = {**dict(zip(("dim", "keepdim"), more, strict=False)), **node.kwargs}
        rows, said = self.rows_of(first), named.get("dim", named.get("axis"))
        if rows is None:
            raise NotFollowed("places of rows are taken together")
        dims = value_of(rows.value).dim()
        over = [*range(dims)] if said in (None, [], ()) else said if isinstance(said, list | tuple) else [said]
        along = sorted({one % dims for one in over})
        if 0 not in along:
            return False
        name = name_of(node)
        blank = self.fill_unselected(node, rows, fill=1 if name == "all" else 0).value
        args, kwargs = map_arguments(node, partial(in_place_of, {first: blank}))
        if name != "mean":
            node.replace_all_uses_with(self._call(node, node.target, *args, **kwargs))
            return True
        inner = math.prod(value_of(rows.value).shape[one] for one in along if one != 0)
        keepdim, dtype = bool(named.get("keepdim")), named.get("dtype")
        node.replace_all_uses_with(self.mean(node, blank, rows.chosen, inner, along, keepdim, dtype))
        return True

    def mean(
        self, node: Node, blank: Node, chosen: RowSelection, inner: int, along: Sequence[int], keepdim: bool, dtype: torch.dtype | None
    ) -> Node:
        """The mean over selected rows with `inner` numbers each; torch accumulates half precision in float32."""
        wanted = dtype or value_of(blank).dtype
        wide = torch.float32 if wanted in (torch.float16, torch.bfloat16) else wanted
        summed = self._call(node, "sum", blank, list(along), keepdim, dtype=wide)
        count = self._call(node, operator.mul, self._call(node, "sum", chosen.mask), inner)
        made = self._call(node, operator.truediv, summed, count)
        return made if wide == wanted else self._call(node, "to", made, wanted)

    def loss(self, node: Node, name: str, named: Mapping[str, Any]) -> None:
        """One of torch's losses with a sum or a mean over rows."""
        if named.get("size_average") is not None or named.get("reduce") is not None:
            raise NotFollowed("size_average and reduce are torch's older words for reduction")
        target = named.get("target")
        if name in BY_CLASS and isinstance(target, Node) and not value_of(target).is_floating_point() and target in self.rows:
            self.by_class(node, named)
            return
        reduction = named["reduction"]
        asked = {**bind_arguments(node.target, node.args, node.kwargs), "reduction": "none"}
        like = self._graph.create_node  # a call with the same arguments, of which each row has its own loss
        with self._graph.inserting_before(node):
            each = like(node.op, node.target, (), asked)
        each.meta = {**node.meta, "example_value": torch.empty(0)}
        try:
            rows = self.each(each, name)
        finally:
            self._graph.erase_node(each)
        assert isinstance(rows, SelectedRows)
        blank = self.fill_unselected(node, rows).value
        shape = value_of(blank).shape
        if reduction == "sum":
            node.replace_all_uses_with(self._call(node, "sum", blank))
            return
        inner = 1 if reduction == "batchmean" else math.prod(shape[1:])
        node.replace_all_uses_with(self.mean(node, blank, rows.chosen, inner, range(len(shape)), False, None))

    def by_class(self, node: Node, named: Mapping[str, Any]) -> None:
        """A classification loss: rows that are not selected get the ignored class."""
        x, target = named["input"], named["target"]
        scores, classes = self.rows_of(x), self.rows_of(target)
        if scores is None or classes is None or scores.chosen != classes.chosen:
            raise NotFollowed("rows that different masks select meet")
        ignored = named.get("ignore_index", -100)
        values = {
            x: self.fill_unselected(node, scores).value,
            target: self.fill_unselected(node, replace(classes, zero=False), fill=ignored).value,
        }
        args, kwargs = map_arguments(node, partial(in_place_of, values))
        if any(one in self.begun for one in (*nodes_in(args), *nodes_in(kwargs))):
            raise NotFollowed("weights of classes follow from them")
        node.replace_all_uses_with(self._call(node, node.target, *args, **kwargs))


def _loss_arguments(node: Node) -> Mapping[str, Any]:
    """The arguments of a function of torch.nn.functional by name, with defaults; {} for any other call."""
    if getattr(node.target, "__module__", "") != "torch.nn.functional":
        return {}
    try:
        target: Any = node.target
        return bind_with_defaults(target, node.args, node.kwargs)
    except TypeError:
        return {}
