"""All scores at once: what the CPU's kernels give, in float64."""

from __future__ import annotations

import math

import pytest
import torch

from meshc.ops.attention import attention, attention_backward
from meshc.ops.attention_in_full import in_full, in_full_backward


@pytest.mark.parametrize(("queries", "keys", "causal", "biased"), [(5, 7, False, True), (7, 7, True, False), (4, 9, True, False)])
def test_as_the_kernels(queries, keys, causal, biased):
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 3, queries, 8, dtype=torch.float64).unbind()
    k, v = torch.randn(2, 2, 3, keys, 8, dtype=torch.float64).unbind()
    bias = torch.randn(2, 1, queries, keys, dtype=torch.float64) if biased else None
    if bias is not None:
        bias[0, :, 1, 2:] = -math.inf
    wanted = attention(q, k, v, bias, causal, 0.3)
    found = in_full(q, k, v, bias, causal, 0.3)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
    gradients = in_full_backward(grad, q, k, v, bias, *found, causal, 0.3)
    torch.testing.assert_close(gradients, attention_backward(grad, q, k, v, bias, *wanted, causal, 0.3), rtol=1e-12, atol=1e-12)


def test_a_query_that_sees_nothing():
    q, k, v = torch.randn(3, 1, 1, 4, 8, dtype=torch.float64).unbind()
    bias = torch.zeros(1, 1, 4, 4, dtype=torch.float64)
    bias[:, :, 2] = -math.inf
    out, lse = in_full(q, k, v, bias, False, 1.0)
    assert out[0, 0, 2].eq(0).all() and lse[0, 0, 2] == -math.inf
    assert all(x.isfinite().all() for x in in_full_backward(torch.ones_like(q), q, k, v, bias, out, lse, False, 1.0))
