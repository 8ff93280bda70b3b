"""Steps of recurrent layers are torch's own, however they are taken: whole, in parts of the rows, in stretches that hand a state on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshc.ops.recurrent import RAISED
from meshc.ops.rnn import KINDS, rnn, rnn_backward, rnn_turn, rnn_turn_backward
from meshc.ops.turns import in_turn

STEPS, ROWS, H = 7, 4, 3
TORCHS = {
    "lstm": (nn.LSTM, torch.lstm, {}), "gru": (nn.GRU, torch.gru, {}),
    "tanh": (nn.RNN, torch.rnn_tanh, {}), "relu": (nn.RNN, torch.rnn_relu, {"nonlinearity": "relu"}),
}  # fmt: skip


def numbers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def leaves(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [leaf for each in found for leaf in leaves(each)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{}, {"bias": False, "batch_first": True}, {"bidirectional": True, "num_layers": 2}])
def test_layers_of_torch_and_their_gradients(kind: str, how: dict[str, Any]) -> None:
    made, function, more = TORCHS[kind]
    torch.manual_seed(0)
    layer = made(5, H, **how, **more).double()
    x = numbers(*((ROWS, STEPS) if layer.batch_first else (STEPS, ROWS)), 5).requires_grad_()
    states = [numbers(layer.num_layers * (1 + layer.bidirectional), ROWS, H).requires_grad_() for _ in range(KINDS[kind].states)]
    start = tuple(states) if kind == "lstm" else states[0]
    wanted = leaves(layer(x, start))
    given = x, start, layer._flat_weights, layer.bias, layer.num_layers, 0.0, True, layer.bidirectional, layer.batch_first
    found = leaves(RAISED[function](*given))
    cotangents = [numbers(*each.shape) for each in wanted]
    operands = [x, *states, *layer.parameters()]
    pairs = zip(torch.autograd.grad(found, operands, cotangents), torch.autograd.grad(wanted, operands, cotangents), strict=True)
    for mine, its in (*zip(found, wanted, strict=True), *pairs):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("kind", KINDS)
def test_the_last_state_alone_has_a_gradient(kind: str) -> None:
    how = KINDS[kind]
    x, weight = numbers(STEPS, ROWS, how.gates * H).requires_grad_(), numbers(how.gates * H, H).requires_grad_()
    out, _, last = rnn(kind, x, weight, None, None, False)
    torch.testing.assert_close(last[0], out[-1])
    by_last, by_out = (torch.autograd.grad(each.sum(), (x, weight), retain_graph=True) for each in (last[0], out[-1]))
    for mine, its in zip(by_last, by_out, strict=True):
        torch.testing.assert_close(mine, its)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_three_ranks_in_turns_are_one(kind: str, reverse: bool, parts: int) -> None:
    """Stretches of 3, 3 and 1 positions, each filled up to 3; forward from the first rank to the last, backward the other way."""
    how, ranks, tile = KINDS[kind], 3, 3
    x, weight, bias = numbers(STEPS, ROWS, how.gates * H), numbers(how.gates * H, H), numbers(how.gates * H)
    before, grad, of_last = numbers(how.states, ROWS, H), numbers(STEPS, ROWS, H), numbers(how.states, ROWS, H) + 1
    out, kept, last = rnn(kind, x, weight, bias, before, reverse)
    gates, first = rnn_backward(kind, grad, of_last, kept, weight, reverse)

    def stretch(y: Tensor, rank: int) -> Tensor:
        return torch.nn.functional.pad(y[rank * tile : (rank + 1) * tile], (0, 0, 0, 0, 0, max(0, (rank + 1) * tile - STEPS)), value=9.0)

    def count(rank: int) -> int:
        return min(tile, STEPS - rank * tile)

    def chained(back: bool, call: Any) -> list[list[tuple[Tensor, ...]]]:
        found: list[list[tuple[Tensor, ...]]] = [[] for _ in range(ranks)]
        for slot in range(parts + ranks - 1):
            sent = [made[-1][-1] if made else None for made in found]
            for rank in range(ranks):
                source = rank + 1 if back else rank - 1
                found[rank].append(call(rank, sent[source] if 0 <= source < ranks else None, (slot, parts, rank, ranks)))
        return found

    made = chained(reverse, lambda rank, handed, turn: rnn_turn(
        kind, stretch(x, rank), weight, bias, before, handed, reverse, count(rank), *turn))  # fmt: skip
    back = chained(not reverse, lambda rank, handed, turn: rnn_turn_backward(
        kind, stretch(grad, rank), of_last, handed, stretch(kept, rank), weight, reverse, count(rank), *turn))  # fmt: skip
    for rank in range(ranks):
        here = slice(rank * tile, rank * tile + count(rank))
        for index, whole in enumerate((out, kept)):
            torch.testing.assert_close(in_turn([turn[index] for turn in made[rank]], 1, rank, ranks, reverse)[: count(rank)], whole[here])
        torch.testing.assert_close(in_turn([turn[0] for turn in back[rank]], 1, rank, ranks, not reverse)[: count(rank)], gates[here])
    end, begin = (0, ranks - 1) if reverse else (ranks - 1, 0)
    torch.testing.assert_close(in_turn([turn[2][0] for turn in made[end]], 1, end, ranks, reverse), last)
    torch.testing.assert_close(in_turn([turn[1][0] for turn in back[begin]], 1, begin, ranks, not reverse), first)


def test_no_steps_leave_the_state_as_it_was() -> None:
    before = numbers(2, ROWS, H)
    out, _, last = rnn("lstm", numbers(1, ROWS, 4 * H)[:0], numbers(4 * H, H), None, before, False)
    assert out.shape == (0, ROWS, H) and torch.equal(last, before)
