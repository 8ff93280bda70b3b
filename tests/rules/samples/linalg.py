"""Factorisations and solvers, in batches of 5."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
begin(__name__)

_square = f(5, 3, 3)
_positive = _square @ _square.mT + torch.eye(3, dtype=torch.float64)
_lu, _pivots, _ = aten.linalg_lu_factor_ex(_square)
_lower = _positive.tril()

sample(aten.linalg_cholesky_ex.default, _positive)
sample(aten.linalg_cholesky_ex.default, _positive[0])
sample(aten.linalg_qr.default, f(5, 4, 3))
sample(aten.linalg_qr.default, f(5, 3, 4), "complete")
sample(aten._linalg_svd.default, f(5, 4, 3))
sample(aten._linalg_eigh.default, _positive)
sample(aten.linalg_eig.default, _positive)
sample(aten._linalg_det.default, _square)
sample(aten._linalg_slogdet.default, _square)
sample(aten.linalg_inv_ex.default, _square)
sample(aten.linalg_lu_factor_ex.default, _square)
sample(aten.linalg_lu.default, f(5, 4, 3))
sample(aten.linalg_matrix_exp.default, _square)
sample(aten.linalg_householder_product.default, *aten.geqrf(f(5, 4, 3)))
sample(aten.cholesky_solve.default, f(5, 3, 4), _lower)
sample(aten.linalg_solve_triangular.default, _lower, f(5, 3, 4), upper=False)
sample(aten.linalg_solve_triangular.default, _lower.mT, f(5, 4, 3), upper=True, left=False)
sample(aten.linalg_lu_solve.default, _lu, _pivots, f(5, 3, 4))
sample(aten.linalg_lu_solve.default, _lu, _pivots, f(5, 4, 3), left=False)
sample(aten.lu_unpack.default, _lu, _pivots)
sample(aten.lu_unpack.default, _lu, _pivots, True, False)
sample(aten.lu_unpack.default, _lu, _pivots, False, True)
sample(aten._linalg_solve_ex.default, _square, f(5, 3, 4))
sample(aten._linalg_solve_ex.default, _square, f(5, 3))
sample(aten.linalg_cross.default, f(5, 3), f(5, 3))
sample(aten.linalg_cross.default, f(3, 1, 5), f(3, 4, 5), dim=0)
sample(aten.linalg_pinv.atol_rtol_tensor, f(5, 4, 3), atol=f(5).abs() / 100, rtol=f(()).abs() / 100)
sample(aten.linalg_pinv.atol_rtol_tensor, f(5, 4, 3))
for _left, _transpose in ((True, False), (True, True), (False, False)):
    _other = f(5, 4, 2) if _left else f(5, 2, 4)
    sample(aten.ormqr.default, *aten.geqrf(f(5, 4, 3)), _other, _left, _transpose)
sample(aten.triangular_solve.default, f(5, 3, 4), _lower, False)
sample(aten.linalg_ldl_factor_ex.default, _positive)
_indefinite = f(5, 4, 4) + f(5, 4, 4).mT
_indefinite = _indefinite + _indefinite.mT
_ld, _ldl_pivots, _ = aten.linalg_ldl_factor_ex(_indefinite)
assert (_ldl_pivots < 0).any(), "no block of two"
sample(aten.linalg_ldl_solve.default, _ld, _ldl_pivots, f(5, 4, 7))
