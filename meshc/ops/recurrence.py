"""`meshc::recurrence`: a first-order linear recurrence along one dim, which state-space models call a selective scan.

    recurrence(a [..., t, ...], b [..., t, ...], before, dim) -> h         h[t] = a[t] h[t-1] + b[t],   h[-1] = before, or 0
    recurrence_end(a, b, dim, reverse) -> (product of a, last h)           [..., 1, ...] each; reversed, from the last t to the first
    recurrence_backward(grad, a, h, before, after, dim) -> (of a, of b)    g[t] = grad[t] + a[t+1] g[t+1];   g[t] h[t-1],   g[t]
                                                                           after: a[t+1] g[t+1] of the last t, or 0
    recurrence_turn, recurrence_backward_turn                              the same in turns of ranks (`ops/turns.py`); handed on is the
                                                                           last h, and a[t] g[t] of the first t

Steps compose: a stretch maps h to `product * h + last`. So ranks that hold stretches of t exchange these two, and each starts with the
composition of the stretches before it (Blelloch, Prefix sums and their applications, CMU-CS-90-190, 1990). On a CPU steps are computed one
after another, elsewhere stretches in parallel: about 2 sqrt(t) calls for t steps.
"""

from __future__ import annotations

from math import isqrt

import torch
from torch import Tensor
from torch.nn import functional

from meshc.ops.definition import misfit, operator
from meshc.ops.turns import turn


def _at(x: Tensor, dim: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], 1, *x.shape[dim + 1 :]))


def _fit(
    operator: str, a: Tensor, dim: int, grad: Tensor | None = None, b: Tensor | None = None, h: Tensor | None = None,
    before: Tensor | None = None, after: Tensor | None = None, handed: Tensor | None = None, along: int | None = None, parts: int = 1,
) -> None:  # fmt: skip
    operands = {name: x for name, x in {"grad": grad, "a": a, "b": b, "h": h}.items() if x is not None}
    alike = all((x.shape, x.dtype, x.device) == (a.shape, a.dtype, a.device) for x in operands.values())
    if not alike or not 0 <= dim < a.dim() or not a.is_floating_point():
        raise misfit(operator, f"{', '.join(operands)} are of one shape and floating dtype, of which {dim} is a dim", **operands)
    narrow = (*a.shape[:dim], 1, *a.shape[dim + 1 :])
    for edge in (before, after, handed):
        if edge is not None and (edge.shape, edge.dtype, edge.device) != (narrow, a.dtype, a.device):
            raise misfit(operator, f"what comes from beyond an end is as long as they are, and 1 along dim {dim}", beyond=edge, **operands)
    if along is not None and (along == dim and parts > 1 or not a.shape[dim]):
        raise misfit(operator, f"parts are taken along another dim than the steps', {dim}, of which there are some", **operands)


@operator("recurrence", results="b", fit=_fit)
def recurrence(a: Tensor, b: Tensor, before: Tensor | None, dim: int) -> Tensor:
    return _steps(a, b, before, dim, False) if a.device.type == "cpu" else stretches(a, b, before, dim)


@operator("recurrence_end", results=lambda a, b, dim: (_at(a, dim), _at(b, dim)), fit=_fit)
def recurrence_end(a: Tensor, b: Tensor, dim: int, reverse: bool) -> tuple[Tensor, Tensor]:
    last = torch.zeros_like(_at(b, dim)) if b.shape[dim] == 0 else torch.zeros_like(b.narrow(dim, 0, 1))
    steps = zip(a.split(1, dim), b.split(1, dim), strict=True) if a.shape[dim] else ()
    for factor, term in reversed(list(steps)) if reverse else steps:
        last = torch.addcmul(term, factor, last)
    return a.prod(dim, keepdim=True), last


