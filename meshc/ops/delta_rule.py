"""`meshc::delta_rule`: the gated delta rule, linear attention with a matrix-valued state; and operators that compose stretches of steps.

    delta_rule(q, k, v, e, g, before) -> (out, last)       S[t] = exp(g[t]) (S[t-1] - k[t] (e[t] S[t-1])) + k[t] v[t]
                                                           out[t] = q[t] S[t]
    delta_rule_backward(grad, q, k, v, e, g, before, after) -> gradients of q, k, v, e, g, before          after: that of `last`
    delta_rule_end(k, v, e, g) -> (product, end)           a stretch maps state S to product S + end
    delta_rule_ends(grad, q, k, v, e, g) -> (product, end, start)         and, in reverse, gradient G to product^T G + start
    delta_rule_join(products, added, edge, place, reverse) -> state      from `edge` or zero through the stretches before `place`,
                                                                         each mapping S to product S + added; reversed, those behind it

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

from meshc.ops.delta_rule_chunks import Chunks
from meshc.ops.operands import misfit


@torch.library.custom_op("meshc::delta_rule", mutates_args=())
def delta_rule(q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    _fit("delta_rule", k, v, e, g, like_keys={"q": q}, states={"before": before})
    return Chunks(k, v, e, g).forward(q, before)


@delta_rule.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor]:
    _fit("delta_rule", k, v, e, g, like_keys={"q": q}, states={"before": before})
    return v.new_empty(v.shape), _state(k, v)


@torch.library.custom_op("meshc::delta_rule_backward", mutates_args=())
def delta_rule_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _fit("delta_rule_backward", k, v, e, g, like_keys={"q": q}, like_values={"grad": grad}, states={"before": before, "after": after})
    return Chunks(k, v, e, g).backward(grad, q, before, after)


@delta_rule_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor, before: Tensor | None, after: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    _fit("delta_rule_backward", k, v, e, g, like_keys={"q": q}, like_values={"grad": grad}, states={"before": before, "after": after})
    of_q, of_k, of_v, of_e, of_g = (x.new_empty(x.shape) for x in (q, k, v, e, g))
    return of_q, of_k, of_v, of_e, of_g, _state(k, v)


@torch.library.custom_op("meshc::delta_rule_end", mutates_args=())
def delta_rule_end(k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    _fit("delta_rule_end", k, v, e, g)
    return Chunks(k, v, e, g).end()


@delta_rule_end.register_fake
def _(k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    _fit("delta_rule_end", k, v, e, g)
    return _state(k, k), _state(k, v)


@torch.library.custom_op("meshc::delta_rule_ends", mutates_args=())
def delta_rule_ends(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _fit("delta_rule_ends", k, v, e, g, like_keys={"q": q}, like_values={"grad": grad})
    chunks = Chunks(k, v, e, g)
    return *chunks.end(), chunks.start(grad, q)


@delta_rule_ends.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, e: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    _fit("delta_rule_ends", k, v, e, g, like_keys={"q": q}, like_values={"grad": grad})
    return _state(k, k), _state(k, v), _state(k, v)


@torch.library.custom_op("meshc::delta_rule_join", mutates_args=())
def delta_rule_join(products: Tensor, added: Tensor, edge: Tensor | None, place: int, reverse: bool) -> Tensor:
    """State behind the stretches along dim 0, in order; reversed, from the last, with products transposed."""
    _fit_join(products, added, edge)
    state = torch.zeros_like(added[0]) if edge is None else edge.clone()
    count = products.shape[0]
    for stretch in range(count - 1, max(place, -1), -1) if reverse else range(min(place, count)):
        product = products[stretch].transpose(-1, -2) if reverse else products[stretch]
        state = product @ state + added[stretch]
    return state


@delta_rule_join.register_fake
def _(products: Tensor, added: Tensor, edge: Tensor | None, place: int, reverse: bool) -> Tensor:
    _fit_join(products, added, edge)
    return added.new_empty(added.shape[1:])


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad, after):  # type: ignore[no-untyped-def]
    q, k, v, e, g, before = ctx.saved_tensors
    grad = torch.zeros_like(v) if grad is None else grad
    *gradients, of_before = delta_rule_backward(grad, q, k, v, e, g, before, after)
    return *gradients, None if before is None else of_before


delta_rule.register_autograd(_backward, setup_context=_setup)


def _state(k: Tensor, v: Tensor) -> Tensor:
    return v.new_empty((*k.shape[:-2], k.shape[-1], v.shape[-1]))


def _fit(
    operator: str, k: Tensor, v: Tensor, e: Tensor, g: Tensor, *, like_keys: dict[str, Tensor] | None = None,
    like_values: dict[str, Tensor] | None = None, states: dict[str, Tensor | None] | None = None,
) -> None:  # fmt: skip
    keys, values = {"k": k, "e": e, **(like_keys or {})}, {"v": v, **(like_values or {})}
    given = {name: x for name, x in (states or {}).items() if x is not None}
    fits = k.dim() > 1 and v.dim() > 1 and v.shape[:-1] == k.shape[:-1] == g.shape
    fits = fits and all(x.shape == k.shape for x in keys.values()) and all(x.shape == v.shape for x in values.values())
    fits = fits and all(x.shape == (*k.shape[:-2], k.shape[-1], v.shape[-1]) for x in given.values())
    everything = {**keys, **values, "g": g, **given}
    if not fits or not _alike(k, *everything.values()):
        rule = "q, k, e are [..., t, keys], v and grad [..., t, values], g [..., t], states [..., keys, values], all float32 or float64"
        raise misfit(operator, rule, **everything)


def _fit_join(products: Tensor, added: Tensor, edge: Tensor | None) -> None:
    fits = products.dim() > 2 and added.shape[:-1] == products.shape[:-1] and products.shape[-1] == products.shape[-2]
    given = () if edge is None else (edge,)
    if not fits or not _alike(products, added, *given) or any(x.shape != added.shape[1:] for x in given):
        rule = "products are [n, ..., keys, keys], added [n, ..., keys, values], an edge [..., keys, values], all float32 or float64"
        raise misfit("delta_rule_join", rule, products=products, added=added, edge=edge)


def _alike(first: Tensor, *others: Tensor) -> bool:
    return first.dtype in (torch.float32, torch.float64) and all((x.dtype, x.device) == (first.dtype, first.device) for x in others)
