"""Sharding rules of factorisations and solvers: batch dims and columns of right-hand sides may be split, matrices are whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.fx import Node

from meshc.ir.schemas import named_arguments
from meshc.rules.operator import EITHER, Operator, Shapes, declarations
from meshc.rules.preconditions import Operands, finite, holds, within
from meshc.rules.rule import ALONE, Local, Rule, RuleFunction, by_text, einsum, pointwise, result_shapes, shape_of

aten = torch.ops.aten
MATRIX, OTHER, THIRD = "... m! n!", "... p! q!", "... r! s!"


def _matrices(text: str) -> RuleFunction:
    """A rule by its text. Padded matrices are zero, so operators that refuse zero matrices (Cholesky without `info`) have no rule."""
    return by_text(text, clean=tuple(range(text.count(",") + 1)))


def _beside(text: str, **fields: Any) -> RuleFunction:
    """A rule by its text, where `side` is B of A X = B, or of X A = B with left=False; likewise what a matrix multiplies."""
    sides = {True: "... n! k", False: "... k n!"}
    return lambda node, tensors: einsum(text.replace("side", sides[named_arguments(node)["left"]]), node, tensors, **fields)


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
    return _beside(f"{MATRIX}, side -> side | {OTHER} | ... v! | ...", clean=(0,))(node, tensors)


def _pinv(node: Node, tensors: list[Node]) -> Rule:
    """With up to two tolerances, a number for each matrix."""
    return einsum(f"{', '.join([MATRIX, *['...'] * (len(tensors) - 1)])} -> {OTHER}", node, tensors, clean=tuple(range(len(tensors))))


def _cross(node: Node, tensors: list[Node]) -> Rule:
    found = pointwise(node, tensors)
    return replace(found, whole={found.results[0][named_arguments(node)["dim"]]})


# Flops of whole matrices, with vectors where an operator has them: Golub, Van Loan: Matrix Computations, tables of chapters 3, 5 and 8.


def _square_flops(shapes: Shapes, times: float) -> float:
    """`times` the cube of a side, of each matrix."""
    return times * prod(shapes[0]) * shapes[0][-1]


def _rectangle_flops(shapes: Shapes, long: float, short: float) -> float:
    """long * m n^2 + short * n^3 of m by n, n the short side, of each matrix."""
    *rows, one, other = shapes[0]
    m, n = max(one, other), min(one, other)
    return prod(rows) * (long * m * n**2 + short * n**3)


def _solve_flops(node: Node, shapes: Shapes) -> float:
    return _square_flops(shapes, 2 / 3) + 2.0 * prod(shapes[0]) * shapes[1][-1]


def _factorization(text: str, flops: Callable[[Shapes], float]) -> Operator:
    return Operator(_matrices(text), flops=lambda node, shapes: flops(shapes), arithmetic="factorization")


def _pivot_fault(o: Operands) -> str | None:
    """Blocks of two rows are marked by two equal negative numbers, and LAPACK takes the word of the first for the second."""
    given = o["pivots"]
    if given.shape != o["LD"].shape[:-1]:
        return "there is a pivot for each row"
    count = given.shape[-1]
    for row in [] if given.is_meta else given.reshape(-1, count).tolist() if count else []:
        at = 0
        while at < count:
            paired = row[at] < 0
            if not 1 <= abs(row[at]) <= count or paired and (at + 1 == count or row[at + 1] >= 0 or -row[at + 1] > count):
                return f"pivots hold {row[at]}, which is no row from 1 to {count}, or half a block"
            at += 2 if paired else 1
    return None


OPERATORS = declarations({
    "linalg_cholesky_ex": _factorization(f"{MATRIX} -> {OTHER} | ...", lambda shapes: _square_flops(shapes, 1 / 3)),
    "linalg_inv_ex": _factorization(f"{MATRIX} -> {OTHER} | ...", lambda shapes: _square_flops(shapes, 2.0)),
    "linalg_qr": _factorization(f"{MATRIX} -> {OTHER} | {THIRD}", lambda shapes: 2 * _rectangle_flops(shapes, 2.0, -2 / 3)),
    "_linalg_svd": _factorization(f"{MATRIX} -> {OTHER} | ... v! | {THIRD}", lambda shapes: _rectangle_flops(shapes, 6.0, 20.0)),
    "_linalg_eigh": _factorization(f"{MATRIX} -> ... v! | {OTHER}", lambda shapes: _square_flops(shapes, 9.0)),
    "linalg_eig": Operator(_matrices(f"{MATRIX} -> ... v! | {OTHER}")),
    "_linalg_eigvals": Operator(preconditions=(finite("self"),)),
    "_linalg_det": Operator(_matrices(f"{MATRIX} -> ... | {OTHER} | ... v!")),
    "_linalg_slogdet": Operator(_matrices(f"{MATRIX} -> ... | ... | {OTHER} | ... v!")),
    "linalg_lu_factor_ex": _factorization(f"{MATRIX} -> {OTHER} | ... v! | ...", lambda shapes: _square_flops(shapes, 2 / 3)),
    "linalg_ldl_factor_ex": Operator(_matrices(f"{MATRIX} -> {OTHER} | ... v! | ...")),
    "linalg_lu": Operator(_matrices(f"{MATRIX} -> {OTHER} | {THIRD} | ... t! u!")),
    "linalg_matrix_exp": Operator(_matrices(f"{MATRIX} -> {OTHER}")),
    "linalg_householder_product": Operator(_matrices(f"{MATRIX}, ... v! -> {OTHER}")),
    "cholesky_solve": Operator(_matrices(f"... n! k, {MATRIX} -> ... n! k"), linear=ALONE),
    "triangular_solve": Operator(_matrices(f"... n! k, {MATRIX} -> ... n! k | {OTHER}")),
    "linalg_solve_triangular": Operator(
        _beside(f"{MATRIX}, side -> side", clean=(0,)),
        linear=((1,),),
        flops=lambda node, shapes: prod(shapes[0]) * shapes[1][-1],
        arithmetic="factorization",
    ),
    "linalg_lu_solve": Operator(
        _beside(f"{MATRIX}, ... v!, side -> side", clean=(0, 1), lower=_lower_pivots),
        linear=((2,),),
        preconditions=(
            holds("there is a pivot for each row", lambda o: o["pivots"].shape == o["LU"].shape[:-1]),
            within("pivots", 1, lambda o: int(o["LU"].shape[-1]) + 1),
        ),
    ),
    "linalg_ldl_solve": Operator(
        by_text(f"{MATRIX}, ... v!, ... n! k -> ... n! k", clean=(0, 1), lower=_lower_ldl_solve), preconditions=(_pivot_fault,)
    ),
    "ormqr": Operator(_beside(f"{OTHER}, ... v!, side -> side", clean=(0, 1))),
    "lu_unpack": Operator(
        _lu_unpack,
        preconditions=(
            holds(
                "there is a pivot for each row or column",
                lambda o: o["LU_pivots"].shape == (*o["LU_data"].shape[:-2], min(o["LU_data"].shape[-2:])),
            ),
            within("LU_pivots", 1, lambda o: int(o["LU_data"].shape[-2]) + 1),
        ),
    ),
    "_linalg_solve_ex": Operator(_solve_ex, flops=_solve_flops, arithmetic="factorization"),
    "linalg_cross": Operator(_cross, linear=EITHER),
    "linalg_pinv.atol_rtol_tensor": Operator(_pinv),
})
