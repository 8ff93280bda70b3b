"""Flops of an operator by its shapes: matrix products, factorizations, convolutions, attention.

Others count as none. `operators.py` predicts seconds from them.

Shapes are those of the records at hand: of the whole before `partition`, of one rank's tiles after it. The counts are those of
`torch.utils.flop_counter`, whose tests are the source, for the operators that a program may have; of factorizations it has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Final

from torch.fx import Node

from meshc import ir
from meshc.ops.delta_rule_chunks import LENGTH

Shapes = Sequence[tuple[int, ...]]


def flops(node: Node) -> float:
    """Multiplications and additions of one call; 0 for operators that are not counted."""
    name = ir.op_name(node)
    counted = COUNTS.get(name) or FACTORIZATIONS.get(name)
    if counted is None:
        return 0.0
    producers = [ir.value_of(operand) for operand in ir.operands(node)]
    return counted(node, [ir.records(producer)[index].shape for producer, index in producers])


def _convolution(node: Node, shapes: Shapes) -> float:
    """Each output element is a product over the kernel and the input channels of its group."""
    image, weight = shapes[0], shapes[1]
    made = ir.record(node).shape
    positions = prod(image[2:]) if node.args[6] else prod(made[2:])  # a transposed one spreads each input element
    return 2.0 * image[0] * positions * prod(weight)


def _convolution_backward(node: Node, shapes: Shapes) -> float:
    grad, image, weight = shapes[0], shapes[1], shapes[2]
    wanted = node.args[-1]
    positions = prod(image[2:]) if node.args[7] else prod(grad[2:])
    return 2.0 * image[0] * positions * prod(weight) * sum(map(bool, wanted[:2]))  # type: ignore[index, arg-type]


def _filled_share(node: Node) -> float:
    """The share of rows that meet a matrix where tokens choose evenly: the last argument of products in groups."""
    found = node.args[-1]
    assert isinstance(found, float)
    return found


def _delta_rule(shapes: Shapes, within: int, between: int) -> float:
    """Products within chunks, of a chunk's positions, keys and values, and those of a chunk and the state between chunks; of k and v."""
    *_, positions, keys = shapes[0]
    values = shapes[1][-1]
    return prod(shapes[0][:-1]) * (within * min(LENGTH, positions) * (keys + values) + 2.0 * between * keys * values)


def _rnn_backward(shapes: Shapes) -> float:
    """Of each step of each row, by the gradient [t, rows, h] and the weight, whose product it is."""
    return 2.0 * prod(shapes[0][:2]) * prod(shapes[-1])


def _parts(node: Node) -> int:
    """In how many parts rows are, of which a turn takes one."""
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    parts = node.args[names.index("parts")]
    assert isinstance(parts, int)
    return parts


