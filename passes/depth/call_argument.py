"""Call number of a random operator: the index of the argument that holds it, and the arguments with another number."""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from meshc.private import OpOverload


def call_argument(node: Node) -> int | None:
    """The argument's index; None for operators that draw no random numbers."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "meshc":
        return None
    return next((place for place, row in enumerate(node.target._schema.arguments) if row.name == "call"), None)


def with_call(node: Node, number: Any) -> tuple[Any, ...]:
    """The arguments, with `number` as the call's number."""
    place = call_argument(node)
    assert place is not None
    return (*node.args[:place], number, *node.args[place + 1 :])
