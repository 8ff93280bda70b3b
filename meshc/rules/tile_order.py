"""Operators that accept the tiles of a split letter in any order (`meshc/ir/sharding.py`).

An operator without a lowering of its own gives the same result for any order of the positions along a letter that is neither whole nor tied
to a window. `ANY_ORDER` lists the operators whose lowering uses the start of a tile along `major` letters only (an embedding's vocabulary),
or not at all. All others need natural order, except attention over blocks in zigzag order.
"""

from __future__ import annotations

from typing import Final

from torch.fx import Node

from meshc.ir import op_name
from meshc.rules.rule import Rule

ANY_ORDER: Final = frozenset({
    "aten.embedding", "aten.embedding_dense_backward", "aten.addmm", "aten._log_softmax", "aten._log_softmax_backward_data",
    "aten._softmax", "aten._softmax_backward_data", "aten.mean", "aten.sum", "aten.native_layer_norm", "aten.native_layer_norm_backward",
    "meshc.take", "meshc.take_backward", "meshc.one_hot", "aten.full", "aten.zeros", "aten.ones", "aten.full_like", "aten.zeros_like",
    "aten.ones_like", "aten.new_zeros", "aten.new_full", "aten.new_ones", "aten.scatter", "meshc.counts_of_rows",
    "meshc.group_choices", "meshc.group_mm", "meshc.group_outer", "aten.cumsum", "aten.cumprod", "aten.cummax", "aten.cummin",
    "aten.logcumsumexp", "meshc.cumsum_back", "meshc.logcumsumexp_back",
})  # fmt: skip
"""Operators whose lowering uses the start of a tile along `major` letters only, or not at all."""


def in_any_order(node: Node, rule: Rule, letter: str) -> bool:
    """Whether an operator accepts the positions along a letter in any order."""
    if letter in rule.whole or letter in rule.windows or any(letter == other for other, _ in rule.windows.values()):
        return False
    if rule.kind == "layout" or rule.lower is None:
        return True
    name = op_name(node)
    return (name in ANY_ORDER or name.rpartition(".")[0] in ANY_ORDER) and letter not in rule.major
