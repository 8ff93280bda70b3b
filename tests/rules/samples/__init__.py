"""One or more calls of every operator that has a rule, small and uneven: dims of 5 and 7 leave padding on axes of 2 and 3."""

from __future__ import annotations

import meshc.ops.attention
import meshc.ops.delta_rule
import meshc.ops.norm
import meshc.ops.optim
import meshc.ops.recurrence
import meshc.ops.scan_back
import meshc.ops.sum_of_parts
import meshc.ops.take  # noqa: F401
from tests.rules.samples import (  # noqa: F401 - each adds its calls to SAMPLES
    attention,
    contraction,
    convolution,
    creation,
    delta_rule,
    diagonal,
    elementwise,
    experts,
    few_bits,
    fourier,
    index,
    layout,
    linalg,
    losses,
    normalisation,
    optimizer,
    pooling,
    random,
    recurrence,
    reduction,
    rnn,
    segments,
    selection,
    sparsity,
    spatial,
)
from tests.rules.samples.calls import SAMPLES, f, i
from tests.rules.samples.pointwise import pointwise_operators, pointwise_sample

__all__ = ["SAMPLES", "f", "i", "pointwise_operators", "pointwise_sample"]
