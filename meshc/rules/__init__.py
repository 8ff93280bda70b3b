"""Operators, one file per family; `rule_of(node)` finds the sharding rule of a node's operator, or None.

Each family's file has a table `OPERATORS` of records (`operator.py`), which say all that meshc knows of an operator. Users register rules
of their own operators with `meshc.register_rule`. `docs/add-a-rule.md` shows how to add either.
"""

from __future__ import annotations

from dataclasses import replace

from torch.fx import Node

from meshc.rules.elementwise import is_pointwise
from meshc.rules.families import every_family, operator_of
from meshc.rules.operator import Operator
from meshc.rules.rule import Positions, Rule, pointwise
from meshc.rules.tile_order import in_any_order
from meshc.rules.user_rules import registered_rule


def rule_of(node: Node, tensors: list[Node]) -> Rule | None:
    """The rule for this node's operator and shapes; None for an operator without a rule, which must run on whole operands."""
    operator = operator_of(node.target)
    if operator.rule is not None:
        rule = operator.rule(node, tensors)
    else:
        rule = registered_rule(node, tensors) or (pointwise(node, tensors) if is_pointwise(node) else None)
    if rule is None or rule.linear:
        return rule
    linear = _linear_in(node, operator, len(rule.operands))
    return replace(rule, linear=linear, defers=operator.defers is not None and operator.defers(node)) if linear else rule


def _linear_in(node: Node, operator: Operator, count: int) -> Positions:
    """Sets of operand positions, of `count` operands, in each of which this call is additive."""
    if operator.linear_at_zero and node.args[-1] == 0:
        return operator.affine
    if any(position < 0 for positions in operator.linear for position in positions):
        return tuple(tuple(position % count for position in positions) for positions in operator.linear)
    return tuple(positions for positions in operator.linear if max(positions) < count)


def has_rule(target: object) -> bool:
    """Whether a family has the rule of an operator."""
    return operator_of(target).rule is not None


__all__ = ["Operator", "Rule", "every_family", "has_rule", "in_any_order", "operator_of", "rule_of"]
