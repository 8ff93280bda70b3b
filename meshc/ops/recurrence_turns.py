"""`meshc::recurrence` in turns: the steps of one part of the rows, from the state of the rank before.

    recurrence_turn(a, b, handed, dim, along, slot, parts, place, ranks) -> (h, state)
    recurrence_backward_turn(grad, a, h, before, handed, dim, along, slot, parts, place, ranks) -> (of a, of b, state)

    a, b, grad, h  of the whole stretch; a turn takes a part along the dim `along`, and returns results of that size
    handed, state  [1, ..., 1, ...], one position of t, of a part: the last h; backward a[t] g[t] of the first t
    before         the last h of the stretch before, of all rows, zeros at the first

`ops/turns.py` explains turns, `ops/recurrence.py` the letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.operands import misfit
from meshc.ops.recurrence import recurrence, recurrence_backward
from meshc.ops.turns import Turn, fit_turns

_recurrence, _backward = recurrence._init_fn, recurrence_backward._init_fn


@torch.library.custom_op("meshc::recurrence_turn", mutates_args=())
def recurrence_turn(
    a: Tensor, b: Tensor, handed: Tensor | None, dim: int, along: int, slot: int, parts: int, place: int, ranks: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _fit("recurrence_turn", dim, along, slot, parts, ranks, handed, a=a, b=b)
    turn = Turn(slot, parts, place, ranks, False)
    if turn.part is None:
        h, state = _empty_results(a, dim, along, parts)
        return h.zero_(), state.zero_()
    h = _recurrence(turn.of(a, along), turn.of(b, along), None if handed is None or not turn.link else handed[0], dim)
    return h, h.narrow(dim, h.shape[dim] - 1, 1).unsqueeze(0).clone()


@recurrence_turn.register_fake
def _(
    a: Tensor, b: Tensor, handed: Tensor | None, dim: int, along: int, slot: int, parts: int, place: int, ranks: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _fit("recurrence_turn", dim, along, slot, parts, ranks, handed, a=a, b=b)
    return _empty_results(a, dim, along, parts)


@torch.library.custom_op("meshc::recurrence_backward_turn", mutates_args=())
def recurrence_backward_turn(
    grad: Tensor, a: Tensor, h: Tensor, before: Tensor, handed: Tensor | None, dim: int, along: int, slot: int, parts: int, place: int,
    ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _fit("recurrence_backward_turn", dim, along, slot, parts, ranks, handed, grad=grad, a=a, h=h, before=before)
    turn = Turn(slot, parts, place, ranks, True)
    if turn.part is None:
        made, state = _empty_results(a, dim, along, parts)
        return made.zero_(), torch.zeros_like(made), state.zero_()
    mine, after = [turn.of(x, along) for x in (grad, a, h, before)], None if handed is None or not turn.link else handed[0]
    of_a, of_b = _backward(*mine, after, dim)
    return of_a, of_b, (mine[1].narrow(dim, 0, 1) * of_b.narrow(dim, 0, 1)).unsqueeze(0)


@recurrence_backward_turn.register_fake
def _(
    grad: Tensor, a: Tensor, h: Tensor, before: Tensor, handed: Tensor | None, dim: int, along: int, slot: int, parts: int, place: int,
    ranks: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _fit("recurrence_backward_turn", dim, along, slot, parts, ranks, handed, grad=grad, a=a, h=h, before=before)
    made, state = _empty_results(a, dim, along, parts)
    return made, torch.empty_like(made), state


def _empty_results(a: Tensor, dim: int, along: int, parts: int) -> tuple[Tensor, Tensor]:
    shape = list(a.shape)
    shape[along] //= parts
    return a.new_empty(shape), a.new_empty([1, *shape[:dim], 1, *shape[dim + 1 :]])


def _fit(
    operator: str, dim: int, along: int, slot: int, parts: int, ranks: int, handed: Tensor | None, before: Tensor | None = None,
    **operands: Tensor,
) -> None:  # fmt: skip
    first, *others = operands.values()
    alike = all((one.shape, one.dtype, one.device) == (first.shape, first.dtype, first.device) for one in others)
    fits = alike and first.is_floating_point() and 0 <= dim < first.dim() and 0 <= along < first.dim() and (along != dim or parts == 1)
    if not fits or not first.shape[dim]:
        rule = f"{', '.join(operands)} are of one shape and floating dtype, of which {dim} and {along} are dims, the first not empty"
        raise misfit(operator, rule, **operands)
    fit_turns(operator, first.shape[along], slot, parts, ranks, **operands)
    narrow, whole = list(_empty_results(first, dim, along, parts)[1].shape), list(first.shape)
    whole[dim] = 1
    for name, edge, shape in (("handed", handed, narrow), ("before", before, whole)):
        if edge is not None and (list(edge.shape), edge.dtype, edge.device) != (shape, first.dtype, first.device):
            raise misfit(operator, f"{name} is {shape}, of the others' dtype", edge=edge, **operands)
