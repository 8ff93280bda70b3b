"""Losses that compare entry by entry, and of what frames say."""

from __future__ import annotations

import torch

import meshc.ops.ctc  # noqa: F401
from tests.rules.samples.calls import begin, f, positive, sample

aten = torch.ops.aten
ours = torch.ops.meshc
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

# -------------------------------------------------------------------------------------------------------------- what frames say, by row

_said = torch.tensor([[1, 2, 3], [1, 1, 2], [4, 3, 2], [2, 2, 1], [3, 1, 1]])
_lengths = torch.tensor([6, 5, 4, 2, 6]), torch.tensor([3, 2, 1, 3, 0])
for endless in (False, True):
    sample(ours.ctc_loss.default, f(6, 5, 5).log_softmax(-1), _said, *_lengths, 0, endless)
sample(ours.ctc_loss_backward.default, f(5), f(6, 5, 5).log_softmax(-1), _said, *_lengths, 0, True)
