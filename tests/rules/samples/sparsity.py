"""The largest of each group along each dim, and gradients that draw the others towards zero."""

from __future__ import annotations

import torch

import meshc.ops.sparsity  # noqa: F401
from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)

for _shape, _dim in (((5, 3, 4), 2), ((5, 4, 3), 1), ((4, 6), 0), ((5, 1, 4), 2)):
    sample(ours.keep_largest.default, f(*_shape), 2, _dim)
    sample(ours.refine_gradient.default, f(*_shape), f(*_shape), 2, _dim, 0.25)
    sample(ours.is_largest.default, f(*_shape), 2, _dim)
    for _steps in (0, 1):
        for _operator in (ours.next_mask.default, ours.keep_masked.default):
            sample(_operator, f(*_shape), ours.is_largest(f(*_shape), 2, _dim), torch.tensor([_steps]), 2, _dim, 2, -1)
sample(ours.keep_largest.default, f(3, 4, 8).round(), 3, 2)
