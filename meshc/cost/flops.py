"""Flops of an operator by its shapes: matrix products, factorizations, convolutions, attention.

Others count as none. The seconds that they take are in `roofline.py`.

Shapes are those of the records at hand: of the whole before `partition`, of one rank's tiles after it. The counts (`Operator.flops`) are
those of `torch.utils.flop_counter`, whose tests are the source, for the operators that a program may have; of factorizations it has none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.fx import Node

from meshc import ir
from meshc.lazy_module import LazyModule

if TYPE_CHECKING:
    from meshc.rules import families
else:
    families = LazyModule("meshc.rules.families")


def flops(node: Node) -> float:
    """Multiplications and additions of one call; 0 for operators that are not counted."""
    counted = families.operator_of(node.target).flops
    if counted is None:
        return 0.0
    producers = [ir.value_of(operand) for operand in ir.operands(node)]
    return counted(node, [ir.records(producer)[index].shape for producer, index in producers])


def is_product(node: Node) -> bool:
    """Whether an operator is a product, convolution or attention."""
    operator = families.operator_of(node.target)
    return operator.flops is not None and operator.arithmetic != "factorization"


def is_attention(node: Node) -> bool:
    return families.operator_of(node.target).arithmetic == "attention"
