"""`meshc::rnn`: the sequential steps of a recurrent layer (LSTM, GRU, or RNN with tanh or relu).

    rnn(kind, x, weight, bias, before, reverse) -> (out, kept, last)
    rnn_backward(kind, grad, of_last, kept, weight, reverse) -> (of_gates, of_before)
    rnn_turn, rnn_turn_backward                the same in turns of ranks that have a stretch of steps each (`ops/turns.py`)

    x       [t, rows, gates * h]   the input's contribution to each gate, with its bias
    weight  [gates * h, h]         for the contribution of the previous step's h;  bias [gates * h], or None
    before  [states, rows, h]      the state before the first step, None for zeros;  last: behind the last; reversed, of the first position
    out     [t, rows, h]           h of each step
    kept    [t, rows, .. * h]      values of each step that backward needs, the previous h last
    of_gates  [t, rows, .. * h]    gradients of the inputs of each gate; for a GRU's new h twice, for the parts of x and of h

An LSTM's state is h and c, that of other kinds h. Steps whose new h is not linear in the previous h do not compose: ranks that hold
stretches of t pass the state from rank to rank. x is a matrix product over all positions, and so is the gradient of `weight`.

Hochreiter, Schmidhuber: Long Short-Term Memory (Neural Computation 9(8), 1997); Cho et al.: arXiv:1406.1078.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from meshc.ops import double_backward
from meshc.ops.definition import misfit, operator
from meshc.ops.turns import turn

States = Sequence[Tensor]
"""h and c of an LSTM, h of other kinds, [rows, h] each."""


@dataclass(frozen=True)
class CellKind:
    """
    gates, kept, made, states    sizes in multiples of h: gates of x and weight; values kept per step; gradients per step; state tensors
    step    (x, contribution of h to each gate, state) -> (state, kept, without the previous h)
    back    (gradients of the state, kept) -> (gradients of gates; those that go to h; of the previous state, without the part by `weight`)
    """

    gates: int
    kept: int
    made: int
    states: int
    step: Callable[[Tensor, Tensor, States], tuple[States, list[Tensor]]]
    back: Callable[[States, States], tuple[list[Tensor], list[Tensor], list[Tensor]]]


def _lstm(x: Tensor, sums: Tensor, state: States) -> tuple[States, list[Tensor]]:
    _, cell = state
    i, f, g, o = (x + sums).chunk(4, -1)
    i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
    made = f * cell + i * g
    return (o * made.tanh(), made), [i, f, g, o, cell]


def _lstm_back(grads: States, kept: States) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    (of_h, of_cell), (i, f, g, o, cell, _) = grads, kept
    shown = (f * cell + i * g).tanh()
    of_cell = of_cell + of_h * o * (1 - shown * shown)
    gates = [of_cell * g * i * (1 - i), of_cell * cell * f * (1 - f), of_cell * i * (1 - g * g), of_h * shown * o * (1 - o)]
    return gates, gates, [torch.zeros_like(of_h), of_cell * f]


def _gru(x: Tensor, sums: Tensor, state: States) -> tuple[States, list[Tensor]]:
    (h,) = state
    (of_r, of_z, of_n), (by_r, by_z, by_n) = x.chunk(3, -1), sums.chunk(3, -1)
    r, z = (of_r + by_r).sigmoid(), (of_z + by_z).sigmoid()
    n = (of_n + r * by_n).tanh()
    return ((h - n) * z + n,), [r, z, n, by_n]


def _gru_back(grads: States, kept: States) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    (of_h,), (r, z, n, by_n, h) = grads, kept
    of_n = of_h * (1 - z) * (1 - n * n)
    of_r, of_z = of_n * by_n * r * (1 - r), of_h * (h - n) * z * (1 - z)
    return [of_r, of_z, of_n, of_n * r], [of_r, of_z, of_n * r], [of_h * z]


def _tanh(x: Tensor, sums: Tensor, state: States) -> tuple[States, list[Tensor]]:
    made = (x + sums).tanh()
    return (made,), [made]


def _tanh_back(grads: States, kept: States) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    gate = grads[0] * (1 - kept[0] * kept[0])
    return [gate], [gate], [torch.zeros_like(gate)]


def _relu(x: Tensor, sums: Tensor, state: States) -> tuple[States, list[Tensor]]:
    made = (x + sums).relu()
    return (made,), [made]


def _relu_back(grads: States, kept: States) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    gate = torch.where(kept[0] > 0, grads[0], 0)
    return [gate], [gate], [torch.zeros_like(gate)]


KINDS: Final[Mapping[str, CellKind]] = {
    "lstm": CellKind(4, 6, 4, 2, _lstm, _lstm_back),
    "gru": CellKind(3, 5, 4, 1, _gru, _gru_back),
    "tanh": CellKind(1, 2, 1, 1, _tanh, _tanh_back),
    "relu": CellKind(1, 2, 1, 1, _relu, _relu_back),
}
"""`kind`, the operators' first argument -> the cell."""


