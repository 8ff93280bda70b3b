"""Record of an operator (rule, flops, index bounds, ...) by its target, from the tables of all families of operators.

A family is imported when an operator is looked up that no family before it declares: most models need a third of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import ModuleType
from typing import Final

import torch

from meshc.private import OpOverload
from meshc.rules import elementwise, layout
from meshc.rules.operator import Operator

FAMILIES: Final = """
    contraction reduction slices index creation attention softmax optimizer_updates normalisation rearrange selection losses statistics
    few_bits sparsity torch_scaled scatter scan convolution pooling resize routed_experts recurrence delta_rule rnn turns diagonal
    segments spatial linalg fourier
""".split()
"""Files of this folder, the usual ones first; beside `elementwise` and `layout`, which alone declare operators with torch's tag
`pointwise`."""
UNDECLARED: Final = Operator()

_FOUND: Final[dict[object, ModuleType | None]] = {}
"""Target -> its family, of those that were looked up; None: it has none."""


def every_family() -> Iterator[ModuleType]:
    """All families, each imported when it is its turn."""
    yield from (elementwise, layout)
    yield from (importlib.import_module(f"meshc.rules.{name}") for name in FAMILIES)


def operator_of(target: object) -> Operator:
    """The record of an operator; of one that no family declares, a record without facts."""
    family = _FOUND.get(target)
    if family is None or target not in family.OPERATORS:
        family = _FOUND[target] = _family_of(target)
    return UNDECLARED if family is None else family.OPERATORS[target]


def _family_of(target: object) -> ModuleType | None:
    if not isinstance(target, OpOverload):
        return None
    for family in every_family():
        if target in family.OPERATORS:
            return family
        if family is layout and torch.Tag.pointwise in target.tags:
            return None
    return None
