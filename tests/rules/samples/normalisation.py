"""Norms."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import begin, f, sample

aten = torch.ops.aten
begin(__name__)

_x, _w = f(3, 5, 4), f(4)
_, _mean, _rstd = aten.native_layer_norm(_x, [4], _w, _w, 1e-5)
sample(aten.native_layer_norm.default, _x, [4], _w, f(4), 1e-5)
sample(aten.native_layer_norm.default, _x, [5, 4], None, None, 1e-5)
sample(aten.native_layer_norm_backward.default, f(3, 5, 4), _x, [4], _mean, _rstd, _w, f(4), [True, True, True])
sample(aten.native_layer_norm_backward.default, f(3, 5, 4), _x, [4], _mean, _rstd, None, None, [True, False, False])
sample(aten.native_layer_norm_backward.default, f(3, 5, 4), _x, [4], _mean, _rstd, _w, None, [True, True, False])
