"""The gated delta rule."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.rules.samples.calls import begin, f, sample

ours = torch.ops.meshc
begin(__name__)


TURN = (1, 1, 2, 1, 2)
"""Along dim 1, of two parts the first, on the second of two ranks; backward the second rank takes the second."""


def _operands(*lead: int, t: int = 7) -> tuple[Tensor, ...]:
    """q, k, v, e, g: 3 numbers a key, 5 a value."""
    return f(*lead, t, 3), f(*lead, t, 3) / 2, f(*lead, t, 5), f(*lead, t, 3) / 2, -f(*lead, t).abs()


sample(ours.delta_rule.default, *_operands(2, 5), None)
sample(ours.delta_rule.default, *_operands(5), f(5, 3, 5))
sample(ours.delta_rule_backward.default, f(2, 5, 7, 5), *_operands(2, 5), None, None)
sample(ours.delta_rule_backward.default, f(5, 7, 5), *_operands(5), f(5, 3, 5), None)
sample(ours.delta_rule_backward.default, f(5, 7, 5), *_operands(5), None, f(5, 3, 5))
sample(ours.delta_rule_backward.default, f(5, 6, 5), *_operands(5, t=6), f(5, 3, 5), f(5, 3, 5), refine={0: (5, 3, 2, 5)})
sample(ours.delta_rule_turn.default, *_operands(2, 4), f(2, 4, 3, 5), f(1, 2, 2, 3, 5), *TURN)
sample(ours.delta_rule_state_turn.default, *_operands(2, 4)[1:], None, f(1, 2, 2, 3, 5), *TURN)
sample(ours.delta_rule_backward_turn.default, f(2, 4, 7, 5), *_operands(2, 4), f(2, 4, 3, 5), f(2, 4, 3, 5), f(1, 2, 2, 3, 5), *TURN)
