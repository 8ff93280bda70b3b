"""Guards of a loaded program's operators: checks of operand values before a kernel that trusts them runs.

A kernel that walks memory by numbers which it finds in its operands (indices, offsets, lengths) reads and writes wherever these say. What a
program is compiled to in this process gives such kernels what torch gave them when it was traced; of a text that anybody may have written
nothing is known, so each of them has a guard here, and memory that nobody has written is zero.

    Operator.preconditions      ValueError says which does not hold, and the operator does not run
    Operator.uninitialised      memory as it was left: it is zero, or it could be made an output

The types have been checked before (`stage.py`), rules of shapes with them; they are asked once more of the operands that have come.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshc.check.unchecked_kernels import fault
from meshc.ir.functions import Function, Target
from meshc.lazy_module import LazyModule
from meshc.private import OpOverload

if TYPE_CHECKING:
    from meshc.rules import families
else:
    families = LazyModule("meshc.rules.families")  # the records of all operators, which a rank that reads no text does without


def is_guarded(target: Target) -> bool:
    operator = families.operator_of(target)
    return operator.uninitialised or bool(operator.preconditions)


def guard_function(target: Target, function: Function) -> Function:
    """`function`, which does what the operator `target` does, after its guard."""
    if families.operator_of(target).uninitialised:
        return _zero_result(function)
    if not isinstance(target, OpOverload) or not families.operator_of(target).preconditions:
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