@operator("recurrence_backward", results="a, a", fit=_fit)
def recurrence_backward(
    grad: Tensor, a: Tensor, h: Tensor, before: Tensor | None, after: Tensor | None, dim: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if not a.shape[dim]:
        return torch.empty_like(a), torch.empty_like(a)
    # g[t] = grad[t] + a[t+1] g[t+1] is a recurrence from the last t to the first, with factors shifted by one
    last, size = torch.zeros_like(a.narrow(dim, 0, 1)), a.shape[dim]
    shifted = torch.cat([a.narrow(dim, 1, size - 1), last], dim)
    grad = grad if after is None else torch.cat([grad.narrow(dim, 0, size - 1), grad.narrow(dim, size - 1, 1) + after], dim)
    if a.device.type == "cpu":
        g = _steps(shifted, grad, None, dim, True)
    else:
        g = stretches(shifted.flip(dim), grad.flip(dim), None, dim).flip(dim)
    earlier = torch.cat([torch.zeros_like(last) if before is None else before, h.narrow(dim, 0, size - 1)], dim)
    return earlier.mul_(g), g


@turn(
    "recurrence_turn", rows={"a": None, "b": None}, back=lambda: False, results=lambda a, b, dim: (b.new_empty(b.shape), _at(b, dim)),
    fit=_fit,
)  # fmt: skip
def recurrence_turn(a: Tensor, b: Tensor, handed: Tensor | None, dim: int, along: int) -> tuple[Tensor, Tensor]:
    h = recurrence._init_fn(a, b, handed, dim)
    return h, h.narrow(dim, h.shape[dim] - 1, 1).clone()


@turn(
    "recurrence_backward_turn", rows={"grad": None, "a": None, "h": None, "before": None}, back=lambda: True,
    results=lambda a, dim: (a.new_empty(a.shape), a.new_empty(a.shape), _at(a, dim)), fit=_fit,
)  # fmt: skip
def recurrence_backward_turn(
    grad: Tensor, a: Tensor, h: Tensor, before: Tensor, handed: Tensor | None, dim: int, along: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    of_a, of_b = recurrence_backward._init_fn(grad, a, h, before, handed, dim)
    return of_a, of_b, a.narrow(dim, 0, 1) * of_b.narrow(dim, 0, 1)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    a, _, before, ctx.dim = inputs
    if before is not None and before.requires_grad:
        raise ValueError("meshc::recurrence: `before` has no gradient; put it into the first b")
    ctx.save_for_backward(a, output, before)


def _backward(ctx, grad):  # type: ignore[no-untyped-def]
    a, h, before = ctx.saved_tensors
    return *recurrence_backward(grad, a, h, before, None, ctx.dim), None, None


recurrence.register_autograd(_backward, setup_context=_setup)


def _steps(a: Tensor, b: Tensor, before: Tensor | None, dim: int, reverse: bool) -> Tensor:
    """h of each step, computed one after another."""
    out = torch.empty_like(b)
    rows = list(zip(a.unbind(dim), b.unbind(dim), out.unbind(dim), strict=True))
    state = None if before is None else before.squeeze(dim)
    for factor, term, made in reversed(rows) if reverse else rows:
        state = made.copy_(term) if state is None else torch.addcmul(term, factor, state, out=made)
    return out


def stretches(a: Tensor, b: Tensor, before: Tensor | None, dim: int) -> Tensor:
    """h of each step, by about sqrt(t) stretches computed from zero, plus the carry from earlier stretches times the factors since."""
    size = a.shape[dim]
    if not size:
        return torch.empty_like(b)
    long = isqrt(size - 1) + 1
    many = -(-size // long)
    beyond = [0, 0] * (a.dim() - 1 - dim) + [0, many * long - size]
    factors, terms = (functional.pad(x, beyond, value=fill).unflatten(dim, (many, long)) for x, fill in ((a, 1.0), (b, 0.0)))
    made = _steps(factors, terms, None, dim + 1, False)
    products = factors.cumprod(dim + 1)
    ends = _steps(products.select(dim + 1, long - 1), made.select(dim + 1, long - 1), before, dim, False)
    first = torch.zeros_like(ends.narrow(dim, 0, 1)) if before is None else before
    starts = torch.cat([first, ends.narrow(dim, 0, many - 1)], dim).unsqueeze(dim + 1)
    return torch.addcmul(made, products, starts).flatten(dim, dim + 1).narrow(dim, 0, size).contiguous()
