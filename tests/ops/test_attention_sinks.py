"""Attention with sinks is a softmax with one more column, in values and in every gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from meshc.ops.attention_sinks import sink_attention


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v; a sink for each head, one of which outweighs all keys and one of which weighs next to nothing."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 4) for size in (5, 7, 7))
    return [x.to(dtype).requires_grad_() for x in (q, k, v, torch.tensor([0.3, 30.0, -30.0]).reshape(1, 3, 1, 1))]


def written_out(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor, scale: float) -> Tensor:
    scores = q @ k.transpose(2, 3) * scale
    return torch.softmax(torch.cat([scores if bias is None else scores + bias, sinks], -1), -1)[..., :-1] @ v


def some_hidden(least: float) -> Tensor:
    """From the first query every key is hidden, from the third all but one."""
    bias = torch.zeros(1, 1, 5, 7, dtype=torch.float64)
    bias[0, 0, 0], bias[0, 0, 2, 1:] = least, least
    return bias


@pytest.mark.parametrize("bias", [None, torch.randn(2, 1, 5, 7).double(), some_hidden(-torch.inf), some_hidden(-1.7e308)])
def test_it_is_one_more_column(bias: Tensor | None) -> None:
    found = []
    for call in (sink_attention, written_out):
        q, k, v, sinks = given = operands()
        out = call(q, k, v, bias, sinks.expand(2, -1, 5, -1), 0.5)
        found.append([out, *torch.autograd.grad(out.square().sum(), given)])
    for here, there in zip(*found, strict=True):
        assert torch.isfinite(there).all() and (here - there).abs().max() < 1e-12


@pytest.mark.parametrize("keys, learned", [(4, True), (6, False)])
def test_what_the_kernel_does_not_take_is_written_out(keys: int, learned: bool) -> None:
    """A bias that has a gradient; values of another size."""
    q, k, _, sinks = operands()
    v, bias = torch.randn(2, 3, 7, keys).double(), torch.randn(1, 3, 5, 7).double().requires_grad_(learned)
    given = q, k, v, bias, sinks.expand(2, -1, 5, -1), 0.5
    made = sink_attention(*given)
    assert (made - written_out(*given)).abs().max() < 1e-12
    assert not learned or torch.autograd.grad(made.sum(), bias)[0].abs().max() > 0


def test_in_bfloat16_it_is_as_near_as_its_rounding() -> None:
    q, k, v, sinks = operands(torch.bfloat16)
    exact = written_out(*(x.double() for x in (q, k, v)), None, sinks.double().expand(2, -1, 5, -1), 0.5)
    found = sink_attention(q, k, v, None, sinks.expand(2, -1, 5, -1), 0.5)
    assert found.dtype == torch.bfloat16 and (found.double() - exact).abs().max() < 0.02
