"""Sharding rules of factorisations and solvers: batch dims and columns of right-hand sides may be split, matrices are whole."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.fx import Node

from meshc.rules.reduction import argument
from meshc.rules.rule import Rule, RuleFunction, by_text, einsum, pointwise, result_shapes, shape_of

if TYPE_CHECKING:
    from meshc.rules.local import Local

aten = torch.ops.aten
MATRIX, OTHER, THIRD = "... m! n!", "... p! q!", "... r! s!"

TEXTS = {
    aten.linalg_cholesky_ex.default: f"{MATRIX} -> {OTHER} | ...",
    aten.linalg_qr.default: f"{MATRIX} -> {OTHER} | {THIRD}",
    aten._linalg_svd.default: f"{MATRIX} -> {OTHER} | ... v! | {THIRD}",
    aten._linalg_eigh.default: f"{MATRIX} -> ... v! | {OTHER}",
    aten.linalg_eig.default: f"{MATRIX} -> ... v! | {OTHER}",
    aten._linalg_det.default: f"{MATRIX} -> ... | {OTHER} | ... v!",
    aten._linalg_slogdet.default: f"{MATRIX} -> ... | ... | {OTHER} | ... v!",
    aten.linalg_inv_ex.default: f"{MATRIX} -> {OTHER} | ...",
    aten.linalg_lu_factor_ex.default: f"{MATRIX} -> {OTHER} | ... v! | ...",
    aten.linalg_lu.default: f"{MATRIX} -> {OTHER} | {THIRD} | ... t! u!",
    aten.linalg_matrix_exp.default: f"{MATRIX} -> {OTHER}",
    aten.linalg_householder_product.default: f"{MATRIX}, ... v! -> {OTHER}",
    aten.cholesky_solve.default: f"... n! k, {MATRIX} -> ... n! k",
    aten.linalg_ldl_factor_ex.default: f"{MATRIX} -> {OTHER} | ... v! | ...",
    aten.triangular_solve.default: f"... n! k, {MATRIX} -> ... n! k | {OTHER}",
}
"""Padded matrices are zero: operators that refuse zero matrices (a Cholesky factorisation without `info`) have no rule."""


def _solve_triangular(node: Node, tensors: list[Node]) -> Rule:
    """A X = B, or X A = B with left=False."""
    b = "... n! k" if node.kwargs.get("left", True) else "... k n!"
    return einsum(f"{MATRIX}, {b} -> {b}", node, tensors, clean=(0,))


def _lu_solve(node: Node, tensors: list[Node]) -> Rule:
    b = "... n! k" if node.kwargs.get("left", True) else "... k n!"
    return einsum(f"{MATRIX}, ... v!, {b} -> {b}", node, tensors, clean=(0, 1), lower=_lower_pivots)


def _ormqr(node: Node, tensors: list[Node]) -> Rule:
    """Q of a factorisation times a matrix, or the matrix times Q with left=False."""
    other = "... r! k" if argument(node, 3, "left", True) else "... k r!"
    return einsum(f"{MATRIX}, ... v!, {other} -> {other}", node, tensors, clean=(0, 1))


def _ldl_solve(node: Node, tensors: list[Node]) -> Rule:
    return einsum(f"{MATRIX}, ... v!, ... n! k -> ... n! k", node, tensors, clean=(0, 1), lower=_lower_ldl_solve)


def _lower_ldl_solve(local: Local) -> Node:
    """Pivots count from 1 and are negative for blocks of two; LAPACK does not check them, so those in padding become 1."""
    ld, pivots, b = local.operands
    for letter in local.rule.operands[1][:-1]:
        pivots = local.neutralise(pivots, letter, 1, index=1)
    return local.call(ld, pivots, b)


def _lu_unpack(node: Node, tensors: list[Node]) -> Rule:
    """Results that the call does not request are empty rows."""
    texts = [text if len(shape) > 1 else "e!" for text, shape in zip((OTHER, THIRD, "... t! u!"), result_shapes(node), strict=True)]
    return einsum(f"{MATRIX}, ... v! -> {' | '.join(texts)}", node, tensors, clean=(0, 1), lower=_lower_pivots)


def _lower_pivots(local: Local) -> Node:
    """Pivots count from 1; LAPACK does not check them, so those in padding become 1."""
    lu, pivots, *rest = local.operands
    return local.call(lu, local.emit(aten.clamp.default, pivots, 1), *rest)


def _solve_ex(node: Node, tensors: list[Node]) -> Rule | None:
    """A X = B. B is a vector, or a batch of vectors, if it has one dim less than A."""
    a, b = (shape_of(tensor) for tensor in tensors)
    if len(b) == 1 or (len(b) == len(a) - 1 and b == a[:-1]):
        return einsum(f"{MATRIX}, ... n! -> ... n! | {OTHER} | ... v! | ...", node, tensors, clean=(0, 1))
    side = "... n! k" if node.kwargs.get("left", True) else "... k n!"
    return einsum(f"{MATRIX}, {side} -> {side} | {OTHER} | ... v! | ...", node, tensors, clean=(0,))


def _pinv(node: Node, tensors: list[Node]) -> Rule:
    """With up to two tolerances, a number for each matrix."""
    return einsum(f"{', '.join([MATRIX, *['...'] * (len(tensors) - 1)])} -> {OTHER}", node, tensors, clean=tuple(range(len(tensors))))


def _cross(node: Node, tensors: list[Node]) -> Rule:
    rank = len(result_shapes(node)[0])
    dim = node.kwargs.get("dim", -1)
    assert isinstance(dim, int)
    return replace(pointwise(node, tensors), whole=frozenset({f"*{dim % rank}"}))


RULES: dict[object, RuleFunction] = {
    **{op: by_text(text, clean=range(text.count(",") + 1)) for op, text in TEXTS.items()},
    aten.linalg_solve_triangular.default: _solve_triangular,
    aten.linalg_lu_solve.default: _lu_solve,
    aten.linalg_ldl_solve.default: _ldl_solve,
    aten.ormqr.default: _ormqr,
    aten.lu_unpack.default: _lu_unpack,
    aten._linalg_solve_ex.default: _solve_ex,
    aten.linalg_cross.default: _cross,
    aten.linalg_pinv.atol_rtol_tensor: _pinv,
}
