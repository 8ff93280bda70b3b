"""Losses that compare entry by entry."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, positive, sample

aten = torch.ops.aten
begin(__name__)

for reduction in range(3):
    for op in (aten.mse_loss, aten.huber_loss, aten.smooth_l1_loss, aten.soft_margin_loss):
        sample(op.default, f(5, 7), f(5, 7), reduction)
    sample(aten.huber_loss.default, f(5, 7), f(5, 7), reduction, 0.3)
    sample(aten.smooth_l1_loss.default, f(5, 7), f(5, 7), reduction, beta=0.3)
    sample(aten.mse_loss.default, f(5, 7), f(1, 7), reduction)
    sample(aten.mse_loss.default, f(5, 1), f(1, 7), reduction)
    sample(aten.binary_cross_entropy.default, f(5, 7).sigmoid(), f(5, 7).sigmoid(), None, reduction)
    sample(aten.binary_cross_entropy.default, f(5, 7).sigmoid(), f(5, 7).sigmoid(), positive(7), reduction)
    sample(aten.binary_cross_entropy_with_logits.default, f(5, 7), f(5, 7).sigmoid(), None, positive(7), reduction)
    sample(aten.binary_cross_entropy_with_logits.default, f(5, 7), f(5, 7), positive(5, 7), positive(7), reduction)
sample(aten.mse_loss.default, f(5, 6), f(5, 6), refine={0: (5, 3, 2)})
