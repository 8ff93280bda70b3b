"""Operators on used rows alone, as the calls on all rows that they stand for; and which values have no other rows.

    used, ends = used_rows(own, 4)              own, with one dim for tokens and choices
    rows = rows_of_tokens(x, used, 2)           to_groups(x, own)
    h = used_mm(rows, w, ends, share)           group_mm(rows, w, own, 4, share)
    y = tokens_of_rows(h, used, 8, 2)           from_groups(h, own)

A value of used rows is what it would be of all rows, where there are any: so its readers must take each row by itself, or go by the same
choices. `UsedRows` looks at that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import torch
from torch.fx import Node

from meshc.ir import is_getitem, operands, records, spmd
from meshc.ir.schemas import RESHAPES, named_arguments
from meshc.ir.used_rows_dims import fault
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers its operators
from meshc.ops import expert_groups as _groups  # noqa: F401 - registers its operators
from meshc.ops import used_rows as _used_rows  # noqa: F401 - likewise
from meshc.proof import dispatched_rows
from meshc.proof.held import Held
from meshc.proof.terms import constant
from meshc.proof.tiles import Tiles, Unfit, permute_dims, reshape_dims

if TYPE_CHECKING:
    from meshc.proof.evaluate import Evaluator

aten, meshc = torch.ops.aten, torch.ops.meshc
Of: TypeAlias = Callable[[Node], Held]
Form: TypeAlias = "Callable[[Evaluator, Node, list[Any]], Tiles]"
USED, PLACED, WEIGHTS = meshc.used_rows.default, meshc.places_of_rows.default, meshc.weights_to_tokens.default
FLAT: Final = "choices"
"""Term of the ends of each expert's rows, which are made of the same choices."""


def _term(of: Evaluator, target: Any, shape: tuple[int, ...], *args: Any) -> Tiles:
    said = ("list", *(one if isinstance(one, Tiles) else constant(one) for one in args))
    return of.root(shape, "call", target, said, ("named",))


def _to_groups(of: Evaluator, x: Tiles, own: Tiles) -> Tiles:
    return _term(of, meshc.to_groups.default, (*own.shape, x.shape[-1]), x, own)


def _from_groups(of: Evaluator, rows: Tiles, own: Tiles) -> Tiles:
    return _term(of, meshc.from_groups.default, (own.shape[1], rows.shape[-1]), rows, own)


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
    return _term(of, meshc.group_mm.default, records(node)[0].shape, rows, matrices, own, count, filled)


def _outer(of: Evaluator, left: Tiles, right: Tiles, *rest: Any) -> Tiles:
    """Of both orders of the operands the one is the other's transpose."""
    count = rest[2]
    if (right.root, right.dims) < (left.root, left.dims):
        return permute_dims(_outer(of, right, left, *rest), (0, 2, 1))
    return _term(of, meshc.group_outer.default, (count, left.shape[-1], right.shape[-1]), left, right, *rest)


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
        return _term(of, target, records(node)[0].shape, reshape_dims(x, x.shape[1:]), own, *rest)

    return make


def _over_one_group(target: Any) -> Form:
    """What a group adds up, as the sum over all groups."""

    def make(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
        if args[1].shape[0] != 1:
            raise Unfit("several groups")
        shape = records(node)[0].shape
        return reshape_dims(_term(of, target, shape[1:], *args), shape)

    return make


def _spread(of: Evaluator, x: Tiles, dim: int, size: int, start: int, step: int) -> Tiles:
    if x.shape[dim] == size:
        return x
    shape = (*x.shape[:dim], size, *x.shape[dim + 1 :])
    return _term(of, meshc.rows_spread.default, shape, x, dim, size, start, step)


def _slice_backward(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    given = named_arguments(node)
    dim = given["dim"] % len(args[0].shape)
    size = given["input_sizes"][dim]
    return _spread(of, args[0], dim, size, given["start"] % size, given["step"])


def _select_backward(of: Evaluator, node: Node, args: list[Any]) -> Tiles:
    given = named_arguments(node)
    sizes = given["input_sizes"]
    dim = given["dim"] % len(sizes)
    x = reshape_dims(args[0], (*sizes[:dim], 1, *sizes[dim + 1 :]))
    return _spread(of, x, dim, sizes[dim], given["index"] % sizes[dim], 1)


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
    meshc.rows_spread.default: lambda of, _, args: _spread(of, *args),
    spmd.gather_rows: lambda of, _, args: dispatched_rows.gather(of, args[0], args[1]),
    spmd.scatter_rows: lambda of, _, args: dispatched_rows.scatter(of, args[0], args[1]),
    aten.slice_backward.default: _slice_backward, aten.select_backward.default: _select_backward,
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
    flat = _flat(own)
    return flat if node.args[1] == 0 else of.root(records(node)[0].shape, FLAT, flat, count)


class UsedRows:
    """By which choices the rows of a value are used; of values without an entry all rows are there."""

    def __init__(self) -> None:
        self._choices: dict[Node, Tiles] = {}

    def choices(self, node: Node) -> Tiles | None:
        """By which choices a value's rows are used; None where all rows are there."""
        return self._choices.get(node)

    def fault(self, node: Node, held: Of) -> str:
        """What is wrong with a call that reads used rows; "" if nothing is. Notes by which choices its own rows are used."""
        if is_getitem(node) and node.args[0].target is USED:  # type: ignore[union-attr]
            own = held(node.args[0].args[0])  # type: ignore[union-attr, arg-type]
            if isinstance(own, Tiles):
                self._choices[node] = _flat(own)
            return fault(node)
        choices = {self._choices[one] for one in node.all_input_nodes if one in self._choices}
        if len(choices) > 1:
            return "it takes rows together that are used by different choices"
        if choices:
            (by,) = choices
            placed = all(records(one)[0].used is None for one in operands(node))
            if records(node)[0].used is not None or node.target is PLACED or placed and node.target in RESHAPES:
                self._choices[node] = by
            elif placed and not (node.target is WEIGHTS and isinstance(own := held(node.args[1]), Tiles) and _flat(own) == by):  # type: ignore[arg-type]
                return "it reads places without a row, which hold nothing"
        return fault(node)


def _flat(own: Tiles) -> Tiles:
    return reshape_dims(own, (1, prod(own.shape)))
