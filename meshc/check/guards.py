"""Guards of a loaded program's operators: checks of operand values before a kernel that trusts them runs.

A kernel that addresses memory by values of its operands (indices, offsets, lengths) reads and writes wherever these values point. Programs
compiled in this process pass such kernels what the traced model passes; a loaded text may pass anything, so each of these kernels is
guarded here, and uninitialised memory is zeroed.

    Operator.preconditions      a precondition that fails raises ValueError, and the operator does not run
    Operator.uninitialised      the result is zeroed: an output must not show earlier contents of memory

Types and preconditions have been checked on meta tensors (`stage.py`); preconditions are checked again on the real operands.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshc.ir.functions import Function, Target
from meshc.ir.schemas import arguments_by_name
from meshc.lazy_module import LazyModule
from meshc.private import OpOverload

if TYPE_CHECKING:
    from meshc.rules import families
else:
    families = LazyModule("meshc.rules.families")  # records of all operators; a rank that reads no text never loads them


def fault(target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """The message of the first of the operator's preconditions (`meshc/rules`) that fails for the operands of a call, meta tensors or real
    ones; None if all hold."""
    preconditions = families.operator_of(target).preconditions
    if not preconditions:
        return None
    operands = arguments_by_name(target, args, kwargs)
    try:
        return next((words for precondition in preconditions if (words := precondition(operands)) is not None), None)
    except (IndexError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"they are not of the kind that it takes: {error}"


def is_guarded(target: Target) -> bool:
    operator = families.operator_of(target)
    return operator.uninitialised or bool(operator.preconditions)


def guard_function(target: Target, function: Function) -> Function:
    """`function`, an implementation of the operator `target`, with the guard that `target` needs, if any."""
    operator = families.operator_of(target)
    if operator.uninitialised:
        return lambda *args, **kwargs: function(*args, **kwargs).zero_()
    if not isinstance(target, OpOverload) or not operator.preconditions:
        return function

    def after_guard(*args: object, **kwargs: object) -> object:
        wrong = fault(target, args, kwargs)
        if wrong is not None:
            raise ValueError(f"its operands do not fit: {wrong}")
        return function(*args, **kwargs)

    return after_guard
