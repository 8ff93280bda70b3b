"""Fourier transforms and windows along a dim."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
begin(__name__)

sample(aten._fft_c2c.default, torch.complex(f(5, 4), f(5, 4)), [1], 0, True)
sample(aten._fft_c2c.default, torch.complex(f(5, 4, 7), f(5, 4, 7)), [0, 2], 2, False)
sample(aten._fft_r2c.default, f(5, 4), [1], 0, True)
sample(aten._fft_r2c.default, f(5, 7), [0], 0, False)
sample(aten._fft_c2r.default, torch.complex(f(5, 4), f(5, 4)), [1], 2, 7)
for op in (aten.unfold, aten.unfold_copy):
    sample(op.default, f(5, 7), 1, 3, 2)
    sample(op.default, f(7, 5), 0, 7, 1)
sample(aten.unfold_backward.default, f(5, 3, 3), [5, 7], 1, 3, 2)
sample(aten.unfold_backward.default, f(3, 5, 3), [7, 5], 0, 3, 2)
