"""Attention on a GPU, by whichever kernel serves, beside all scores in float64. Needs a GPU; nothing else does."""

from __future__ import annotations

import pytest
import torch

from meshc.ops.attention import attention, attention_backward
from meshc.ops.attention_in_full import in_full, in_full_backward

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

CASES = {
    "causal": (64, 64, 64, {"causal": True}),
    "whole": (64, 48, 64, {"causal": False}),
    "behind a cache": (3, 40, 64, {"causal": True, "offset": 37}),
    "a window": (96, 96, 64, {"causal": True, "window": 20}),
    "a bias": (64, 48, 64, {"causal": False, "biased": True}),
    "heads of 20": (64, 64, 20, {"causal": True}),
    "heads of 20, all keys": (64, 48, 20, {"causal": False}),
    "heads of 20 and a bias": (64, 48, 20, {"causal": False, "biased": True}),
    "heads of 24 behind a cache": (3, 40, 24, {"causal": True, "offset": 37}),
    "heads of 72 and a bias": (64, 64, 72, {"causal": False, "biased": True}),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("case", CASES)
def test_as_all_scores(case, dtype):
    queries, keys, head, how = CASES[case]
    torch.manual_seed(0)
    q, grad = (torch.randn(2, 3, queries, head, device="cuda", dtype=dtype) for _ in range(2))
    k, v = (torch.randn(2, 3, keys, head, device="cuda", dtype=dtype) for _ in range(2))
    biased, causal = how.get("biased", False), how["causal"]
    bias = torch.randn(2, 1, queries, keys, device="cuda", dtype=dtype) if biased else None
    window, offset, scale = how.get("window", 0), how.get("offset", 0), 0.2
    out, lse = attention(q, k, v, bias, causal, scale, window, offset)
    found = attention_backward(grad, q, k, v, bias, out, lse, causal, scale, window, offset)
    again = attention_backward(grad, q, k, v, bias, out.contiguous(), lse, causal, scale, window, offset)
    at = torch.arange(queries, device="cuda").unsqueeze(1) + offset
    places = torch.arange(keys, device="cuda")
    hidden = (places > at) | ((places <= at - window) if window else False) if causal else torch.zeros_like(places > at)
    mask = torch.zeros(1, 1, queries, keys, device="cuda", dtype=torch.float64).masked_fill(hidden, -torch.inf)
    wide = [x.double() for x in (grad, q, k, v)]
    over = mask if bias is None else mask + bias.double()
    wanted = in_full(*wide[1:], over, False, scale)
    gradients = in_full_backward(*wide, over, *wanted, False, scale)
    near = {torch.bfloat16: 3e-2, torch.float16: 5e-3, torch.float32: 1e-3, torch.float64: 1e-10}[dtype]
    for mine, theirs in zip((out, lse, *found, *again), (*wanted, *gradients, *gradients), strict=True):
        assert (mine.double() - theirs).norm() <= near * theirs.norm()
