"""What a torch-level graph changes where it lies: by which calls, and whether a value is changed behind the call that makes it.

    out = matmul(weights, v);  part = transpose(out, 1, 2);  part += x            out is, through a view

What takes a value for its backward must find it there as it was. An operator that stands for the call that made a value may take it where
that call did not.
"""

from __future__ import annotations

import operator
from typing import Final

import torch
from torch.fx import Node

from meshc.frontend.transforms_within import storage_of

CHANGES: Final[tuple[object, ...]] = (
    operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.imod, operator.ipow,
    operator.iand, operator.ior, operator.ixor, operator.imatmul,
)  # fmt: skip
UNCHANGED: Final[tuple[object, ...]] = ("to", "type_as", "float", "double", "contiguous", "requires_grad_")
"""Calls that may give back what they were given, and leave it alone."""
BY_STRIDES: Final[tuple[object, ...]] = ("reshape", "flatten", "contiguous", torch.reshape, torch.flatten)
"""Calls that give a view or a copy, by how what they are given lies."""


def is_written_behind(value: Node) -> bool:
    """Whether its memory is written to, or would be if it lay otherwise. Of a call of a kind that nobody knows, which gives back what it
    was given, that is assumed."""
    seen, waiting = {value}, [value]
    while waiting:
        one = waiting.pop()
        for user in one.users:
            if changed_by(user) is one:
                return True
            shares = user.target in BY_STRIDES or storage_of(user) is not None and storage_of(user) == storage_of(one)
            if user not in seen and shares:
                seen.add(user)
                waiting.append(user)
    return False


def changed_by(call: Node) -> Node | None:
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

