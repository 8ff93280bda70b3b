"""Draws."""

from __future__ import annotations

import torch

from meshc.ops.random import seed_step
from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)

_seed = seed_step(3, 5)
for _shape in ((5, 4), (7,)):
    _zeros = [0] * len(_shape)
    sample(ours.dropout.default, f(*_shape), _seed, 2, 0.3, _shape, _shape, _zeros)
    sample(ours.uniform.default, _seed, 2, _shape, _shape, _zeros, torch.float64)
    sample(ours.normal.default, _seed, 2, _shape, _shape, _zeros, torch.float64)
    sample(ours.keep_mask.default, _seed, 2, 0.3, _shape, _shape, _zeros)
sample(ours.dropout.default, f(6, 5), _seed, 2, 0.3, (6, 5), (6, 5), [0, 0], refine={0: (3, 2, 5)})
sample(ours.uniform.default, _seed, 2, (6, 5), (6, 5), [0, 0], torch.float64, refine={~0: (3, 2, 5)})
