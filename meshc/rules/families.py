"""Record of an operator (rule, flops, index bounds, ...) by its target, from the tables of all families of operators."""

from __future__ import annotations

from typing import Final

from meshc.rules import (
    attention,
    contraction,
    convolution,
    creation,
    delta_rule,
    diagonal,
    elementwise,
    fourier,
    index,
    layout,
    linalg,
    losses,
    normalisation,
    optimizer_updates,
    pooling,
    rearrange,
    recurrence,
    reduction,
    resize,
    rnn,
    routed_experts,
    scan,
    scatter,
    segments,
    selection,
    slices,
    softmax,
    spatial,
    statistics,
    turns,
)
from meshc.rules.operator import Operator

FAMILIES: Final = (
    elementwise,
    layout,
    contraction,
    reduction,
    slices,
    rearrange,
    index,
    normalisation,
    routed_experts,
    attention,
    convolution,
    pooling,
    resize,
    creation,
    optimizer_updates,
    softmax,
    statistics,
    selection,
    recurrence,
    delta_rule,
    rnn,
    turns,
    scan,
    scatter,
    diagonal,
    segments,
    spatial,
    losses,
    linalg,
    fourier,
)
UNDECLARED: Final = Operator()


def operator_of(target: object) -> Operator:
    """The record of an operator; of one that no family declares, a record without facts."""
    for family in FAMILIES:
        found = family.OPERATORS.get(target)
        if found is not None:
            return found
    return UNDECLARED
