"""Operators on used rows alone, as the calls on all rows that they stand for; and which values have no other rows.

    used, ends = used_rows(own, 4)              own, with one dim for tokens and choices
    rows = rows_of_tokens(x, used, 2)           to_groups(x, own)
    h = used_mm(rows, w, ends, share)           group_mm(rows, w, own, 4, share)
    y = tokens_of_rows(h, used, 8, 2)           from_groups(h, own)

A value of used rows is what it would be of all rows, where there are any: so its readers must take each row by itself, or go by the same
choices. `rows_in_use.py` looks at that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.fx import Node

from meshc.ir import records, spmd
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import expert_groups as _groups  # noqa: F401 - registers its operators
from meshc.ops import used_rows as _used_rows  # noqa: F401 - likewise
from meshc.proof import dispatched_rows, sliced_tiles
from meshc.proof.held import Held
from meshc.proof.rows_in_use import flat_choices
from meshc.proof.terms import call_term
from meshc.proof.tile_moves import permute_dims, reshape_dims
from meshc.proof.tiles import Tiles, Unfit

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator

aten, meshc = torch.ops.aten, torch.ops.meshc
Of: TypeAlias = Callable[[Node], Held]
Form: TypeAlias = "Callable[[Evaluator, Node, list[Any]], Tiles]"
FLAT: Final = "choices"
"""Term of the ends of each expert's rows, which are made of the same choices."""


def _to_groups(of: Evaluator, x: Tiles, own: Tiles) -> Tiles:
    return of.root((*own.shape, x.shape[-1]), *call_term(meshc.to_groups.default, x, own))


def _from_groups(of: Evaluator, rows: Tiles, own: Tiles) -> Tiles:
    return of.root((own.shape[1], rows.shape[-1]), *call_term(meshc.from_groups.default, rows, own))


def _rows_of_tokens(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    x, used, chosen = args
    own = reshape_dims(used, (1, x.shape[0], chosen))
    return reshape_dims(_to_groups(of, x, own), (1, x.shape[0] * chosen, x.shape[1]))


def _tokens_of_rows(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    rows, used, tokens, chosen = args
    return _from_groups(of, reshape_dims(rows, (1, tokens, chosen, rows.shape[-1])), reshape_dims(used, (1, tokens, chosen)))


def _choices_of_ends(of: Evaluator, ends: Tiles) -> tuple[Tiles, int]:
    what, *rest = of.terms.term(ends.root)
    if what != FLAT:
        raise Unfit("runs that nothing says the choices of")
    own, count = rest
    return own, count


def _used_mm(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    rows, matrices, ends, filled = args
    own, count = _choices_of_ends(of, ends)
    return of.root(records(node)[0].shape, *call_term(meshc.group_mm.default, rows, matrices, own, count, filled))


def _outer(of: Evaluator, left: Tiles, right: Tiles, *rest: Any) -> Tiles:
    """Of both orders of the operands the one is the other's transpose."""
    count = rest[2]
    if (right.root, right.dims) < (left.root, left.dims):
        return permute_dims(_outer(of, right, left, *rest), (0, 2, 1))
    return of.root((count, left.shape[-1], right.shape[-1]), *call_term(meshc.group_outer.default, left, right, *rest))


def _used_outer(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    left, right, ends, filled = args
    own, count = _choices_of_ends(of, ends)
    return _outer(of, left, right, own, count, count, filled)


def _into_one_group(target: Any) -> Form:
    """Tokens that a group has, as tokens of all groups, of which there is one."""

    def make(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
        x, own, *rest = args
        if own.shape[0] != 1:
            raise Unfit("several groups")
        return of.root(records(node)[0].shape, *call_term(target, reshape_dims(x, x.shape[1:]), own, *rest))

    return make


def _over_one_group(target: Any) -> Form:
    """What a group adds up, as the sum over all groups."""

    def make(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
        if args[1].shape[0] != 1:
            raise Unfit("several groups")
        shape = records(node)[0].shape
        return reshape_dims(of.root(shape[1:], *call_term(target, *args)), shape)

    return make


FORMS: Final[Mapping[Any, Form]] = {
    meshc.rows_of_tokens.default: _rows_of_tokens, meshc.tokens_of_rows.default: _tokens_of_rows, meshc.used_mm.default: _used_mm,
    meshc.used_outer.default: _used_outer,
    meshc.in_slots.default: _into_one_group(meshc.to_groups.default),
    meshc.in_places.default: _into_one_group(meshc.to_places.default),
    meshc.over_slots.default: _over_one_group(meshc.from_groups.default),
    meshc.over_places.default: _over_one_group(meshc.from_places.default),
    meshc.group_outer.default: lambda of, _, args: _outer(of, *args),
    meshc.rows_of_places.default: lambda of, _, args: args[0],
    meshc.places_of_rows.default: lambda of, _, args: args[0],
    meshc.rows_spread.default: lambda of, _, args: sliced_tiles.spread(of, *args),
    spmd.gather_rows: lambda of, _, args: dispatched_rows.gather(of, args[0], args[1]),
    spmd.scatter_rows: lambda of, _, args: dispatched_rows.scatter(of, args[0], args[1]),
    aten.slice_backward.default: sliced_tiles.slice_backward, aten.select_backward.default: sliced_tiles.select_backward,
}  # fmt: skip
"""Operator -> what its call stands for. Each raises Unfit for other arguments."""


def form(of: Evaluator, node: Node, held: Of) -> Tiles:
    args = [held(one) if isinstance(one, Node) else one for one in node.args]
    if node.kwargs or not all(isinstance(one, Tiles) for one, given in zip(args, node.args, strict=True) if isinstance(given, Node)):
        raise Unfit("other arguments")
    return FORMS[node.target](of, node, args)


def item(of: Evaluator, node: Node, held: Of) -> Tiles:
    """A result of `used_rows`: the choices themselves, or the ends of each expert's rows, which they say."""
    own, count = (held(one) if isinstance(one, Node) else one for one in node.args[0].args)  # type: ignore[union-attr]
    assert isinstance(own, Tiles)
    flat = flat_choices(own)
    return flat if node.args[1] == 0 else of.root(records(node)[0].shape, FLAT, flat, count)
