"""Registry of the sharding rules that users give for their own operators; and the overload that a name or function of theirs means.

This module is below the compiler, which reads the rules (`meshc.rules.user_rules`), and the runtime, which compares them between
ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from meshc.errors import CompileError
from meshc.ir.functions import Function, Target
from meshc.private import OpOverload, OpOverloadPacket


@dataclass(frozen=True)
class RegisteredRule:
    """`rule` is a rule's text or a function of `(node, tensors)`; `fields` are further fields of the `Rule` that the text becomes."""

    rule: str | Function
    fields: Mapping[str, object]


RULES: Final[dict[OpOverload, RegisteredRule]] = {}
"""Operator -> its registered rule; a later registration replaces an earlier one."""


def by_name() -> dict[str, tuple[str | Function, Mapping[str, object]]]:
    """(rule, fields) of all registered rules by operator name, sorted, to compare between ranks."""
    return {str(op): (found.rule, found.fields) for op, found in sorted(RULES.items(), key=lambda item: str(item[0]))}


def overload_of(op: Target) -> OpOverload:
    """The operator overload of `op`: "mylib::op", "mylib::op.overload", `torch.ops.mylib.op`, one of its overloads, or a result of
    `torch.library.custom_op`. Raises CompileError for anything else."""
    found = _of_name(op) if isinstance(op, str) else getattr(op, "_opoverload", op)  # the attribute is custom_op's
    if isinstance(found, OpOverloadPacket):
        overloads = found.overloads()
        if "default" not in overloads:
            raise CompileError(f"{found} has the overloads {', '.join(overloads)}\n  what to do: name the one that is meant")
        found = found.default
    if not isinstance(found, OpOverload):
        raise CompileError(
            f"{op!r} is no operator\n"
            '  what to do: give its name, "mylib::my_op", or what torch.library.custom_op returned; a Python function that torch does not '
            "know as an operator is traced, and needs no rule"
        )
    return found


def _of_name(name: str) -> OpOverload | OpOverloadPacket:
    namespace, colons, rest = name.partition("::")
    base, _, overload = rest.partition(".")
    words = (namespace, base, overload or "default")
    if not colons or not all(word.isidentifier() for word in words):
        raise CompileError(f'{name!r} is no operator\'s name: write "NAMESPACE::NAME", as in "mylib::my_rmsnorm"')
    packet = getattr(getattr(torch.ops, namespace), base, None)
    if not isinstance(packet, OpOverloadPacket) or overload and overload not in packet.overloads():
        raise CompileError(f"there is no operator {name}\n  what to do: import the library that defines it before its rule is registered")
    return getattr(packet, overload) if overload else packet
