"""Second derivatives of operators whose backward is an operator, by torch's finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshc.ops.attention import attention
from meshc.ops.random import seed_step
from meshc.ops.rnn import KINDS, rnn
from meshc.ops.take import take


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    """One tensor is queries and keys; without `causal` a query to which all keys are hidden has gradients of zero."""
    bias = None if causal else torch.tensor([[0.5, -torch.inf, 0.0], [-torch.inf] * 3, [0.0] * 3], dtype=torch.float64)[None, None]
    x, v = normal(1, 2, 3, 2), normal(1, 2, 3, 2, seed=1)
    assert torch.autograd.gradgradcheck(lambda x, v: attention(x, x, v, bias, causal, 0.7)[0], (x, v))


def test_attention_that_drops_weights() -> None:
    """The same weights as forward; and a bias has a gradient."""
    shape = [1, 2, 3, 3]
    draws = (seed_step(3, 1, "cpu"), 4, 0.5, shape, shape, [0] * 4)
    q, k, v = (normal(1, 2, 3, 2, seed=seed) for seed in range(3))
    bias = normal(1, 1, 3, 3, seed=3)
    assert torch.autograd.gradgradcheck(lambda *x: attention(*x, False, 0.7, 0, 0, 0, 0, None, *draws)[0], (q, k, v, bias))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reverse", [False, True])
def test_recurrent_layers(kind: str, reverse: bool) -> None:
    gates, states = KINDS[kind].gates, KINDS[kind].states
    given = (normal(3, 2, gates * 2), normal(gates * 2, 2, seed=1), normal(gates * 2, seed=2), normal(states, 2, 2, seed=3))
    assert torch.autograd.gradgradcheck(lambda *x: rnn(kind, *x, reverse)[::2], given)


def test_take() -> None:
    """An index that is ignored takes nothing, of any order."""
    index = torch.tensor([2, 0, -100])
    assert torch.autograd.gradgradcheck(lambda x: take(x.square(), index, -100), (normal(3, 4),))
