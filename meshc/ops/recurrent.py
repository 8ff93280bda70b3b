"""Torch's LSTM, GRU and RNN layers as a product over all positions and `meshc::rnn`: a program does not grow with the sequence.

    out, h, c = torch.lstm(x, (h, c), weights, ...)      for each layer and direction:    made = linear(x, w_ih, b_ih)
                                                                                           out, kept, last = rnn(made, w_hh, b_hh, before)

Layers on packed sequences, whose rows end at different steps, and an LSTM with projections stay torch's own functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from meshc.ir.functions import Function, Target
from meshc.lazy_module import LazyModule

if TYPE_CHECKING:
    from meshc.ops import rnn
else:
    rnn = LazyModule("meshc.ops.rnn")

Layers = Callable[..., tuple[Tensor, ...]]


def _layers(kind: str, torchs: Function) -> Layers:
    """Replacement of `torchs`, a stack of layers of one kind without dropout between them."""

    def layers(*args: Any) -> tuple[Tensor, ...]:
        if not isinstance(args[3], bool):  # a packed sequence has its batch sizes as one more argument
            return tuple(torchs(*args))
        x, given, weights, biases, count, _, _, both, batch_first = args
        ways = 2 if both else 1
        each = len(weights) // (count * ways)
        if each != (4 if biases else 2):
            return tuple(torchs(*args))
        states = [given] if isinstance(given, Tensor) else list(given)
        x, ends = x.transpose(0, 1) if batch_first else x, list[Tensor]()
        for layer in range(count):
            made = []
            for way in range(ways):
                index = layer * ways + way
                before = torch.stack([state[index] for state in states])
                out, last = _one(kind, x, weights[index * each : (index + 1) * each], before, way == 1)
                made.append(out)
                ends.append(last)
            x = torch.cat(made, -1) if both else made[0]
        x = x.transpose(0, 1) if batch_first else x
        return (x, *(torch.stack([end[index] for end in ends]) for index in range(len(states))))

    return layers


def _one(kind: str, x: Tensor, weights: Sequence[Tensor], before: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """(h of each step, the last state) of one layer in one direction."""
    w_in, w_before, *biases = weights
    b_in, b_before = biases or (None, None)
    out, _, last = rnn.rnn(kind, functional.linear(x, w_in, b_in), w_before, b_before, before, reverse)
    return out, last


RAISED: Final[dict[Target, Function]] = {
    torch.lstm: _layers("lstm", torch.lstm),
    torch.gru: _layers("gru", torch.gru),
    torch.rnn_tanh: _layers("tanh", torch.rnn_tanh),
    torch.rnn_relu: _layers("relu", torch.rnn_relu),
}
"""Torch's function -> its replacement."""
