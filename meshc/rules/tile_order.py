"""Test whether an operator accepts the tiles of a split letter in any order, as zigzag order needs (`meshc/ir/sharding.py`).

An operator without a lowering of its own gives the same result for any order of the positions along a letter that is neither whole nor tied
to a window; nor does one of `Operator.any_order`, whose lowering uses the start of a tile along `major` letters only (an embedding's
vocabulary), or not at all. All others need natural order, except attention over blocks in zigzag order.
"""

from __future__ import annotations

from torch.fx import Node

from meshc.rules.families import operator_of
from meshc.rules.rule import Rule


def in_any_order(node: Node, rule: Rule, letter: str) -> bool:
    """Whether an operator accepts the positions along a letter in any order."""
    if letter in rule.whole or letter in rule.windows or any(letter == other for other, _ in rule.windows.values()):
        return False
    if rule.kind == "layout" or rule.lower is None:
        return True
    return operator_of(node.target).any_order and letter not in rule.major
