"""Facts of an operator by torch's schema of it: names and defaults of arguments, results that are views, operands that are written into.

    aten.cumsum(x, 1)                 arguments {"self": x, "dim": 1, "dtype": None}
    aten.t                            its result is a view of its operand
    aten.reshape                      too, in a program, where operands are dense; its schema does not say so
    meshc.adam_many_(params, ..)      it writes into the tensors of `params` and of the state
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final, cast

import torch
from torch.fx import Node

from meshc.private import OpOverload

aten = torch.ops.aten

RESHAPES: Final = (aten.reshape.default, aten.view.default, aten._unsafe_view.default)
"""Operators whose result has all elements of their operand, in its order, in another shape."""


@cache
def _defaults(target: OpOverload) -> Mapping[str, Any]:
    """Name -> default of an operator's arguments, in order. Cached, as all of a schema is built at each access."""
    return {argument.name: argument.default_value for argument in target._schema.arguments}


@cache
def argument_names(target: OpOverload) -> tuple[str, ...]:
    """Names of an operator's arguments, in order."""
    return tuple(_defaults(target))


def arguments_by_name(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """All arguments of a call by name, in order, with defaults for those that it leaves out."""
    return {**_defaults(target), **dict(zip(argument_names(target), args, strict=False)), **kwargs}


def named_arguments(node: Node) -> dict[str, Any]:
    """All arguments of a node's call by name, in order, with defaults for those that it leaves out."""
    return arguments_by_name(cast(OpOverload, node.target), node.args, node.kwargs)


def place_of(node: Node, name: str) -> int:
    """Position of the argument `name` among those of a node's operator."""
    return argument_names(node.target).index(name)


def call_place(node: Node) -> int | None:
    """Position of the number of a random call, one of meshc's own operators; None for calls that draw no random numbers."""
    if not isinstance(node.target, OpOverload) or node.target.namespace != "meshc" or "call" not in argument_names(node.target):
        return None
    place = place_of(node, "call")
    return place if place < len(node.args) and node.args[place - 1] is not None else None


def call_number(node: Node) -> int | None:
    """The number of a random call; None for calls that draw no random numbers."""
    place = call_place(node)
    return None if place is None else cast(int, node.args[place])


def with_call(node: Node, number: Any) -> tuple[Any, ...]:
    """The arguments of a random call, with `number` as its number."""
    place = call_place(node)
    assert place is not None
    return (*node.args[:place], number, *node.args[place + 1 :])


@cache
def returns_view(target: OpOverload) -> bool:
    """Whether results of an operator are views of operands, or operands themselves: all of them are, or none."""
    returns = target._schema.returns
    return target in RESHAPES or bool(returns and returns[0].alias_info is not None)


@cache
def written_arguments(target: OpOverload) -> Mapping[int, str]:
    """Position and name of each argument that an operator writes into."""
    rows = enumerate(target._schema.arguments)
    return {place: row.name for place, row in rows if row.alias_info is not None and row.alias_info.is_write}


def written_operands(target: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The operands that a call writes into, those of a list one by one."""
    found: list[Any] = []
    for place, name in written_arguments(target).items():
        value = args[place] if place < len(args) else kwargs.get(name, ())
        found += value if isinstance(value, list | tuple) else [value]
    return found


@cache
def in_place_form(target: OpOverload) -> OpOverload:
    """The operator that writes the same result over its first operand: `add_.Tensor` of `add.Tensor`."""
    space, name, overload = str(target).split(".")
    form: OpOverload = getattr(getattr(getattr(torch.ops, space), f"{name}_"), overload)
    return form
