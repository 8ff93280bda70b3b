"""Attention that drops weights or whose bias has a gradient, whole, in blocks of its queries, and in blocks of keys that are joined."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from meshc.ops import explicit_attention as explicit
from meshc.ops.attention import attention, attention_bias_backward
from meshc.ops.attention_join import attention_merge
from meshc.ops.random import keep_mask, seed_step

QUERIES, KEYS, CALL, SCALE = 37, 41, 7, 0.5
SEED = seed_step(5, 3)
WHOLE = [2, 3, QUERIES, KEYS]


def operands(shape: tuple[int, ...] | None) -> list[Tensor | None]:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, size, 4, dtype=torch.float64, requires_grad=True) for size in (QUERIES, KEYS, KEYS))
    return [q, k, v, None if shape is None else torch.randn(shape, dtype=torch.float64, requires_grad=True)]


def draws(p: float, offset: int = 0, keys: int = KEYS) -> tuple[Any, ...]:
    return (SEED, CALL, p, WHOLE, [2, 3, QUERIES, keys], [0, 0, 0, offset]) if p else ()


def called(p: float, causal: bool = False, window: int = 0, offset: int = 0) -> tuple[Any, ...]:
    """The arguments behind the bias, of a call over all keys."""
    return causal, SCALE, window, offset, 0, 0, None, *draws(p)


def plain(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, p: float, causal: bool, window: int = 0, offset: int = 0) -> Tensor:
    scores = q @ k.transpose(2, 3) * SCALE
    scores = scores if bias is None else scores + bias
    at, keys = torch.arange(QUERIES)[:, None] + offset, torch.arange(KEYS)
    hidden = (keys > at) | (keys <= at - window if window else keys < 0)
    weights = torch.softmax(scores.masked_fill(hidden, -math.inf) if causal else scores, -1)
    return (torch.where(keep_mask(SEED, CALL, p, WHOLE), weights / (1 - p), 0.0) if p else weights) @ v


HOW: list[tuple[tuple[int, ...] | None, tuple[Any, ...]]] = [
    (None, (False,)), ((2, 3, QUERIES, KEYS), (False,)), ((1, 3, QUERIES, KEYS), (False,)), ((2, 1, 1, KEYS), (False,)),
    ((1, 1, QUERIES, 1), (False,)), (None, (True, 0, 4)), (None, (True, 5, 4)),
]  # fmt: skip


@pytest.mark.parametrize("at_once", [1 << 20, 8])
@pytest.mark.parametrize("p", [0.0, 0.3])
@pytest.mark.parametrize("shape, how", HOW)
def test_it_is_softmax_with_what_is_dropped(
    shape: tuple[int, ...] | None, how: tuple[Any, ...], p: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are all gradients, of all queries at once and of 16 at a time."""
    monkeypatch.setattr(explicit, "AT_ONCE", at_once)
    given = operands(shape)
    out, _ = attention(*given, *called(p, *how))
    expected = plain(*given, p, *how)  # type: ignore[arg-type]
    learned, grad = [x for x in given if x is not None], torch.randn(out.shape, dtype=out.dtype)
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(torch.autograd.grad(out, learned, grad), torch.autograd.grad(expected, learned, grad), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("never", [-math.inf, -1e38])
def test_what_a_bias_hides_from_all_queries_of_a_block_is_not_computed(never: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents, whose queries see no other's keys: dropped weights, and gradients, the bias's too, are as ever."""
    monkeypatch.setattr(explicit, "AT_ONCE", 8)
    q, k, v, bias = operands((1, 3, QUERIES, KEYS))
    assert q is not None and k is not None and v is not None and bias is not None
    queries, keys = torch.arange(QUERIES)[:, None] // 20, torch.arange(KEYS) // 20
    with torch.no_grad():
        bias.masked_fill_(queries != keys, never)
    taken: list[slice] = []
    scores = explicit._scores

    def counted(q: Tensor, k: Tensor, bias: Tensor | None, scale: float) -> Tensor:
        taken.append(slice(q.shape[2], k.shape[2]))
        return scores(q, k, bias, scale)

    monkeypatch.setattr(explicit, "_scores", counted)
    given = [q, k, v, bias]
    out, _ = attention(*given, *called(0.3))
    expected, grad = plain(q, k, v, bias, 0.3, False), torch.randn(2, 3, QUERIES, 4, dtype=out.dtype)
    torch.testing.assert_close(out, expected)
    for mine, theirs in zip(torch.autograd.grad(out, given, grad), torch.autograd.grad(expected, given, grad), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert [(one.start, one.stop) for one in taken] == [(16, 20), (16, 40), (5, 20)] * 2


def test_blocks_of_keys_are_the_whole() -> None:
    """Tiles of 16 keys, the last one padded with NaN: outputs are joined, gradients of queries add up, those of a bias lie side by side."""
    q, k, v, bias = operands((1, 3, QUERIES, KEYS))
    assert q is not None and k is not None and v is not None and bias is not None
    out, lse = attention(q, k, v, bias, *called(0.3))
    grad, tile = torch.randn(out.shape, dtype=out.dtype), 16
    blocks = []
    for first in range(0, KEYS, tile):
        keys, values, of_bias = (torch.full((*x.shape[:dim], tile, *x.shape[dim + 1 :]), math.nan, dtype=x.dtype)
                                 for x, dim in ((k, 2), (v, 2), (bias, 3)))  # fmt: skip
        real = min(tile, KEYS - first)
        keys[:, :, :real], values[:, :, :real], of_bias[..., :real] = (
            k[:, :, first : first + real], v[:, :, first : first + real], bias[..., first : first + real]
        )  # fmt: skip
        blocks.append((keys, values, of_bias, (False, SCALE, 0, 0, 0, first, real, *draws(0.3, first, tile))))
    made: tuple[Tensor, Tensor] | None = None
    for keys, values, of_bias, numbers in blocks:
        part = attention(q, keys, values, of_bias, *numbers)
        made = part if made is None else attention_merge(*made, *part)
    assert made is not None
    torch.testing.assert_close(made, (out, lse))
    parts = [
        attention_bias_backward(grad, q, keys, values, of_bias, out, lse, *numbers) for keys, values, of_bias, numbers in blocks
    ]
    dq, dk, dv, dbias = attention_bias_backward(grad, q, k, v, bias, out, lse, *called(0.3))
    torch.testing.assert_close(sum(part[0] for part in parts), dq)
    for index, dim, whole in ((1, 2, dk), (2, 2, dv), (3, 3, dbias)):
        torch.testing.assert_close(torch.cat([part[index] for part in parts], dim).narrow(dim, 0, KEYS), whole)


def test_a_draw_may_have_a_dim_for_each_factor() -> None:
    """A batch of 2 as 2 x 1: what is drawn is what the whole draws."""
    q, k, v, _ = operands(None)
    assert q is not None
    tile = (SEED, CALL, 0.3, [2, 1, 3, QUERIES, KEYS], [2, 1, 3, QUERIES, KEYS], [0] * 5)
    found, expected = (attention(q, k, v, None, False, SCALE, 0, 0, 0, 0, None, *drawn) for drawn in (tile, draws(0.3)))
    torch.testing.assert_close(found, expected)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q, k, v, _ = operands(None)
    assert q is not None and k is not None and v is not None
    bias = torch.zeros(1, 1, QUERIES, KEYS, dtype=torch.float64)
    bias[:, :, 3] = -math.inf
    bias.requires_grad_()
    out, lse = attention(q, k, v, bias, *called(0.3))
    assert not out[:, :, 3].any() and (lse[:, :, 3] == -math.inf).all()
    for gradient in torch.autograd.grad(out.square().sum(), [q, k, v, bias]):
        assert gradient.isfinite().all()


def test_in_bfloat16_weights_are_added_up_in_float32() -> None:
    q, k, v, bias = (None if x is None else x.detach().bfloat16() for x in operands((1, 3, QUERIES, KEYS)))
    out, lse = attention(q, k, v, bias, *called(0.3))
    wide = [x.double() if x is not None else None for x in (q, k, v, bias)]
    assert out.dtype == torch.bfloat16 and lse.dtype == torch.float32
    torch.testing.assert_close(out.double(), plain(*wide, 0.3, False), atol=0.03, rtol=0.03)  # type: ignore[arg-type]
