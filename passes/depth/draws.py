"""Draws: at which argument an operator that draws random numbers has the number of its call."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from meshc.private import OpOverload


def call_of(node: Node) -> int | None:
    """None of operators that do not draw."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "meshc":
        return None
    return next((place for place, row in enumerate(node.target._schema.arguments) if row.name == "call"), None)


def with_call(node: Node, number: Any) -> tuple[Any, ...]:
    """The arguments with another number of the call."""
    place = call_of(node)
    assert place is not None
    return (*node.args[:place], number, *node.args[place + 1 :])
