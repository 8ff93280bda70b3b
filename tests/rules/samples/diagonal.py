"""Triangles and diagonals."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import b, begin, f, i, sample

aten = torch.ops.aten
begin(__name__)

for op in (aten.tril, aten.triu):
    sample(op.default, f(2, 5, 7))
    sample(op.default, f(5, 6), -1, refine={0: (5, 3, 2)})
    sample(op.default, i(9, 5, 4), 2)
    sample(op.default, b(5, 7), 1)
    sample(op.default, f(5, 1, 7), 1)
    sample(op.default, b(5, 7))
for op in (aten.diagonal, aten.diagonal_copy):
    sample(op.default, f(5, 4))
    sample(op.default, f(5, 4, 7), 1, 0, -1)
    sample(op.default, f(5, 1, 7), 0, 1, 2)
sample(aten.diagonal_backward.default, f(4), [5, 4], 0, 0, 1)
sample(aten.diagonal_backward.default, f(5, 4), [4, 5, 7], 2, 0, -1)
sample(aten.diagonal_scatter.default, f(5, 4), f(4))
sample(aten.diagonal_scatter.default, f(5, 4, 7), f(7, 4), 0, 0, 1)
sample(aten.tril.default, f(5, 7) > 0, 1)
sample(aten.diag_embed.default, f(5, 7))
sample(aten.diag_embed.default, f(5, 3, 7), 1, 0, 2)
sample(aten.diag_embed.default, f(4), -1)
sample(aten.block_diag.default, [f(5, 3), f(2, 4)])
sample(aten.block_diag.default, [f(5), f(1, 4), f(())])
sample(aten.trace.default, f(5, 4))
