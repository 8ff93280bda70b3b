"""Queries of a torch-level graph: traced values, calls run again, and matching of chains of calls by sets of equivalent targets.

    x = only(node_of(call.args[0]));  need(x.target in MATMULS)         raises PatternMismatch where the pattern does not match

Values inside a pattern may have no other reader: a model that also returns its attention weights is not changed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.fx import Node

functional = torch.nn.functional

MATMULS: tuple[object, ...] = (torch.matmul, operator.matmul, "matmul")
SOFTMAXES: tuple[object, ...] = (functional.softmax, torch.softmax, "softmax")
TRANSPOSES: tuple[object, ...] = (torch.transpose, "transpose")
MULTIPLIES: tuple[object, ...] = (operator.mul, torch.mul, "mul")
DIVIDES: tuple[object, ...] = (operator.truediv, torch.div, "div")
ADDS: tuple[object, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")
SUBTRACTS: tuple[object, ...] = (operator.sub, torch.sub, "sub")
FILLS: tuple[object, ...] = (torch.masked_fill, "masked_fill", "masked_fill_")
READ: frozenset[object] = frozenset((
    *MATMULS, *SOFTMAXES, *TRANSPOSES, *MULTIPLIES, *DIVIDES, *ADDS, *SUBTRACTS, *FILLS, torch.cat, "max", "amax", torch.max, torch.amax,
    functional.dropout,
))  # fmt: skip
"""Calls whose arguments patterns read by position."""
IDLE: tuple[object, ...] = ("to", "type_as", "float", "contiguous")
"""Calls that change at most the dtype."""


def attribute(node: Node, module: nn.Module) -> Any:
    """What a `get_attr` node of a module's graph reads."""
    return operator.attrgetter(str(node.target))(module)


def traced_value(node: Node, module: nn.Module) -> Any:
    """The value of a node in the trace of a module; None if the trace has none."""
    found = node.meta.get("example_value", node.meta.get("val"))
    return attribute(node, module) if found is None and node.op == "get_attr" else found


def run_call(node: Node, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of a node's call on other arguments."""
    target: Any = node.target
    return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


class PatternMismatch(Exception):
    """The pattern does not match."""


def need(holds: object) -> None:
    """Raises PatternMismatch unless `holds`."""
    if not holds:
        raise PatternMismatch


def argument(node: Node, place: int, name: str, default: object = None) -> object:
    """An argument, by position or name."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def node_of(x: object) -> Node:
    if not isinstance(x, Node):
        raise PatternMismatch
    return x


def plain_number(x: object) -> float:
    if not isinstance(x, int | float):
        raise PatternMismatch
    return x


def only(x: Node) -> Node:
    """`x` itself, if it has one reader; raises PatternMismatch if not."""
    need(len(x.users) == 1)
    return x


def reader(x: Node) -> Node:
    """The only reader of `x`; raises PatternMismatch if there are several."""
    return next(iter(only(x).users))


def drops_nothing(node: Node) -> bool:
    """Whether a call is a dropout that drops nothing."""
    return node.target is functional.dropout and (argument(node, 1, "p", 0.5) == 0.0 or argument(node, 2, "training", True) is False)


def forget(node: Node) -> None:
    """Erases a call that nobody reads, and then its operands that nobody reads any more."""
    if node.op in ("call_function", "call_method") and not node.users:
        before = node.all_input_nodes
        node.graph.erase_node(node)
        for one in before:
            forget(one)
