"""Reductions, orders, scans, softmax."""

from __future__ import annotations

import math

import torch

from tests.rules.samples.calls import b, begin, f, i, positive, sample

aten, ours = torch.ops.aten, torch.ops.meshc
begin(__name__)

sample(aten.sum.dim_IntList, f(5, 4, 3), [1])
sample(aten.sum.dim_IntList, f(5, 4, 3), [0, -1], True)
sample(aten.sum.dim_IntList, f(6, 4), [0], refine={0: (3, 2, 4)})
sample(aten.sum.dim_IntList, i(9, 5, 4), [0])
sample(aten.sum.dim_IntList, b(5, 4), [0])
sample(aten.sum.dim_IntList, f(5, 4), None)
sample(aten.sum.default, f(5, 4))
sample(aten.sum.default, f(5, 4), dtype=torch.float32)
sample(aten.mean.dim, f(5, 4, 3), [1])
sample(aten.mean.dim, f(5, 4, 3), [0, -1], True)
sample(aten.mean.dim, f(6, 4), [0], refine={0: (3, 2, 4)})
sample(aten.mean.default, f(5, 4))
sample(aten.mean.dim, f(5, 4).float(), [0], dtype=torch.float64)
sample(aten.mean.dim, f(), [-1])
sample(aten.amax.default, f(5, 4, 3) - 5, [1])
sample(aten.amax.default, f(5, 4) - 5, [-1, 0], True)
sample(aten.amax.default, -1 - i(9, 5, 4), [0])
sample(aten.amax.default, torch.zeros(5, 3, dtype=torch.bool), [0])
sample(aten.amin.default, f(5, 4, 3) + 5, [1])
sample(aten.amin.default, 5 + i(9, 5, 4), [0])
sample(aten.max.default, f(5, 4) - 5)
sample(aten.min.default, f(5, 4) + 5)
for op in (aten.cumsum, aten.cumprod, aten.logcumsumexp, aten.cummax, aten.cummin):
    sample(op.default, f(5, 4), 1)
    sample(op.default, f(5, 4), 0)
    sample(op.default, f(()), 0)
for op in (ours.cumsum_back, ours.logcumsumexp_back):
    sample(op.default, f(5, 7), 1)
    sample(op.default, f(7), 0)
    sample(op.default, f(6, 4), 0, refine={0: (3, 2, 4)})
for op in (aten.cummax, aten.cummin):
    sample(op.default, i(3, 6, 5), -1)  # equal ones, of which the last counts
    sample(op.default, b(5, 4), 0)
    sample(op.default, torch.tensor([1.0, 3.0, math.nan, 2.0, math.nan, 4.0, 0.0], dtype=torch.float64), 0)
    sample(op.default, torch.tensor([-math.inf] * 4 + [math.inf] * 3, dtype=torch.float64), 0)
    sample(op.default, f(6, 4), 0, refine={0: (3, 2, 4)})
sample(aten.cumsum.default, i(9, 6, 5), -1)
sample(aten.cumsum.default, b(5, 4), 0)
sample(aten.cumprod.default, f(6, 4), 0, refine={0: (3, 2, 4)})
sample(aten.logcumsumexp.default, torch.full((7,), -math.inf, dtype=torch.float64), 0)
for op in (aten.any, aten.all):
    for _x in (b(5, 4, 3), i(2, 5, 4, 3), f(5, 4, 3), torch.ones(5, 4, 3, dtype=torch.bool), torch.zeros(5, 4, 3, dtype=torch.bool)):
        sample(op.dim, _x, 1)
        sample(op.dims, _x, [0, 1], True)
        sample(op.default, _x)
for op in (aten.var, aten.std):
    sample(op.correction, f(5, 4), [1])
    sample(op.correction, f(5, 4), [0], correction=0, keepdim=True)
    sample(op.correction, f(5, 4))
    sample(op.correction, f(5, 6), [1], refine={0: (5, 3, 2)})
    sample(op.correction, torch.complex(f(5, 4), f(5, 4)), [0])
    sample(op.dim, f(5, 4), [1], False, True)
sample(aten.var.correction, f(5, 1), [1])
for op in (aten.linalg_vector_norm.default, aten.norm.ScalarOpt_dim):
    for _p in (2, 1, 0, 3, -1.5, math.inf, -math.inf):
        sample(op, f(5, 4), _p, [1], True)
    sample(op, f(5, 4, 3), 2, [0, 2])
sample(aten.linalg_vector_norm.default, f(5, 4), 1)
sample(aten.linalg_vector_norm.default, f(5, 4).float(), 2, [0], dtype=torch.float64)
sample(aten.norm.Scalar, f(5, 4), 2)
sample(aten.prod.default, f(5, 4))
sample(aten.prod.dim_int, f(5, 4), 1)
sample(aten.prod.dim_int, i(3, 5, 7) + 1, 0, True)
sample(aten.histc.default, f(5, 7), 4, -1, 1)
sample(aten.histc.default, torch.zeros(7, dtype=torch.float64), 4, 0, 3)
sample(aten.histc.default, i(4, 6).double(), 4, 0, 3, refine={0: (2, 3)})
sample(aten.histc.default, f(5, 7), 4)
sample(aten.logsumexp.default, f(5, 7), [1])
sample(aten.logsumexp.default, f(5, 4, 7), [2, 0], True)
sample(aten.logsumexp.default, f(5, 6), [-1], refine={0: (5, 3, 2)})
sample(aten.logsumexp.default, torch.full((5, 7), -math.inf, dtype=torch.float64), [1])
for op in (aten.nansum.default, aten.count_nonzero.dim_IntList):
    sample(op, f(5, 4), [1])
    sample(op, f(5, 4), [0, 1])
sample(aten.nansum.default, torch.where(b(5, 7), f(5, 7), math.nan), [0], True)
sample(aten.count_nonzero.default, i(2, 5, 7))
sample(aten._softmax.default, f(5, 4, 3), 1, False)
sample(aten._softmax_backward_data.default, f(5, 4), positive(5, 4), -1, torch.float64)
sample(aten._log_softmax.default, f(5, 4, 7), 1, False)
sample(aten._log_softmax.default, f(5, 6), -1, False, refine={0: (5, 3, 2)})
sample(aten._log_softmax_backward_data.default, f(5, 7), f(5, 7).log_softmax(-1), -1, torch.float64)
sample(aten._log_softmax_backward_data.default, f(5, 6), f(5, 6).log_softmax(-1), -1, torch.float64, refine={0: (5, 3, 2)})
sample(aten._safe_softmax.default, f(5, 4, 3), 1)
