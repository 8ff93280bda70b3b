"""Convolutions and windows."""

from __future__ import annotations

import torch

from tests.rules.samples.calls import f, sample

aten = torch.ops.aten

_ARGS = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
sample(aten.convolution.default, f(3, 4, 5, 5), f(5, 4, 3, 3), f(5), *_ARGS)
sample(aten.convolution.default, f(3, 4, 5, 5), f(5, 4, 3, 3), None, [2, 2], *_ARGS[1:])
sample(aten.convolution.default, f(3, 4, 6), f(6, 2, 3), f(6), [1], [1], [1], False, [0], 2)
sample(aten.convolution.default, f(3, 4, 5, 5), f(4, 5, 3, 3), f(5), [1, 1], [1, 1], [1, 1], True, [0, 0], 1)
sample(aten.convolution_backward.default, f(3, 5, 5, 5), f(3, 4, 5, 5), f(5, 4, 3, 3), [5], *_ARGS, [True, True, True])
sample(aten.convolution_backward.default, f(3, 5, 5, 5), f(3, 4, 5, 5), f(5, 4, 3, 3), None, *_ARGS, [True, True, False])
sample(aten.convolution_backward.default, f(3, 5, 5, 5), f(3, 4, 5, 5), f(5, 4, 3, 3), [0], *_ARGS, [False, True, False])
sample(aten.convolution_backward.default, f(3, 6, 6), f(3, 4, 6), f(6, 2, 3), [6], [1], [1], [1], False, [0], 2, [True, True, True])
_pool = f(3, 4, 6, 6)
_pooled, _indices = aten.max_pool2d_with_indices(_pool, [2, 2], [2, 2])
sample(aten.max_pool2d_with_indices.default, _pool, [2, 2], [2, 2])
_grad = f(3, 4, 3, 3)
sample(aten.max_pool2d_with_indices_backward.default, _grad, _pool, [2, 2], [2, 2], [0, 0], [1, 1], False, _indices)
sample(aten.avg_pool2d.default, _pool, [2, 2], [2, 2])
sample(aten.avg_pool2d.default, f(4, 6, 6), [2, 2], [2, 2])
sample(aten.avg_pool2d_backward.default, _grad, _pool, [2, 2], [2, 2], [0, 0], False, True, None)
sample(aten._adaptive_avg_pool2d.default, _pool, [3, 3])
sample(aten._adaptive_avg_pool2d_backward.default, _grad, _pool)
sample(aten.adaptive_max_pool2d.default, _pool, [3, 3])
sample(aten.max_pool3d_with_indices.default, f(3, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2])
sample(aten.avg_pool3d.default, f(3, 2, 4, 4, 4), [2, 2, 2], [2, 2, 2])
sample(aten._adaptive_avg_pool3d.default, f(3, 2, 4, 4, 4), [2, 2, 2])
sample(aten.reflection_pad2d.default, _pool, [1, 1, 2, 2])
sample(aten.replication_pad2d.default, _pool, [1, 1, 2, 2])
sample(aten.upsample_nearest2d.default, _pool, [12, 12])
sample(aten.upsample_nearest2d.vec, _pool, None, [2.0, 2.0])
sample(aten.upsample_bilinear2d.default, _pool, [12, 12], False)
sample(aten.upsample_bilinear2d.vec, _pool, [12, 12], True, None)
sample(aten.upsample_nearest2d_backward.default, f(3, 4, 12, 12), [12, 12], [3, 4, 6, 6])
sample(aten.upsample_bilinear2d_backward.default, f(3, 4, 12, 12), [12, 12], [3, 4, 6, 6], False)
