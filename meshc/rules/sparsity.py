"""Sharding rules of sparse weights: a group is whole on its rank, whatever else is split.

A mask is made of what is stored on a rank, ahead of a gather, so that each rank has a share of the work.
"""

from __future__ import annotations

from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.ops import sparsity as _sparsity  # noqa: F401 - registers its operators
from meshc.rules.operator import Operator, declarations
from meshc.rules.rule import ONE, Rule, dims_of, letters_of, shape_of


def _keep_largest(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    whole = {letters[named_arguments(node)["dim"]]}
    return Rule((letters,), (letters,), whole=whole, kind="layout", settles=True, shrinks=True)


def _of_groups(node: Node, tensors: list[Node]) -> Rule:
    letters = letters_of(tensors[0])
    return Rule((letters,) * len(tensors), (letters,), whole={letters[named_arguments(node)["dim"]]}, kind="update")


def _keep_masked(node: Node, tensors: list[Node]) -> Rule:
    letters = dims_of("d", shape_of(tensors[0]))
    whole = {letters[named_arguments(node)["dim"]]}
    return Rule((letters, letters, (ONE,)), (letters,), whole=whole, kind="layout", settles=True, shrinks=True)


def _next_mask(node: Node, tensors: list[Node]) -> Rule:
    letters = letters_of(tensors[0])
    return Rule((letters, letters, (ONE,)), (letters,), whole={letters[named_arguments(node)["dim"]]}, kind="stored")


OPERATORS = declarations({
    "meshc.next_mask": Operator(_next_mask, cheap=True),
    "meshc.keep_masked": Operator(_keep_masked, cheap=True),
    "meshc.keep_largest": Operator(_keep_largest, cheap=True),
    "meshc.refine_gradient meshc.is_largest": Operator(_of_groups, cheap=True),
})