COUNTS: Final[Mapping[str, Callable[[Node, Shapes], float]]] = {
    "aten.mm": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],
    "aten.bmm": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],
    "aten.addmm": lambda node, shapes: 2.0 * prod(shapes[1]) * shapes[2][-1],
    "aten.baddbmm": lambda node, shapes: 2.0 * prod(shapes[1]) * shapes[2][-1],
    "aten.mv": lambda node, shapes: 2.0 * prod(shapes[0]),
    "aten.dot": lambda node, shapes: 2.0 * prod(shapes[0]),
    "aten._grouped_mm": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],  # each row meets one matrix
    "meshc.grouped_mm": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],
    "meshc.grouped_outer": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],
    "meshc.routed_mm": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],
    "meshc.routed_outer": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],
    "meshc.group_mm": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1] * _filled_share(node),
    "meshc.group_outer": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1] * _filled_share(node),
    "meshc.used_mm": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1] * _filled_share(node),
    "meshc.used_outer": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1] * _filled_share(node),
    "aten.convolution": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "meshc.attention": lambda node, shapes: 4.0 * prod(shapes[0]) * shapes[1][-2],
    "meshc.attention_backward": lambda node, shapes: 10.0 * prod(shapes[1]) * shapes[2][-2],
    "meshc.attention_block": lambda node, shapes: 4.0 * prod(shapes[0]) * shapes[1][-2],
    "meshc.attention_block_backward": lambda node, shapes: 10.0 * prod(shapes[1]) * shapes[2][-2],
    "meshc.attention_zigzag": lambda node, shapes: 4.0 * prod(shapes[0]) * shapes[1][-2],
    "meshc.attention_zigzag_backward": lambda node, shapes: 10.0 * prod(shapes[1]) * shapes[2][-2],
    "meshc.explicit_attention": lambda node, shapes: 4.0 * prod(shapes[0]) * shapes[1][-2],
    "meshc.explicit_attention_backward": lambda node, shapes: 10.0 * prod(shapes[1]) * shapes[2][-2],
    "meshc.explicit_attention_bias_backward": lambda node, shapes: 10.0 * prod(shapes[1]) * shapes[2][-2],
    "meshc.rnn": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1],
    "meshc.rnn_backward": lambda node, shapes: _rnn_backward(shapes),
    "meshc.rnn_turn": lambda node, shapes: 2.0 * prod(shapes[0]) * shapes[1][-1] / _parts(node),
    "meshc.rnn_turn_backward": lambda node, shapes: _rnn_backward(shapes) / _parts(node),
    "meshc.delta_rule": lambda node, shapes: _delta_rule(shapes[1:], 5, 3),
    "meshc.delta_rule_backward": lambda node, shapes: _delta_rule(shapes[2:], 12, 8),
    "meshc.delta_rule_end": lambda node, shapes: _delta_rule(shapes, 3, 4),
    "meshc.delta_rule_turn": lambda node, shapes: _delta_rule(shapes[1:], 5, 3) / _parts(node),
    "meshc.delta_rule_state_turn": lambda node, shapes: _delta_rule(shapes, 3, 2) / _parts(node),
    "meshc.delta_rule_backward_turn": lambda node, shapes: _delta_rule(shapes[2:], 12, 8) / _parts(node),
    "meshc.delta_rule_ends": lambda node, shapes: _delta_rule(shapes[2:], 5, 7),
}

FACTORIZATIONS: Final[Mapping[str, Callable[[Node, Shapes], float]]] = {
    "aten._linalg_eigh": lambda node, shapes: _of_square(shapes, 9.0),
    "aten.linalg_qr": lambda node, shapes: 2 * _of_sides(shapes, 2.0, -2 / 3),
    "aten._linalg_svd": lambda node, shapes: _of_sides(shapes, 6.0, 20.0),
    "aten.linalg_inv_ex": lambda node, shapes: _of_square(shapes, 2.0),
    "aten.linalg_cholesky_ex": lambda node, shapes: _of_square(shapes, 1 / 3),
    "aten.linalg_lu_factor_ex": lambda node, shapes: _of_square(shapes, 2 / 3),
    "aten._linalg_solve_ex": lambda node, shapes: _of_square(shapes, 2 / 3) + 2.0 * prod(shapes[0]) * shapes[1][-1],
    "aten.linalg_solve_triangular": lambda node, shapes: prod(shapes[0]) * shapes[1][-1],
}
"""Of whole matrices (Golub, Van Loan: Matrix Computations, tables of chapters 3, 5 and 8): with vectors where an operator has them."""


def _of_square(shapes: Shapes, times: float) -> float:
    """So often the cube of a side, of each matrix."""
    return times * prod(shapes[0]) * shapes[0][-1]


def _of_sides(shapes: Shapes, long: float, short: float) -> float:
    """long * m n^2 + short * n^3 of m by n, n the short side, of each matrix."""
    *rows, one, other = shapes[0]
    m, n = max(one, other), min(one, other)
    return prod(rows) * (long * m * n**2 + short * n**3)
