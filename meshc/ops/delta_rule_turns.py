"""`meshc::delta_rule` in turns: the steps of one part of the rows or heads, from the state of the rank before.

    delta_rule_turn(q, k, v, e, g, before, handed, along, slot, parts, place, ranks) -> (out, state)
    delta_rule_state_turn(k, v, e, g, before, handed, along, slot, parts, place, ranks) -> state
    delta_rule_backward_turn(grad, q, k, v, e, g, begin, after, handed, along, slot, parts, place, ranks)
        -> (gradients of q, k, v, e, g, state)

    before, after  the state before the first position, and the gradient of that behind the last, for the rank at that end, of all rows
    begin          the state before the rank's stretch, of all rows
    handed, state  [1, ..., keys, values] of a part: the state behind a stretch; backward, the gradient of the state before it

Operands are of the whole stretch; a turn takes a part along the dim `along`, and returns results of that size. `ops/turns.py` explains
turns, `ops/delta_rule.py` the letters.
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.delta_rule import _fit, _state
from meshc.ops.delta_rule_chunks import Chunks
from meshc.ops.operands import misfit
from meshc.ops.turns import Turn, fit_turns


@torch.library.custom_op("meshc::delta_rule_turn", mutates_args=())
def delta_rule_turn(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, handed: Tensor | None, along: int, slot: int, parts: int,
    place: int, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _fit("delta_rule_turn", k, v, e, g, like_keys={"q": q}, states={"before": before})
    _fit_handed("delta_rule_turn", k, v, handed, along, slot, parts, ranks)
    turn = Turn(slot, parts, place, ranks, False)
    if turn.part is None:
        return _part(v, along, parts).zero_(), _boundary_state(k, v, along, parts).zero_()
    asked, *mine = [turn.of(x, along) for x in (q, k, v, e, g)]
    out, last = Chunks(*mine).forward(asked, _begin(turn, before, handed, along))
    return out, last.unsqueeze(0)


@delta_rule_turn.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, handed: Tensor | None, along: int, slot: int, parts: int,
    place: int, ranks: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    _fit("delta_rule_turn", k, v, e, g, like_keys={"q": q}, states={"before": before})
    _fit_handed("delta_rule_turn", k, v, handed, along, slot, parts, ranks)
    return _part(v, along, parts), _boundary_state(k, v, along, parts)


@torch.library.custom_op("meshc::delta_rule_state_turn", mutates_args=())
def delta_rule_state_turn(
    k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, handed: Tensor | None, along: int, slot: int, parts: int, place: int,
    ranks: int,
) -> Tensor:  # fmt: skip
    _fit("delta_rule_state_turn", k, v, e, g, states={"before": before})
    _fit_handed("delta_rule_state_turn", k, v, handed, along, slot, parts, ranks)
    turn = Turn(slot, parts, place, ranks, False)
    if turn.part is None:
        return _boundary_state(k, v, along, parts).zero_()
    return Chunks(*(turn.of(x, along) for x in (k, v, e, g))).through(_begin(turn, before, handed, along)).unsqueeze(0)


@delta_rule_state_turn.register_fake
def _(
    k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, handed: Tensor | None, along: int, slot: int, parts: int, place: int,
    ranks: int,
) -> Tensor:  # fmt: skip
    _fit("delta_rule_state_turn", k, v, e, g, states={"before": before})
    _fit_handed("delta_rule_state_turn", k, v, handed, along, slot, parts, ranks)
    return _boundary_state(k, v, along, parts)


@torch.library.custom_op("meshc::delta_rule_backward_turn", mutates_args=())
def delta_rule_backward_turn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, begin: Tensor, after: Tensor | None, handed: Tensor | None,
    along: int, slot: int, parts: int, place: int, ranks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    states = {"begin": begin, "after": after}
    _fit("delta_rule_backward_turn", k, v, e, g, like_keys={"q": q}, like_values={"grad": grad}, states=states)
    _fit_handed("delta_rule_backward_turn", k, v, handed, along, slot, parts, ranks)
    turn = Turn(slot, parts, place, ranks, True)
    if turn.part is None:
        of_q, of_k, of_v, of_e, of_g = (_part(x, along, parts).zero_() for x in (q, k, v, e, g))
        return of_q, of_k, of_v, of_e, of_g, _boundary_state(k, v, along, parts).zero_()
    given, asked, *mine = [turn.of(x, along) for x in (grad, q, k, v, e, g)]
    *gradients, first = Chunks(*mine).backward(given, asked, turn.of(begin, along), _begin(turn, after, handed, along))
    of_q, of_k, of_v, of_e, of_g = gradients
    return of_q, of_k, of_v, of_e, of_g, first.unsqueeze(0)


@delta_rule_backward_turn.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, begin: Tensor, after: Tensor | None, handed: Tensor | None,
    along: int, slot: int, parts: int, place: int, ranks: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    states = {"begin": begin, "after": after}
    _fit("delta_rule_backward_turn", k, v, e, g, like_keys={"q": q}, like_values={"grad": grad}, states=states)
    _fit_handed("delta_rule_backward_turn", k, v, handed, along, slot, parts, ranks)
    of_q, of_k, of_v, of_e, of_g = (_part(x, along, parts) for x in (q, k, v, e, g))
    return of_q, of_k, of_v, of_e, of_g, _boundary_state(k, v, along, parts)


def _begin(turn: Turn, edge: Tensor | None, handed: Tensor | None, along: int) -> Tensor | None:
    """First state of a part: the rows of `edge` at the chain's first rank, else `handed`."""
    if turn.link == 0:
        return None if edge is None else turn.of(edge, along)
    return None if handed is None else handed[0]


def _part(x: Tensor, along: int, parts: int) -> Tensor:
    shape = list(x.shape)
    shape[along] //= parts
    return x.new_empty(shape)


def _boundary_state(k: Tensor, v: Tensor, along: int, parts: int) -> Tensor:
    return _part(_state(k, v), along, parts).unsqueeze(0)


def _fit_handed(operator: str, k: Tensor, v: Tensor, handed: Tensor | None, along: int, slot: int, parts: int, ranks: int) -> None:
    if not 0 <= along < max(1, k.dim() - 2) or (k.dim() < 3 and parts > 1):
        raise misfit(operator, f"{along} is a dim of rows or heads, before those of positions and keys", k=k, v=v)
    fit_turns(operator, k.shape[along], slot, parts, ranks, k=k, v=v)
    wanted = _boundary_state(k, v, along, parts)
    if handed is not None and (handed.shape, handed.dtype, handed.device) != (wanted.shape, wanted.dtype, wanted.device):
        raise misfit(operator, f"what is handed on is {list(wanted.shape)}, of the others' dtype", k=k, v=v, handed=handed)
