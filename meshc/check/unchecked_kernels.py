"""Faults of operands that a kernel does not check: the first of the operator's preconditions (`meshc/rules`) that fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshc.ir.schemas import arguments_by_name
from meshc.lazy_module import LazyModule
from meshc.private import OpOverload

if TYPE_CHECKING:
    from meshc.rules import families
else:
    families = LazyModule("meshc.rules.families")  # records of all operators; a rank that reads no text never loads them


def fault(target: OpOverload, args: Sequence[object], kwargs: Mapping[str, object]) -> str | None:
    """The message of the first precondition that fails for the operands of a call, meta tensors or real ones; None if all hold."""
    preconditions = families.operator_of(target).preconditions
    if not preconditions:
        return None
    operands = arguments_by_name(target, args, kwargs)
    try:
        return next((words for precondition in preconditions if (words := precondition(operands)) is not None), None)
    except (IndexError, AttributeError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        return f"they are not of the kind that it takes: {error}"
