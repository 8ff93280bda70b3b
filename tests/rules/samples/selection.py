"""Largest entries and their places, also where several are equal, NaN, or nothing but minus infinity."""

from __future__ import annotations

import math

import torch

from tests.rules.samples.calls import b, begin, f, i, sample

aten = torch.ops.aten
begin(__name__)

_nan = f(5, 7)
_nan[1, 3] = _nan[1, 5] = _nan[4, 6] = math.nan
for op in (aten.argmax.default, aten.argmin.default, aten.max.dim, aten.min.dim):
    sample(op, f(5, 4), 1)
    sample(op, f(5, 4), 0, True)
    sample(op, i(3, 5, 7), 1)
    sample(op, _nan, 1)
    sample(op, torch.full((5, 7), -math.inf, dtype=torch.float64), -1)
    sample(op, f(4, 6), 1, refine={0: (4, 3, 2)})
for op in (aten.argmax.default, aten.argmin.default):
    sample(op, f(5, 4))
    sample(op, i(3, 5, 7))
    sample(op, f(5, 6), refine={0: (5, 3, 2)})
sample(aten.max.dim, b(5, 7), 1)
sample(aten.sort.default, f(5, 4), 0, True)
sample(aten.sort.stable, f(5, 4), stable=True, dim=1)
sample(aten.topk.default, f(5, 4), 2)
sample(aten.topk.default, f(5, 4), 5, 0)
for op in (aten.median.dim, aten.nanmedian.dim):
    sample(op, f(5, 7), 1)
    sample(op, f(5, 7), 0, True)
sample(aten.mode.default, i(3, 5, 7).double())
sample(aten.kthvalue.default, f(5, 7), 2)
sample(aten.kthvalue.default, f(5, 7), 3, 0, True)
for op in (aten.median.default, aten.nanmedian.default):
    sample(op, f(5, 7))