def _empty_results(kind: str, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    how, (steps, rows, _), h = KINDS[kind], x.shape, weight.shape[1]
    return x.new_empty((steps, rows, h)), x.new_empty((steps, rows, how.kept * h)), x.new_empty((how.states, rows, h))


def _empty_gradients(kind: str, grad: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    how, (steps, rows, h) = KINDS[kind], grad.shape
    return grad.new_empty((steps, rows, how.made * h)), grad.new_empty((how.states, rows, h))


def _fit(
    operator: str, kind: str, weight: Tensor, x: Tensor | None = None, bias: Tensor | None = None, before: Tensor | None = None,
    grad: Tensor | None = None, kept: Tensor | None = None, of_last: Tensor | None = None, handed: Tensor | None = None, count: int = 0,
) -> None:  # fmt: skip
    everything = {
        "x": x, "grad": grad, "kept": kept, "weight": weight, "bias": bias, "before": before, "of_last": of_last, "handed": handed,
    }  # fmt: skip
    given = {name: one for name, one in everything.items() if one is not None}
    first, how = next(iter(given.values())), KINDS.get(kind)
    fits = how is not None and first.dim() == 3 and weight.dim() == 2 and 0 <= count <= first.shape[0] and weight.is_floating_point()
    if how is not None and fits:
        (steps, rows, _), h = first.shape, weight.shape[1]
        shapes: dict[str, tuple[int, ...]] = {
            "x": (steps, rows, how.gates * h), "grad": (steps, rows, h), "kept": (steps, rows, how.kept * h),
            "weight": (how.gates * h, h), "bias": (how.gates * h,),
        }  # fmt: skip
        fits = all(one.shape == shapes.get(name, (how.states, rows, h)) for name, one in given.items())
    if not fits or any((one.dtype, one.device) != (weight.dtype, weight.device) for one in given.values()):
        rule = (
            f"kind {kind!r} is one of {', '.join(KINDS)}; x is [t, rows, gates * h], weight [gates * h, h], bias [gates * h], a state "
            "[states, rows, h], grad is [t, rows, h], kept what rnn keeps, all of one floating dtype; at most t positions are steps"
        )
        raise misfit(operator, rule, **given)


@operator("rnn", results=_empty_results, fit=_fit)
def rnn(kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    return _steps(kind, x, weight, bias, before, reverse, x.shape[0])


@operator("rnn_backward", results=_empty_gradients, fit=_fit)
def rnn_backward(
    kind: str, grad: Tensor, of_last: Tensor | None, kept: Tensor, weight: Tensor, reverse: bool
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return _steps_back(kind, grad, of_last, kept, weight, reverse, kept.shape[0])


@turn("rnn_turn", rows={"x": 1, "before": 1}, edge="before", back=lambda reverse: reverse, results=_empty_results, fit=_fit)
def rnn_turn(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, handed: Tensor | None, reverse: bool, count: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Of a rank's stretch, whose first `count` positions are steps."""
    return _steps(kind, x, weight, bias, handed, reverse, count)


@turn(
    "rnn_turn_backward", rows={"grad": 1, "of_last": 1, "kept": 1}, edge="of_last", back=lambda reverse: not reverse,
    results=_empty_gradients, fit=_fit,
)  # fmt: skip
def rnn_turn_backward(
    kind: str, grad: Tensor, of_last: Tensor | None, handed: Tensor | None, kept: Tensor, weight: Tensor, reverse: bool, count: int
) -> tuple[Tensor, Tensor]:
    return _steps_back(kind, grad, handed, kept, weight, reverse, count)


def _setup(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    ctx.kind, x, weight, bias, before, ctx.reverse = inputs
    ctx.bias, ctx.before = bias is not None, before is not None
    ctx.set_materialize_grads(False)
    taken = before if before is not None and before.requires_grad else None  # a model may overwrite other tensors; `kept` has their values
    ctx.save_for_backward(weight, output[1], x, bias, taken)


def _backward(ctx, grad, _, of_last):  # type: ignore[no-untyped-def]
    weight, kept, *others = ctx.saved_tensors
    if double_backward.is_differentiated():
        x, bias, before = others
        if ctx.before and before is None:
            states = KINDS[ctx.kind].states
            begun = kept[-1 if ctx.reverse else 0].detach().chunk(KINDS[ctx.kind].kept, -1)
            before = torch.stack(begun[: -states - 1 : -1])
        steps = partial(_written_out, ctx.kind, ctx.reverse)
        return None, *double_backward.differentiable_gradients(steps, (x, weight, bias, before), (grad, of_last)), None
    h = weight.shape[1]
    grad = kept.new_zeros((*kept.shape[:-1], h)) if grad is None else grad
    gates, of_before = rnn_backward(ctx.kind, grad, of_last, kept, weight, ctx.reverse)
    of_x, to_h = gates, gates
    if ctx.kind == "gru":
        of_x, to_h = gates[..., : 3 * h], torch.cat([gates[..., : 2 * h], gates[..., 3 * h :]], -1)
    of_weight = to_h.flatten(0, 1).t() @ kept[..., -h:].flatten(0, 1)
    of_bias = to_h.sum((0, 1)) if ctx.bias else None
    return None, of_x, of_weight, of_bias, of_before if ctx.before else None, None


rnn.register_autograd(_backward, setup_context=_setup)


def _written_out(
    kind: str, reverse: bool, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`(out, last)` in torch operators, step by step."""
    how = KINDS[kind]
    state: States = list(x.new_zeros(how.states, x.shape[1], weight.shape[1]) if before is None else before)
    out: list[Tensor] = []
    for row in reversed([*x]) if reverse else x:
        state, _ = how.step(row, torch.nn.functional.linear(state[0], weight, bias), state)
        out.append(state[0])
    return torch.stack(out[::-1] if reverse else out), torch.stack(list(state))


def _steps(
    kind: str, x: Tensor, weight: Tensor, bias: Tensor | None, before: Tensor | None, reverse: bool, count: int
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`(out, kept, last)` over the first `count` positions; results at later positions are zero."""
    how, turned = KINDS[kind], weight.t()
    out, kept, last = (torch.zeros_like(made) if count < x.shape[0] else made for made in _empty_results(kind, x, weight))
    state: States = list(torch.zeros_like(last) if before is None else before)
    for t in reversed(range(count)) if reverse else range(count):
        sums = state[0] @ turned if bias is None else torch.addmm(bias, state[0], turned)
        new, rest = how.step(x[t], sums, state)
        torch.cat([*rest, state[0]], -1, out=kept[t])
        out[t], state = new[0], new
    torch.stack(list(state), out=last)
    return out, kept, last


def _steps_back(
    kind: str, grad: Tensor, of_last: Tensor | None, kept: Tensor, weight: Tensor, reverse: bool, count: int
) -> tuple[Tensor, Tensor]:  # fmt: skip
    how = KINDS[kind]
    gates, first = (
        torch.zeros_like(made) if count < grad.shape[0] else made for made in _empty_gradients(kind, grad, weight)
    )
    of_state = list(torch.zeros_like(first) if of_last is None else of_last)
    for t in range(count) if reverse else reversed(range(count)):
        made, to_h, rest = how.back([of_state[0] + grad[t], *of_state[1:]], kept[t].chunk(how.kept, -1))
        torch.cat(made, -1, out=gates[t])
        of_state = [torch.addmm(rest[0], gates[t] if to_h is made else torch.cat(to_h, -1), weight), *rest[1:]]
    torch.stack(of_state, out=first)
    return gates, first
