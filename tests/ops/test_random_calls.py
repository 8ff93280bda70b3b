"""torch's functions that draw: which they are, and what they are made of."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshc.frontend.reference_random import ReferenceRandom
from meshc.ops import random
from meshc.ops.random_calls import RAISED, draws, is_random


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 6, num_layers=3, dropout=0.5)
        self.attention = nn.MultiheadAttention(6, 2, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x)[0]
        x = self.attention(x, x, x)[0]
        x = F.dropout(F.dropout(F.dropout(x, 0.0), 1.0) + torch.randn(6), 0.1) + F.alpha_dropout(x, 0.3)
        return x.bernoulli_(0.5) * F.scaled_dot_product_attention(x, x, x, dropout_p=0.2)


def test_draws_counts_what_the_reference_sees() -> None:
    class Count(torch.overrides.TorchFunctionMode):
        total, depth = 0, 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.total += draws(func, args, kwargs)
            return func(*args, **(kwargs or {}))

    with ReferenceRandom(0) as reference, Count() as count:
        model = Several()
        before, count.total = reference.calls, 0
        model(torch.randn(4, 3, 6))
    assert count.total == reference.calls - before == 2 + 1 + 1 + 1 + 1 + 1 + 1


def test_is_random() -> None:
    for target in (F.dropout, torch.rand, torch.bernoulli, torch.randperm, "bernoulli_", torch.Tensor.normal_, F.dropout3d):
        assert is_random(target)
    for target in (F.relu, torch.add, "view", torch.Tensor.view, F.scaled_dot_product_attention, torch.zeros):
        assert not is_random(target)
    assert draws(F.scaled_dot_product_attention, (0, 0, 0), {"dropout_p": 0.1}) == 1
    assert draws(F.dropout, (0, 0.1, False)) == draws(F.dropout, (0, 1.0)) == draws(F.alpha_dropout, (0, 0.1)) == 0
    assert draws(F.dropout, (0, 0.1)) == draws(torch.dropout, (0, 0.1, True)) == draws(torch.native_dropout, (0, 0.0, True)) == 1


RAISED_CALLS = [
    (F.dropout, (0.3,), {}),
    (torch.dropout, (0.3, True), {}),
    (F.dropout1d, (0.3,), {}),
    (F.dropout2d, (0.3,), {}),
    (torch.feature_dropout, (0.3, True), {}),
    (F.alpha_dropout, (0.3, True), {}),
    (torch.native_dropout, (0.3, True), {}),
    (torch.rand_like, (), {}),
    (torch.randn_like, (), {"dtype": torch.float64}),
    (torch.bernoulli, (0.25,), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), RAISED_CALLS)
def test_raised_functions_mean_what_the_reference_draws(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 4)
    with warnings.catch_warnings(), ReferenceRandom(1, 2) as reference:
        warnings.simplefilter("ignore")  # dropout2d on three dims
        expected = target(x, *args, **kwargs)
    assert reference.calls == 1
    ours = RAISED[target](x, *args, **kwargs, seed_step=random.seed_step(1, 2), call=0)
    if target is torch.native_dropout:
        expected, ours = expected[0], ours[0]
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("target", [F.dropout1d, F.dropout3d])
def test_raised_channel_dropout_without_batch(target: Any) -> None:
    x = torch.ones(3, 4) if target is F.dropout1d else torch.ones(3, 4, 2, 2)
    with ReferenceRandom(1):
        expected = target(x, 0.5)
    torch.testing.assert_close(RAISED[target](x, 0.5, seed_step=random.seed_step(1), call=0), expected)
