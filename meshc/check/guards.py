"""Guards of a loaded program's operators: checks of operand values before a kernel that trusts them runs.

A kernel that walks memory by numbers which it finds in its operands (indices, offsets, lengths) reads and writes wherever these say. What a
program is compiled to in this process gives such kernels what torch gave them when it was traced; of a text that anybody may have written
nothing is known, so each of them has a guard here, and memory that nobody has written is zero.

    TRUSTING[op]      rules over its operands (`unchecked_kernels.py`): ValueError says which does not hold, and the operator does not run

The types have been checked before (`stage.py`), rules of shapes with them; they are asked once more of the operands that have come.
"""

from __future__ import annotations

from typing import Final

import torch

from meshc.check.unchecked_kernels import TRUSTING, fault
from meshc.ir.functions import Function, Target
from meshc.private import OpOverload

aten = torch.ops.aten

EMPTY: Final = frozenset(
    {
        aten.empty.memory_format,
        aten.empty_like.default,
        aten.empty_permuted.default,
        aten.empty_strided.default,
        aten.new_empty.default,
        aten.new_empty_strided.default,
    }
)
"""Memory as it was left: of a stranger's program it is zero, or it could be made an output."""


def is_guarded(target: Target) -> bool:
    return target in EMPTY or target in TRUSTING


def guard_function(target: Target, function: Function) -> Function:
    """`function`, which does what the operator `target` does, after its guard."""
    if target in EMPTY:
        return _zero_result(function)
    if not isinstance(target, OpOverload) or target not in TRUSTING:
        return function

    def after_guard(*args: object, **kwargs: object) -> object:
        wrong = fault(target, args, kwargs)
        if wrong is not None:
            raise ValueError(f"its operands do not fit: {wrong}")
        return function(*args, **kwargs)

    return after_guard


def _zero_result(function: Function) -> Function:
    def zeros(*args: object, **kwargs: object) -> object:
        return function(*args, **kwargs).zero_()

    return zeros
