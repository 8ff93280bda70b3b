"""Rows that travel only to the ranks whose experts were chosen: as gathers and reductions of all rows, and who may read or send them.

    x = gather_rows(tokens, ["ep"], choice, 2, share)        all_gather(tokens, ["ep"]); rows of tokens that chose no expert here are not
                                                             there, so that readers must go by the choices of the same experts
    out = scatter_rows(y, ["ep"], choice, 2, share)          reduce_scatter(y, ["ep"]); rows that are not sent must be zeros, as those are
                                                             that are added up by the choices of the same experts

In two hops, between nodes and inside them, the choices of the first are of nodes, those of the second of a node's ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.fx import Node

from meshc.ir import is_getitem, spmd
from meshc.ir.schemas import RESHAPES
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import expert_groups as _groups  # noqa: F401 - likewise
from meshc.ops import used_rows as _used_rows  # noqa: F401 - likewise
from meshc.proof import exchanged_tiles
from meshc.proof.held import Held, JoinedValues
from meshc.proof.receivers import ChosenReceivers, Receivers
from meshc.proof.tiles import Tiles, fuse_digits

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator
    from meshc.proof.moves import Of
    from meshc.proof.rows_in_use import UsedRows
    from meshc.proof.traced import TracedTerms

aten, meshc = torch.ops.aten, torch.ops.meshc
READERS: Final[Mapping[Any, int]] = {
    meshc.rows_of_tokens.default: 1, meshc.to_groups.default: 1, meshc.in_slots.default: 1, meshc.to_places.default: 1,
    meshc.in_places.default: 1, meshc.weights_of_groups.default: 1,
}  # fmt: skip
"""Calls that read rows of chosen experts alone, each with the place of the choices by which it goes."""
ADDING: Final[Mapping[Any, int]] = {
    meshc.tokens_of_rows.default: 1, meshc.from_groups.default: 1, meshc.over_slots.default: 1, meshc.from_places.default: 1,
    meshc.over_places.default: 1, meshc.weights_to_tokens.default: 1,
}  # fmt: skip
"""Calls that give zeros for tokens without a choice, likewise."""
KEEPING: Final = (*RESHAPES, aten.slice.Tensor, aten.cat.default)


def gather(of: Evaluator, x: Tiles, axes: Sequence[str]) -> Tiles:
    made = exchanged_tiles.all_gather(of, x, axes, len(x.dims) - 2)
    return replace(made, dims=((), *made.dims))


def scatter(of: Evaluator, x: Tiles, axes: Sequence[str]) -> Tiles:
    made = exchanged_tiles.reduce_scatter(of, x, axes, len(x.dims) - 2, "sum")
    return replace(made, dims=made.dims[1:])


class DispatchedRows:
    def __init__(self, traced: TracedTerms, sizes: Mapping[str, int], used: UsedRows) -> None:
        self._whose, self._used = ChosenReceivers(traced, sizes), used
        self._sent: dict[Node, Receivers] = {}
        """Values of which the rows of other tokens are not there."""
        self._zero: dict[Node, list[Held]] = {}
        """Values whose other rows are zeros: by which choices."""

    def fault(self, node: Node, held: Of) -> str:
        """What is wrong with a call that sends rows, or reads what was sent; "" if nothing is."""
        sent = [self._sent[one] for one in node.all_input_nodes if one in self._sent]
        zero = [self._zero.get(one, []) for one in node.all_input_nodes]
        if node.target in ADDING:
            self._zero[node] = [self._choices(node, ADDING, held)]
        elif (node.target in KEEPING or is_getitem(node)) and zero and all(zero):
            self._zero[node] = [one for row in zero for one in row]
        if node.target in spmd.OF_ROWS:
            return self._fault_of_exchange(node, held)
        if not sent:
            return ""
        if node.target in READERS:
            own = self._choices(node, READERS, held)
            return "" if all(self._whose.is_for(own, one) for one in sent) else "it reads rows by other choices than they were sent by"
        if node.target in KEEPING or is_getitem(node):
            self._sent[node] = sent[0]
            return "" if len(set(sent)) == 1 else "it joins rows that were sent by different choices"
        return "it reads rows of tokens that were not sent to this rank"

    def _choices(self, node: Node, table: Mapping[Any, int], held: Of) -> Held:
        said = node.args[table[node.target]]
        assert isinstance(said, Node)
        return self._used.choices(said) or held(said)

    def _fault_of_exchange(self, node: Node, held: Of) -> str:
        x, axes, choice, each = node.args[:4]
        assert isinstance(x, Node) and isinstance(choice, Node) and isinstance(axes, list) and isinstance(each, int)
        found = self._whose.receivers_by(held(choice), tuple(axes), each)
        if found is None:
            return "nothing says whose choices it goes by"
        choices, receivers = found
        value, gathers = held(x), node.target is spmd.gather_rows
        rows = [*value.pieces] if isinstance(value, JoinedValues) else [value] if isinstance(value, Tiles) else []
        whole = held(node) if gathers else value
        pieces = whole.pieces if isinstance(whole, JoinedValues) else (whole,)
        if not all(isinstance(one, Tiles) and _tokens(one) == _tokens(choices) for one in pieces):
            return "its rows are other tokens than its choices are of"
        if gathers:
            before = self._sent.get(x)
            if before is not None and not self._whose.goes_on(before, receivers):
                return "it passes on rows that were not sent to this rank"
            self._sent[node] = receivers
            return ""
        zero = self._zero.get(x, [])
        if not rows or not zero or not all(self._whose.is_for(own, receivers) or self._whose.is_inside(own, receivers) for own in zero):
            return "rows that it does not send may be others than zeros"
        self._zero[node] = zero
        return ""


def _tokens(x: Tiles) -> object:
    """Which rows these are, whatever their width: positions of the rows of a rank, and how far apart those of other ranks are."""
    width = prod(extent for _, extent in x.dims[-1])
    digits = [digit for dim in x.dims[:-1] for digit in dim]
    rows = [(stride / width, extent) for stride, extent in digits]
    return fuse_digits(rows), tuple(sorted((axis, stride / width) for axis, stride in x.axes))  # type: ignore[arg-type]
