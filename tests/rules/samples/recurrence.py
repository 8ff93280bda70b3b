"""Linear recurrences."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)

sample(ours.recurrence.default, f(5, 7), f(5, 7), None, 1)
sample(ours.recurrence.default, f(5, 7, 3), f(5, 7, 3), None, 1)
sample(ours.recurrence.default, f(7), f(7), None, 0)
sample(ours.recurrence.default, f(5, 6), f(5, 6), None, 1, refine={0: (5, 3, 2)})
sample(ours.recurrence_backward.default, f(5, 7), f(5, 7), f(5, 7), None, None, 1)
sample(ours.recurrence_backward.default, f(7, 5, 3), f(7, 5, 3), f(7, 5, 3), None, None, 0)
sample(ours.recurrence_backward.default, f(5, 6), f(5, 6), f(5, 6), None, None, 1, refine={0: (5, 3, 2)})
sample(ours.recurrence_turn.default, f(6, 7), f(6, 7), f(1, 3, 1), 1, 0, 1, 2, 1, 2)
sample(ours.recurrence_backward_turn.default, f(6, 7), f(6, 7), f(6, 7), f(6, 1), f(1, 3, 1), 1, 0, 1, 2, 0, 2)
