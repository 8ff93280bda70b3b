"""In-place changes in a torch-level graph: the operand that a call changes, and whether a value is changed after the call that computes it.

    out = matmul(weights, v);  part = transpose(out, 1, 2);  part += x            out is, through a view

A value saved for backward must stay unchanged. An operator that replaces the call of a value may save the value where that call did not.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch.fx import Node

from meshc.frontend.inner_transforms import storage_of

CHANGES: Final[tuple[object, ...]] = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.imatmul,
)  # fmt: skip
UNCHANGED: Final[tuple[object, ...]] = ("to", "type_as", "float", "double", "contiguous", "requires_grad_")
"""Calls that may return their operand, and do not change it."""
BY_STRIDES: Final[tuple[object, ...]] = ("reshape", "flatten", "contiguous", torch.reshape, torch.flatten)
"""Calls that return a view or a copy, depending on their operand's strides."""


def is_changed_later(value: Node) -> bool:
    """Whether a value's memory is written by a later call, or would be with other strides. A call of an unknown kind that returns its
    operand is taken to change it."""
    seen, waiting = {value}, [value]
    while waiting:
        one = waiting.pop()
        for user in one.users:
            if changed_operand(user) is one:
                return True
            shares = user.target in BY_STRIDES or storage_of(user) is not None and storage_of(user) == storage_of(one)
            if user not in seen and shares:
                seen.add(user)
                waiting.append(user)
    return False


def changed_operand(call: Node) -> Node | None:
    """The operand that a call changes in place; None if it changes none."""
    out, first = call.kwargs.get("out"), call.args[0] if call.args else None
    if isinstance(out, Node):
        return out
    if call.op not in ("call_function", "call_method") or not isinstance(first, Node) or call.target in UNCHANGED:
        return None
    name = call.target if isinstance(call.target, str) else getattr(call.target, "__name__", "")
    named = name.endswith("_") and not name.endswith("__") and getattr(call.target, "__module__", "") != "_operator"  # and_, or_, not_
    in_place = call.target in CHANGES or named
    return first if in_place or call.meta.get("example_value") is first.meta.get("example_value") is not None else None

