"""Linear operators: the operands of each in which a call is additive, together, while the others are whole on every rank.

    mm        ((0,), (1,))          (sum of x) @ w = sum of x @ w, and likewise in w
    addmm     ((0, 1), (0, 2))      the bias with one of the factors
    add       ((0, 1),)             both at once
    where     ((1, 2),)             the values, not the condition

`Rule.linear` of an operator is taken from here unless its family's rule sets it for the call (a reduction, a concatenation). Partial sums
may enter at these operands. `propagate` uses only some of this: it defers a reduction past operators that `defers` accepts, where that
saves a collective, and completes sums before all others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch.fx import Node

from meshc.ir import is_tensor, record
from meshc.ops import bounded_groups as _bounded  # noqa: F401 - registers them
from meshc.ops import expert_groups as _groups  # noqa: F401 - likewise
from meshc.ops import grouped_mm as _grouped  # noqa: F401 - likewise
from meshc.ops import routed_mm as _routed  # noqa: F401 - likewise
from meshc.rules.rule import ALONE, Positions

aten = torch.ops.aten


def overloads(names: str) -> set[object]:
    """Operators by name: `exp`, `add.Scalar`."""
    found = set()
    for name in names.split():
        packet, _, overload = name.partition(".")
        found.add(getattr(getattr(aten, packet), overload or "default"))
    return found


PICKS: Final = overloads(
    "index_select gather embedding index.Tensor _unsafe_index.Tensor reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d "
    "replication_pad2d replication_pad3d unfold_copy take upsample_nearest1d upsample_nearest2d upsample_nearest2d.vec upsample_nearest3d "
    "_upsample_nearest_exact1d _upsample_nearest_exact3d"
)
"""Operators whose result's entries are entries of operand 0."""

BLANKS: Final = overloads("masked_fill.Scalar where.ScalarOther index_fill.int_Scalar tril triu max_unpool2d max_unpool3d")
"""Operators whose result's entries are entries of operand 0 (for `where`, of operand 1), or a number."""

SCALES: Final = overloads("mul.Tensor div.Tensor")
"""Operators whose result is a multiple of the first operand if the second is one number."""

TERMWISE: Final = overloads("neg mul.Scalar div.Scalar _conj add.Tensor sub.Tensor")
"""Operators past which reductions are deferred: none of their operands or results gets larger by that."""

OPERATORS: Final[Mapping[str, Positions]] = {
    "neg mul.Scalar div.Scalar _conj conj_physical positive deg2rad rad2deg div.Tensor ldexp.Tensor xlogy.Tensor xlogy.Scalar_Other "
    "special_xlog1py polar cumsum tril triu view_as_real view_as_complex real imag grid_sampler_2d grid_sampler_3d "
    "threshold_backward tanh_backward sigmoid_backward silu_backward gelu_backward hardtanh_backward leaky_relu_backward softplus_backward "
    "mish_backward hardswish_backward hardsigmoid_backward log_sigmoid_backward native_dropout_backward _softmax_backward_data "
    "_log_softmax_backward_data native_layer_norm_backward avg_pool2d avg_pool3d avg_pool2d_backward avg_pool3d_backward "
    "_adaptive_avg_pool2d _adaptive_avg_pool3d _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward "
    "max_pool2d_with_indices_backward max_pool3d_with_indices_backward "
    "upsample_linear1d upsample_bicubic2d upsample_trilinear3d upsample_bilinear2d upsample_bilinear2d.vec "
    "upsample_nearest2d_backward upsample_bilinear2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward "
    "_upsample_bicubic2d_aa _upsample_bicubic2d_aa_backward affine_grid_generator max_unpool2d max_unpool3d "
    "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward "
    "replication_pad3d_backward cholesky_solve": ALONE,
    "linalg_solve_triangular": ((1,),),
    "linalg_lu_solve": ((2,),),
    "mul.Tensor mm bmm mv dot vdot linalg_cross": ((0,), (1,)),
    "addmm baddbmm addbmm addmv addr addcmul": ((0, 1), (0, 2)),
    "add.Tensor sub.Tensor rsub.Tensor lerp.Scalar lerp.Tensor complex addcdiv": ((0, 1),),
    "where.self": ((1, 2),),
    "index_add scatter_add scatter.src index_copy masked_fill.Tensor index_fill.int_Tensor": ((0, 2),),
    "index_put _unsafe_index_put": ((0, -1),),
}  # fmt: skip
PLACED: Final = ("to_places", "in_places", "from_places", "over_places")
LINEAR: Final[Mapping[object, Positions]] = {
    **dict.fromkeys(PICKS, ALONE),
    **{op: positions for names, positions in OPERATORS.items() for op in overloads(names)},
    **{getattr(torch.ops.meshc, name).default: ((0,), (1,)) for name in ("grouped_mm", "grouped_outer", "routed_mm", "routed_outer")},
    **{getattr(torch.ops.meshc, name).default: ((0,), (1,)) for name in ("group_mm", "group_outer")},
    **{
        getattr(torch.ops.meshc, name).default: ALONE
        for name in ("to_groups", "from_groups", "in_slots", "over_slots", "weights_of_groups", "weights_to_tokens", *PLACED)
    },
}


def linear_in(node: Node, count: int) -> Positions:
    """Sets of operand positions, of `count` operands, in each of which this call is additive."""
    if node.target in BLANKS and node.args[-1] == 0:
        return ((retained_operand(node),),)
    found = LINEAR.get(node.target, ())
    if any(position < 0 for positions in found for position in positions):
        return tuple(tuple(position % count for position in positions) for positions in found)
    return tuple(positions for positions in found if max(positions) < count)


def retained_operand(node: Node) -> int:
    """Position of the operand whose entries an operator of BLANKS retains."""
    return int(node.target is aten.where.ScalarOther)


def defers(node: Node) -> bool:
    """Whether reductions of sums are deferred past this pointwise call: a sum, or a multiple by one number."""
    if node.target not in SCALES:
        return node.target in TERMWISE
    left, right = node.args[:2]
    return isinstance(left, Node) and (not isinstance(right, Node) or (is_tensor(right) and record(right).shape == ()))
