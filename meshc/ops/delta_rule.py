"""`meshc::delta_rule`: the gated delta rule, linear attention with a matrix-valued state; and operators that compose stretches of steps.

    delta_rule(q, k, v, e, g, before) -> (out, last)       S[t] = exp(g[t]) (S[t-1] - k[t] (e[t] S[t-1])) + k[t] v[t]
                                                           out[t] = q[t] S[t]
    delta_rule_backward(grad, q, k, v, e, g, before, after) -> gradients of q, k, v, e, g, before          after: that of `last`
    delta_rule_end(k, v, e, g) -> (product, end)           a stretch maps state S to product S + end
    delta_rule_ends(grad, q, k, v, e, g) -> (product, end, start)         and, in reverse, gradient G to product^T G + start
    delta_rule_join(products, added, edge, place, reverse) -> state      from `edge` or zero through the stretches before `place`,
                                                                         each mapping S to product S + added; reversed, those behind it
    delta_rule_turn, delta_rule_state_turn, delta_rule_backward_turn     in turns of ranks (`ops/turns.py`), of which the second is the
                                                                         state alone; begin: the state before the rank's stretch

    q, k, e  [..., t, keys]     v, out, grad  [..., t, values]     g  [..., t], at most 0
    S, before, last, after, end, start  [..., keys, values]        product  [..., keys, keys]

`e` is the erase vector beta k, with beta the share of the old value that is removed. Positions of zeros change nothing. Steps are computed
in chunks (`delta_rule_chunks`). Stretches compose, so ranks that hold stretches of t exchange their (product, end), and each begins with
the composition of those before it.

Yang, Kautz, Hatamizadeh: Gated Delta Networks (arXiv:2412.06464).
"""

from __future__ import annotations

import torch
from torch import Tensor

from meshc.ops.definition import misfit, operator
from meshc.ops.delta_rule_chunks import Chunks
from meshc.ops.turns import turn


def _state(k: Tensor, v: Tensor) -> Tensor:
    return v.new_empty((*k.shape[:-2], k.shape[-1], v.shape[-1]))


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, ...]:
    return *(x.new_empty(x.shape) for x in (q, k, v, e, g)), _state(k, v)


def _alike(first: Tensor, *others: Tensor) -> bool:
    return first.dtype in (torch.float32, torch.float64) and all((x.dtype, x.device) == (first.dtype, first.device) for x in others)


def _fit(
    operator: str, k: Tensor, v: Tensor, e: Tensor, g: Tensor, q: Tensor | None = None, grad: Tensor | None = None,
    before: Tensor | None = None, begin: Tensor | None = None, after: Tensor | None = None, handed: Tensor | None = None,
    along: int | None = None, parts: int = 1,
) -> None:  # fmt: skip
    everything = {"k": k, "e": e, "q": q, "v": v, "grad": grad, "g": g, "before": before, "begin": begin, "after": after, "handed": handed}
    given = {name: x for name, x in everything.items() if x is not None}
    state = (*k.shape[:-2], k.shape[-1], v.shape[-1]) if k.dim() > 1 and v.dim() > 1 else ()
    shapes = {"e": k.shape, "q": k.shape, "v": (*k.shape[:-1], *v.shape[-1:]), "grad": v.shape, "g": k.shape[:-1], "k": k.shape}
    if not state or any(x.shape != shapes.get(name, state) for name, x in given.items()) or not _alike(*given.values()):
        rule = "q, k, e are [..., t, keys], v and grad [..., t, values], g [..., t], states [..., keys, values], all float32 or float64"
        raise misfit(operator, rule, **given)
    if along is not None and along >= max(k.dim() - 2, parts == 1):
        raise misfit(operator, f"{along} is a dim of rows or heads, before those of positions and keys", k=k)


@operator("delta_rule", results=lambda k, v: (v.new_empty(v.shape), _state(k, v)), fit=_fit)
def delta_rule(q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    return Chunks(k, v, e, g).forward(q, before)


@operator("delta_rule_backward", results=_empty_gradients, fit=_fit)
def delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return Chunks(k, v, e, g).backward(grad, q, before, after)


@operator("delta_rule_end", results=lambda k, v: (_state(k, k), _state(k, v)), fit=_fit)
def delta_rule_end(k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    return Chunks(k, v, e, g).end()


@operator("delta_rule_ends", results=lambda k, v: (_state(k, k), _state(k, v), _state(k, v)), fit=_fit)
def delta_rule_ends(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    chunks = Chunks(k, v, e, g)
    return *chunks.end(), chunks.start(grad, q)


def _fit_join(products: Tensor, added: Tensor, edge: Tensor | None) -> None:
    fits = products.dim() > 2 and added.shape[:-1] == products.shape[:-1] and products.shape[-1] == products.shape[-2]
    given = () if edge is None else (edge,)
    if not fits or not _alike(products, added, *given) or any(x.shape != added.shape[1:] for x in given):
        rule = "products are [n, ..., keys, keys], added [n, ..., keys, values], an edge [..., keys, values], all float32 or float64"
        raise misfit("delta_rule_join", rule, products=products, added=added, edge=edge)


@operator("delta_rule_join", results=lambda added: added.new_empty(added.shape[1:]), fit=_fit_join)
def delta_rule_join(products: Tensor, added: Tensor, edge: Tensor | None, place: int, reverse: bool) -> Tensor:
    """State behind the stretches along dim 0, in order; reversed, from the last, with products transposed."""
    state = torch.zeros_like(added[0]) if edge is None else edge.clone()
    count = products.shape[0]
    for stretch in range(count - 1, max(place, -1), -1) if reverse else range(min(place, count)):
        product = products[stretch].transpose(-1, -2) if reverse else products[stretch]
        state = product @ state + added[stretch]
    return state


OPERANDS = dict.fromkeys("qkveg")
"""Of which turns take a part along the dim `along`, one of rows or heads."""


@turn(
    "delta_rule_turn", rows={**OPERANDS, "before": None}, edge="before", back=lambda: False,
    results=lambda k, v: (v.new_empty(v.shape), _state(k, v)), fit=_fit,
)  # fmt: skip
def delta_rule_turn(
    q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, handed: Tensor | None, along: int
) -> tuple[Tensor, Tensor]:
    return Chunks(k, v, e, g).forward(q, handed)


@turn(
    "delta_rule_state_turn", rows={**dict.fromkeys("kveg"), "before": None}, edge="before", back=lambda: False,
    results=lambda k, v: (_state(k, v),), fit=_fit,
)  # fmt: skip
def delta_rule_state_turn(
    k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, handed: Tensor | None, along: int
) -> Tensor:
    return Chunks(k, v, e, g).through(handed)


@turn(
    "delta_rule_backward_turn", rows={"grad": None, **OPERANDS, "begin": None, "after": None}, edge="after", back=lambda: True,
    results=_empty_gradients, fit=_fit,
)  # fmt: skip
def delta_rule_backward_turn(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, begin: Tensor, after: Tensor | None, handed: Tensor | None,
    along: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return Chunks(k, v, e, g).backward(grad, q, begin, handed)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad, after):  # type: ignore[no-untyped-def]
    q, k, v, e, g, before = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    *gradients, of_before = delta_rule_backward(grad, q, k, v, e, g, before, after)
    return *gradients, None if before is None else of_before


delta_rule.register_autograd(_backward, setup_context=_setup)
